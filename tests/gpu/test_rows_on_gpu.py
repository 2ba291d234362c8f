"""Rows on a GPU: summed and updated in one pass, the same bits in every run, and no wait for the device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from freescale.embedding import SGD, Adam, EmbeddingTable, RowwiseAdagrad, ShardedEmbedding, TableSpec
from freescale.embedding.optimizer import rule_of
from freescale.embedding.tables.direct import PlannedRows
from freescale.errors import DataError
from freescale.kernels.rows import (
    plan_of_unique,
    recorded_plan,
    step_numbers,
    sum_planned,
    unique_of,
    update_rows,
)
from freescale.kernels.runtime import kernels_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
OPTIMIZERS = [SGD(), RowwiseAdagrad(), Adam()]
ROWS, LR = 3000, 0.05
# A width that is no power of two: the mean of squares is rounded where a compiler pleases.
DIMS = (64, 96)
DIM = 64
# Around the limits of the kernels, and one row with most of the values.
COUNTS = {11: 64, 12: 65, 13: 512, 14: 513, 15: 1024, 16: 1025, 17: 40_000}


@contextmanager
def nobody_waits() -> Iterator[None]:
    """An operation for which the host would wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def made(optimizer, dtype=torch.float32, dim=DIM) -> ShardedEmbedding:
    spec = TableSpec(name="item", num_rows=ROWS, dim=dim, optimizer=optimizer, dtype=dtype)
    return ShardedEmbedding([spec], device=GPU)


def drawn(seed: int, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Ids and a gradient for each."""
    draw = torch.Generator(GPU).manual_seed(seed)
    parts = [torch.randint(100, ROWS, (5000,), generator=draw, device=GPU)]
    ids = torch.cat([*parts, *(torch.full((count,), row, device=GPU) for row, count in COUNTS.items())])
    ids = ids[torch.randperm(len(ids), generator=draw, device=GPU)]
    return ids, torch.randn(len(ids), dim, generator=draw, device=GPU)


def one_step(embedding: ShardedEmbedding, rows, grad: Tensor) -> None:
    embedding({"item": rows})["item"].backward(grad)
    embedding.step(lr=LR)


def bits(embedding: ShardedEmbedding) -> list[Tensor]:
    table = embedding.tables["item"]
    return [table.weight.clone(), *(each.clone() for each in table.state.values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("dim", DIMS)
def test_a_step_is_that_of_the_plain_path(optimizer, dtype, dim) -> None:
    ours, ahead, by_cpu = (made(optimizer, dtype, dim) for _ in range(3))
    plain = EmbeddingTable(ROWS, dim, optimizer=optimizer, dtype=dtype, device=GPU)
    for step in (1, 2, 3):
        ids, grad = drawn(step, dim)
        one_step(ours, ids, grad)
        planned = ahead.prepare("item", ids)
        assert isinstance(planned, PlannedRows)
        one_step(ahead, planned, grad)
        plan = ours.tables["item"].plan(ids)
        unique, inverse = unique_of(plan, ids)
        by_cpu.tables["item"].apply_sums(
            plan_of_unique(unique.cpu(), inverse.cpu(), GPU), grad, lr=LR, step=step
        )
        for one, two, three in zip(bits(ours), bits(ahead), bits(by_cpu)):
            assert torch.equal(one, two)
            assert torch.equal(one, three)
        sums = sum_planned(grad, plan, len(unique))
        exact = torch.zeros(len(unique), dim, dtype=torch.float64, device=GPU)
        torch.testing.assert_close(
            sums.double(), exact.index_add_(0, inverse, grad.double()), rtol=1e-5, atol=1e-3
        )
        plain._apply_plainly(unique, sums, lr=LR, step=step)
        few = unique[torch.bincount(inverse) <= 64]
        if dtype == torch.float32 and dim == 64:
            assert torch.equal(ours.tables["item"].weight[few], plain.weight[few])
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1 / 64, "atol": 1e-4}
        torch.testing.assert_close(ours.tables["item"].weight, plain.weight, **tolerance)
        plain.weight.copy_(ours.tables["item"].weight)


def test_every_run_gives_the_same_bits_and_other_rows_change_nothing() -> None:
    ids, grad = drawn(0)
    first = made(RowwiseAdagrad())
    one_step(first, ids, grad)
    for moved in (torch.arange(len(ids), device=GPU), torch.argsort(ids * 7919 % ROWS, stable=True)):
        again = made(RowwiseAdagrad())
        one_step(again, ids[moved], grad[moved])
        assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(again)))
    alone = made(RowwiseAdagrad())
    one_step(alone, ids[ids == 17], grad[ids == 17])
    assert torch.equal(alone.tables["item"].weight[17], first.tables["item"].weight[17])


def test_a_batch_in_two_parts_is_the_batch() -> None:
    ids, grad = drawn(4)
    whole, parts = made(Adam()), made(Adam())
    one_step(whole, ids, grad)
    for half in (ids % 2 == 0, ids % 2 == 1):
        table = parts.tables["item"]
        table.apply_sums(table.plan(ids[half]), grad[half], lr=LR, step=1)
    assert all(torch.equal(a, b) for a, b in zip(bits(whole), bits(parts)))


def test_nobody_waits_for_a_step() -> None:
    for optimizer in OPTIMIZERS:
        embedding, (ids, grad) = made(optimizer), drawn(1)
        for _ in range(3):
            one_step(embedding, ids, grad)  # kernels are compiled and loaded, and the sort is recorded
        with nobody_waits():
            one_step(embedding, ids, grad)
            one_step(embedding, embedding.prepare("item", ids), grad)
            embedding.tables["item"].apply(torch.arange(9, device=GPU), grad[:9], lr=LR, step=3)


@pytest.fixture
def recordings(monkeypatch) -> recorded_plan._Recordings:
    """None made yet."""
    fresh = recorded_plan._Recordings()
    monkeypatch.setattr(recorded_plan, "_recordings", fresh)
    return fresh


def test_steps_whose_sorts_are_replayed_have_the_bits_of_planned_ones(recordings) -> None:
    """Of sizes that come and go; two tables and two streams take turns with what is recorded."""
    draw = torch.Generator().manual_seed(0)
    sizes = [int(each) for each in torch.randint(1, 30_000, (40,), generator=draw)]
    replayed, other, ahead, never = (made(RowwiseAdagrad()) for _ in range(4))
    never.tables["item"].replays_sorts = False
    side = torch.cuda.Stream()
    for turn, size in enumerate(sizes):
        ids, grad = (each[:size] for each in drawn(turn))
        one_step(replayed, ids, grad)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one_step(other, ids, grad)
        torch.cuda.current_stream().wait_stream(side)
        one_step(ahead, ahead.prepare("item", ids), grad)
        one_step(never, ids, grad)
    for one, *others in zip(*map(bits, (replayed, other, ahead, never))):
        assert all(torch.equal(one, each) for each in others)
    assert len({(device, stream) for device, stream, *_ in recordings.made}) == 2


def test_sizes_that_no_longer_come_make_room_for_others(recordings, monkeypatch) -> None:
    monkeypatch.setattr(recorded_plan, "_MOST_SIZES", 2)
    monkeypatch.setattr(recorded_plan, "_FORGOTTEN", 10)
    ids, grad = drawn(1)
    replayed, never = (made(Adam()) for _ in range(2))
    never.tables["item"].replays_sorts = False
    sizes = [*[5_000] * 4, *[9_000] * 4, *[20_000] * 4, *[9_000] * 4, *[20_000] * 12, *[5_000] * 12]
    seen = []
    for size in sizes:
        for embedding in (replayed, never):
            one_step(embedding, ids[:size], grad[:size])
        seen.append(sorted(capacity for *_, capacity in recordings.made))
    assert all(torch.equal(one, two) for one, two in zip(bits(replayed), bits(never)))
    few, some, many = map(recorded_plan.capacity_of, (5_000, 9_000, 20_000))
    assert seen[11] == [few, some], "both had been used not long before"
    assert seen[27] == [some, many]
    assert seen[-1] in ([few, some], [few, many])
    assert max(map(len, seen)) == 2


def test_threads_that_share_a_stream_keep_their_plans_apart() -> None:
    ids, grad = drawn(3)
    tables = [made(Adam()) for _ in range(4)]

    def train(number: int) -> None:
        rolled = ids.roll(number * 1000), grad.roll(number * 1000, 0)
        for _ in range(12):
            one_step(tables[number], *rolled)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, table in enumerate(tables):
        alone = made(Adam())
        planned = alone.prepare("item", ids.roll(number * 1000))
        for _ in range(12):
            one_step(alone, planned, grad.roll(number * 1000, 0))
        assert all(torch.equal(one, two) for one, two in zip(bits(table), bits(alone)))


def test_a_sort_that_has_no_room_to_be_recorded_is_told_once_and_started_as_usual(
    recordings, monkeypatch
) -> None:
    kernels = kernels_of("rows.triton.plan")
    make_plan = kernels.make_plan

    def without_room(keys: Tensor, **options):
        plan = make_plan(keys, **options)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("no room")
        return plan

    monkeypatch.setattr(kernels, "make_plan", without_room)
    ids, grad = drawn(3)
    plain, planned = made(SGD()), made(SGD())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (len(ids), 5_000) * 6:
            one_step(plain, ids[:size], grad[:size])
    (text,) = [str(one.message) for one in told if "recorded" in str(one.message)]
    assert text.startswith("sorts of rows cannot be recorded as CUDA graphs (no room)")
    assert recordings.failed
    assert torch.nn.functional.dropout(grad, 0.5).isfinite().all()
    for size in (len(ids), 5_000) * 6:
        one_step(planned, planned.prepare("item", ids[:size]), grad[:size])
    assert all(torch.equal(one, two) for one, two in zip(bits(plain), bits(planned)))


def test_rows_prepared_for_another_table_are_refused() -> None:
    first, second = made(SGD()), made(SGD())
    planned = first.prepare("item", torch.tensor([1, 2], device=GPU))
    with pytest.raises(DataError, match="prepared for another table"):
        second({"item": planned})


def test_several_calls_a_step_add_up() -> None:
    ids, grad = drawn(2)
    once, twice = made(RowwiseAdagrad()), made(RowwiseAdagrad())
    one_step(once, ids, grad)
    for part in (slice(0, 20_000), slice(20_000, None)):
        twice({"item": ids[part]})["item"].backward(grad[part])
    twice.step(lr=LR)
    assert all(torch.equal(a, b) for a, b in zip(bits(once), bits(twice)))
    vectors = once({"item": ids.view(-1, 1)})["item"]
    assert vectors.shape == (len(ids), 1, DIM)
    (2 * vectors).sum().backward()
    vectors = twice({"item": ids})["item"]
    vectors.sum().backward(retain_graph=True)
    vectors.sum().backward()
    once.step(lr=LR)
    twice.step(lr=LR)
    assert all(torch.equal(a, b) for a, b in zip(bits(once), bits(twice)))


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_a_row_outside_the_table_is_told_by_a_later_call_and_changes_nothing(bad: int) -> None:
    embedding = made(SGD())
    before = bits(embedding)[0]
    with torch.no_grad():
        vectors = embedding({"item": torch.tensor([bad, 2], device=GPU)})["item"]
    assert torch.equal(vectors, torch.stack([torch.zeros(DIM, device=GPU), before[2]]))
    with pytest.raises(DataError, match=f"row {bad} lies outside table 'item'"):
        embedding({"item": torch.tensor([1], device=GPU)})
    embedding({"item": torch.tensor([1], device=GPU)})
    with pytest.raises(DataError, match=f"row {bad} lies outside"):
        embedding.lookup("item", torch.tensor([bad], device=GPU))


def test_a_captured_update_reads_the_numbers_of_its_step() -> None:
    optimizer, rule = Adam(), rule_of(Adam())
    eager, captured = (
        EmbeddingTable(ROWS, DIM, optimizer=optimizer, dtype=torch.bfloat16, device=GPU) for _ in range(2)
    )
    ids, grad = drawn(5)
    numbers, keys = torch.zeros(4, device=GPU), ids.int()
    state = tuple(captured.state[name] for name in rule.state)
    copies = [captured.weight.clone(), *(each.clone() for each in state)]

    def update() -> None:
        from freescale.kernels.rows import plan_again

        update_rows(captured.weight, state, plan_again(keys), grad, rule, numbers=numbers)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    for values, copy in zip((captured.weight, *state), copies):
        values.copy_(copy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    for step in (1, 2, 9):
        other, more = drawn(10 + step)
        keys.copy_(other)
        grad.copy_(more)
        step_numbers(rule, lr=LR * step, step=step, out=numbers)
        graph.replay()
        eager.apply_sums(eager.plan(other), more, lr=LR * step, step=step)
        assert torch.equal(captured.weight, eager.weight)
        assert all(torch.equal(captured.state[name], kept) for name, kept in eager.state.items())
