"""Which sorts are replayed, and which make room; with recordings that are made up (tests/gpu has real ones)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.rows import recorded_plan
from freescale.kernels.rows.recorded_plan import FEWEST_KEYS, MOST_KEYS, capacity_of, use_plan


class MadeUp:
    """Says what was lent to whom."""

    refuse = False

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device, pool: Any) -> None:
        if MadeUp.refuse:
            raise RuntimeError("no room\nat all")
        self.capacity, self.pool, self.used = capacity, pool, 0

    def of(self, keys: torch.Tensor) -> tuple[str, int]:
        return "replayed", self.capacity


class Kernels:
    """What sorts as usual."""

    @staticmethod
    def make_plan(keys: torch.Tensor) -> tuple[str, int]:
        return "as usual", len(keys)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> recorded_plan._Recordings:
    fresh = recorded_plan._Recordings()
    monkeypatch.setattr(recorded_plan, "_recordings", fresh)
    monkeypatch.setattr(recorded_plan, "RecordedPlan", MadeUp)
    monkeypatch.setattr(
        recorded_plan, "_can_replay", lambda keys: not fresh.failed and len(keys) <= MOST_KEYS
    )
    monkeypatch.setattr(recorded_plan, "stream_address", lambda device: 7)
    monkeypatch.setattr(recorded_plan, "_pool", lambda *name: name)
    monkeypatch.setattr(recorded_plan, "kernels_of", lambda module: Kernels)
    monkeypatch.setattr(MadeUp, "refuse", False)
    return fresh


def planned(size: int, dtype: torch.dtype = torch.int32) -> tuple[str, int]:
    seen: list[Any] = []
    use_plan(torch.zeros(size, dtype=dtype), seen.append)
    (plan,) = seen
    return plan


def test_a_size_is_replayed_from_the_third_time_on(recordings: recorded_plan._Recordings) -> None:
    capacity = capacity_of(5_000)
    assert [planned(5_000 + n) for n in range(4)] == [
        ("as usual", 5_000),
        ("as usual", 5_001),
        ("replayed", capacity),
        ("replayed", capacity),
    ]
    assert planned(5_000, torch.int64) == ("as usual", 5_000)
    assert planned(MOST_KEYS + 1) == ("as usual", MOST_KEYS + 1)
    (one,) = recordings.made.values()
    assert one.pool == (None, 7), "of the stream"  # type: ignore[attr-defined]


def test_what_was_used_lately_stays_and_what_no_longer_comes_makes_room(
    recordings: recorded_plan._Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_plan, "_MOST_SIZES", 2)
    monkeypatch.setattr(recorded_plan, "_FORGOTTEN", 10)
    for size in [5_000] * 4 + [9_000] * 4 + [20_000] * 4:
        planned(size)
    made = [capacity for *_, capacity in recordings.made]
    assert made == [capacity_of(5_000), capacity_of(9_000)], "both had been used not long before"
    for size in [9_000] * 4 + [20_000] * 4:
        planned(size)
    assert [capacity for *_, capacity in recordings.made] == [capacity_of(9_000), capacity_of(20_000)]
    assert planned(9_000)[0] == "replayed"


def test_where_none_can_be_recorded_it_is_told_once(recordings: recorded_plan._Recordings) -> None:
    MadeUp.refuse = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plans = [planned(size) for size in (5_000, 9_000) * 5]
    assert {how for how, _ in plans} == {"as usual"}
    assert [str(one.message) for one in told] == [
        "sorts of rows cannot be recorded as CUDA graphs (no room): they are started one by one"
    ]


def test_a_use_that_fails_leaves_the_way_free(recordings: recorded_plan._Recordings) -> None:
    def fail(plan: Any) -> None:
        raise ValueError(plan)

    for _ in range(5):
        with pytest.raises(ValueError, match=r"replayed|as usual"):
            use_plan(torch.zeros(5_000), fail)
    assert planned(9_000) == ("as usual", 9_000)


@given(st.integers(1, 1 << 18))
def test_keys_are_padded_to_the_fewest_or_by_an_eighth_at_most(count: int) -> None:
    capacity = capacity_of(count)
    assert count <= capacity <= max(FEWEST_KEYS, count * 9 / 8)
    assert capacity_of(capacity) == capacity
