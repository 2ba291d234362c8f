"""The attention models call: checks the inputs and picks the way to compute them.

CPU             compiled loops over exactly the causal pairs     loop_attention
anything else   batched products over tiles                      tiled_attention
truth           one sequence at a time, autograd backward        reference
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from freescale.kernels.loop_attention import loop_silu_attention
from freescale.kernels.tile_layout import TileLayout
from freescale.kernels.tiled_attention import tiled_silu_attention, tiled_softmax_attention

Backend = Literal["auto", "loops", "tiles"]


def hstu_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    query_time: Tensor | None = None,
    key_time: Tensor | None = None,
    layout: TileLayout | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal pointwise attention over jagged sequences: scale * SiLU(q k^T + bias) v.

    Args:
        q_THD: queries of all tokens, [tokens, heads, width].
        k_THD: keys.
        v_THV: values; their width may differ.
        offsets: [B + 1] where each sequence starts.
        scale: multiplies the attention weights, e.g. 1 / longest history.
        position_bias: one weight for each distance i - j, at least as many as the longest sequence has tokens.
        time_bias: 129 weights, one for each bucket of the time between `query_time` of i and `key_time` of j.
        query_time: [tokens] time at which the prediction is asked for (that of the next event).
        key_time: [tokens] time of the event itself.
        layout: the batch's layout, to share it between layers.
        backend: "auto" takes loops on the CPU and tiles elsewhere.
    """
    layout = layout or TileLayout(offsets.cpu(), device=q_THD.device)
    if position_bias is not None and len(position_bias) < layout.longest:
        raise ValueError(
            f"position_bias has {len(position_bias)} weights for sequences of up to {layout.longest} tokens"
        )
    if time_bias is not None and (query_time is None or key_time is None):
        raise ValueError("time_bias needs query_time and key_time")
    use_loops = backend == "loops" or (backend == "auto" and q_THD.device.type == "cpu")
    bias: dict[str, Any] = {"position_bias": position_bias, "time_bias": time_bias, "buckets": None}
    if query_time is not None and key_time is not None and time_bias is not None:
        find = layout.loops.buckets if use_loops else layout.time_buckets
        bias["buckets"] = find(query_time, key_time)
    with torch.autocast(q_THD.device.type, enabled=False):
        q, k, v = (_wide(x) for x in (q_THD, k_THD, v_THV))
        if use_loops:
            out = loop_silu_attention(q, k, v, layout.loops, scale=scale, **bias)
        else:
            out = tiled_silu_attention(q, k, v, layout, scale=scale, **bias)
    return out.to(v_THV.dtype)


def softmax_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    layout: TileLayout | None = None,
) -> Tensor:
    """Causal softmax attention over jagged sequences: softmax(scale * q k^T) v."""
    layout = layout or TileLayout(offsets.cpu(), device=q_THD.device)
    with torch.autocast(q_THD.device.type, enabled=False):
        q, k, v = (_wide(x) for x in (q_THD, k_THD, v_THV))
        return tiled_softmax_attention(q, k, v, layout, scale=scale).to(v_THV.dtype)


def _wide(x: Tensor) -> Tensor:
    """float32 or better, also under autocast: the scores feed an unnormalised sum over keys."""
    return x if x.dtype == torch.float64 else x.float()
