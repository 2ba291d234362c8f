"""Attention of cached requests by one Triton kernel a layer: nothing is padded or copied together beforehand."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention import has_triton
from freescale.kernels.attention_launch import last_dense, start_kernel
from freescale.kernels.attention_mask import Ints, numbered
from freescale.kernels.fused_attention import MAX_WIDTH

# New tokens a program: small tiles for the few events of a request.
_MOST_QUERIES = 64
_KEYS = 32


class CachedPlan(NamedTuple):
    """Where new and cached tokens stand; made once a request, shared by all layers.

    Args:
        tiles: [tiles, 9] first new token of the user, how many, first one of the tile, first cached token in the store,
            how many, place of the first new token, where the user's buckets begin, how wide their rows are, and at
            which column those of new tokens begin.
        places: [cached tokens of the store] place of each.
        block: new tokens a tile.
    """

    tiles: Tensor
    places: Tensor
    block: int


def tile_table(*, offsets: Ints, starts: Ints, counts: Ints, ends: Ints) -> tuple[Ints, int]:
    """The tiles of a `CachedPlan` and their size.

    Args:
        offsets: [users + 1] of the new tokens.
        starts: [users] first cached token in the store.
        counts: [users] cached tokens.
        ends: [users] place of the first new token.
    """
    lengths = np.diff(offsets)
    longest, most = int(lengths.max(initial=0)), int(counts.max(initial=0))
    block = min(_MOST_QUERIES, max(16, 1 << (longest - 1).bit_length()))
    user, number = numbered(-(-lengths // block))
    table = np.empty((len(user), 9), np.int64)
    width = most + longest
    for column, values in enumerate((offsets[:-1], lengths, None, starts, counts, ends)):
        table[:, column] = number * block if values is None else values[user]
    table[:, 6], table[:, 7], table[:, 8] = user * longest * width, width, most
    return table, block


def can_fuse(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these; otherwise padded products do."""
    narrow = max(q.shape[-1], v.shape[-1]) <= MAX_WIDTH and q.dtype == v.dtype
    return q.device.type == "cuda" and narrow and q.dtype != torch.float64 and len(q) > 0 and has_triton()


def cached_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    cached_k: Tensor,
    cached_v: Tensor,
    plan: CachedPlan,
    *,
    alpha: float,
    scale: float | None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    buckets: Tensor | None = None,
) -> Tensor:
    """Scale * SiLU(alpha q k^T + bias) v over cached and earlier new tokens, or softmax where `scale` is None.

    Forward only: a cache holds numbers, nothing to train.

    Args:
        q_THD: queries of the new tokens.
        k_THD: keys of the new tokens; as many heads or a divisor of it.
        v_THV: values of the new tokens.
        cached_k: [N, heads, width] keys of the store.
        cached_v: values of the store.
        plan: which of them belong to whom.
        alpha: factor of the scores.
        scale: factor of the weights.
        position_bias: a weight for each distance in places.
        time_bias: a weight for each bucket of time.
        buckets: [users, most new tokens, most cached + most new tokens] uint8, with `time_bias`.
    """
    from freescale.kernels.triton_cached import cached_kernel

    q, k, v, cached_k, cached_v = (last_dense(x) for x in (q_THD, k_THD, v_THV, cached_k, cached_v))
    out = v.new_empty(*q.shape[:2], v.shape[2])
    strided = {"q": q, "k": k, "v": v, "ck": cached_k, "cv": cached_v, "o": out}
    options: dict[str, Any] = {
        **{f"{name}_row": x.stride(0) for name, x in strided.items()},
        **{f"{name}_head": x.stride(1) for name, x in strided.items()},
        "num_heads": q.shape[1],
        "WIDTH": q.shape[2],
        "V_WIDTH": v.shape[2],
        "BLOCK_D": _padded(q.shape[2]),
        "BLOCK_V": _padded(v.shape[2]),
        "BLOCK_M": plan.block,
        "BLOCK_N": _KEYS,
        "SOFTMAX": scale is None,
        "HAS_POSITION": position_bias is not None,
        "HAS_TIME": time_bias is not None,
        "FAST": q.dtype.itemsize == 2 and q.device.type == "cuda",
        "PRECISION": _precision(q.dtype),
        "ACC": torch.float64 if q.dtype == torch.float64 else torch.float32,
        "GROUP": q.shape[1] // k.shape[1],
        "num_warps": 4 if max(q.shape[2], v.shape[2]) <= 128 else 8,
    }
    tensors = {
        **{"Q": q, "K": k, "V": v, "CachedK": cached_k, "CachedV": cached_v, "Out": out},
        **{"Tiles": plan.tiles, "Places": plan.places},
        "Position": plan.places if position_bias is None else position_bias,
        "Time": plan.places if time_bias is None else time_bias,
        "Buckets": plan.places if buckets is None else buckets,
    }
    numbers = {"half_alpha": alpha / 2, "scale": scale or 0.0}
    start_kernel(cached_kernel, (len(plan.tiles) * q.shape[1],), tensors, numbers, options)
    return out


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _precision(dtype: torch.dtype) -> str:
    tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else "ieee"
