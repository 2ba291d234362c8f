"""The vectorised critical path against the event-by-event oracle, and what a critical path must obey."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from freescale.sim.costs.durations import Durations
from freescale.sim.engine.accounts import Record, spans_of
from freescale.sim.engine.engine import simulate
from freescale.sim.engine.schedules import plain, prioritized, split
from freescale.sim.engine.shared_cores import shared_finish
from freescale.sim.engine.stages import (
    ALWAYS,
    LAST,
    LATER,
    SIDE,
    Exchange,
    Mark,
    Program,
    Ready,
    Stage,
    Start,
    Wait,
    Work,
)
from freescale.trace.bubbles import split_step
from tests.effort import examples
from tests.sim.oracle import Oracle

CASE = {"ranks": st.integers(1, 5), "steps": st.integers(1, 6), "seed": st.integers(0, 2**32 - 1)}
# The schedules; in the first two rows may go home while dense gradients are added up.
SCHEDULE = {"kind": st.sampled_from(["plain", "prioritized", "split", "late"]), "rows_first": st.booleans()}


def schedule(kind: str, durations: Durations, *, rows_first: bool) -> Program:
    if kind in ("split", "late"):
        return split(durations, late=kind == "late")
    return {"plain": plain, "prioritized": prioritized}[kind](durations, rows_first=rows_first)


NUMBERS = ("exposed_bytes", "hidden_bytes", "busiest_owner", "bucket_share")


def random_durations(rng: np.random.Generator, *, ranks: int, steps: int) -> Durations:
    """Stages of any length, some of no length at all."""
    arrays = {}
    for item in dataclasses.fields(Durations):
        values = rng.exponential(1.0, (steps, ranks)) * rng.integers(0, 3, (steps, ranks))
        arrays[item.name] = 0.0 if item.name in NUMBERS else np.round(values, 3)
    for part in ("lead", "forward"):
        arrays[part] = np.minimum(arrays[part], arrays["compute"])
    arrays["bucket_share"] = float(rng.choice([0.1, 0.375, 1.0]))
    return Durations(**arrays)  # type: ignore[arg-type]


def random_program(rng: np.random.Generator, *, ranks: int, steps: int) -> Program:
    """Any stages in any order that both lanes can follow: one start a step, waits only for marks of the step before.

    A sum that is begun in one place may be waited for before it, which is in the next step, and behind it.
    """

    def seconds() -> np.ndarray:
        return np.round(rng.exponential(1.0, (steps, ranks)) * rng.integers(0, 2, (steps, ranks)), 3)

    def stages(lane: str) -> list[Stage]:
        made: list[Stage] = []
        for number in range(int(rng.integers(0, 4))):
            if rng.random() < 0.5:
                kind = "compute" if rng.random() < 0.7 else "host"
                when = str(rng.choice([ALWAYS, LATER, LAST]))
                made.append(Work(f"{lane} work {number}", seconds(), kind=kind, lane=lane, when=when))
            else:
                made.append(Exchange(f"{lane} sum {number}", seconds(), whole=rng.random() < 0.5, lane=lane))
        return made

    waits: list[Stage] = [Wait("wait", "ready")] if rng.random() < 0.7 else []
    program = [
        *stages("main"), *waits, *stages("main"), Start(), *stages(SIDE), Mark("ready"), *stages("main"),
    ]  # fmt: skip
    if rng.random() < 0.7:
        begun = int(rng.integers(0, len(program) + 1))
        program.insert(begun, Ready("sum"))
        for _ in range(int(rng.integers(1, 4))):
            late = Exchange(
                "late sum", seconds(), lead=seconds(), total=seconds(), whole=rng.random() < 0.5, ready="sum"
            )
            when = str(rng.choice([ALWAYS, LATER, LAST]))
            program.insert(int(rng.integers(0, len(program) + 1)), dataclasses.replace(late, when=when))
    return program


@examples(50, thorough=200)
@given(
    **CASE, kind=st.sampled_from(["plain", "prioritized", "split", "late", "any"]), rows_first=st.booleans()
)
def test_the_oracle_gives_the_same_ends(
    ranks: int, steps: int, seed: int, kind: str, rows_first: bool
) -> None:
    rng = np.random.default_rng(seed)
    if kind == "any":
        program = random_program(rng, ranks=ranks, steps=steps)
    else:
        program = schedule(kind, random_durations(rng, ranks=ranks, steps=steps), rows_first=rows_first)
    outcome = simulate(program, num_ranks=ranks, num_steps=steps)
    expected = Oracle(program, num_ranks=ranks, num_steps=steps).run()
    np.testing.assert_allclose(outcome.ends, expected, rtol=1e-12, atol=1e-12)


@examples(20, thorough=200)
@given(**CASE, **SCHEDULE, chunk=st.integers(1, 8))
@example(
    ranks=1, steps=2, seed=235, kind="prioritized", rows_first=False, chunk=1
)  # an exchange that everybody came to at 0.0
@example(ranks=4, steps=5, seed=1, kind="split", rows_first=False, chunk=1)  # a lane that is two steps behind
@example(ranks=4, steps=5, seed=1, kind="split", rows_first=False, chunk=8)
@example(ranks=4, steps=5, seed=1, kind="late", rows_first=False, chunk=1)  # a sum from the chunk before
def test_parts_are_those_of_the_trace(
    ranks: int, steps: int, seed: int, kind: str, rows_first: bool, chunk: int
) -> None:
    """The accounts of all ranks at once are what `trace.bubbles` makes of their spans."""
    import freescale.sim.engine.engine as engine

    durations = random_durations(np.random.default_rng(seed), ranks=ranks, steps=steps)
    program = schedule(kind, durations, rows_first=rows_first)
    seen: list[tuple[int, Record]] = []
    size, engine.CHUNK = engine.CHUNK, chunk
    try:
        outcome = simulate(
            program,
            num_ranks=ranks,
            num_steps=steps,
            observe=lambda first, record: seen.append((first, record)),
        )
    finally:
        engine.CHUNK = size
    for rank in range(ranks):
        spans = [
            span
            for first, record in seen
            for row in range(len(record.step_ends))
            for span in spans_of(program, record, rank=rank, row=row, step=first + row + 1)
        ]
        start = 0.0
        for step in range(steps):
            end = float(outcome.ends[step, rank])
            parts = split_step(start, end, spans)
            ours = [
                getattr(outcome.accounts, name)[step, rank]
                for name in ("total", "compute", "straggler", "comm")
            ]
            theirs = [parts.total, parts.compute, parts.straggler, parts.comm]
            np.testing.assert_allclose(ours, theirs, atol=1e-9)
            start = end


@examples(20, thorough=200)
@given(**CASE, **SCHEDULE, data=st.data())
def test_a_longer_stage_never_ends_anything_earlier(
    ranks: int, steps: int, seed: int, kind: str, rows_first: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    durations = random_durations(rng, ranks=ranks, steps=steps)
    names = [item.name for item in dataclasses.fields(Durations) if item.name not in NUMBERS]
    parts = ("lead", "contention", "forward")
    name = data.draw(st.sampled_from([name for name in names if name not in parts]))
    longer = dataclasses.replace(durations, **{name: getattr(durations, name) + rng.random((steps, ranks))})
    short, long = (
        simulate(schedule(kind, d, rows_first=rows_first), num_ranks=ranks, num_steps=steps).ends
        for d in (durations, longer)
    )
    assert (long >= short - 1e-12).all()


def bare_durations(*, ranks: int, steps: int, **given: object) -> Durations:
    """Nothing takes any time but what is given."""
    none = {
        item.name: 0.0 if item.name in NUMBERS else np.zeros((steps, ranks))
        for item in dataclasses.fields(Durations)
    }
    return Durations(**{**none, **given})  # type: ignore[arg-type]


def test_a_dense_sum_travels_beside_the_next_forward() -> None:
    """Of a sum that is shorter than the next forward a step contains nothing; the last step waits for its own."""
    shape = (4, 2)
    durations = bare_durations(
        ranks=2,
        steps=4,
        compute=np.full(shape, 30.0),
        forward=np.full(shape, 10.0),
        weights=np.full(shape, 2.0),
        optimizer=np.full(shape, 1.0),
        dense_last=np.full(shape, 0.5),
        dense_total=np.full(shape, 8.0),
        bucket_share=0.0625,
    )
    outcome = simulate(split(durations, late=True), num_ranks=2, num_steps=4)
    # The first piece is on its way for 0.5 s when the next forward could begin, 1.875 s after it has left.
    totals = outcome.accounts.total
    np.testing.assert_allclose(totals[0], 32.0)
    np.testing.assert_allclose(totals[1:-1], 33.0)
    np.testing.assert_allclose(outcome.accounts.comm[:-1], 0.0)
    np.testing.assert_allclose(totals[-1], 33.0 + (8.0 - 1.875) + 1.0)
    at_the_end = simulate(
        split(dataclasses.replace(durations, lead=np.full(shape, 1.875))), num_ranks=2, num_steps=4
    )
    np.testing.assert_allclose(at_the_end.accounts.total, 33.0 + 8.0 - 1.875)


def test_a_dense_sum_longer_than_the_next_forward_holds_up_its_last_layers() -> None:
    shape = (5, 2)
    durations = bare_durations(
        ranks=2,
        steps=5,
        compute=np.full(shape, 30.0),
        forward=np.full(shape, 10.0),
        weights=np.full(shape, 2.0),
        dense_last=np.full(shape, 4.0),
        dense_total=np.full(shape, 16.0),
        bucket_share=0.25,
    )
    accounts = simulate(split(durations, late=True), num_ranks=2, num_steps=5).accounts
    # From the first gradients, 1.5 s before the end of a step, 16 s to the last sum; then a quarter of the forward.
    np.testing.assert_allclose(accounts.total[1:-1], 32.0 + (16.0 - 1.5 - 7.5))
    np.testing.assert_allclose(accounts.comm[1:-1], 7.0)


@examples(20, thorough=200)
@given(ranks=st.integers(1, 4), pieces=st.integers(1, 8), seed=st.integers(0, 2**32 - 1))
def test_two_waits_end_a_forward_when_one_for_every_piece_would(ranks: int, pieces: int, seed: int) -> None:
    """Piece by piece as `LateUpdate` does it, against the two waits of the schedule."""
    rng, steps = np.random.default_rng(seed), 5
    compute, weights, optimizer, host = (rng.exponential(size, (steps, ranks)) for size in (9, 3, 1, 2))
    forward, seconds = rng.random((steps, ranks)) * compute, rng.exponential(4 / pieces, (steps, 1))
    whole = np.ones((steps, ranks)) * seconds
    durations = bare_durations(
        ranks=ranks,
        steps=steps,
        host=host,
        compute=compute,
        forward=forward,
        weights=weights,
        optimizer=optimizer,
        dense_last=whole,
        dense_total=pieces * whole,
        bucket_share=1 / pieces,
    )
    ends = simulate(split(durations, late=True), num_ranks=ranks, num_steps=steps).ends
    clock, rows, summed = np.zeros(ranks), 0.0, [0.0] * pieces
    for step in range(steps):
        clock = np.maximum(clock + host[step], rows)
        for end in summed:
            clock = (
                np.maximum(clock, end) + (optimizer[step] / pieces if step else 0.0) + forward[step] / pieces
            )
        clock = clock + compute[step] - forward[step]
        rows, on_the_way = float(clock.max()), 0.0
        for number in range(pieces):
            clock = clock + weights[step] / pieces
            on_the_way = max(on_the_way, float(clock.max())) + float(seconds[step, 0])
            summed[number] = on_the_way
        if step == steps - 1:
            clock = np.maximum(clock, on_the_way) + optimizer[step]
        np.testing.assert_allclose(ends[step], clock, rtol=1e-9)


@examples(8, thorough=200)
@given(ranks=st.integers(1, 6), cores=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_shared_cores_do_all_the_work_and_no_more(ranks: int, cores: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = np.round(rng.random(ranks) * rng.integers(0, 2, ranks), 2)
    work = np.round(rng.random(ranks) * rng.integers(0, 3, ranks), 2)
    finish = shared_finish(start, work, cores)
    assert (finish >= start + work - 1e-9).all()
    assert (shared_finish(start, work, cores + 1) <= finish + 1e-9).all()
    # Time steps of a thousandth, each shared out among those that have work.
    left, now, slow = work.copy(), 0.0, np.where(work > 0, np.inf, start)
    while (left > 1e-9).any():
        busy = np.flatnonzero((start <= now + 1e-9) & (left > 1e-9))
        now += 0.001
        left[busy] -= 0.001 * min(1.0, cores / max(1, len(busy)))
        slow[busy[left[busy] <= 1e-9]] = now
    np.testing.assert_allclose(finish, slow, atol=0.02)


def test_ranks_on_shared_cores_take_longer() -> None:
    durations = random_durations(np.random.default_rng(3), ranks=4, steps=5)
    alone, shared = (
        simulate(plain(durations), num_ranks=4, num_steps=5, cores=cores).ends[-1].max() for cores in (4, 2)
    )
    free = simulate(plain(durations), num_ranks=4, num_steps=5).ends[-1].max()
    np.testing.assert_allclose(alone, free)
    assert free < shared <= 2 * free
