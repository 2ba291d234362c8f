"""Sums of rows by where they belong, in Triton's interpreter, against the reference; see tests/gpu for a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import SequenceLayout
from freescale.kernels.rows import reference
from tests.effort import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@examples(8, thorough=200)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 200]), min_size=1, max_size=9),
    width=st.sampled_from([1, 16, 33, 70]),
    seed=st.integers(0, 99),
    segment=st.sampled_from([64, 100, 1024]),
)
def test_values_are_summed_by_index(counts, width, seed, segment):
    from freescale.kernels.rows.triton import sums

    sum_by_index = sums.sum_by_index
    draw = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    index = index[torch.randperm(len(index), generator=draw)]
    values = torch.randn(len(index), width, dtype=torch.float64, generator=draw)
    onto = torch.randn(len(counts), width, dtype=torch.float64, generator=draw) if seed % 2 else None
    wanted = reference.sum_by_index(values, index, len(counts), scale=3.0, onto=onto)
    with mock.patch.object(sums, "SEGMENT", segment):
        got = sum_by_index(values, index, len(counts), scale=3.0, onto=onto)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    narrow = sum_by_index(values.half(), index, len(counts), scale=3.0, onto=onto)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wanted, rtol=0.01, atol=0.3)


def test_the_sum_of_a_row_does_not_depend_on_the_rows_beside_it():
    from freescale.kernels.rows.triton.sums import sum_by_index

    values = torch.randn(3600, 24)
    index = torch.arange(3600) % 2
    index[:3300] = 1
    together = sum_by_index(values, index, 2)
    for row in (0, 1):
        alone = sum_by_index(values[index == row], index[index == row], 2)
        assert torch.equal(alone[row], together[row])


@examples(4, thorough=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 7, 63, 64, 65, 100]), min_size=1, max_size=35),
    width=st.sampled_from([1, 130]),
)
def test_values_are_summed_by_position(lengths, width):
    from freescale.kernels.rows.triton.sums import sum_by_position

    draw = torch.Generator().manual_seed(len(lengths))
    _, first, reach = SequenceLayout(torch.tensor([0, *lengths]).cumsum(0)).by_length
    values = torch.randn(sum(lengths), width, dtype=torch.float64, generator=draw)
    # Positions that no sequence reaches are zero.
    num_positions = max(lengths) + 3
    wanted = reference.sum_by_position(values, first, reach, num_positions)
    got = sum_by_position(values, first, reach, num_positions)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_sums_by_position_of_half_precision_are_wide():
    from freescale.kernels.rows.triton.sums import sum_by_position

    _, first, reach = SequenceLayout(torch.tensor([0, 5, 5, 8])).by_length
    values = torch.randn(8, 3).half()
    got = sum_by_position(values, first, reach, 6)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference.sum_by_position(values, first, reach, 6))
