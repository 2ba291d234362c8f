"""The relative bias of every pair on the GPU: buckets once a batch, bias once a layer."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention.mask import AttentionMask
from freescale.kernels.attention.plan.room import BIAS_ROWS
from freescale.kernels.attention.plan.schedule import AttentionSchedule, BiasStore, has_targets
from freescale.kernels.attention.reference import NUM_TIME_BUCKETS, TIME_BUCKET_WIDTH, time_bucket
from freescale.kernels.attention.triton.launch import Launch
from freescale.kernels.runtime import kernels_of, start_kernel

# Rows and columns that a program works on at a time.
_PIECE = {"ROWS": 32, "STRIP": BIAS_ROWS}


class BiasTables(NamedTuple):
    """Weights by distance, weights by time bucket, and the bucket of every pair; each may be missing."""

    position: Tensor | None
    time: Tensor | None
    buckets: Tensor | None

    def __bool__(self) -> bool:
        """Whether there is any bias."""
        return self.position is not None or self.time is not None


def time_buckets(
    work: AttentionSchedule, mask: AttentionMask | None, query_time: Tensor, key_time: Tensor
) -> Tensor:
    """Time bucket of every pair, laid out as the batch's `BiasStore`."""
    triton_bias = kernels_of("attention.triton.bias_kernels")

    store = work.bias_store(mask)
    out = torch.empty(store.size, dtype=torch.uint8, device=store.blocks.device)
    tensors = {
        "QueryTime": query_time.contiguous(),
        "KeyTime": key_time.contiguous(),
        "Buckets": out,
        "Rows": store.rows,
        "Blocks": store.blocks,
        "Pieces": store.pieces,
        "Seen": work.nothing if mask is None else work.seen_pieces(mask),
        "Edges": _bucket_edges(out.device),
    }
    numbers = {"log2_to_bucket": math.log(2) / TIME_BUCKET_WIDTH, "seen_row": store.widest // BIAS_ROWS}
    constants = {"top_bucket": NUM_TIME_BUCKETS - 1, "MASKED": mask is not None, **_PIECE}
    start_kernel(triton_bias.bucket_kernel, _grid(store), tensors, numbers, constants)
    return out


@cache
def _bucket_edges(device: torch.device) -> Tensor:
    """Smallest time difference of each bucket, as the reference counts them; the last bucket has no end."""
    buckets = torch.arange(NUM_TIME_BUCKETS)
    below, edges = torch.zeros_like(buckets), torch.full_like(buckets, 2**62)
    for _ in range(62):
        middle = (below + edges) // 2
        reached = time_bucket(middle) >= buckets
        below, edges = torch.where(reached, below, middle), torch.where(reached, middle, edges)
    edges[0] = 0
    return torch.cat([edges, torch.tensor([2**63 - 1])]).to(device)


def pair_bias(launch: Launch, tables: BiasTables) -> Tensor:
    """Bias of every pair over alpha; float16 for half-precision inputs, whose own rounding is eight times coarser."""
    triton_bias = kernels_of("attention.triton.bias_kernels")

    if not tables:
        return launch.nothing
    store = launch.work.bias_store(launch.mask)
    dtype = torch.float16 if launch.q.dtype.itemsize == 2 else launch.q.dtype
    out = torch.empty(store.size, dtype=dtype, device=launch.q.device)
    position, time = (_table(x, launch) for x in (tables.position, tables.time))
    tensors = {
        "Bias": out,
        "Buckets": launch.nothing if tables.buckets is None else tables.buckets,
        "Position": position,
        "Time": time,
        "Rows": store.rows,
        "Blocks": store.blocks,
        "Pieces": store.pieces,
        "Seen": launch.nothing if launch.mask is None else launch.work.seen_pieces(launch.mask),
        "Shared": launch.work.shared_positions(launch.mask) if has_targets(launch.mask) else launch.nothing,
    }
    constants = {
        "last_position": position.shape[0] - 1,
        "HAS_POSITION": tables.position is not None,
        "HAS_TIME": tables.time is not None,
        "MASKED": launch.mask is not None,
        "TARGETS": has_targets(launch.mask),
        **_PIECE,
    }
    numbers = {"factor": 1 / launch.alpha, "seen_row": store.widest // BIAS_ROWS}
    start_kernel(triton_bias.bias_kernel, _grid(store), tensors, numbers, constants)
    return out


def _grid(store: BiasStore) -> tuple[int, int]:
    """Some programs for every piece."""
    return store.pieces.shape[0], BIAS_ROWS // _PIECE["ROWS"]


def _table(x: Tensor | None, launch: Launch) -> Tensor:
    return (
        launch.nothing.new_zeros(1, dtype=launch.sums_dtype)
        if x is None
        else x.to(launch.sums_dtype).contiguous()
    )
