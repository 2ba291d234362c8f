"""tokens.*: the parts of a model that read features, from them to vectors of items and tokens of events and users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale.recipe.reading.keys import changed, key, section_options
from freescale.recipe.tables import table_options, table_widths

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.data import BatchFeatures
    from freescale.embedding import IdMap, ShardedCompute, ShardedEmbedding
    from freescale.exports import ExportFeatures
    from freescale.model import ContextTokens, FeatureJoin, FeatureTokens, ItemTowers, Recommender
    from freescale.recipe.building.run_tables import RunTables
    from freescale.recipe.config import Config
    from freescale.recipe.embedding import EmbeddingSection
    from freescale.train import FeaturedItems


@dataclass(frozen=True, kw_only=True)
class TokensSection:
    """How features become tokens."""

    join: Literal["sum", "mlp", "towers"] = key(
        "sum",
        "features of one event or item: added up, or put together by one hidden layer; towers: as MLPerf's DLRMv4 does",
    )
    hidden: int = key(256, "join=towers: width inside the MLPs of tokens", at_least=1)


def problems(config: Config) -> list[str]:
    """Towers go with a head that looks at products, and the other way round."""
    towers = config.tokens.join == "towers"
    product = config.head.kind == "tasks" and config.head.extra.get("towers") == "product"
    found = []
    if towers and not product:
        found.append("tokens.join=towers: goes with head.kind=tasks head.towers=product")
    if product and not towers:
        found.append("head.towers=product: goes with tokens.join=towers, which gives items a tower")
    if not towers and changed(config.tokens, "hidden"):
        found.append("tokens.hidden: only for tokens.join=towers")
    return found


def build_item_join(config: Config, features: BatchFeatures) -> FeatureJoin | ItemTowers:
    """What makes the vectors of items."""
    from freescale.model import FeatureJoin, ItemTowers
    from freescale.recipe.features import item_features
    from freescale.recipe.requests import request_options

    if config.tokens.join == "towers":
        options = request_options(config)
        assert options is not None
        return ItemTowers(
            item_features(features.schema),
            widths=table_widths(config, features),
            dim=config.model.dim,
            hidden=config.tokens.hidden,
            judged=options.hidden,
        )
    return FeatureJoin(item_features(features.schema), **_shape(config, features))


def build_tokens(config: Config, features: BatchFeatures) -> FeatureTokens | ContextTokens | None:
    """What puts features of events and users into sequences; None where there are none."""
    from freescale.model import ContextTokens, FeatureTokens
    from freescale.recipe.features import token_features

    wanted = token_features(config, features.schema)
    if config.tokens.join == "towers":
        widths = table_widths(config, features)
        return ContextTokens(wanted, widths=widths, dim=config.model.dim, hidden=config.tokens.hidden)
    return FeatureTokens(wanted, **_shape(config, features)) if wanted else None


def build_featured_items(
    config: Config, ranks: Ranks, features: BatchFeatures, *, model: Recommender, tables: RunTables
) -> FeaturedItems:
    """Where the vectors of items with features come from."""
    from freescale.data import LogSource
    from freescale.model import FeatureJoin, ItemTowers
    from freescale.train import FeaturedItems

    assert isinstance(model.items, FeatureJoin | ItemTowers)
    assert tables.features is not None
    return FeaturedItems(
        join=model.items,
        features=features,
        ids=tables.features,
        of_tokens=frozenset(() if model.tokens is None else model.tokens.tables()),
        embedding=tables.embedding,
        work=shared_work(config, ranks, len(features.source.items.ids)),
        device=ranks.device,
        grows=isinstance(features.source, LogSource),
    )


def export_features(
    config: Config,
    features: BatchFeatures | None,
    *,
    embedding: ShardedEmbedding,
    id_maps: Mapping[str, IdMap],
) -> ExportFeatures | None:
    """What an export keeps of features; None where requests say nothing but items and times."""
    from freescale.exports import ExportFeatures
    from freescale.recipe.features import token_features

    wanted = [] if features is None else token_features(config, features.schema)
    if features is None or not (wanted or config.tokens.join == "towers"):
        return None
    return ExportFeatures(
        features=features,
        tokens=[each.name for each in wanted],
        widths=table_widths(config, features),
        join=config.tokens.join,
        hidden=config.tokens.hidden,
        embedding=embedding,
        id_maps=id_maps,
        map_kinds={
            name: _map_kind(options.section)
            for name, options in table_options(config, features.schema).items()
        },
    )


def _map_kind(section: EmbeddingSection) -> dict[str, Any]:
    """The name of a table's id map, and its options."""
    options = section_options(section, "id_map")
    return {"kind": section.id_map, "options": None if options is None else dataclasses.asdict(options)}


def shared_work(config: Config, ranks: Ranks, num_items: int) -> ShardedCompute:
    """Which rank computes the vectors of which items, and how they travel."""
    from freescale.embedding import ShardedCompute
    from freescale.recipe.comm import channel

    ways: dict[str, Any] = {}
    if ranks.group is not None:
        numbers = channel(config, ranks)
        on_cpu = ranks.device.type == "cpu"
        vectors = numbers if on_cpu else channel(config, ranks, device=ranks.device)
        ways = {"numbers": numbers, "vectors": vectors}
    return ShardedCompute(num_items, **ways)


def _shape(config: Config, features: BatchFeatures) -> dict[str, Any]:
    return {"widths": table_widths(config, features), "dim": config.model.dim, "how": config.tokens.join}
