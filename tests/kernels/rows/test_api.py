"""Row kernels against plain torch and plain Python: values, order of sums, gradients, odd shapes, bad rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from freescale.kernels.rows.api import adam_direction, add_scaled, mean_squares, sum_by_row, take, unique

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.one_of(
    st.lists(st.integers(0, 20), max_size=60),
    st.lists(st.integers(-5, 200_000), max_size=60),
    st.lists(INT64, max_size=20),
)


@settings(max_examples=200, deadline=None)
@given(IDS)
def test_distinct_is_unique_with_inverse(ids):
    values, slots = unique(torch.tensor(ids, dtype=torch.int64))
    assert values.tolist() == sorted(set(ids))
    assert [values.tolist()[slot] for slot in slots.tolist()] == ids


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (2, 3), (2, 0, 4), (3, 2, 5)])
def test_distinct_keeps_the_shape_of_the_ids(shape):
    ids = torch.arange(torch.Size(shape).numel()).remainder(4).view(shape)
    values, slots = unique(ids)
    assert slots.shape == ids.shape
    assert torch.equal(values[slots], ids)


def test_distinct_reads_ids_that_do_not_lie_in_one_piece():
    ids = torch.tensor([[5, 1], [5, 3], [2, 5]]).t()
    values, slots = unique(ids)
    assert values.tolist() == [1, 2, 3, 5]
    assert torch.equal(values[slots], ids)


def test_distinct_of_many_ids_in_every_digit():
    ids = torch.randint(0, 2**40, (20_000,), generator=torch.Generator().manual_seed(0)).repeat(2)
    wanted = torch.unique(ids, return_inverse=True)
    for got, want in zip(unique(ids), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("count", "dim", "num_rows"), [(0, 3, 4), (50, 1, 7), (50, 5, 60), (300, 64, 9), (4, 0, 3)]
)
def test_sum_by_row_adds_in_the_order_given(count, dim, num_rows, dtype):
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(0, num_rows, (count,), generator=generator)
    values = torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype) * 1e3
    wanted = torch.zeros(num_rows, dim, dtype=dtype)
    for row, value in zip(index.tolist(), values):
        wanted[row] += value
    torch.full((num_rows, dim), float("nan"), dtype=dtype)  # freed at once: memory that is not written shows
    assert torch.equal(sum_by_row(index, values, num_rows), wanted)


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
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    grad = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(dtype)
    got, wanted = take(ours, slots), F.embedding(slots, theirs)
    assert torch.equal(got, wanted)
    got.backward(grad)
    wanted.backward(grad)
    assert torch.equal(ours.grad, theirs.grad)


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
    wanted = table.clone()
    wanted[rows] += scale[:, None] * values
    add_scaled(table, rows, values, scale)
    assert torch.equal(table, wanted)


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_row_outside_is_refused(bad):
    index = torch.tensor([0, bad])
    with pytest.raises(IndexError, match="out of range"):
        sum_by_row(index, torch.ones(2, 2), 3)
    with pytest.raises(IndexError, match="out of range"):
        add_scaled(torch.ones(3, 2), index, torch.ones(2, 2), torch.ones(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("count", "width"), [(0, 8), (1, 1), (300, 50), (70, 128)])
def test_updates_on_a_gpu_are_those_of_the_cpu(count, width):
    """The Triton kernels, run by Triton's interpreter."""
    pytest.importorskip("triton")
    from freescale.kernels.rows.triton import table as triton_table

    draw = torch.Generator().manual_seed(count)
    grad, first, second = (torch.randn(count, width, generator=draw) for _ in range(3))
    torch.testing.assert_close(triton_table.mean_squares(grad), mean_squares(grad))
    tables = [torch.randn(2 * count + 1, width, generator=draw)] * 2
    tables = [table.clone() for table in tables]
    rows, scale = torch.randperm(2 * count + 1, generator=draw)[:count], torch.randn(count, generator=draw)
    triton_table.add_scaled(tables[0], rows, grad, scale)
    add_scaled(tables[1], rows, grad, scale)
    torch.testing.assert_close(*tables)
    moments = [(first.clone(), second.square()) for _ in range(2)]
    rates = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8}
    ours = triton_table.adam_direction(grad, *moments[0], correction2=1 - 0.98**3, **rates)
    wanted = adam_direction(grad, *moments[1], step=3, **rates)
    for x, y in zip((ours, *moments[0]), (wanted, *moments[1])):
        torch.testing.assert_close(x, y)
    # A row has the same bits wherever it stands.
    if count > 1:
        assert torch.equal(
            triton_table.mean_squares(grad[1:])[: count - 1], triton_table.mean_squares(grad)[1:]
        )
