"""What a run tells about its ids: no more than fits into a line of the log, however many have come and gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freescale.embedding.ids.evicted_ids import MOST_TOLD, EvictedIds
from freescale.embedding.ids.eviction import LRU
from freescale.train.log.id_report import IdReport
from tests.effort import slow
from tests.embedding.ids.test_owned_ids import make
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

FRESH = 4_000


def memory_mib() -> float:
    """What this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def come_and_go(rank: int, num_steps: int) -> dict[str, object]:
    """Fresh ids in every step, and rows for ten steps: from then on about as many are evicted as come."""
    ranks = these_ranks()
    _, ids = make("sgd", rows=40_000, buckets=8, eviction=LRU())
    report, evicted, largest, before = IdReport(ids, ranks), 0, 0.0, 0.0
    for step in range(num_steps):
        first = 10**15 + (step * ranks.num_ranks + rank) * FRESH
        ids.rows(torch.arange(first, first + FRESH), step=step)
        evicted += int(ids.take_counts(step)[3])
        if step == 20:
            before = memory_mib()
        if before:
            largest = max(largest, memory_mib() - before)
    picture = report.picture()
    assert picture is not None
    assert report.picture()["evicted_ids"] == []
    return {"evicted": evicted, "mib": largest, "picture": picture}


@pytest.mark.parametrize(("num_steps", "num_evictions"), [(120, 400_000), slow(520, 2_000_000)])
def test_millions_of_evictions_take_little_memory_and_a_short_line(num_steps, num_evictions):
    results = run_on_ranks(come_and_go, 1, num_steps, timeout=100)
    told = results[0]["picture"]
    evicted = results[0]["evicted"]
    assert evicted > num_evictions
    assert results[0]["mib"] < 2
    assert len(json.dumps(told)) < 1_000_000
    assert len(told["evicted_ids"]) == MOST_TOLD
    assert told["evicted_ids"] == sorted(set(told["evicted_ids"]))
    assert told["evicted_left_out"] == evicted - MOST_TOLD  # none came back
    assert told["evictions"] == 0  # of step lines, which this test has none of


@pytest.mark.parametrize("back", [False, True])
def test_what_is_told_is_gone_and_what_is_not_is_counted(back):
    """Against a set: ids go in any order, some of them twice, and some come back."""
    rng = torch.Generator().manual_seed(3)
    resident = torch.zeros(10 * MOST_TOLD, dtype=torch.bool)
    evicted, everything = EvictedIds(lambda ids: ~resident[ids]), set()
    for _ in range(60):
        ids = torch.randint(0, len(resident), (1_500,), generator=rng).unique()
        evicted.add(ids)
        everything |= set(ids.tolist())
        if back:
            resident[ids[::7]] = True
    gone = sorted(each for each in everything if not resident[each])
    told = evicted.take().tolist()
    assert len(told) + evicted.left_out >= len(gone)
    assert set(told) <= set(gone)
    assert len(told) <= MOST_TOLD
    if not back:
        assert told == gone[:MOST_TOLD]
    assert evicted.take().tolist() == []
    assert evicted.left_out == 0


def test_few_are_all_told():
    evicted = EvictedIds(lambda ids: ids != 5)
    evicted.add(torch.tensor([9, 5, 7]))
    evicted.add(torch.tensor([7, 3]))
    assert evicted.take().tolist() == [3, 7, 9]
    assert evicted.left_out == 0
