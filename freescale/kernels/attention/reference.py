"""The plain truth of the attention kernels: one sequence at a time, no tricks, autograd does the backward.

Shapes: T tokens in all, H heads, D and V widths of a head, B sequences; `offsets` is [B + 1].
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from freescale.kernels.attention.mask import shared_position
from freescale.kernels.attention.mask_rule import MaskRule, visible_in_sequence

NUM_TIME_BUCKETS = 129
TIME_BUCKET_WIDTH = 0.301


def time_bucket(delta: Tensor) -> Tensor:
    """Bucket of a time difference: floor(ln(max(|delta|, 1)) / 0.301), at most 128."""
    logs = torch.log(delta.abs().clamp(min=1).to(torch.float64))
    return (logs / TIME_BUCKET_WIDTH).floor().clamp(max=NUM_TIME_BUCKETS - 1).to(torch.int64)


def relative_bias(
    length: int,
    *,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_time: Tensor | None,
    key_time: Tensor | None,
    last_position: int | None = None,
) -> Tensor | float:
    """Bias [length, length] of one sequence: position_bias[i - j] + time_bias[bucket(query_time_i - key_time_j)].

    Tokens from `last_position` on all stand there.
    """
    bias: Tensor | float = 0.0
    if position_bias is not None:
        most = length if last_position is None else last_position
        index = torch.arange(length, device=position_bias.device).clamp(max=most)
        bias = bias + position_bias[(index[:, None] - index[None, :]).clamp(min=0)]
    if time_bias is not None:
        assert query_time is not None
        assert key_time is not None
        bias = bias + time_bias[time_bucket(query_time[:, None] - key_time[None, :])]
    return bias


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
) -> Tensor:
    """Causal pointwise attention: scale * SiLU(alpha q k^T + bias) v, without any normalisation over keys."""
    outputs = []
    shared = shared_position(mask, offsets.diff().cpu().numpy())
    for n, (start, stop) in enumerate(_spans(offsets)):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THV))
        bias = relative_bias(
            stop - start,
            position_bias=position_bias,
            time_bias=time_bias,
            query_time=None if query_time is None else query_time[start:stop],
            key_time=None if key_time is None else key_time[start:stop],
            last_position=None if shared is None else int(shared[n]),
        )
        weights = torch.nn.functional.silu(alpha * (q @ k.transpose(1, 2)) + bias) * scale
        weights = weights * _visible(mask, n, start, stop, q.device)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs) if outputs else v_THV[:0]


def softmax_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    mask: MaskRule | None = None,
) -> Tensor:
    """Causal softmax attention: softmax(scale * q k^T) v; neighbouring heads of q may share one of k and v."""
    k_THD, v_THV = (for_every_head(x, q_THD.shape[1]) for x in (k_THD, v_THV))
    outputs = []
    for n, (start, stop) in enumerate(_spans(offsets)):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THV))
        scores = q @ k.transpose(1, 2) * scale
        hidden = ~_visible(mask, n, start, stop, q.device)
        # A token that sees nothing gets zeros: its row is kept finite, and hidden in the end.
        blind = hidden.all(-1, keepdim=True)
        scores = scores.masked_fill(hidden, float("-inf")).masked_fill(blind, 0.0)
        weights = scores.softmax(-1).masked_fill(blind, 0.0)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs) if outputs else v_THV[:0]


def for_every_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values [..., heads, width] with one head for each query head; gradients of copies add up."""
    group = heads // x.shape[-2]
    return x if group == 1 else x.repeat_interleave(group, dim=-2)


def _visible(mask: MaskRule | None, n: int, start: int, stop: int, device: torch.device) -> Tensor:
    """[length, length], true where row sees column: itself and what came before, or as a mask says."""
    if mask is None:
        return torch.ones(stop - start, stop - start, dtype=torch.bool, device=device).tril()
    return visible_in_sequence(mask, n, start, stop, device)


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    edges = offsets.tolist()
    return list(itertools.pairwise(edges))
