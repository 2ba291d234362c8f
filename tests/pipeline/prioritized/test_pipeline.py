"""Prioritized communication gives the bits of the plain path, whatever the batches share."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.embedding.sharding.plan import TableSpec
from freescale.errors import DataError, FreeScaleError
from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD, PrioritizedPipeline
from tests.effort import slow
from tests.pipeline.two_paths import (
    OPTIMIZERS,
    backward,
    channels_of,
    learning_rate,
    make_embedding,
    random_batches,
    state_bits,
    train_plainly,
    train_prioritized,
)
from tests.ranks import run_on_ranks


def specs_of(optimizer: str, dtype: torch.dtype = torch.float32) -> list[TableSpec]:
    return [
        TableSpec(
            name="item", num_rows=61, dim=7, optimizer=OPTIMIZERS[optimizer], dtype=dtype, init_std=1.0
        ),
        TableSpec(
            name="user", num_rows=13, dim=5, optimizer=OPTIMIZERS[optimizer], dtype=dtype, init_std=1.0
        ),
    ]


def one_table_each() -> list[TableSpec]:
    return [
        TableSpec(name=name, num_rows=50 + 7 * n, dim=3 + n, optimizer=optimizer, init_std=1.0)
        for n, (name, optimizer) in enumerate(OPTIMIZERS.items())
    ]


def assert_same(
    specs: list[TableSpec], batches: list, *, sockets=False, staged=False, limit_mb=0.0, **options: Any
) -> list:
    """Both paths on these batches; fails unless losses, rows and optimizer state agree in every bit."""
    plain, ours = (make_embedding(specs, sockets=sockets, staged=staged, limit_mb=limit_mb) for _ in range(2))
    expected = train_plainly(plain, batches)
    losses, traffic = train_prioritized(ours, batches, **options)
    assert losses == expected
    assert state_bits(ours) == state_bits(plain)
    return traffic


def long_run(rank: int, num_ranks: int, num_steps: int) -> tuple[float, float, float]:
    """One table for each optimizer; rows shared, asked for and parked."""
    specs = one_table_each()
    batches = random_batches(num_ranks, specs, num_steps, rank, num_ranks)
    traffic = assert_same(specs, batches, channels=channels_of(sockets=False))
    names = ("shared_rows", "unique_rows", "parked_rows")
    return tuple(sum(getattr(step.total, name) for step in traffic) for name in names)


@pytest.mark.parametrize(
    ("num_ranks", "num_steps"),
    [*(slow(n, 300) for n in (2, 4)), slow(4, 40), (3, 24)],
)
def test_long_runs_of_every_optimizer_have_the_bits_of_the_plain_path(num_ranks, num_steps):
    shared, unique, parked = run_on_ranks(long_run, num_ranks, num_ranks, num_steps, timeout=110)[0]
    assert shared > num_steps
    assert parked > num_steps
    assert unique > 2 * shared


def many(rank: int, num_ranks: int, optimizer: str, seeds: list[int], options: dict[str, Any]) -> None:
    sockets = options.get("sockets", False)
    specs = specs_of(optimizer, options.pop("dtype", torch.float32))
    channels = channels_of(sockets=sockets, staged=options.get("staged", False))
    num_steps = options.pop("num_steps", 25)
    for seed in seeds:
        batches = random_batches(seed, specs, num_steps, rank, num_ranks)
        assert_same(specs, batches, channels=channels, check=True, **options)


def alternating(step: int) -> bool:
    """Plain, prioritized, one step each, several each: every change of way there is."""
    return step % 11 in (1, 2, 3, 4, 6, 9)


def never_past_the_fifth(step: int) -> bool:
    return step % 5 != 4


@pytest.mark.parametrize("num_steps", [12, slow(25)])  # `alternating` has every change of way after 11
@pytest.mark.parametrize(
    "options",
    [
        slow({"sockets": True}),
        slow({"staged": True}),
        {"staged": True, "chunk_mb": 0.0001, "prioritized": alternating},
        {"limit_mb": 0.0005},
        {"dtype": torch.bfloat16, "sockets": True},
        slow({"chunk_mb": 0.0001}),
        slow({"prioritized": alternating, "sockets": True}),
        {"look_past": never_past_the_fifth, "sockets": True},
        slow({"beside": True, "limit_mb": 0.0005}),
        {"beside": True, "staged": True, "chunk_mb": 0.0001, "prioritized": alternating},
        {"beside": True, "look_past": never_past_the_fifth, "sockets": True},
        slow({"look_past": lambda step: False, "sockets": True}),
    ],
)
def test_on_every_transport_storage_and_way(options, num_steps):
    run_on_ranks(many, 3, 3, "adam", [1], {**options, "num_steps": num_steps}, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("beside", [False, True])
def test_many_runs_have_the_bits_of_the_plain_path(num_ranks, optimizer, beside):
    run_on_ranks(many, num_ranks, num_ranks, optimizer, list(range(40)), {"beside": beside}, timeout=1200)


# Batches that hypothesis thinks of: for two ranks, lists of rows a step, for one or two tables.

ROWS = st.lists(st.integers(0, 7), max_size=6)
CASES = st.lists(
    st.lists(st.tuples(st.tuples(ROWS, ROWS), st.tuples(ROWS, ROWS)), min_size=1, max_size=7),
    min_size=6,
    max_size=10,
)


def drawn(rank: int, cases: list, num_tables: int) -> None:
    specs = [
        TableSpec(name=f"table{n}", num_rows=8, dim=2, optimizer=OPTIMIZERS["adam"], init_std=1.0)
        for n in range(num_tables)
    ]
    channels = channels_of(sockets=True)
    for number, case in enumerate(cases):
        batches = [
            {
                spec.name: torch.tensor(by_rank[rank], dtype=torch.int64)
                for spec, by_rank in zip(specs, tables)
            }
            for tables in case
        ]
        assert_same(specs, batches, sockets=True, channels=channels, check=True, beside=number % 2 == 0)


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(cases=CASES, num_tables=st.integers(1, 2))
def test_any_batches_have_the_bits_of_the_plain_path(cases, num_tables):
    run_on_ranks(drawn, 2, cases, num_tables)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_few_batches_or_none(num_steps):
    run_on_ranks(few, 2, num_steps)


def few(rank: int, num_steps: int) -> None:
    specs = specs_of("sgd")
    batches = random_batches(5, specs, num_steps, rank, 2)
    for beside in (False, True):
        options = {"channels": channels_of(sockets=False), "check": True, "beside": beside}
        assert len(assert_same(specs, batches, **options)) == num_steps


# What happens between steps.


def read_between(rank: int, beside: bool) -> None:
    """Looking at the tables between two steps, by any door, shows what the plain path would show."""
    specs = specs_of("rowwise_adagrad")
    batches = random_batches(4, specs, 30, rank, 2)
    plain, ours = make_embedding(specs), make_embedding(specs)
    seen: list[list[Any]] = [[], []]

    def look(embedding: Any, step: int, into: list[Any]) -> None:
        if step % 4 == 1:
            into.append({n: v.full_tensor().tolist() for n, v in embedding.state_dict().items()})
        if step % 4 == 2:
            into.append(embedding.lookup("item", torch.arange(61)).rows.tolist())

    for step in range(len(batches)):
        lookups = {name: plain.lookup(name, rows) for name, rows in batches[step].items()}
        backward({name: lookup.vectors() for name, lookup in lookups.items()})
        for lookup in lookups.values():
            plain.update(lookup, lr=learning_rate(step), step=step + 1)
        look(plain, step, seen[0])
    after = lambda step: look(ours, step, seen[1])  # noqa: E731
    options = {"channels": channels_of(sockets=False), "check": True, "beside": beside}
    train_prioritized(ours, batches, after_step=after, **options)
    assert len(seen[0]) > 10
    assert seen[0] == seen[1]


@pytest.mark.parametrize("beside", [False, True])
def test_reading_the_tables_between_steps_shows_every_update(beside):
    run_on_ranks(read_between, 2, beside)


def stop_and_go_on(rank: int, beside: bool) -> None:
    """Leave after any step, start a new pipeline at the next one: as if there had been no stop."""
    specs = specs_of("adam")
    batches = random_batches(6, specs, 24, rank, 2)
    channels, plain, ours = channels_of(sockets=False), make_embedding(specs), make_embedding(specs)
    train_plainly(plain, batches)
    first = 0
    for last in (0, 1, 5, 12, 23):
        pipeline = PrioritizedPipeline(
            batches[first:],
            embedding=ours,
            rows_of=lambda b: b,
            first_step=first,
            channels=channels,
            beside=beside,
        )
        with pipeline:
            for ready in pipeline:
                backward(ready.vectors)
                pipeline.update(ready, lr=learning_rate(ready.step))
                if ready.step == last:
                    break
        first = last + 1
    assert state_bits(ours) == state_bits(plain)


@pytest.mark.parametrize("beside", [False, True])
def test_leaving_after_any_step_loses_nothing(beside):
    run_on_ranks(stop_and_go_on, 2, beside)


def watch_rows(rank: int, beside: bool) -> list[bool]:
    """Rows in flight hold, at every mapping of ids, those of the LOOK_AHEAD batches before."""
    (spec, _) = specs_of("sgd")
    batches = random_batches(2, [spec], 20, rank, 2)
    everybody = [random_batches(2, [spec], 20, other, 2) for other in range(2)]
    embedding, order, held = make_embedding([spec]), itertools.count(), []
    first, count = embedding.plans["item"].block(rank)

    def rows_of(batch: Any) -> Any:
        step = next(order)
        assert batch is batches[step], "ids are mapped in step order"
        under_way = set(pipeline.rows_in_flight("item").tolist()) if step else set()
        used = {
            int(row) - first
            for before in range(max(0, step - LOOK_AHEAD), step)
            for other in everybody
            for row in other[before]["item"]
            if first <= row < first + count
        }
        held.append(used <= under_way)
        return batch

    pipeline = PrioritizedPipeline(
        batches, embedding=embedding, rows_of=rows_of, channels=channels_of(sockets=False), beside=beside
    )
    with pipeline:
        for ready in pipeline:
            backward(ready.vectors)
            pipeline.update(ready, lr=0.1)
        pipeline.flush()
        assert len(pipeline.rows_in_flight("item")) == 0
    return held


@pytest.mark.parametrize("beside", [False, True])
def test_rows_of_batches_under_way_are_known_where_ids_are_mapped(beside):
    for held in run_on_ranks(watch_rows, 2, beside):
        assert held == [True] * 20


def alone(batches: list) -> PrioritizedPipeline[Any]:
    return PrioritizedPipeline(batches, embedding=make_embedding(specs_of("sgd")), rows_of=lambda b: b)


def test_on_one_rank_it_is_the_plain_path():
    specs = specs_of("adam")
    batches = random_batches(1, specs, 20, 0, 1)
    assert_same(specs, batches, channels=channels_of(sockets=False))


def test_a_batch_without_update_is_refused():
    pipeline = alone([{"item": torch.tensor([1])}] * 3)
    with pytest.raises(FreeScaleError, match="step 1 has not been updated"), pipeline:
        for _ in pipeline:
            pass


def ask_for_another_table(rank: int) -> str:
    batches = [{"items": torch.tensor([1])}] * 3
    embedding = make_embedding(specs_of("sgd"), sockets=True)
    with (
        pytest.raises(DataError) as caught,
        PrioritizedPipeline(batches, embedding=embedding, rows_of=lambda b: b) as pipeline,
    ):
        next(iter(pipeline))
    return str(caught.value)


def test_a_table_that_is_not_there_is_refused_by_name():
    for said in run_on_ranks(ask_for_another_table, 2):
        assert "no such table" in said
        assert "'items'" in said


def test_updating_twice_or_out_of_turn_is_refused():
    with alone([{"item": torch.tensor([1])}] * 3) as pipeline:
        taken = iter(pipeline)
        ready = next(taken)
        backward(ready.vectors)
        pipeline.update(ready, lr=0.1)
        with pytest.raises(FreeScaleError, match="step 1 is not the batch that was taken last"):
            pipeline.update(ready, lr=0.1)


def events_of_a_run(rank: int) -> list[str]:
    """What happens in which order; batches are told when they are loaded."""
    specs, events = specs_of("sgd"), []
    embedding = make_embedding(specs)
    channels = channels_of(sockets=False)

    def loader() -> Any:
        for number, batch in enumerate(random_batches(3, specs, 6, rank, 2)):
            events.append(f"load {number}")
            yield batch

    pipeline = PrioritizedPipeline(
        loader(), embedding=embedding, rows_of=lambda batch: batch, channels=channels
    )
    fetch_late = pipeline._moves.fetch_late

    def told(flight: Any, storage: Any) -> None:
        events.append(f"rows {flight.step}")
        fetch_late(flight, storage)

    pipeline._moves.fetch_late = told  # type: ignore[method-assign]
    with pipeline:
        for ready in pipeline:
            events.append(f"compute {ready.step}")
            backward(ready.vectors)
            pipeline.update(ready, lr=0.1)
    return events


def test_a_batch_is_loaded_when_the_compute_of_another_is_queued():
    events = run_on_ranks(events_of_a_run, 2, timeout=60)[0]
    assert events[:9] == [
        *("load 0", "load 1", "load 2", "rows 0", "compute 0"),
        *("load 3", "rows 1", "compute 1", "load 4"),
    ]
    assert events[-2:] == ["rows 5", "compute 5"]
