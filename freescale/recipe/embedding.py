"""The item table: how ids become rows, and what updates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale import registry
from freescale.recipe.keys import changed, extra_keys, key, options_from_outside, section_options

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.data import SequenceSource
    from freescale.embedding import IdMap, IdMapKind, ShardedEmbedding, TableRows
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection:
    """The item table and its own optimizer."""

    id_map: str = key(
        "direct",
        "how raw ids become rows: a row for each number, by hash, or learnt in training",
        family="id_map",
    )
    rows: int | None = key(
        None,
        "table rows; null: largest id + 1 or, for text and sparse ids, as many as there are; zero_collision: 1.5 times "
        "the items (required for id_map=hash)",
        at_least=1,
    )
    max_probe: int = key(128, "zero_collision: rows an id may live in", at_least=1)
    buckets: int | None = key(
        None, "zero_collision: parts that ranks hold as a whole; null: by the number of rows", at_least=1
    )
    eviction: Literal["none", "ttl", "lru", "lfu"] = key(
        "none", "zero_collision: which id gives way when all rows it may live in are taken"
    )
    ttl: int | None = key(None, "eviction=ttl: steps an id stays after it was last seen", at_least=1)
    admit_after: int = key(1, "zero_collision: steps an id must be seen in to get a row", at_least=1)
    admission: Literal["count_min", "exact"] = key(
        "count_min", "admit_after: how ids without a row are counted"
    )
    guard: int = key(
        3,
        "zero_collision: rows of this many last steps are not taken over; bounds batches under way",
        at_least=0,
    )
    optimizer: str = key("adam", "sparse optimizer of the table", family="optimizer", elsewhere=("beta1",))
    lr: float = key(1e-3, "learning rate of the table, follows optim.schedule", at_least=0)
    dtype: Literal["float32", "bfloat16"] = key(
        "float32", "storage type of the table (float64 with model.dtype)"
    )
    beta2: float = key(0.98, "adam: decay of the second moment", at_least=0, at_most=0.999999)
    eps: float = key(1e-8, "adam, adagrad: added to the denominator", at_least=1e-30)
    replicate_below_mb: float = key(
        0.0, "replicate tables smaller than this on every rank", at_least=0, free=True
    )
    extra: Mapping[str, Any] = extra_keys()


# Ids of two batches go ahead of the current one, and gradients of the one before it may still be on their way.
BATCHES_IN_FLIGHT = 3
_OF_ZERO_COLLISION = ("max_probe", "buckets", "eviction", "ttl", "admit_after", "admission", "guard")


def problems(config: Config) -> list[str]:
    """Keys of id maps that do nothing, or miss each other."""
    options, found = config.embedding, []
    if options.id_map == "hash" and options.rows is None:
        found.append("embedding.rows: required when embedding.id_map=hash")
    if options.id_map != "zero_collision":
        unused = set(changed(options, *_OF_ZERO_COLLISION)) - options_from_outside(options, "id_map")
        found += [f"embedding.{name}: only for embedding.id_map=zero_collision" for name in sorted(unused)]
    elif (options.eviction == "ttl") != (options.ttl is not None):
        found.append("embedding.ttl: goes with embedding.eviction=ttl, both or none")
    if config.pipeline.prioritized and options.guard < BATCHES_IN_FLIGHT:
        found.append(
            f"embedding.guard: pipeline.prioritized has {BATCHES_IN_FLIGHT} batches under way, got {options.guard}; "
            "raise it, or set pipeline.prioritized=false"
        )
    return found


def build_tables(config: Config, source: SequenceSource, ranks: Ranks) -> tuple[ShardedEmbedding, IdMap]:
    """The item table, and how raw ids become its rows; no table where nothing looks at ids."""
    from freescale.embedding import HashMap, NumberedMap, ShardedEmbedding, needs_numbers
    from freescale.pipeline import TABLE
    from freescale.recipe.comm import channel
    from freescale.recipe.pipeline import hides_traffic

    if config.items.kind != "ids" and not config.items.add_ids:
        return ShardedEmbedding([], group=ranks.group, device=ranks.device), HashMap(1)
    kind: IdMapKind = registry.find("id_map", config.embedding.id_map).make
    options, items = section_options(config.embedding, "id_map"), source.items.ids
    # A kind that wants numbers from 0 on gets them: words, negative and sparse ids are numbered first.
    numbered = getattr(kind, "dense", False) and needs_numbers(items, rows=config.embedding.rows)
    largest = len(items) - 1 if numbered else int(items[-1])
    rows = kind.plan(num_items=len(items), largest_id=largest, options=options)
    embedding = build_embedding(config, rows, ranks)
    beside_training = kind.learns and hides_traffic(config, embedding, ranks)
    own = channel(config, ranks) if beside_training else None
    id_map = kind.build(embedding=embedding, table=TABLE, channel=own, options=options)
    return embedding, NumberedMap(items, id_map) if numbered else id_map


def build_embedding(config: Config, rows: TableRows, ranks: Ranks) -> ShardedEmbedding:
    """The item table."""
    import torch

    from freescale.comm.transports import TracedTransport, make_transport
    from freescale.embedding import ShardedEmbedding, TableSpec
    from freescale.pipeline import TABLE

    options = config.embedding
    optimizer = registry.find("optimizer", options.optimizer)
    spec = TableSpec(
        name=TABLE,
        num_rows=rows.num_rows,
        row_group=rows.row_group,
        dim=config.model.dim,
        optimizer=optimizer.make(section_options(options, "optimizer", beta1=config.optim.beta1)),
        dtype=torch.float64 if config.model.dtype == "float64" else getattr(torch, options.dtype),
        seed=config.run.seed,
    )
    transport = make_transport(
        ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
    )
    return ShardedEmbedding(
        [spec],
        group=ranks.group,
        device=ranks.device,
        replicate_below_mb=options.replicate_below_mb,
        transport=transport if ranks.num_ranks == 1 else TracedTransport(transport),
    )
