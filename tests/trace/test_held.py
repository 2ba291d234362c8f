"""A rank that a transfer has held is not late by its own work."""

from __future__ import annotations

from freescale.trace import held
from freescale.trace.spans import MAIN, Arrival, Span


def wait(serial: int, start: float, end: float, *, lane: str = MAIN, arrived: float | None = None) -> Span:
    arrival = Arrival("x", 1, start if arrived is None else arrived, serial)
    return Span("x", "wait", lane, 1, start, end, arrival)


def held_before(spans: list[Span], came: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Of every arrival, as if this rank had always been the last."""
    return held.held_before(spans, came, late=came)


def test_the_wait_for_a_transfer_right_before_an_arrival_holds_it() -> None:
    spans = [wait(0, 1, 5), wait(1, 6, 8)]
    assert held_before(spans, {0: 2, 1: 6}) == {1: (2, 5)}
    assert held_before(spans, {0: 7, 1: 6}) == {}, "until the end it was another rank that it waited for"


def test_a_wait_before_the_exchange_before_is_over_and_done_with() -> None:
    spans = [wait(0, 1, 5), wait(1, 6, 7), wait(2, 20, 21)]
    assert held_before(spans, {0: 1, 1: 6, 2: 20})[2] == (6, 7)


def test_the_longest_of_several_counts_and_a_look_at_what_has_arrived_holds_nobody() -> None:
    spans = [wait(0, 1, 9, arrived=0), wait(1, 15, 15.1, arrived=0.5), wait(2, 16, 17)]
    assert held_before(spans, {0: 0, 1: 0.5, 2: 16})[2] == (1, 9)


def test_an_exchange_started_while_another_is_under_way_looks_behind_both() -> None:
    spans = [wait(0, 0, 8), wait(1, 9, 12, arrived=8.5), wait(2, 12, 13, arrived=8.6)]
    assert held_before(spans, {0: 0, 1: 8.5, 2: 8.6}) == {1: (0, 8), 2: (0, 8)}


def test_what_holds_the_main_thread_holds_those_it_gives_work_to_but_not_the_reverse() -> None:
    spans = [wait(0, 1, 5), wait(1, 6, 8, lane="communication"), wait(2, 9, 10)]
    assert held_before(spans, {0: 1, 1: 6, 2: 9}) == {1: (1, 5), 2: (1, 5)}
