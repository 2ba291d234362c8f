"""What keyed dropout must compute, in plain torch on any device.

    key of a step     mixed from seed and step, one number
    key of a token    mixed from that, the sample it belongs to, and its position in the sample
    mask              hashed from the token's key, the number of the site, and the column

Everything is arithmetic on whole numbers that wrap, so that CPU and GPU find the same bits. The 64-bit rounds are
splitmix64's. A column costs two rounds of 32 bits, which CPUs have vectors for; the other half of the token's key
enters between them, so that two tokens that meet in one half go apart again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.dropout.constants import COLUMN, DOMAIN, FIRST, GOLDEN, LEFT, RIGHT, SECOND

_LOW = 0xFFFFFFFF


def key_of_step(seed: int, step: int) -> int:
    """One number, as int64 holds it, for a seed of any size and a step."""
    word = 2**64 - 1
    key = _mixed(seed % 2**64 ^ DOMAIN)
    key = _mixed((key + (step + 1) * GOLDEN) & word)
    return _signed(key)


def keys(step: Tensor, samples: Tensor, positions: Tensor | int) -> Tensor:
    """The keys of tokens, int64.

    Args:
        step: [1] the key of the step.
        samples: what names each sample in the step, int64.
        positions: where the token stands in it, int64; -1 is the sample as a whole.
    """
    golden = _signed(GOLDEN)
    sample = _mix(step + (samples + 1) * golden)
    return _mix(sample + (positions + 1) * golden)


def mask(keys_N: Tensor, site: int, threshold: int, *, width: int) -> Tensor:
    """[N, width] true where a number is kept; arguments as in `api.Masked`."""
    key = _mix(keys_N + _signed((site + 1) * GOLDEN))[:, None]
    columns = torch.arange(width, device=keys_N.device)
    h = ((key & _LOW) + columns * COLUMN) & _LOW
    h = ((h ^ (h >> 16)) * FIRST) & _LOW
    h = h ^ _shift(key, 32)
    h = ((h ^ (h >> 15)) * SECOND) & _LOW
    h = h ^ (h >> 16)
    return h >= threshold


def dropout(x: Tensor, keys_N: Tensor, site: int, threshold: int, scale: float) -> Tensor:
    """X [N, ...] times scale where it is kept, else 0; narrow numbers are multiplied in float32."""
    kept = mask(keys_N, site, threshold, width=x[0].numel() if len(x) else 0).view(x.shape)
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(kept, wide * scale, 0.0).to(x.dtype)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(LEFT)
    x = (x ^ _shift(x, 27)) * _signed(RIGHT)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left, as if int64 had no sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mixed(x: int) -> int:
    word = 2**64 - 1
    x = ((x ^ (x >> 30)) * LEFT) & word
    x = ((x ^ (x >> 27)) * RIGHT) & word
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned one."""
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x
