"""Splitting a step: the parts add up to it whatever the spans, and every moment has one cause."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.trace.bubbles import Parts, overlap, slowest, split_step, total, union, without
from freescale.trace.spans import MAIN, Arrival, Span

MOMENTS = st.integers(-2, 12)


@st.composite
def intervals(draw):
    return [(min(a, b), max(a, b)) for a, b in draw(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=8))]


@st.composite
def spans(draw):
    low, high = sorted(draw(st.tuples(MOMENTS, MOMENTS)))
    kind = draw(st.sampled_from(["compute", "wait", "stage"]))
    lane = draw(st.sampled_from([MAIN, "communication"]))
    keyed = kind == "wait" and draw(st.booleans())
    last = draw(st.none() | MOMENTS) if keyed else None
    missing = None
    if last is not None and draw(st.booleans()):
        missing = tuple(overlap([(low, high)] if low < high else [], union(draw(intervals()))))
    return Span("x", kind, lane, 1, low, high, Arrival("x", 1, low, 0) if keyed else None, last, missing)


def cause_of(moment: float, everything: list[Span]) -> str:
    """The definition, moment by moment."""
    here = [s for s in everything if s.start < moment < s.end]
    if any(s.kind == "compute" for s in here):
        return "compute"
    waits = [s for s in here if s.kind == "wait" and s.lane == MAIN]
    if not waits:
        return "host"
    others = [s for s in here if s.kind == "wait" and s.lane != MAIN]
    for wait in waits:
        asked = [wait] if wait.arrival is not None else others
        if any(somebody_missing(moment, each) for each in asked):
            return "straggler"
    return "comm"


def somebody_missing(moment: float, wait: Span) -> bool:
    if wait.missing is not None:
        return any(low < moment < high for low, high in wait.missing)
    return wait.last is not None and moment < wait.last


@given(st.lists(spans(), max_size=10))
def test_every_moment_has_the_cause_the_definition_gives_it(everything):
    parts = split_step(0, 10, everything)
    wanted = {"compute": 0, "straggler": 0, "comm": 0, "host": 0}
    for second in range(10):
        wanted[cause_of(second + 0.5, everything)] += 1
    assert {name: getattr(parts, name) for name in wanted} == wanted
    assert parts.compute + parts.straggler + parts.comm + parts.host == parts.total == 10
    assert sum(parts.shares()[cause] for cause in ("straggler", "comm", "host")) == pytest.approx(
        parts.bubble
    )


@given(intervals(), intervals())
def test_union_and_without_keep_exactly_the_right_moments(some, cover):
    merged, hidden = union(some), union(cover)
    left = without(merged, hidden)
    assert all(low < high for low, high in left)
    assert all(before[1] <= after[0] for before, after in pairwise(left))
    for second in range(-2, 12):
        moment = second + 0.5
        inside = any(low < moment < high for low, high in some)
        covered = any(low < moment < high for low, high in cover)
        assert any(low < moment < high for low, high in merged) == inside
        assert any(low < moment < high for low, high in left) == (inside and not covered)
        common = any(low < moment < high for low, high in overlap(merged, hidden))
        assert common == (inside and covered)


def test_a_wait_inside_a_collective_is_never_work():
    rows = Arrival("rows", 1, 2.0, 0)
    parts = split_step(0, 10, [Span("rows", "wait", MAIN, 1, 2.0, 9.0, rows, 7.0)])
    assert (parts.compute, parts.straggler, parts.comm, parts.host) == (0, 5, 2, 3)
    assert parts.bubble == 1


def test_what_another_thread_waits_for_explains_the_wait_for_that_thread():
    rows = Arrival("rows", 1, 0.0, 0)
    background = Span("rows", "wait", "communication", 1, 0.0, 9.0, rows, 4.0)
    alone = split_step(0, 10, [background])
    assert (alone.straggler, alone.comm, alone.host) == (0, 0, 10)
    main = Span("next batch", "wait", MAIN, 1, 1.0, 9.0)
    both = split_step(0, 10, [background, main])
    assert (both.straggler, both.comm, both.host) == (3, 5, 2)


def test_long_steps_weigh_more_and_no_steps_divide_nothing():
    assert total([Parts(1, 1, 0, 0), Parts(3, 0, 3, 0)]).bubble == 0.75
    assert total([]).bubble == 0
    assert math.isclose(total([Parts(2, 1, 0.5, 0.25)]).host, 0.25)


def test_the_slowest_is_the_one_that_waits_least_and_the_cause_is_what_it_does_more():
    even = Parts(10, 5, 3, 1)
    assert slowest([even]) is None
    assert slowest([Parts(10, 9, 0, 0), Parts(10, 9, 0, 0)]) is None
    late = slowest([even, Parts(10, 8, 0, 1), even])
    assert (late.rank, late.cause) == (1, "compute")
    assert late.excess == pytest.approx(0.2)
    assert slowest([even, Parts(10, 5, 0, 1)]).cause == "host"
    assert slowest([even, Parts(10, 5, 0, 4)]).cause == "comm"
