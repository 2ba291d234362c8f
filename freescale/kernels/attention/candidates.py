"""Attention of candidates over cached histories, by Triton kernels: a bias a key, keys cut into parts.

A new event sees what is cached, new events before it, and itself: as a single candidate behind fewer events does. So
the few new events of a request are tiles beside those of candidates, each with a row of bias of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.jagged import group_index
from freescale.kernels.attention.cached import KeyValueBuffer
from freescale.kernels.attention.mask import Ints
from freescale.kernels.attention.triton.launch import last_dense, padded
from freescale.kernels.runtime import kernels_of, product_precision, start_kernel

FIELDS = 9
_LEAST_KEYS = 500
"""Cached keys that are worth a part of their own: 1,023 in two parts took 21.1 us on an H200, in four 22.8."""
_PROGRAMS = 4.2
"""Keys are cut while a processor has at most this many programs: 4,095 keys and 1,000 candidates took 50.3 us in two
parts, 47.0 in eight."""
_SUM_ROWS = 16


class CandidatePlan(NamedTuple):
    """Where candidates and what they see stand; made once a request, shared by all layers.

    Args:
        tiles: [tiles, 9] first new token of the user, how many new events are seen, how many candidates stand behind
            them, first candidate of the tile, first cached token in the store, how many, and in the rows of bias where
            cached tokens begin, where new events do, and where the candidate itself stands.
        distances: [rows, bias_width] how far back each key stands: cached, new, and the candidate itself. Of every
            user a row for each new event there is room for, where they are tiles, and one for all candidates.
        buckets: the same of the time since; None without times.
        block: candidates a tile.
        splits: parts that cached keys are cut into.
    """

    tiles: Tensor
    distances: Tensor
    buckets: Tensor | None
    block: int
    splits: int


def bias_width(room: KeyValueBuffer) -> int:
    """Columns of a row of bias: cached tokens, new events, the candidate; filled up to whole blocks of 16."""
    return (room.cached + room.new + 1 + 15) // 16 * 16


def candidate_block(dtype: torch.dtype, most: int) -> int:
    """Candidates a tile, for users with at most so many. Tiles of 128 read keys less often, and were slower."""
    return min(64 if dtype.itemsize == 2 else 32, max(16, 1 << max(most - 1, 0).bit_length()))


def candidate_tile(width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys a step, warps and tiles in flight, for heads of this width."""
    if dtype.itemsize == 2:
        return (64, 4, 3) if width <= 128 else (32, 8, 2)
    return (32, 4, 2) if width <= 128 else (16, 8, 1)


def candidate_splits(programs: int, most_cached: int, *, device: torch.device, softmax: bool) -> int:
    """Parts that fill a GPU with so many programs a part; powers of two, so that few kernels are compiled.

    A softmax is not cut: it has to know its highest score.
    """
    if softmax or programs == 0:
        return 1
    splits, most = 1, _PROGRAMS * _processors(device)
    while programs * splits * 2 <= most and most_cached >= _LEAST_KEYS * splits * 2 and splits < 16:
        splits *= 2
    return splits


@cache
def _processors(device: torch.device) -> int:
    # Without a GPU the interpreter runs the kernels; some parts there, so that tests see them.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 64


def candidate_tiles(
    *,
    offsets: Ints,
    targets: Ints,
    starts: Ints,
    counts: Ints,
    block: int,
    room: KeyValueBuffer,
    fill: bool,
    events: bool,
) -> Ints:
    """The tiles of a `CandidatePlan`.

    Args:
        offsets: [users + 1] of the new tokens.
        targets: [users] how many of the last new tokens are candidates.
        starts: [users] first cached token in the store.
        counts: [users] cached tokens.
        block: candidates a tile.
        room: bounds of all of these.
        fill: as many tiles as there is room for; those that are not needed have no candidates.
        events: new events are tiles, too.
    """
    before = np.diff(offsets) - targets
    user, number = group_index(-(-targets // block))
    rows = room.new + 1 if events else 1
    parts = [(user, before[user], targets[user], number * block, user * rows + rows - 1)]
    most = -(-room.candidates // block)
    if events:
        user, number = group_index(before)
        parts.append((user, number, np.ones_like(number), np.zeros_like(number), user * rows + number))
        most += room.new
    user, seen, count, first, row = (np.concatenate(column) for column in zip(*parts))
    table = np.zeros((room.users * most if fill else len(user), FIELDS), np.int64)
    own, begin = table[: len(user)], row * bias_width(room)
    columns = (offsets[:-1][user], seen, count, first, starts[user], counts[user])
    for column, values in enumerate((*columns, begin, begin + room.cached, begin + room.cached + room.new)):
        own[:, column] = values
    return table


def candidate_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    cached_k: Tensor,
    cached_v: Tensor,
    plan: CandidatePlan,
    out: Tensor,
    *,
    alpha: float,
    scale: float | None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
) -> None:
    """Write the output of candidates, as `cached_attention` does for events; arguments as there.

    Forward only. Other rows of `out` are left alone.
    """
    kernels = kernels_of("attention.triton.candidate_kernel")
    if not len(plan.tiles):
        return
    q, k, v, cached_k, cached_v = (last_dense(x) for x in (q_THD, k_THD, v_THV, cached_k, cached_v))
    bias = _bias(plan, position_bias, time_bias, q)
    width = max(q.shape[2], v.shape[2])
    keys, warps, stages = candidate_tile(width, q.dtype)
    parts = out if plan.splits == 1 else _parts(out, plan.splits)
    stride = 0 if plan.splits == 1 else parts.stride(0)
    target = out if plan.splits == 1 else parts[0]
    strided = {"q": q, "k": k, "v": v, "ck": cached_k, "cv": cached_v, "o": target}
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
        "SPLITS": plan.splits,
        "SOFTMAX": scale is None,
        "HAS_BIAS": bias is not None,
        "FAST": q.dtype.itemsize == 2 and q.device.type == "cuda",
        "PRECISION": product_precision(q.dtype),
        "ACC": _sums(q),
        "GROUP": q.shape[1] // k.shape[1],
        "STAGES": stages,
        "num_warps": warps,
    }
    tensors = {
        **{"Q": q, "K": k, "V": v, "CachedK": cached_k, "CachedV": cached_v, "Out": target},
        **{"Tiles": plan.tiles, "Bias": plan.distances if bias is None else bias},
    }
    programs = len(plan.tiles) * q.shape[1]
    numbers = {"split_stride": stride, "half_alpha": alpha / 2, "scale": scale or 0.0}
    start_kernel(kernels.candidate_kernel, (programs * plan.splits,), tensors, numbers, options)
    if plan.splits > 1:
        _add_splits(plan, parts, out, programs)


def _add_splits(plan: CandidatePlan, parts: Tensor, out: Tensor, programs: int) -> None:
    rows = min(_SUM_ROWS, plan.block)
    options: dict[str, Any] = {
        **{
            "o_row": out.stride(0),
            "o_head": out.stride(1),
            "p_row": parts.stride(1),
            "p_head": parts.stride(2),
        },
        **{"num_heads": out.shape[1], "V_WIDTH": out.shape[2], "BLOCK_V": padded(out.shape[2])},
        **{"ROWS": rows, "SPLITS": plan.splits, "num_warps": 4},
    }
    tensors = {"Parts": parts, "Out": out, "Tiles": plan.tiles}
    kernel = kernels_of("attention.triton.candidate_kernel").add_splits_kernel
    start_kernel(kernel, (programs, plan.block // rows), tensors, {"split_stride": parts.stride(0)}, options)


def _parts(out: Tensor, splits: int) -> Tensor:
    """Room for the sums of every part; each begins at a whole block, which the kernels rely on."""
    tokens = (len(out) + 15) // 16 * 16
    return out.new_empty(splits, tokens, *out.shape[1:], dtype=_sums(out))


def _bias(
    plan: CandidatePlan, position_bias: Tensor | None, time_bias: Tensor | None, like: Tensor
) -> Tensor | None:
    """Half of the bias of every key, like `plan.distances`; None where there is none."""
    if position_bias is None and time_bias is None:
        return None
    row = torch.empty(plan.distances.shape, dtype=_sums(like), device=like.device)
    tensors = {
        **{"Out": row, "Distances": plan.distances},
        "Buckets": plan.distances if plan.buckets is None else plan.buckets,
        "Position": row if position_bias is None else position_bias,
        "Time": row if time_bias is None else time_bias,
    }
    options = {
        "last_position": 0 if position_bias is None else len(position_bias) - 1,
        "HAS_POSITION": position_bias is not None,
        "HAS_TIME": time_bias is not None,
        "BLOCK": 256,
        "num_warps": 4,
    }
    kernel = kernels_of("attention.triton.candidate_kernel").bias_row_kernel
    start_kernel(kernel, (-(-row.numel() // 256),), tensors, {"size": row.numel()}, options)
    return row


def _sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
