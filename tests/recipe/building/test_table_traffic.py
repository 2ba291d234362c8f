"""Ids that a step will ask of every table, against those that batches have."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.data import NONE
from freescale.recipe import build_examples, build_features, build_source, expected_ids, load_config
from freescale.recipe.features import id_columns
from tests.small_run import SMALL


@pytest.mark.parametrize("ranks", [1, 2])
def test_expected_ids_are_those_of_batches(ranks: int) -> None:
    config = load_config(None, [*SMALL, "synthetic.features=true", "data.global_batch=100"])
    source = build_source(config)
    features = build_features(config, source)
    assert features is not None
    expected = expected_ids(config, source, features, num_ranks=ranks)
    examples = build_examples(config, source, "train", negatives=True)
    rows = np.arange(0, 300, 3 * ranks)
    batch = examples.batch(rows)
    found: dict[str, int] = {}
    for column in id_columns(config, features.schema):
        ids = getattr(batch, column.domain)[column.name].numpy()
        if column.domain == "items":
            # Batches have what is known of an item once; it is expected for every event and negative.
            index = [batch.tokens["item_index"], batch.samples["negative_index"].flatten()]
            ids = np.concatenate([ids[each.numpy()] for each in index])
        found[column.table] = found.get(column.table, 0) + int((ids != NONE).sum())
    assert set(expected) == set(found)
    for name, count in found.items():
        assert expected[name] == pytest.approx(count, rel=0.2), name


def test_items_alone_are_events_and_negatives() -> None:
    config = load_config(None, [*SMALL, "data.global_tokens=500"])
    source = build_source(config)
    mean = np.clip(source.lengths - 3, 0, 40).mean()
    assert expected_ids(config, source, None, num_ranks=2) == {"item": int(250 * (1 + 16 / mean))}
