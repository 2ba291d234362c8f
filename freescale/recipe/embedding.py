"""The item table: how ids become rows, and what updates them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale.recipe.reading.keys import changed, extra_keys, key, options_from_outside

if TYPE_CHECKING:
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
    ttl: int | None = key(
        None,
        "eviction=ttl: steps an id stays after it was last seen; with a log, seconds of its data",
        at_least=1,
    )
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
    init_std: float = key(0.02, "standard deviation of fresh rows", at_least=0)
    beta2: float = key(0.98, "adam: decay of the second moment", at_least=0, at_most=0.999999)
    eps: float = key(1e-8, "adam, adagrad: added to the denominator", at_least=1e-30)
    spread_hot: int = key(
        0,
        "of the most popular items so many have their rows dealt evenly to the ranks; 0: rows lie as the map puts them",
        at_least=0,
    )
    replicate_below_mb: float = key(
        0.0, "replicate tables smaller than this on every rank", at_least=0, free=True
    )
    start_from: str | None = key(
        None, "folder of rows from elsewhere that tables start with (`freescale import`); null: random rows"
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
    said = set(changed(options, *_OF_ZERO_COLLISION, "spread_hot"))
    found += [f"embedding.{text}" for text in map_problems(config, options, said)]
    return found


def map_problems(config: Config, options: EmbeddingSection, said: Container[str]) -> list[str]:
    """Keys of a table's id map that do nothing, or miss each other; `said` are those that are told of this table."""
    if options.id_map != "zero_collision":
        unused = {name for name in _OF_ZERO_COLLISION if name in said} - options_from_outside(
            options, "id_map"
        )
        return [f"{name}: only for map zero_collision, got {options.id_map}" for name in sorted(unused)]
    found = []
    if options.spread_hot and "spread_hot" in said:
        found.append("spread_hot: map zero_collision gives rows itself; use direct or hash, or leave it out")
    if (options.eviction == "ttl") != (options.ttl is not None) and ("ttl" in said or "eviction" in said):
        found.append("ttl: goes with eviction=ttl, both or none")
    if config.pipeline.prioritized and options.guard < BATCHES_IN_FLIGHT and "guard" in said:
        found.append(
            f"guard: pipeline.prioritized has {BATCHES_IN_FLIGHT} batches under way, got {options.guard}; "
            "raise it, or set pipeline.prioritized=false"
        )
    return found
