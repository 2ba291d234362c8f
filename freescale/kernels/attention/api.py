"""The attention models call: checks the inputs and picks the way to compute them.

CPU             compiled loops over exactly the pairs that are seen           loop_attention
CUDA            Triton kernels, bf16, fp16 and fp32, any AttentionMask        fused_attention
otherwise       batched products over tiles: softmax on the CPU, float64,     tiled_attention
                odd devices, and every other mask, which is asked tile by tile
truth           one sequence at a time, autograd                              reference
"""

from __future__ import annotations

import os
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention import reference
from freescale.kernels.attention.cpu.loop_attention import loop_silu_attention
from freescale.kernels.attention.cpu.tiled_attention import tiled_silu_attention, tiled_softmax_attention
from freescale.kernels.attention.inputs import AttentionInputError, check_shapes
from freescale.kernels.attention.layout import SequenceLayout
from freescale.kernels.attention.mask import AttentionMask, kernels_know, shared_position
from freescale.kernels.attention.mask_rule import MaskRule
from freescale.kernels.attention.segment_runs import can_unroll
from freescale.kernels.attention.triton.fused_attention import MAX_WIDTH, fused_attention
from freescale.kernels.attention.triton.pair_bias import BiasTables
from freescale.kernels.runtime import has_triton

Backend = Literal["auto", "loops", "tiles", "triton", "reference"]
BACKENDS = get_args(Backend)
# What Triton takes for a yes in TRITON_INTERPRET.
_ON = ("1", "true", "yes", "on", "y")


def hstu_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    query_time: Tensor | None = None,
    key_time: Tensor | None = None,
    mask: MaskRule | None = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal pointwise attention over jagged sequences: scale * SiLU(alpha q k^T + bias) v.

    Gradients are computed in a fixed order by every backend, so they are the same in every run.

    Args:
        q_THD: queries of all tokens, [tokens, heads, width].
        k_THD: keys.
        v_THV: values; their width may differ.
        offsets: [B + 1] where each sequence starts: whole numbers that rise from 0 to the number of tokens.
        scale: multiplies the attention weights, e.g. 1 / longest history.
        alpha: multiplies the scores, e.g. 1 / sqrt(width).
        position_bias: one weight for each distance i - j, at least as many as the longest sequence has tokens; all
            targets of a mask stand at one position, the first after the events.
        time_bias: 129 weights, one for each bucket of the time between `query_time` of i and `key_time` of j.
        query_time: [tokens] time at which the prediction is asked for (that of the next event).
        key_time: [tokens] time of the event itself.
        mask: an `AttentionMask` (window, prefix, targets, segments) or a `MaskRule` of your own; without it a token
            sees itself and all tokens before it.
        layout: the batch's layout, to share it between layers; made of `offsets`.
        backend: "auto" takes loops on the CPU and Triton kernels on a GPU.
    """
    layout = layout or _layout(offsets, q_THD)
    check_shapes(q_THD, k_THD, v_THV, layout.num_tokens)
    layout.check(mask)
    check_bias(position_bias, time_bias, query_time, key_time, layout, mask)
    backend = _choose(backend, q_THD, v_THV, mask, layout.offsets, softmax=False)
    bias: dict[str, Any] = {"position_bias": position_bias, "time_bias": time_bias}
    with torch.autocast(q_THD.device.type, enabled=False):
        if backend == "reference":
            bias |= {"query_time": query_time, "key_time": key_time}
            q, k, v = (_wide(x) for x in (q_THD, k_THD, v_THV))
            out = reference.hstu_attention(
                q, k, v, layout.offsets, scale=scale, alpha=alpha, mask=mask, **bias
            )
            return out.to(v_THV.dtype)
        buckets: Any = None
        if query_time is not None and key_time is not None and time_bias is not None:
            buckets = layout.buckets(query_time, key_time, backend=backend, mask=mask)
        if backend == "triton":
            assert kernels_know(mask)
            tables = BiasTables(position_bias, time_bias, buckets)
            return fused_attention(
                q_THD, k_THD, v_THV, layout.work, alpha=alpha, scale=scale, bias=tables, mask=mask
            )
        q, k, v = (_wide(x) for x in (q_THD, k_THD, v_THV))
        q = q if alpha == 1 else q * alpha
        bias |= {"scale": scale, "buckets": buckets}
        if backend == "tiles":
            seen = None if mask is None else layout.rule_tiles(mask)
            out = tiled_silu_attention(q, k, v, layout.tiles, mask=seen, **bias)
        elif mask is None:
            out = loop_silu_attention(q, k, v, layout.loops, **bias)
        else:
            assert isinstance(mask, AttentionMask)
            runs = layout.runs(mask)
            q, k, v = (x.index_select(0, runs.index) for x in (q, k, v))
            out = loop_silu_attention(q, k, v, runs.loops, **bias).index_select(0, runs.own)
    return out.to(v_THV.dtype)


def check_bias(
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_time: Tensor | None,
    key_time: Tensor | None,
    layout: SequenceLayout,
    mask: MaskRule | None,
) -> None:
    """Refuse tables and times that do not fit the batch; all targets of a sequence take one position."""
    if position_bias is not None and position_bias.shape[0] < layout.longest:
        shared = shared_position(mask, layout.lengths)
        longest = layout.longest if shared is None else np.minimum(shared + 1, layout.lengths).max(initial=0)
        if position_bias.shape[0] < longest:
            raise ValueError(
                f"position_bias has {position_bias.shape[0]} weights for sequences of up to {longest} tokens"
            )
    if time_bias is None:
        return
    if query_time is None or key_time is None:
        raise ValueError("time_bias needs query_time and key_time")
    sizes = time_bias.shape[0], query_time.shape[0], key_time.shape[0]
    if sizes[0] < reference.NUM_TIME_BUCKETS or not sizes[1] == sizes[2] == layout.num_tokens:
        raise AttentionInputError(
            "time_bias, query_time and key_time do not fit the batch",
            got=f"{sizes[0]} weights, {sizes[1]} and {sizes[2]} times for {layout.num_tokens} tokens",
            allowed=f"{reference.NUM_TIME_BUCKETS} weights, two times for each token",
        )


def softmax_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    mask: MaskRule | None = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal softmax attention over jagged sequences: softmax(scale * q k^T) v; arguments as in `hstu_attention`.

    Keys and values may have fewer heads than queries (grouped-query attention): each is shared by as many neighbouring
    heads of q.
    """
    layout = layout or _layout(offsets, q_THD)
    check_shapes(q_THD, k_THD, v_THV, layout.num_tokens, share_heads=True)
    layout.check(mask)
    backend = _choose(backend, q_THD, v_THV, mask, layout.offsets, softmax=True)
    with torch.autocast(q_THD.device.type, enabled=False):
        if backend == "triton":
            assert kernels_know(mask)
            no_bias = BiasTables(None, None, None)
            return fused_attention(
                q_THD, k_THD, v_THV, layout.work, alpha=scale, scale=None, bias=no_bias, mask=mask
            )
        q, k, v = (_wide(x) for x in (q_THD, k_THD, v_THV))
        if backend == "reference":
            return reference.softmax_attention(q, k, v, layout.offsets, scale=scale, mask=mask).to(
                v_THV.dtype
            )
        # The products want every operand laid out anew anyway, so shared heads are written out for each query head.
        k, v = (reference.for_every_head(x, q.shape[1]) for x in (k, v))
        if mask is not None and _unrolls(mask, q, layout.offsets):
            runs = layout.runs(mask)
            q, k, v = (x.index_select(0, runs.index) for x in (q, k, v))
            out = tiled_softmax_attention(q, k, v, runs.tiles, scale=scale).index_select(0, runs.own)
        else:
            seen = None if mask is None else layout.rule_tiles(mask)
            out = tiled_softmax_attention(q, k, v, layout.tiles, scale=scale, mask=seen)
        return out.to(v_THV.dtype)


def _layout(offsets: Tensor, q: Tensor) -> SequenceLayout:
    """The layout of a call that brings none."""
    return SequenceLayout(offsets.cpu() if isinstance(offsets, Tensor) else offsets, device=q.device)


def _choose(
    backend: Backend, q: Tensor, v: Tensor, mask: MaskRule | None, offsets: Tensor, *, softmax: bool
) -> Backend:
    """The way to compute that "auto" stands for, or a complaint about one that cannot."""
    known = kernels_know(mask)
    if backend == "auto":
        if known and q.device.type == "cuda" and _fits_triton(q, v) and has_triton():
            return "triton"
        loops = q.device.type == "cpu" and not softmax and (mask is None or _unrolls(mask, q, offsets))
        return "loops" if loops else "tiles"
    _refuse(backend, q, v, softmax=softmax)
    if backend == "loops" and mask is not None and not _unrolls(mask, q, offsets):
        raise ValueError("backend 'loops' knows no masks but segments; take 'auto', 'tiles' or 'reference'")
    if backend == "triton" and not known:
        raise AttentionInputError(
            "backend 'triton' knows no mask but AttentionMask",
            got=type(mask).__name__,
            next_step="take backend='auto' or 'tiles', which ask the mask for every tile",
        )
    return backend


def _unrolls(mask: MaskRule, q: Tensor, offsets: Tensor) -> TypeGuard[AttentionMask]:
    """Whether segments can be computed as sequences of their own, which loops and plain tiles can."""
    return q.device.type == "cpu" and isinstance(mask, AttentionMask) and can_unroll(mask, offsets)


def _refuse(backend: str, q: Tensor, v: Tensor, *, softmax: bool) -> None:
    """Complain about a backend that is unknown or cannot run these tensors."""
    if backend not in BACKENDS:
        raise AttentionInputError(
            "backend is unknown", got=repr(backend), allowed=", ".join(map(repr, BACKENDS))
        )
    why_not = None
    if backend == "triton":
        why_not = _why_not_triton(q, v)
    elif backend == "loops":
        why_not = "it has no softmax" if softmax else None if q.device.type == "cpu" else "it needs a CPU"
    if why_not is not None:
        raise AttentionInputError(
            f"backend {backend!r} cannot compute this: {why_not}",
            got=f"q {q.dtype} {list(q.shape)} on {q.device}, v {v.dtype} {list(v.shape)}",
            next_step="take backend='auto', 'tiles' or 'reference'",
        )


def _why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """The reason why the Triton kernels cannot run these tensors, if there is one."""
    if not has_triton():
        return "it needs the triton package"
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET", "0").lower() not in _ON:
        return "it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
    if q.dtype != v.dtype or max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"it takes q, k and v of one type, with heads up to {MAX_WIDTH} wide"
    return None


def _fits_triton(q: Tensor, v: Tensor) -> bool:
    return q.dtype != torch.float64 and q.dtype == v.dtype and max(q.shape[-1], v.shape[-1]) <= MAX_WIDTH


def _wide(x: Tensor) -> Tensor:
    """float32 or better, also under autocast: the scores feed an unnormalised sum over keys."""
    return x if x.dtype == torch.float64 else x.float()
