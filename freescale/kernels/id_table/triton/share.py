"""Overflow rows for ids without a row of their own, on a GPU. Import this module where it is used: it needs triton."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freescale.kernels.id_table.layout import SlotLayout
from freescale.kernels.id_table.triton.probe import GOLDEN, MIX_1, MIX_2

_BLOCK = 1024


@triton.jit
def _share_kernel(
    ids_ptr, rows_ptr, found_ptr, count,
    num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets, overflow_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    without = (tl.load(rows_ptr + n, mask=n < count, other=0) < 0) & (n < count)
    found = tl.sum(without.to(tl.int32), 0)
    if found > 0:
        x = tl.load(ids_ptr + n, mask=without, other=0).to(tl.uint64, bitcast=True) + GOLDEN
        x = (x ^ (x >> 30)) * MIX_1
        x = (x ^ (x >> 27)) * MIX_2
        x = x ^ (x >> 31)
        bucket = (((x >> 32) * num_buckets) >> 32).to(tl.int64) - first_bucket
        shared = ((((x >> 16) & 0xFFFF) * overflow_rows) >> 16).to(tl.int64)
        here = without & (bucket >= 0) & (bucket < held_buckets)
        tl.store(rows_ptr + n, bucket * bucket_rows + bucket_slots + shared, mask=here)
        tl.atomic_add(found_ptr, found.to(tl.int64), sem="relaxed")


def share(ids: Tensor, rows: Tensor, layout: SlotLayout) -> int:
    """Fill in the overflow rows of ids without one; how many those are, waited for."""
    found = torch.zeros((), dtype=torch.int64, device=ids.device)
    if len(ids):
        _share_kernel[(triton.cdiv(len(ids), _BLOCK),)](
            ids, rows, found, len(ids),
            layout.num_buckets, layout.bucket_rows, layout.bucket_slots, layout.first_bucket, layout.held_buckets,
            layout.overflow_rows, BLOCK=_BLOCK,
        )  # fmt: skip
    return int(found)
