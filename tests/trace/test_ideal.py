"""Waits for other ranks are those that a world without wires would have: held against such a world, run beside it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.trace import ideal as ideal_module
from freescale.trace.ideal import IdealClocks, ideal_times
from freescale.trace.spans import MAIN, Arrival, Span

SIDE = "communication"
MOMENT = 1e-9
"""Nothing takes no time at all."""


@dataclass
class World:
    """Ranks that run one program in a main thread and a side thread; every number is a list, one a rank.

    An exchange is over on a rank when the last one has come and the wire has taken its time; in an ideal world, where
    `wires` is False, the wire takes none.
    """

    num_ranks: int
    wires: bool = True
    spans: list[list[Span]] = field(default_factory=list)
    waits: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = {lane: [100.0] * self.num_ranks for lane in (MAIN, SIDE)}
        self.spans = [[] for _ in range(self.num_ranks)]
        self._serials = itertools.count()

    def work(self, lane: str, seconds: list[float], *, told: bool = True) -> None:
        """Ranks work, or do what nobody records."""
        for rank, more in enumerate(seconds):
            begin, self.now[lane][rank] = self.now[lane][rank], self.now[lane][rank] + more
            if told and more:
                self.spans[rank].append(Span("work", "compute", lane, 1, begin, begin + more))

    def start(self) -> tuple[int, list[float]]:
        """Arrive at an exchange in the main thread, and go on."""
        return next(self._serials), list(self.now[MAIN])

    def wait(self, lane: str, started: tuple[int, list[float]], wire: list[float]) -> None:
        """Until the exchange is over."""
        serial, came = started
        for rank in range(self.num_ranks):
            begin = self.now[lane][rank]
            end = max(begin, max(came) + (wire[rank] + MOMENT if self.wires else 0.0)) + MOMENT
            self.now[lane][rank] = end
            self.waits[rank, serial] = max(0.0, max(came) - begin)
            arrival = Arrival("exchange", 1, came[rank], serial)
            self.spans[rank].append(Span("exchange", "wait", lane, 1, begin, end, arrival))

    def exchange(self, lane: str, wire: list[float]) -> None:
        """Arrive and wait."""
        self.wait(lane, (next(self._serials), list(self.now[lane])), wire)

    def hand_over(self, source: str, target: str, ready: list[float]) -> None:
        """A thread goes on when another one had something ready."""
        for rank in range(self.num_ranks):
            begin = self.now[target][rank]
            end = self.now[target][rank] = max(begin, ready[rank]) + MOMENT
            arrival = Arrival(source, 1, ready[rank], -1)
            self.spans[rank].append(Span("take over", "handover", target, 1, begin, end, arrival))

    def job(self, *moves: tuple[list[float], list[float]]) -> list[float]:
        """What the main thread gives to the other one: work and exchanges in turn; returns when it is done."""
        self.hand_over(MAIN, SIDE, list(self.now[MAIN]))
        for seconds, wire in moves:
            self.work(SIDE, seconds)
            self.exchange(SIDE, wire)
        return list(self.now[SIDE])


def compared(worlds: list[list[Span]], untils: list[list[float]]) -> dict[tuple[int, int], float]:
    """What the clocks of all ranks make of their spans: (rank, exchange) -> seconds waited for another rank.

    The ranks compare at the moments `untils`, of which each has its own.
    """
    clocks = [IdealClocks() for _ in worlds]
    found: dict[tuple[int, int], float] = {}
    begun = [-1.0] * len(worlds)
    for until in untils:
        waits = []
        for rank, (clock, spans) in enumerate(zip(clocks, worlds)):
            clock.hear([span for span in spans if begun[rank] < span.end <= until[rank]])
            waits.append(clock.due(until[rank]))
        begun = until
        keys = [[wait.arrival.serial for wait in some] for some in waits]
        assert all(sorted(some) == sorted(keys[0]) for some in keys), (
            "ranks would compare different exchanges"
        )
        came: dict[int, float] = defaultdict(float)
        for wait in itertools.chain(*waits):
            came[wait.arrival.serial] = max(came[wait.arrival.serial], wait.arrival.mark)
        longest: dict[int, dict[int | None, float]] = defaultdict(dict)
        for clock in clocks:
            for key, paths in clock.paths(came).items():
                for start, seconds in paths.items():
                    longest[key][start] = max(seconds, longest[key].get(start, 0.0))
        ideal = ideal_times(longest, sorted(longest))
        for rank, clock in enumerate(clocks):
            clock.set_ideal(ideal)
            for wait in waits[rank]:
                intervals = clock.missing(wait, ideal[wait.arrival.serial])
                found[rank, wait.arrival.serial] = sum(high - low for low, high in intervals)
    return found


FOREVER = float("inf")


def check(program, num_ranks: int) -> dict[tuple[int, int], float]:
    """Run a program with wires and without: what is found in the first are the waits of the second."""
    real, ideal = World(num_ranks), World(num_ranks, wires=False)
    for world in (real, ideal):
        program(world)
    found = compared(real.spans, [[FOREVER] * num_ranks])
    length = {
        (rank, span.arrival.serial): span.end - span.start
        for rank, spans in enumerate(real.spans)
        for span in spans
        if span.kind == "wait"
    }
    for key, seconds in found.items():
        # A rank may have been held for so long that there was nothing left to wait for.
        assert seconds == pytest.approx(min(ideal.waits[key], length[key]), abs=1e-6), key
    return found


def test_a_rank_that_works_longer_is_waited_for_and_the_wire_is_not():
    def program(world):
        world.work(MAIN, [1, 4])
        world.exchange(MAIN, [2, 2])

    assert check(program, 2) == pytest.approx({(0, 0): 3, (1, 0): 0}, abs=1e-6)


def test_lateness_that_a_transfer_hands_on_is_the_wires():
    def program(world):
        world.exchange(MAIN, [1, 9])  # rank 1 is held for longer ...
        world.work(MAIN, [2, 2])
        world.exchange(MAIN, [1, 1])  # ... and so comes 8 s late

    assert max(check(program, 2).values()) < 1e-6


def test_lateness_is_followed_through_the_communication_thread_to_the_main_one():
    def program(world):
        done = world.job(([0, 0], [1, 9]))  # the wire holds the other thread of rank 1 ...
        world.work(MAIN, [2, 2])
        world.hand_over(SIDE, MAIN, done)  # ... for which its main thread waits ...
        world.exchange(MAIN, [1, 1])  # ... and so comes late: not by its own work

    assert max(check(program, 2).values()) < 1e-6


def test_and_from_the_main_thread_to_the_communication_thread():
    def program(world):
        world.exchange(MAIN, [1, 9])
        world.work(MAIN, [2, 5])
        done = world.job(([0, 0], [1, 1]))  # rank 1 comes 11 s late, 3 of them by its own work
        world.hand_over(SIDE, MAIN, done)
        world.exchange(MAIN, [1, 1])

    assert check(program, 2) == pytest.approx(
        {(0, 0): 0, (1, 0): 0, (0, 1): 3, (1, 1): 0, (0, 2): 0, (1, 2): 0}, abs=1e-6
    )


def test_work_of_a_rank_that_the_wire_had_held_before_is_still_its_own():
    def program(world):
        world.exchange(MAIN, [0, 5])
        world.work(MAIN, [1, 4])
        world.exchange(MAIN, [0, 0])
        world.work(MAIN, [4, 1])
        world.exchange(MAIN, [0, 0])

    assert check(program, 2) == pytest.approx(
        {(0, 0): 0, (1, 0): 0, (0, 1): 3, (1, 1): 0, (0, 2): 0, (1, 2): 3}, abs=1e-6
    )


def test_a_rank_that_leaves_early_is_not_put_ahead_of_the_others():
    # Rank 0 needs nothing from rank 1, which comes to the first exchange at 50, and waits for it at the second.
    moments = [[(0, 1), (11, 61)], [(50, 51), (60, 61)]]
    spans = [
        [
            Span("x", "wait", MAIN, 1, begin, end, Arrival("x", 1, begin, serial))
            for serial, (begin, end) in enumerate(some)
        ]
        for some in moments
    ]
    found = compared(spans, [[FOREVER] * 2])
    assert found[0, 1] == 48, "from 11 to 60, less the second that a transfer had held rank 1"


def test_a_wait_for_the_other_thread_is_for_a_rank_as_far_as_that_thread_would_wait_for_one():
    clock, other = IdealClocks(), IdealClocks()
    real = World(2)
    real.work(MAIN, [0, 6])
    done = real.job(([0, 0], [5, 5]))  # rank 0 is there at 100, rank 1 at 106; over at 111
    real.work(MAIN, [4, 0])
    real.hand_over(SIDE, MAIN, done)
    wait = Span("wait for rows", "wait", MAIN, 1, 104, 111.1)
    for one, spans in zip((clock, other), ([*real.spans[0], wait], real.spans[1])):
        one.hear(spans)
        one.due(FOREVER)
    paths = [one.paths({0: 106}) for one in (clock, other)]
    x = max(one[0][None] for one in paths)
    clock.set_ideal({0: x})
    ((begin, end),) = clock.missing(wait, None)
    assert (begin, end) == (104, pytest.approx(106, abs=1e-6))


def test_a_wait_of_another_stream_under_work_of_the_same_lane_holds_nobody():
    hidden = Span("rows", "wait", MAIN, 1, 1, 5, Arrival("rows", 1, 1, 0))
    spans = [hidden, Span("work", "compute", MAIN, 1, 0, 10)]
    sums = Span("sums", "wait", MAIN, 1, 10, 11, Arrival("sums", 1, 10, 1))
    clock = IdealClocks()
    clock.hear([*spans, sums])
    clock.due(FOREVER)
    assert clock.paths({}) == {0: {None: 1}, 1: {None: 10}}


WORK = st.integers(0, 5)


@st.composite
def programs(draw):
    """Steps of a program on some ranks, as calls of `World`'s methods."""
    num_ranks = draw(st.integers(2, 3))
    each = st.lists(WORK, min_size=num_ranks, max_size=num_ranks)
    move = st.tuples(each, each)
    kinds = st.sampled_from(["work", "exchange", "start", "wait", "job", "join", "step"])
    calls = [
        (kind, draw(each), draw(st.lists(move, max_size=2))) for kind in draw(st.lists(kinds, max_size=14))
    ]
    return num_ranks, calls


def run(world: World, calls, untils: list[list[float]]) -> None:
    started, jobs = [], []
    for kind, seconds, moves in calls:
        if kind == "work":
            world.work(MAIN, seconds)
        elif kind == "exchange":
            world.exchange(MAIN, seconds)
        elif kind == "start":
            started.append(world.start())
            world.work(MAIN, [each + 1 for each in seconds])
        elif kind == "wait" and started:
            world.wait(MAIN, started.pop(0), seconds)
        elif kind == "job":
            jobs.append(world.job(*moves))
        elif kind == "join" and jobs:
            world.hand_over(SIDE, MAIN, jobs.pop(0))
        elif kind == "step":
            untils.append(list(world.now[MAIN]))
            world.work(MAIN, [1] * world.num_ranks, told=False)
    for each in started:
        world.wait(MAIN, each, [1] * world.num_ranks)
    for done in jobs:
        world.hand_over(SIDE, MAIN, done)


@given(programs())
def test_what_is_found_on_slow_wires_are_the_waits_of_a_world_without_wires(drawn):
    num_ranks, calls = drawn
    real, ideal = World(num_ranks), World(num_ranks, wires=False)
    untils: list[list[float]] = []
    run(real, calls, untils)
    run(ideal, calls, [])
    lengths = {
        (rank, span.arrival.serial): span.end - span.start
        for rank, spans in enumerate(real.spans)
        for span in spans
        if span.kind == "wait"
    }
    # All at once, or in several comparisons with exchanges and jobs that are under way then.
    for moments in ([[FOREVER] * num_ranks], [*untils, [FOREVER] * num_ranks]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ideal_module, "_KEPT", 14)  # no more can be under way
            found = compared(real.spans, moments)
        assert found.keys() == lengths.keys()
        for key, seconds in found.items():
            assert seconds == pytest.approx(min(ideal.waits[key], lengths[key]), abs=1e-6), key
