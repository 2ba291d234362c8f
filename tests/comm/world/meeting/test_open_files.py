"""Descriptors for as many ranks as there are: raised where the system allows it, refused in words where it does not."""

from __future__ import annotations

import resource

import pytest

from freescale.comm.world.meeting.open_files import EACH_RANK, OWN, allow_open_files
from freescale.errors import FreeScaleError

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What this process has, last; all that was set before it."""
    kept = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: kept[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: kept.append(pair))
    return kept


def test_few_ranks_change_nothing(limits: list[tuple[int, int]]) -> None:
    allow_open_files(8)
    assert limits == [(1024, 4096)]


def test_many_ranks_get_what_they_need(limits: list[tuple[int, int]]) -> None:
    allow_open_files(200)
    assert limits[-1] == (2 * (OWN + 200 * EACH_RANK), 4096)
    allow_open_files(400)  # twice as many as needed are not allowed
    assert limits[-1] == (4096, 4096)


def test_without_a_hard_limit_any_number_is_allowed(limits: list[tuple[int, int]]) -> None:
    limits[-1] = (1024, UNLIMITED)
    allow_open_files(10_000)
    assert limits[-1][0] > 70_000
    limits[-1] = (UNLIMITED, UNLIMITED)
    allow_open_files(10_000)
    assert limits[-1] == (UNLIMITED, UNLIMITED)


def test_too_few_are_refused_before_anybody_connects(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(FreeScaleError, match=r"rank of 1024 needs about 7,192 file descriptors") as refused:
        allow_open_files(1024)
    assert "ulimit -n 14384" in str(refused.value)
    limits[-1] = (20, 20)
    with pytest.raises(FreeScaleError, match="at most 20"):
        allow_open_files(2)
