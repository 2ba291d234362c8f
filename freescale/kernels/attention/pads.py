"""Room for what kernels write of every token of a batch, with zeros at its pads.

Kernels leave pads alone. Zeros everywhere would cost as much as another pass over all tokens, several times a layer;
only the device knows how many pads there are, since a recorded step is replayed with other batches of its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freescale.kernels.runtime import kernels_of, start_kernel

if TYPE_CHECKING:
    from freescale.kernels.attention.plan.schedule import AttentionSchedule

_SHAPE = {"PROGRAMS": 264, "BLOCK": 1024, "num_warps": 4}
"""Two programs for every SM of a large GPU, each in a loop: mostly there are few pads."""


def token_room(
    like: Tensor, *shape: int, work: AttentionSchedule, dtype: torch.dtype | None = None
) -> Tensor:
    """[T, ...] where kernels write the values of all tokens but pads, which are 0.

    Args:
        like: whose device it is on.
        shape: its own.
        work: of the batch.
        dtype: of the values; that of `like` unless given.
    """
    out = like.new_empty(shape, dtype=dtype or like.dtype)
    clear_pads(out, work)
    return out


def clear_pads(out: Tensor, work: AttentionSchedule) -> None:
    """Zeros where a tensor [T, ...] in one piece has pads."""
    if work.room is None or not out.numel():
        return
    starts, num_tokens = work.device_offsets, len(out)
    start_kernel(
        kernels_of("attention.triton.pads_kernel").clear_pads_kernel,
        (_SHAPE["PROGRAMS"],),
        {"Offsets": starts, "Out": out},
        {"num_sequences": len(starts) - 1, "num_tokens": num_tokens},
        {"ROW": out.numel() // num_tokens, **_SHAPE},
    )
