"""Row kernels of the CPU against the reference: values, order of sums, gradients, odd shapes, bad rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.rows import reference
from freescale.kernels.rows.api import (
    adam_direction,
    add_scaled,
    find_sorted,
    mean_squares,
    overlap,
    sum_by_row,
    sum_gradients,
    sum_rows,
    take,
    take_sums,
    unique,
)
from tests.effort import examples

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.one_of(
    st.lists(st.integers(0, 20), max_size=60),
    st.lists(st.integers(-5, 200_000), max_size=60),
    st.lists(INT64, max_size=20),
)


@examples(67, thorough=200)
@given(IDS)
def test_unique_values_are_ascending_with_their_inverse(ids):
    for way in (unique, reference.unique):
        values, inverse = way(torch.tensor(ids, dtype=torch.int64))
        assert values.tolist() == sorted(set(ids))
        assert [values.tolist()[slot] for slot in inverse.tolist()] == ids


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (2, 3), (2, 0, 4), (3, 2, 5)])
def test_the_inverse_has_the_shape_of_the_ids(shape):
    ids = torch.arange(torch.Size(shape).numel()).remainder(4).view(shape)
    values, inverse = unique(ids)
    assert inverse.shape == ids.shape
    assert torch.equal(values[inverse], ids)


def test_unique_reads_ids_that_do_not_lie_in_one_piece():
    ids = torch.tensor([[5, 1], [5, 3], [2, 5]]).t()
    values, inverse = unique(ids)
    assert values.tolist() == [1, 2, 3, 5]
    assert torch.equal(values[inverse], ids)


def test_unique_values_of_many_ids_in_every_digit():
    ids = torch.randint(0, 2**40, (20_000,), generator=torch.Generator().manual_seed(0)).repeat(2)
    for got, want in zip(unique(ids), reference.unique(ids), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("among", [[], [5], [-3, 0, 5, 2**40]])
@pytest.mark.parametrize("ids", [[], [5], [[-3, 5, 1], [2**40, 2**41, -(2**41)]]])
def test_ids_are_found_among_ascending_ones(among, ids):
    asked = torch.tensor(ids, dtype=torch.int64)
    index, found = find_sorted(torch.tensor(among, dtype=torch.int64), asked.t())
    assert index.shape == found.shape == asked.t().shape
    wanted, there = reference.find_sorted(torch.tensor(among, dtype=torch.int64), asked.t())
    assert torch.equal(found, there)
    assert torch.equal(index * found, wanted * there)
    for id_, place, there in zip(
        asked.t().flatten().tolist(), index.flatten().tolist(), found.flatten().tolist()
    ):
        assert there == (id_ in among)
        assert place == among.index(id_) if there else 0 <= place < max(1, len(among))


@examples(33, thorough=200)
@given(*[st.one_of(st.sets(st.integers(0, 20)), st.sets(INT64, max_size=20))] * 2)
def test_overlap_marks_what_stands_in_both(first, second):
    lists = [torch.tensor(sorted(x), dtype=torch.int64) for x in (first, second)]
    marks = overlap(*lists)
    assert lists[0][marks[0]].tolist() == lists[1][marks[1]].tolist() == sorted(first & second)
    for got, wanted in zip(marks, reference.overlap(*lists), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("count", "dim", "num_rows"), [(0, 3, 4), (50, 1, 7), (50, 5, 60), (300, 64, 9), (4, 0, 3)]
)
def test_sum_by_row_adds_in_the_order_given(count, dim, num_rows, dtype):
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(0, num_rows, (count,), generator=generator)
    values = torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype) * 1e3
    wanted = reference.sum_by_row(index, values, num_rows)
    torch.full((num_rows, dim), float("nan"), dtype=dtype)  # freed at once: memory that is not written shows
    assert torch.equal(sum_by_row(index, values, num_rows), wanted)
    assert torch.equal(
        sum_gradients(values, index, num_rows), reference.sum_gradients(values, index, num_rows)
    )


def test_sum_by_row_in_types_that_are_not_compiled():
    index, values = torch.tensor([1, 0, 1]), torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.bfloat16)
    assert sum_by_row(index, values, 3).flatten().tolist() == [2.0, 5.0, 0.0]
    assert sum_by_row(index, values.float().view(3), 3).tolist() == [2.0, 5.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (9,), (2, 7), (3, 0, 2)])
def test_take_is_an_embedding_with_its_gradient(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    slots = torch.randint(0, 5, shape, generator=generator)
    rows = torch.randn(6, 3, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(dtype)
    check_equal_with_gradient(take, reference.take, rows, slots, grad=grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9,), (2, 7), (0,)])
def test_sum_rows_and_its_gradient(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(0, 5, shape, generator=generator)
    values = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(6, 3, generator=generator, dtype=torch.float64).to(dtype)
    if slots.numel():
        check_equal_with_gradient(sum_rows, reference.sum_rows, values, slots, 6, grad=grad)
    else:
        assert torch.equal(sum_rows(values, slots, 6), reference.sum_rows(values, slots, 6))


def check_equal_with_gradient(ours, truth, x, *options, grad):
    """The same bits both ways."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    got, wanted = ours(inputs[0], *options), truth(inputs[1], *options)
    assert torch.equal(got, wanted)
    got.backward(grad)
    wanted.backward(grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_take_can_be_differentiated_twice_and_takes_any_gradient():
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    slots = torch.tensor([[0, 2], [2, 1]])
    assert torch.autograd.gradcheck(lambda x: take(x, slots), rows)
    assert torch.autograd.gradgradcheck(lambda x: take(x, slots).pow(3), rows)
    (grad,) = torch.autograd.grad(take(rows, slots).sum(), rows)  # expanded: every stride is 0
    assert grad[:, 0].tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_add_scaled_changes_the_rows_named_and_no_others(dtype):
    generator = torch.Generator().manual_seed(2)
    table, values = (torch.randn(n, 5, generator=generator).to(dtype) for n in (8, 3))
    rows, scale = torch.tensor([7, 0, 4]), torch.tensor([2.0, -1.0, 0.5], dtype=dtype)
    written_out, wanted = table.clone(), table.clone()
    written_out[rows] += scale[:, None] * values
    reference.add_scaled(wanted, rows, values, scale)
    assert torch.equal(wanted, written_out)
    add_scaled(table, rows, values, scale)
    assert torch.equal(table, wanted)


@pytest.mark.parametrize(("count", "width"), [(0, 8), (1, 1), (300, 50)])
def test_mean_squares(count, width):
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    wanted = reference.mean_squares(values.double())
    torch.testing.assert_close(mean_squares(values).double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(mean_squares(values.double()), wanted)
    torch.testing.assert_close(mean_squares(values.bfloat16()).double(), wanted, rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "width", "step"), [(0, 8, 1), (1, 1, 1), (70, 5, 3)])
def test_adam_moves_both_moments_and_gives_their_direction(count, width, step, dtype):
    draw = torch.Generator().manual_seed(count)
    grad, first, second = (torch.randn(count, width, generator=draw, dtype=dtype) for _ in range(3))
    rates = {"beta1": 0.9, "beta2": 0.98, "step": step, "eps": 1e-8}
    moments, wanted = ([first.clone(), second.square()] for _ in range(2))
    ours, truth = adam_direction(grad, *moments, **rates), reference.adam_direction(grad, *wanted, **rates)
    for got, want in zip((ours, *moments), (truth, *wanted), strict=True):
        torch.testing.assert_close(got, want)
    # Written out: Adam without the correction of the first moment.
    mean, square = 0.9 * first + 0.1 * grad, 0.98 * second.square() + 0.02 * grad.square()
    torch.testing.assert_close(truth, mean / ((square / (1 - 0.98**step)).sqrt() + 1e-8))


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_row_outside_is_refused(bad):
    index = torch.tensor([0, bad])
    with pytest.raises(IndexError, match="out of range"):
        sum_by_row(index, torch.ones(2, 2), 3)
    with pytest.raises(IndexError, match="out of range"):
        add_scaled(torch.ones(3, 2), index, torch.ones(2, 2), torch.ones(2))


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_rows_and_their_gradients_are_those_of_the_reference(weighted):
    torch.manual_seed(0)
    rows = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    other = rows.detach().clone().requires_grad_()
    for count in (0, 5):
        index = torch.randint(7, (count, 4))
        weights = torch.rand(count, 4, dtype=torch.float64) if weighted else None
        ours, truth = take_sums(rows, index, weights), reference.take_sums(other, index, weights)
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
        (ours.sin().sum() + rows.sum() * 0).backward()
        (truth.sin().sum() + other.sum() * 0).backward()
        torch.testing.assert_close(rows.grad, other.grad, rtol=0, atol=1e-12)
