"""The plain truth of every kernel: one sequence at a time, no tricks, autograd does the backward.

Shapes: T tokens in all, H heads, D and V widths of a head, B sequences; `offsets` is [B + 1].
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

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
) -> Tensor | float:
    """Bias [length, length] of one sequence: position_bias[i - j] + time_bias[bucket(query_time_i - key_time_j)]."""
    bias: Tensor | float = 0.0
    if position_bias is not None:
        index = torch.arange(length, device=position_bias.device)
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
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    query_time: Tensor | None = None,
    key_time: Tensor | None = None,
) -> Tensor:
    """Causal pointwise attention: scale * SiLU(q k^T + bias) v, without any normalisation over keys."""
    outputs = []
    for start, stop in _spans(offsets):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THV))
        bias = relative_bias(
            stop - start,
            position_bias=position_bias,
            time_bias=time_bias,
            query_time=None if query_time is None else query_time[start:stop],
            key_time=None if key_time is None else key_time[start:stop],
        )
        weights = torch.nn.functional.silu(q @ k.transpose(1, 2) + bias).tril() * scale
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs) if outputs else v_THV[:0]


def softmax_attention(
    q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, offsets: Tensor, *, scale: float
) -> Tensor:
    """Causal softmax attention: softmax(scale * q k^T) v."""
    outputs = []
    for start, stop in _spans(offsets):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THV))
        scores = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs) if outputs else v_THV[:0]


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    edges = offsets.tolist()
    return list(itertools.pairwise(edges))
