"""Parts of ranks are added up in their order, to the bit, by a kernel as by one addition after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.runtime import start_kernel, sum_parts
from freescale.kernels.runtime.part_sums import sum_parts_reference


@given(
    num_parts=st.integers(1, 9),
    count=st.integers(0, 40),
    copies=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_type_is_added_up(num_parts: int, count: int, copies: int, dtype: torch.dtype) -> None:
    parts = torch.randn(num_parts, count).to(dtype)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(sum_parts(parts, copies=copies), expected.repeat(copies))


@pytest.mark.parametrize(("num_parts", "count", "copies"), [(4, 2500, 4), (5, 1024, 1), (3, 5, 7)])
def test_the_kernel_adds_in_the_same_order(num_parts: int, count: int, copies: int) -> None:
    """Large and small numbers in turn: another order has other bits."""
    pytest.importorskip("triton")
    from freescale.kernels.runtime.sum_kernel import sum_parts_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = torch.randn(num_parts, count, device=device)
    parts *= 10.0 ** torch.randint(-6, 7, (num_parts, 1), device=device)
    sums = torch.full((copies * count,), float("nan"), device=device)
    start_kernel(
        sum_parts_kernel,
        (-(-count // 1024),),
        {"Parts": parts, "Sums": sums},
        {"count": count},
        {"PARTS": num_parts, "COPIES": copies, "BLOCK": 1024},
    )
    assert torch.equal(sums, sum_parts_reference(parts, copies=copies))
