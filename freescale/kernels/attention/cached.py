"""Attention of cached requests by one Triton kernel a layer: nothing is padded or copied together beforehand."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.jagged import group_index
from freescale.kernels.attention.mask import Ints
from freescale.kernels.attention.triton.fused_attention import MAX_WIDTH
from freescale.kernels.attention.triton.launch import last_dense, padded
from freescale.kernels.runtime import has_triton, product_precision, start_kernel

# Most new tokens a program, keys a step, warps and tiles in flight: half precision, then float32 by width. Larger tiles
# of float32 spill, from width 256 on they do not fit into shared memory.
_HALF = {128: (64, 32, 4, 2), 256: (64, 32, 8, 2)}
_SINGLE = {128: (32, 32, 8, 1), 256: (32, 16, 8, 1)}
FIELDS = 9


class KeyValueBuffer(NamedTuple):
    """Bounds of requests that one plan has room for: users; of a user new events, cached tokens, candidates."""

    users: int
    new: int
    cached: int
    candidates: int = 0


class CachedPlan(NamedTuple):
    """Where new and cached tokens stand; made once a request, shared by all layers.

    Args:
        tiles: [tiles, 9] first new token of the user, how many events, first one of the tile, first cached token in the
            store, how many, position of the first new token, where the user's buckets begin, how wide their rows are,
            and at which column those of new events begin.
        positions: [cached tokens of the store] position of each.
        block: new events a tile.
    """

    tiles: Tensor
    positions: Tensor
    block: int


def block_for(dtype: torch.dtype, longest: int) -> int:
    """New events a tile, for users with at most `longest`."""
    most = _HALF[128][0] if dtype.itemsize == 2 else _SINGLE[128][0]
    return min(most, max(16, 1 << max(longest - 1, 0).bit_length()))


def tile_table(
    *,
    offsets: Ints,
    starts: Ints,
    counts: Ints,
    ends: Ints,
    block: int,
    room: KeyValueBuffer,
    fill: bool,
    targets: Ints | None = None,
) -> Ints:
    """The tiles of a `CachedPlan`: of events, candidates have their own (`candidate_tiles`).

    Args:
        offsets: [users + 1] of the new tokens.
        starts: [users] first cached token in the store.
        counts: [users] cached tokens.
        ends: [users] position of the first new token.
        block: new tokens a tile.
        room: bounds of all of these.
        fill: as many tiles as there is room for; those that are not needed have no tokens.
        targets: [users] how many of the last new tokens are candidates; none unless given.
    """
    lengths = np.diff(offsets) if targets is None else np.diff(offsets) - targets
    user, number = group_index(-(-lengths // block))
    most = room.users * -(-room.new // block) if fill else len(user)
    table = np.zeros((most, FIELDS), np.int64)
    own, width = table[: len(user)], room.cached + room.new
    for column, values in enumerate((offsets[:-1], lengths, None, starts, counts, ends)):
        own[:, column] = number * block if values is None else values[user]
    own[:, 6], own[:, 7], own[:, 8] = user * room.new * width, width, room.cached
    return table


def can_fuse_cached(q: Tensor, v: Tensor) -> bool:
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
    out: Tensor | None = None,
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
        out: where to write; rows of candidates are left alone. Made here unless given.
        alpha: factor of the scores.
        scale: factor of the weights.
        position_bias: a weight for each distance in positions.
        time_bias: a weight for each bucket of time.
        buckets: [users, most new events, most cached + most new events] uint8, with `time_bias`.
    """
    from freescale.kernels.attention.triton.cached_kernel import cached_kernel

    q, k, v, cached_k, cached_v = (last_dense(x) for x in (q_THD, k_THD, v_THV, cached_k, cached_v))
    out = v.new_empty(*q.shape[:2], v.shape[2]) if out is None else out
    if not len(plan.tiles):
        return out
    sizes = _HALF if q.dtype.itemsize == 2 else _SINGLE
    _, keys, warps, stages = sizes[128 if max(q.shape[2], v.shape[2]) <= 128 else 256]
    strided = {"q": q, "k": k, "v": v, "ck": cached_k, "cv": cached_v, "o": out}
    options: dict[str, Any] = {
        **{f"{name}_row": x.stride(0) for name, x in strided.items()},
        **{f"{name}_head": x.stride(1) for name, x in strided.items()},
        "num_heads": q.shape[1],
        "WIDTH": q.shape[2],
        "V_WIDTH": v.shape[2],
        "BLOCK_D": padded(q.shape[2]),
        "BLOCK_V": padded(v.shape[2]),
        "BLOCK_M": plan.block,
        "BLOCK_N": keys,
        "SOFTMAX": scale is None,
        "HAS_POSITION": position_bias is not None,
        "HAS_TIME": time_bias is not None,
        "FAST": q.dtype.itemsize == 2 and q.device.type == "cuda",
        "PRECISION": product_precision(q.dtype),
        "ACC": torch.float64 if q.dtype == torch.float64 else torch.float32,
        "GROUP": q.shape[1] // k.shape[1],
        "num_warps": warps,
        "num_stages": stages,
    }
    tensors = {
        **{"Q": q, "K": k, "V": v, "CachedK": cached_k, "CachedV": cached_v, "Out": out},
        **{"Tiles": plan.tiles, "Positions": plan.positions},
        "Position": plan.positions if position_bias is None else position_bias,
        "Time": plan.positions if time_bias is None else time_bias,
        "Buckets": plan.positions if buckets is None else buckets,
    }
    numbers = {"half_alpha": alpha / 2, "scale": scale or 0.0}
    start_kernel(cached_kernel, (len(plan.tiles) * q.shape[1],), tensors, numbers, options)
    return out
