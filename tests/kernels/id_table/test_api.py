"""The compiled id kernels against one id after the other."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freescale.errors import PlanError
from freescale.kernels.id_table import api as id_probe
from freescale.kernels.id_table import reference
from freescale.kernels.id_table.layout import EMPTY, SlotLayout, id_hash, make_layout
from tests.effort import examples

LOW, HIGH = -(2**63), 2**63 - 1
# Few different ids, so that they come again; and the ends of the range.
IDS = st.one_of(st.integers(-40, 40), st.sampled_from([LOW, LOW + 1, HIGH, HIGH - 1, EMPTY]))
BATCHES = st.lists(st.lists(IDS, min_size=1, max_size=40), min_size=1, max_size=4)


@st.composite
def layouts(draw: st.DrawFn) -> SlotLayout:
    buckets = draw(st.integers(1, 3))
    rows = buckets * draw(st.integers(16, 40))
    layout = make_layout(rows, num_buckets=buckets, max_probe=draw(st.sampled_from([1, 2, 5, 8, 200])))
    first = draw(st.integers(0, buckets - 1))
    return layout.part(first, draw(st.integers(1, buckets - first)))


def empty_table(layout: SlotLayout) -> torch.Tensor:
    return torch.full((layout.held_rows,), EMPTY)


def assert_shared(ids: torch.Tensor, rows: torch.Tensor, layout: SlotLayout, share: Any) -> None:
    """Ids without a row get the row that the layout says they share, and are counted."""
    filled = rows.clone()
    assert share(ids, filled, layout) == int((rows < 0).sum())
    assert torch.equal(filled, torch.where(rows < 0, layout.overflow(ids), rows))


@given(layouts(), BATCHES, st.lists(IDS, min_size=1, max_size=30))
@examples(50, thorough=200)
def test_loops_do_what_the_reference_does(layout: SlotLayout, batches, asked) -> None:
    ours, truth = empty_table(layout), empty_table(layout)
    for batch in batches:
        ids = torch.tensor(batch)
        rows, new, new_ids = id_probe.claim(ids, ours, None, layout)
        true_rows, true_new = reference.claim(ids, truth, layout)
        assert torch.equal(ours, truth)
        assert torch.equal(rows, true_rows)
        assert torch.equal(new, true_new)
        assert torch.equal(new_ids, ours[new])
        assert_shared(ids, rows, layout, id_probe.share)
    ids = torch.tensor(asked)
    assert torch.equal(id_probe.find(ids, ours, layout), reference.find(ids, truth, layout))


@given(layouts(), BATCHES, st.sampled_from(["max", "add", "set"]), st.integers(0, 3), st.integers(-5, 5))
@examples(50, thorough=200)
def test_take_overs_and_scores_follow_the_reference(
    layout: SlotLayout, batches, mode: str, guard: int, threshold: int
) -> None:
    ours = [empty_table(layout), torch.full((layout.held_rows,), -99, dtype=torch.int32)]
    ours.append(torch.zeros(layout.held_rows, dtype=torch.int64))
    truth = [values.clone() for values in ours]
    for now, batch in enumerate(batches):
        ids = torch.tensor(batch)
        rows, _, _ = id_probe.claim(ids, ours[0], None, layout)
        reference.claim(ids, truth[0], layout)
        values = ids % 7 if mode == "set" else torch.tensor([now])
        id_probe.touch(rows, *ours[1:], values, now=now, mode=mode)
        reference.touch(rows, *truth[1:], values, now=now, mode=mode)
        wanting = torch.tensor(sorted(set(ids[rows < 0].tolist())), dtype=torch.int64)
        rule = {"now": now, "safe_from": now - guard, "threshold": threshold, "blank": 1}
        for a, b in zip(
            id_probe.evict(wanting, *ours, layout, **rule), reference.evict(wanting, *truth, layout, **rule)
        ):
            assert torch.equal(a, b)
        for a, b in zip(ours, truth):
            assert torch.equal(a, b)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@given(layouts(), BATCHES, st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 16]))
@settings(deadline=None, max_examples=2, database=None)  # the interpreter takes seconds for each
@example(make_layout(32, num_buckets=2, max_probe=8), [list(range(30)), list(range(-10, 10))], 4, 16)
@example(make_layout(32, num_buckets=2, max_probe=2).part(1, 1), [list(range(20))], 2, 16)
def test_triton_places_the_smallest_first(layout: SlotLayout, batches, group: int, block: int) -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from freescale.kernels.id_table.triton import probe as probe_triton
    from freescale.kernels.id_table.triton import share as share_triton
    from freescale.kernels.id_table.triton import touch as probe_touch

    tiles = probe_triton.Tiles(block=block, group=group, warps=1)
    ours, truth = empty_table(layout), empty_table(layout)
    occupied = id_probe.occupied_bits(ours)
    used, score = torch.full((layout.held_rows,), -9, dtype=torch.int32), torch.zeros_like(ours)
    true_used, true_score = used.clone(), score.clone()
    for now, batch in enumerate(batches):
        ids, ascending = torch.tensor(batch), torch.tensor(sorted(set(batch)))
        rows, new = probe_triton.claim(ids, ours, occupied, layout, tiles=tiles)
        _, true_new = reference.claim(ascending, truth, layout)
        assert torch.equal(ours, truth)
        assert torch.equal(rows, reference.find(ids, truth, layout))
        assert torch.equal(rows[new].sort().values, true_new.sort().values)
        assert torch.equal(ours[rows[new]], ids[new])
        assert torch.equal(occupied, id_probe.occupied_bits(ours))
        assert_shared(ids, rows, layout, share_triton.share)
        assert torch.equal(probe_triton.find(ids, ours, layout, tiles=tiles), rows)
        probe_touch.touch(rows, used, score, torch.ones(1, dtype=torch.int64), now, "add")
        reference.touch(rows, true_used, true_score, torch.ones(1), now=now, mode="add")
        wanting = ascending[reference.find(ascending, truth, layout) < 0]
        rule = {"now": now, "safe_from": now, "threshold": HIGH, "blank": 1}
        taken = probe_triton.evict(wanting, ours, used, score, layout, *rule.values())
        true_taken = reference.evict(wanting, truth, true_used, true_score, layout, **rule)
        assert all(torch.equal(a, b) for a, b in zip(taken, true_taken))
        assert all(torch.equal(a, b) for a, b in zip((ours, used, score), (truth, true_used, true_score)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("mode", ["max", "add", "set"])
@pytest.mark.parametrize("num_rows", [32, 75])
def test_triton_marks_rows_as_the_reference_does(mode: str, num_rows: int) -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from freescale.kernels.id_table.triton import touch as probe_touch

    generator = torch.Generator().manual_seed(num_rows)
    truth = [torch.full((num_rows,), 3, dtype=torch.int32), torch.arange(num_rows) % 5 - 2]
    by_bits, directly = ([values.clone() for values in truth] for _ in range(2))
    # The same batch number again: a row is counted once a batch.
    for now in (3, 4, 4, 6):
        rows = torch.randint(-1, num_rows, (40,), generator=generator)
        value = torch.tensor([now - 4])
        reference.touch(rows, *truth, value, now=now, mode=mode)
        probe_touch.touch_by_bits(rows, *by_bits, value, now, mode)
        probe_touch.touch_directly(rows, *directly, value, now, mode)
        for ours in (by_bits, directly):
            assert all(torch.equal(a, b) for a, b in zip(ours, truth))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
def test_triton_sets_the_bits_of_rows_found() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from freescale.kernels.id_table.triton import probe as probe_triton
    from freescale.kernels.id_table.triton import touch as probe_touch

    layout = make_layout(64, num_buckets=2, max_probe=8)
    table = empty_table(layout)
    reference.claim(torch.arange(30), table, layout)
    asked = torch.tensor([3, 99, 7, 7, -5, 29, EMPTY])
    marks = probe_touch.no_marks(table)
    rows = probe_triton.find(asked, table, layout, marks=marks)
    assert torch.equal(rows, reference.find(asked, table, layout))
    set_bits = [r for r in range(layout.held_rows) if int(marks[r // 32]) >> (r % 32) & 1]
    assert set_bits == sorted(set(rows[rows >= 0].tolist()))


def test_hash_is_splitmix64() -> None:
    ids = np.array([0, 1, -1, LOW, HIGH, 123456789], dtype=np.int64)
    with np.errstate(over="ignore"):
        x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    assert id_hash(torch.from_numpy(ids)).tolist() == x.astype(np.int64).tolist()


@pytest.mark.parametrize(
    "ids", [torch.arange(100_000), torch.arange(100_000) * 2**20, -torch.arange(100_000) * 8]
)
def test_ids_with_a_pattern_fill_buckets_and_homes_evenly(ids: torch.Tensor) -> None:
    layout = make_layout(160_000, num_buckets=16)
    for places, size in ((layout.bucket(ids), 16), (layout.home(ids) // 100, layout.bucket_slots // 100)):
        counts = torch.bincount(places, minlength=size)[:size].double()
        # Chi-squared over its degrees of freedom: 1 for numbers drawn at random.
        assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum() / (size - 1)) < 2.5


@given(st.integers(16, 5000), st.integers(1, 8))
def test_layouts_hold_what_was_asked_for(rows: int, buckets: int) -> None:
    if rows < 16 * buckets:
        with pytest.raises(PlanError):
            make_layout(rows, num_buckets=buckets)
        return
    layout = make_layout(rows, num_buckets=buckets)
    assert rows <= layout.num_rows < rows + buckets
    assert layout.overflow_rows >= 1
    assert layout.bucket_slots % 8 == 0
    ids = torch.arange(-200, 200)
    shared = layout.overflow(ids)
    assert bool((shared % layout.bucket_rows >= layout.bucket_slots).all())
    assert torch.equal(shared // layout.bucket_rows, layout.bucket(ids))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rows": 5}, "few rows"),
        ({"num_rows": 100, "num_buckets": 50}, "too small for its buckets"),
        ({"num_rows": 100, "num_buckets": 0}, "too small for its buckets"),
        ({"num_rows": 100, "max_probe": 0}, "max_probe"),
    ],
)
def test_layouts_that_cannot_work_are_refused(options, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_layout(**options)


@pytest.mark.parametrize("scores", ["equal", "random"])
def test_the_first_of_the_lowest_scores_is_taken_over(scores: str) -> None:
    layout = make_layout(64, num_buckets=1, max_probe=9)
    generator = torch.Generator().manual_seed(1)
    full = torch.arange(1000, 1000 + layout.held_rows)
    used = torch.zeros(layout.held_rows, dtype=torch.int32)
    score = torch.randint(0, 1 if scores == "equal" else 4, (layout.held_rows,), generator=generator)
    rule = {"now": 5, "safe_from": 5, "threshold": 3, "blank": 9}
    ours, truth = ([full.clone(), used.clone(), score.clone()] for _ in range(2))
    wanting = torch.arange(30)
    taken, gone = id_probe.evict(wanting, *ours, layout, **rule)
    true_taken, true_gone = reference.evict(wanting, *truth, layout, **rule)
    assert torch.equal(taken, true_taken)
    assert torch.equal(gone, true_gone)
    assert all(torch.equal(a, b) for a, b in zip(ours, truth))
    first = next(iter(reference.window(layout, 0)))
    assert scores == "random" or int(taken[0]) == first
