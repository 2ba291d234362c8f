"""Plans of rows, and the kernels that sum and update in one pass, against the plain path; in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freescale.embedding import SGD, Adam, EmbeddingTable, RowwiseAdagrad
from freescale.embedding.optimizer import rule_of
from freescale.kernels.rows import NO_ROW, RowPlan, no_bad_row, plan_of_unique, reference, update_reason
from tests.effort import along_edges

pytest.importorskip("triton")
from freescale.kernels.rows.triton import plan as plan_kernels
from freescale.kernels.rows.triton import update as update_kernels

CPU = torch.device("cpu")
OPTIMIZERS = [SGD(), RowwiseAdagrad(), Adam()]


@pytest.fixture(autouse=True)
def _interpreted():
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_rows_on_gpu.py does this on the GPU")


def drawn(count, rows, *, seed=0, popular=0):
    """Ids of which one row has so many more."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, rows, (count,), generator=draw), torch.full((popular,), rows // 2)])
    return ids[torch.randperm(len(ids), generator=draw)], draw


def planned(ids, rows):
    bad = no_bad_row(CPU)
    plan = plan_kernels.make_plan(plan_kernels.make_keys(ids, rows, bad))
    assert int(bad) == NO_ROW
    return plan


def check_plan(plan: RowPlan, keys):
    order, rows, starts, index = reference.row_plan(keys)
    count = int(plan.count)
    assert count == len(rows)
    assert plan.order.tolist() == order.tolist()
    assert plan.rows[:count].tolist() == rows.tolist()
    assert plan.starts[: count + 1].tolist() == starts.tolist()
    assert plan.index[: len(keys)].tolist() == index.tolist()


@pytest.mark.parametrize(
    ("count", "rows"), [(0, 5), (1, 5), (300, 40), (4096, 100), (4097, 3000), (9000, 1), (140_000, 7)]
)
def test_a_plan_sorts_ids_by_row_as_they_stand(count, rows):
    ids, _ = drawn(count, rows)
    check_plan(planned(ids, rows), ids)
    unique, inverse = torch.unique(ids, return_inverse=True)
    check_plan(plan_of_unique(unique, inverse, CPU), ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("count", "capacity", "rows"), [(1, 4096, 5), (300, 4096, 40), (4096, 4096, 9), (4999, 9216, 3000)]
)
def test_a_plan_of_padded_keys_is_that_of_the_keys(dtype, count, capacity, rows):
    """As it is recorded: how many keys are real is read when the kernels run."""
    padded, real = torch.full((capacity,), 3, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    for number in (count, max(1, count // 3)):
        ids, _ = drawn(number, rows, seed=number)
        # The last key there is must not be taken for padding, nor padding for it.
        ids = torch.where(ids == rows - 1, torch.iinfo(dtype).max, ids)
        plan_kernels.pad_keys(ids.to(dtype), padded, real)
        plan = plan_kernels.make_plan(padded, real=real)
        assert int(real) == number
        check_plan(replace(plan, order=plan.order[:number]), ids)


def test_keys_of_a_huge_table_have_64_bits():
    ids = torch.tensor([2**40, 5, 2**40])
    plan = planned(ids, 2**41)
    assert plan.rows.dtype == torch.int64
    check_plan(plan, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**40)])
def test_a_row_outside_is_read_as_zeros_told_and_never_written(dtype, bad):
    weight, flag = torch.randn(7, 5).to(dtype), no_bad_row(CPU)
    ids = torch.tensor([3, bad, 6])
    rows, keys = plan_kernels.gather(weight, ids, flag)
    assert int(flag) == bad
    assert torch.equal(rows, torch.stack([weight[3], torch.zeros(5, dtype=dtype), weight[6]]).float())
    assert torch.equal(rows, reference.gather_rows(weight, ids))
    before, numbers = weight.clone(), torch.tensor([-1.0, 1.0, 1.0, 0.0])
    update_kernels.update_planned(
        weight,
        (),
        plan_kernels.make_plan(keys),
        torch.ones(3, 5),
        rule_of(SGD()),
        numbers=numbers,
        first_row=0,
    )
    changed = (weight != before).any(dim=1).nonzero().flatten()
    assert changed.tolist() == [3, 6]
    again, _ = plan_kernels.gather(before, ids, flag.fill_(NO_ROW), keys=keys)
    assert torch.equal(again, rows)
    assert int(flag) == NO_ROW, "a row is told of once"


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_summed_rows_outside_change_nothing(optimizer):
    """Of a table that every rank holds all rows are given, and those that nobody touched are called as none is."""
    rule, grad = rule_of(optimizer), torch.randn(9, 6)
    some, every = (EmbeddingTable(9, 6, optimizer=optimizer, dtype=torch.float32) for _ in range(2))
    touched = torch.tensor([1, 4, 8])
    outside = torch.full((9,), 9).index_copy(0, touched, touched)
    for table, rows, values in ((some, touched, grad[touched]), (every, outside, grad)):
        state = tuple(table.state[name] for name in rule.state)
        update_kernels.update_summed(table.weight, state, rows, values, rule, lr=0.1, step=3)
    assert torch.equal(some.weight, every.weight)
    assert all(torch.equal(some.state[name], every.state[name]) for name in rule.state)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "shape"),
    along_edges(
        OPTIMIZERS,
        [torch.float32, torch.bfloat16],
        [(1, 1, 0), (20, 90, 0), (8, 30, 64), (16, 200, 1100)],
        also=lambda optimizer, dtype, shape: shape == (8, 30, 64),
    ),
)
def test_summed_and_updated_in_one_pass(optimizer, dtype, shape):
    width, count, popular = shape
    rows, rule = 60, rule_of(optimizer)
    ours, plain = (
        EmbeddingTable(rows, width, optimizer=optimizer, dtype=dtype, first_row=1000) for _ in range(2)
    )
    for step in (1, 70_000):
        ids, draw = drawn(count, rows, seed=step, popular=popular)
        values = torch.randn(len(ids), width, generator=draw)
        plan = planned(ids, rows)
        numbers = update_kernels.write_numbers(rule, lr=0.1, step=step, out=torch.empty(4))
        given = {"lr": 0.1, "step": step} if step == 1 else {"numbers": numbers}
        state = tuple(ours.state[name] for name in rule.state)
        update_kernels.update_planned(ours.weight, state, plan, values, rule, first_row=1000, **given)
        unique, inverse = torch.unique(ids, return_inverse=True)
        sums = update_kernels.sum_planned(plan, values, len(unique))
        wanted = reference.sum_by_row(inverse, values.double(), len(unique))
        torch.testing.assert_close(sums.double(), wanted, rtol=1e-5, atol=1e-4)
        plain.apply(unique, sums, lr=0.1, step=step)
        # Other rounding in the mean of squares may tip a rounding to bfloat16, by one part in 128.
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1 / 64, "atol": 1e-6}
        torch.testing.assert_close(ours.weight, plain.weight, **close)
        if isinstance(optimizer, SGD):
            assert torch.equal(ours.weight, plain.weight)
        for name, kept in plain.state.items():
            torch.testing.assert_close(ours.state[name], kept, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts", [(1, 64, 65), (512, 513), (1024, 1025, 3)])
def test_sums_around_the_limits_of_the_kernels(counts):
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    draw = torch.Generator().manual_seed(1)
    ids = ids[torch.randperm(len(ids), generator=draw)]
    values = torch.randint(-8, 9, (len(ids), 6), generator=draw).float()  # any order gives the same sum
    sums = update_kernels.sum_planned(planned(ids, 9), values, len(counts))
    assert torch.equal(sums, reference.sum_by_row(ids, values, len(counts)))
    assert torch.equal(sums, reference.sum_planned(values, ids))


def test_a_row_gets_the_same_bits_whatever_stands_beside_it():
    draw = torch.Generator().manual_seed(2)
    own = torch.randn(700, 12, generator=draw)
    sums = []
    for before in (0, 1, 77, 600):
        ids = torch.cat([torch.zeros(before, dtype=torch.int64), torch.full((700,), 3), torch.tensor([5])])
        values = torch.cat([torch.randn(before, 12, generator=draw), own, own[:1]])
        plan = planned(ids, 9)
        sums.append(update_kernels.sum_planned(plan, values, int(plan.count))[-2])
    assert all(torch.equal(each, sums[0]) for each in sums)


def test_unique_rows_that_are_summed_already_and_how_many_are_real():
    optimizer, rule = Adam(), rule_of(Adam())
    ours, plain = (EmbeddingTable(30, 7, optimizer=optimizer) for _ in range(2))
    rows, grad = torch.arange(1, 30, 2), torch.randn(15, 7, generator=torch.Generator().manual_seed(3))
    numbers = update_kernels.write_numbers(rule, lr=0.1, step=3, out=torch.empty(4))
    state = tuple(ours.state[name] for name in rule.state)
    for count in (torch.tensor([9], dtype=torch.int32), None):
        update_kernels.update_summed(
            ours.weight, state, rows, grad, rule, numbers=numbers, first_row=0, count=count
        )
        real = len(rows) if count is None else int(count)
        plain.apply(rows[:real], grad[:real], lr=0.1, step=3)
        torch.testing.assert_close(ours.weight, plain.weight)


def test_only_a_class_that_says_how_it_moves_has_a_rule():
    class Slower(RowwiseAdagrad):
        def move(self, state, grad, *, lr, step):
            return super().move(state, grad, lr=lr / 2, step=step)

    class Renamed(RowwiseAdagrad):
        pass

    assert rule_of(Slower()) is None
    assert rule_of(Renamed()) == rule_of(RowwiseAdagrad())
    assert "GPU" in update_reason(torch.zeros(2, 2), rule_of(SGD()))
    assert EmbeddingTable(2, 2, optimizer=SGD()).not_fused is not None
