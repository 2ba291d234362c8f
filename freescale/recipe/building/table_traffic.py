"""How many ids a step asks of every table, before there was a step: for the plan of a run, and for profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from freescale.data import BatchFeatures, Feature, SequenceSource
    from freescale.recipe.config import Config


@dataclass(frozen=True)
class AskedIds:
    """Ids that batches ask of one table, equal ones counted as often as they occur.

    Args:
        per_event: for every event of a history.
        per_sample: for every history, besides.
    """

    per_event: float
    per_sample: float


def asked_ids(config: Config, features: BatchFeatures | None) -> dict[str, AskedIds]:
    """By table. Lists of events and users count as one id: how long they are is not known before they are read."""
    from freescale.recipe.features import id_columns

    negatives = float(config.head.num_negatives)
    if features is None:
        return {"item": AskedIds(1.0, negatives)}
    domains = {"items": (1.0, negatives), "tokens": (1.0, 0.0), "samples": (0.0, 1.0)}
    found: dict[str, AskedIds] = {}
    for column in id_columns(config, features.schema):
        values = _values_of(features, features.schema[column.name])
        per_event, per_sample = (values * count for count in domains[column.domain])
        before = found.get(column.table, AskedIds(0.0, 0.0))
        found[column.table] = AskedIds(before.per_event + per_event, before.per_sample + per_sample)
    return found


def expected_ids(
    config: Config, source: SequenceSource, features: BatchFeatures | None, *, num_ranks: int
) -> dict[str, int]:
    """Ids that one rank asks of each table in a step; as many are unique at most."""
    from freescale.recipe.data import build_examples

    mean = float(build_examples(config, source, "train", negatives=False).lengths().mean())
    samples = float(config.data.global_batch)
    if config.data.global_tokens is not None:
        samples = config.data.global_tokens / max(1.0, mean)
    return {
        name: int(samples * (asked.per_event * mean + asked.per_sample) / num_ranks)
        for name, asked in asked_ids(config, features).items()
    }


def _values_of(features: BatchFeatures, feature: Feature) -> float:
    """Values of a list of items, on average; 1 of everything else."""
    from freescale.data import NONE

    if feature.kind != "ids" or feature.of != "item":
        return 1.0
    some = np.arange(min(1000, len(features.source.items.ids)))
    values = features.items(some)[feature.name]
    return float((values != NONE).sum() / max(1, len(some)))
