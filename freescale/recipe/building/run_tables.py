"""The tables of a run: one for items, and one for each further name that features have rows in."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freescale import registry
from freescale.errors import ConfigError
from freescale.recipe.reading.keys import section_options
from freescale.recipe.tables import TableOptions, table_options

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from freescale.comm.world import Ranks
    from freescale.data import BatchFeatures, SequenceSource
    from freescale.embedding import IdMap, IdMapKind, ShardedEmbedding, TableRows, TableSpec
    from freescale.pipeline import FeatureIds
    from freescale.recipe.config import Config


@dataclass(frozen=True)
class RunTables:
    """All tables of a run.

    Args:
        embedding: holds them.
        id_maps: of each, raw ids to rows; empty where nothing has rows.
        features: ids of features; None where batches ask for items alone.
    """

    embedding: ShardedEmbedding
    id_maps: dict[str, IdMap]
    features: FeatureIds | None = None

    @property
    def id_map(self) -> IdMap:
        """That of items, which have a row each in some table or in none."""
        from freescale.embedding import HashMap
        from freescale.pipeline import TABLE

        return self.id_maps.get(TABLE) or HashMap(1)

    @property
    def learns(self) -> bool:
        """Whether any map gives rows to ids in training."""
        return any(each.learns for each in self.id_maps.values())

    @property
    def guard(self) -> int | None:
        """Batches whose rows no map that learns gives to another id; None where none learns."""
        from freescale.embedding import learns_ids

        return min((each.guard for each in self.id_maps.values() if learns_ids(each)), default=None)


@dataclass(frozen=True)
class _Planned:
    options: TableOptions
    kind: IdMapKind
    rows: TableRows
    numbered: npt.NDArray[np.int64] | None


def build_tables(
    config: Config, source: SequenceSource, ranks: Ranks, features: BatchFeatures | None = None
) -> RunTables:
    """Every table, and how raw ids become its rows; no table where nothing looks at ids."""
    from freescale.embedding import NumberedMap
    from freescale.pipeline import TABLE, FeatureIds
    from freescale.recipe.comm import channel
    from freescale.recipe.features import id_columns
    from freescale.recipe.pipeline import hides_traffic

    wanted = _wanted(config, source, features)
    planned = {options.name: _plan(options, source, features) for options in wanted}
    embedding = _build_embedding(config, planned, ranks)
    id_maps: dict[str, IdMap] = {}
    for name, table in planned.items():
        beside_training = table.kind.learns and hides_traffic(config, embedding, ranks)
        own = channel(config, ranks) if beside_training else None
        options = section_options(table.options.section, "id_map")
        id_map = table.kind.build(embedding=embedding, table=name, channel=own, options=options)
        id_map = id_map if table.numbered is None else NumberedMap(table.numbered, id_map)
        most = table.options.section.spread_hot
        id_maps[name] = _spread(id_map, source, embedding, most) if most and name == TABLE else id_map
    if features is None:
        return RunTables(embedding, id_maps)
    columns = id_columns(config, features.schema)
    return RunTables(embedding, id_maps, FeatureIds(columns, id_maps))


def _spread(id_map: IdMap, source: SequenceSource, embedding: ShardedEmbedding, most: int) -> IdMap:
    """The same rows, of which the most popular are dealt evenly to their owners."""
    from freescale.embedding import SpreadMap
    from freescale.pipeline import TABLE

    if id_map.learns:
        raise ConfigError(
            "embedding.spread_hot: this map gives rows to ids in training",
            next_step="use embedding.id_map=direct or hash, or leave it out",
        )
    spread = SpreadMap(id_map, ids=source.items.ids, counts=source.items.train_counts, most=most)
    spread.move_first_values(embedding.tables[TABLE])
    return spread


def _wanted(config: Config, source: SequenceSource, features: BatchFeatures | None) -> list[TableOptions]:
    """The tables that something has rows in."""
    from freescale.recipe.features import id_columns

    has_ids = config.items.kind == "ids" or config.items.add_ids
    if features is None:
        return [_items_alone(config, source)] if has_ids else []
    used = {column.table for column in id_columns(config, features.schema)}
    found = [each for each in table_options(config, features.schema).values() if each.name in used]
    items = TableOptions("item", ("item",), config.model.dim, config.embedding, None)
    return found if "item" in used or not has_ids else [items, *found]


def _items_alone(config: Config, source: SequenceSource) -> TableOptions:
    """The table of items, where batches ask for nothing else; tables.item.* says what differs from embedding.*."""
    from freescale.recipe.features import run_schema

    found = table_options(config, run_schema(config, source))["item"]
    if found.dim != config.model.dim:
        raise ConfigError(
            f"tables.item.dim: head.kind={config.head.kind} reads rows as wide as the model",
            got=f"{found.dim}, model.dim {config.model.dim}",
            next_step="leave tables.item.dim out",
        )
    return found


def _plan(options: TableOptions, source: SequenceSource, features: BatchFeatures | None) -> _Planned:
    """How many rows a table has, and whether its ids are numbered first."""
    import numpy as np

    from freescale.embedding import needs_numbers

    section, name = options.section, options.name
    kind: IdMapKind = registry.find("id_map", section.id_map).make
    own = section_options(section, "id_map")
    dense = getattr(kind, "dense", False)
    if options.num_values is not None:
        num = options.num_values
        return _Planned(options, kind, kind.plan(num_items=num, largest_id=num - 1, options=own), None)
    ids = source.items.ids if name == "item" else _known_ids(options, source, features)
    if ids is not None and not len(ids):
        # Every value is missing: a learnt vector stands for it, and the table has a row that nobody asks for.
        return _Planned(options, kind, kind.plan(num_items=1, largest_id=0, options=own), None)
    if ids is None:
        if section.rows is None:
            raise ConfigError(
                f"tables.{name}.rows: how many different ids there are is not known before training",
                got=f"{', '.join(options.features)} of the event or the user, without rows",
                next_step=f"tables.{name}.rows=100000 tables.{name}.map=hash, or map=zero_collision",
            )
        largest = section.rows - 1
        return _Planned(
            options, kind, kind.plan(num_items=section.rows, largest_id=largest, options=own), None
        )
    # A kind that wants numbers from 0 on gets them: words, negative and sparse ids are numbered first.
    numbered = dense and needs_numbers(ids, rows=section.rows)
    largest = len(ids) - 1 if numbered else int(ids[-1])
    rows = kind.plan(num_items=len(ids), largest_id=largest, options=own)
    return _Planned(options, kind, rows, np.asarray(ids) if numbered else None)


def _known_ids(
    options: TableOptions, source: SequenceSource, features: BatchFeatures | None
) -> npt.NDArray[np.int64] | None:
    """All ids that features of a table can have, ascending; None where only going through all events would tell."""
    import numpy as np

    from freescale.data import NONE, FeatureSource

    assert features is not None
    if not isinstance(source, FeatureSource):
        return None
    if any(features.schema[name].of != "item" for name in options.features):
        return source.known_ids(options.name)
    columns = source.item_features().take(np.arange(len(source.items.ids)), options.features)
    ids = np.unique(np.concatenate([column.ravel() for column in columns.values()]))
    return ids[ids != NONE]


def _build_embedding(config: Config, planned: dict[str, _Planned], ranks: Ranks) -> ShardedEmbedding:
    from freescale.comm.traffic import open_node_groups, open_node_stages
    from freescale.comm.transports import TracedTransport, make_transport
    from freescale.embedding import ShardedEmbedding

    if not planned:
        return ShardedEmbedding([], group=ranks.group, device=ranks.device)
    transport = make_transport(
        ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
    )
    stages = None
    if ranks.group is not None and config.comm.dedup == "node":
        stages = open_node_stages(
            open_node_groups(ranks.group, timeout_s=ranks.timeout_s),
            device=ranks.device,
            kind=config.comm.transport,
            timeout_s=ranks.timeout_s,
            wrap=TracedTransport,
        )
    return ShardedEmbedding(
        [_spec(config, table) for table in planned.values()],
        group=ranks.group,
        device=ranks.device,
        transport=transport if ranks.num_ranks == 1 else TracedTransport(transport),
        stages=stages,
    )


def _spec(config: Config, table: _Planned) -> TableSpec:
    import torch

    from freescale.embedding import TableSpec, fits_below

    options = table.options.section
    optimizer: Any = registry.find("optimizer", options.optimizer)
    name = table.options.name
    spec = TableSpec(
        name=name,
        num_rows=table.rows.num_rows,
        row_group=table.rows.row_group,
        dim=table.options.dim,
        optimizer=optimizer.make(section_options(options, "optimizer", beta1=config.optim.beta1)),
        dtype=torch.float64 if config.model.dtype == "float64" else getattr(torch, options.dtype),
        # Tables differ in their first values, too.
        seed=config.run.seed if name == "item" else config.run.seed + zlib.crc32(name.encode()),
        init_std=options.init_std,
        lr_scale=options.lr / config.embedding.lr if config.embedding.lr else 1.0,
    )
    return replace(spec, replicate=fits_below(spec, options.replicate_below_mb))
