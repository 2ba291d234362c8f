"""Whom a wait was for: lateness that a transfer has handed on is the wire's, however long ranks compute after it."""

from __future__ import annotations

import pytest

from freescale.trace import Arrival, Span
from freescale.train.log.notes import Notes, _Last


def wait(*, ready: float, end: float, came: float, held: tuple[float, float] | None, left: float) -> Span:
    """The wait of a rank that left its exchange before at `left` and was ready for this one at `ready`."""
    notes = Notes(ranks=None)
    notes._left = {"main": [left]}
    notes._known = {7: _Last(came, () if held is None else (held,))}
    return notes._recalled(Span("rows", "wait", "main", 3, ready, end, Arrival("rows", 3, ready, 7)))


def test_a_rank_that_the_wire_held_longer_is_not_late_by_its_work():
    # Both computed for 2 s; the other was held until 4, this one until 1.
    assert wait(ready=3, end=6.5, came=6, held=(0, 4), left=1).missing == ()


def test_what_it_computed_longer_is_its_own():
    # The other was held until 4 and then computed for 5 s, where this one took 2.
    assert wait(ready=3, end=9.5, came=9, held=(0, 4), left=1).missing == ((3, 6),)


def test_a_transfer_that_held_both_alike_excuses_nobody():
    assert wait(ready=5, end=9.5, came=9, held=(0, 4), left=4).missing == ((5, 9),)


def test_a_rank_that_nothing_held_is_late():
    assert wait(ready=3, end=6.5, came=6, held=None, left=1).missing == ((3, 6),)


@pytest.mark.parametrize("came", [2.0, 3.0])
def test_nobody_waits_for_a_rank_that_was_there_first(came):
    assert wait(ready=3, end=6.5, came=came, held=(0, 1), left=1).missing == ()
