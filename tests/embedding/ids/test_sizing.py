"""Sizing advice holds when it is followed."""

from __future__ import annotations

import pytest
import torch

from freescale.embedding.ids.id_stats import advice, histogram, merged
from freescale.embedding.ids.sizing import MEASURED, PROBES, Size, plain_hash_collisions, size_table
from freescale.embedding.ids.zero_collision import ZeroCollisionMap
from freescale.errors import ConfigError
from tests.effort import slow


@pytest.mark.parametrize("target", [slow(0.01), 0.001, slow(0.0001)])
def test_a_table_of_the_advised_size_keeps_the_target(target: float) -> None:
    num_ids = 200_000
    for size in size_table(num_ids, target=target):
        # Full windows come in clusters: one draw may be a third off its mean.
        counts = [collisions_of(size, num_ids, seed) for seed in range(4)]
        assert sum(counts) / len(counts) <= target * num_ids * 1.15 + 10, size


def collisions_of(size: Size, num_ids: int, seed: int) -> int:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**63), 2**63 - 1, (num_ids,), generator=drawn)
    ids_map = ZeroCollisionMap(size.num_rows, max_probe=size.max_probe)
    ids_map.insert(ids)
    return int(ids_map.stats()["collisions"])


def test_more_probes_and_more_rows_never_hurt() -> None:
    for shares in MEASURED.values():
        assert list(shares) == sorted(shares, reverse=True)
        assert len(shares) == len(PROBES)
    for column in zip(*MEASURED.values()):
        assert list(column) == sorted(column, reverse=True)


def test_plain_hashing_collides_as_measured() -> None:
    rows = torch.randint(0, 266_000, (200_000,))
    assert plain_hash_collisions(266_000, 200_000) == pytest.approx(
        1 - len(rows.unique()) / 200_000, abs=0.005
    )


@pytest.mark.parametrize(
    "options", [{"num_ids": 0, "target": 0.1}, {"num_ids": 5, "target": -1.0}, {"num_ids": 5, "target": 1.0}]
)
def test_questions_without_an_answer_are_refused(options) -> None:
    with pytest.raises(ConfigError):
        size_table(**options)


def test_advice_comes_when_a_table_runs_full() -> None:
    counts = {"asked": 1000, "collisions": 0, "evictions": 0}
    assert advice(occupancy=0.5, counts=counts) is None
    assert "95% of the slots" in str(advice(occupancy=0.95, counts=counts))
    assert advice(occupancy=0.95, counts={**counts, "evictions": 5}) is None
    assert "0.50% of the ids" in str(advice(occupancy=0.95, counts={**counts, "collisions": 5}))
    of_shops = str(advice(occupancy=0.95, counts={**counts, "collisions": 5}, section="tables.shop"))
    assert "raise tables.shop.rows, or let ids go by tables.shop.eviction" in of_shops
    assert "embedding." not in of_shops


def test_histograms_add_up() -> None:
    values = torch.tensor([0, 0, 1, 2, 3, 4, 7, 8, 200])
    counted = histogram(values)
    assert counted == {"0": 2, "1": 1, "2-3": 2, "4-7": 2, "8-15": 1, "128-255": 1}
    assert merged([counted, {"0": 1, "16-31": 4}]) == {**counted, "0": 3, "16-31": 4}
    assert list(merged([{"128-255": 1}, {"16-31": 4, "2-3": 1}])) == ["2-3", "16-31", "128-255"]


def test_who_lets_ids_go_already_is_not_told_to():
    counts = {"asked": 1000, "collisions": 50, "evictions": 0}
    assert "or let ids go by embedding.eviction" in str(advice(occupancy=1.0, counts=counts))
    told = str(advice(occupancy=1.0, counts={**counts, "evictions": 7}))
    assert "let ids go" not in told
    assert "embedding.guard" in told
