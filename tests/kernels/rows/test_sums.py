"""Sums of rows by where they belong, and the input of encoders, in Triton's interpreter; see tests/gpu for a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels import SequenceLayout, input_states
from tests.effort import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 200]), min_size=1, max_size=9),
    width=st.sampled_from([1, 16, 33, 70]),
    seed=st.integers(0, 99),
)
def test_values_are_summed_by_index(counts, width, seed):
    from freescale.kernels.rows.triton.sums import sum_by_index

    draw = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    index = index[torch.randperm(len(index), generator=draw)]
    values = torch.randn(len(index), width, dtype=torch.float64, generator=draw)
    wanted = torch.zeros(len(counts), width, dtype=torch.float64).index_add_(0, index, values) * 3
    got = sum_by_index(values, index, len(counts), scale=3.0)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    narrow = sum_by_index(values.half(), index, len(counts), scale=3.0)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wanted, rtol=0.01, atol=0.3)


def test_the_sum_of_a_row_does_not_depend_on_the_rows_beside_it():
    from freescale.kernels.rows.triton.sums import sum_by_index

    values = torch.randn(400, 24)
    index = torch.arange(400) % 2
    index[:300] = 1
    together = sum_by_index(values, index, 2)
    for row in (0, 1):
        alone = sum_by_index(values[index == row], index[index == row], 2)
        assert torch.equal(alone[row], together[row])


@examples(6, thorough=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 7, 63, 64, 65, 100]), min_size=1, max_size=40).filter(any),
    width=st.sampled_from([1, 24, 130]),
)
def test_fused_input_states_are_the_plain_ones(lengths, width):
    draw = torch.Generator().manual_seed(len(lengths))
    layout = SequenceLayout(torch.tensor([0, *lengths]).cumsum(0))
    rows = torch.randn(11, width, generator=draw).requires_grad_()
    position = torch.randn(103, width, generator=draw).requires_grad_()
    index = torch.randint(9, (sum(lengths),), generator=draw)
    weight = torch.randn(sum(lengths), width, generator=draw)
    results = []
    for fused in (False, True):
        out, past = input_states(rows, index, position, layout, scale=2.5, fused=fused)
        loss = (out * weight).sum() + past.sin().sum()
        results.append((out, *torch.autograd.grad(loss, (rows, position))))
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)


def test_places_reached_are_counted():
    layout = SequenceLayout(torch.tensor([0, 3, 3, 4, 9]))
    sequence, first, reach = layout.by_length
    assert sequence.tolist() == [3, 0, 2, 1]
    assert first.tolist() == [4, 0, 3, 3]
    assert reach.tolist() == [3, 2, 2, 1, 1]
    assert [len(x) for x in SequenceLayout(torch.tensor([0, 0])).by_length] == [1, 1, 0]
