"""64-bit mixing on tensors, and numbers that depend on a key alone: the same on any rank and, to rounding, device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# int64 arithmetic wraps; these are the constants of splitmix64 as signed numbers.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def mix64(x: Tensor) -> Tensor:
    """Every input bit reaches every output bit; int64 in, int64 out."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def keyed(seed: int, key: Tensor) -> Tensor:
    """A random int64 for every key, another one for every seed."""
    return mix64(
        key.long() * _GOLDEN + mix64(torch.tensor(seed, dtype=torch.int64, device=key.device) * _GOLDEN + 1)
    )


def keyed_normal(seed: int, rows: Tensor, dim: int) -> Tensor:
    """[len(rows), dim] float64 standard normals; row r depends on (seed, r) alone."""
    half = (dim + 1) // 2
    columns = torch.arange(half, device=rows.device)
    bits = keyed(seed, mix64(rows.long())[:, None] + columns)
    # Two 31-bit uniforms from one hash, then Box-Muller.
    u1 = ((bits & 0x7FFFFFFF).double() + 0.5) / 2.0**31
    u2 = (_shift_right(bits, 33).double() + 0.5) / 2.0**31
    radius = torch.sqrt(-2 * torch.log(u1))
    normals = torch.stack(
        [radius * torch.cos(2 * math.pi * u2), radius * torch.sin(2 * math.pi * u2)], dim=-1
    )
    return normals.flatten(1)[:, :dim]


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the sign bits are cleared."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
