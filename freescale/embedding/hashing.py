"""64-bit mixing on tensors, and numbers that depend on a key alone: the same on any rank and, to rounding, device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freescale.kernels.rows import GOLDEN, mix64


def keyed(seed: int, key: Tensor) -> Tensor:
    """A random int64 for every key, another one for every seed."""
    return mix64(key.long() * GOLDEN + _start(torch.tensor(seed, dtype=torch.int64, device=key.device)))


def start_of(seed: int) -> int:
    """What `keyed` adds to keys, for `kernels.rows.hashed_rows`."""
    return int(_start(torch.tensor(seed, dtype=torch.int64)))


def _start(seed: Tensor) -> Tensor:
    return mix64(seed * GOLDEN + 1)


def keyed_normal(seed: int, rows: Tensor, dim: int) -> Tensor:
    """[len(rows), dim] float64 standard normals; row r depends on (seed, r) alone."""
    half = (dim + 1) // 2
    columns = torch.arange(half, device=rows.device)
    bits = keyed(seed, mix64(rows.long())[:, None] + columns)
    # Two 31-bit uniforms from one hash, then Box-Muller.
    u1 = ((bits & 0x7FFFFFFF).double() + 0.5) / 2.0**31
    u2 = (((bits >> 33) & 0x7FFFFFFF).double() + 0.5) / 2.0**31
    radius = torch.sqrt(-2 * torch.log(u1))
    normals = torch.stack(
        [radius * torch.cos(2 * math.pi * u2), radius * torch.sin(2 * math.pi * u2)], dim=-1
    )
    return normals.flatten(1)[:, :dim]
