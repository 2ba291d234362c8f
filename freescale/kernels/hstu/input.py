"""The input of an encoder from the unique item vectors of a batch: gathered, scaled, positions added.

In plain PyTorch these are four passes over all tokens each way, in float32. Fused they are one; its backward adds the
gradients of half precision up where they belong, and is in full precision from the first sum on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention import SequenceLayout, token_room
from freescale.kernels.hstu import reference
from freescale.kernels.runtime import can_fuse, start_kernel

_BLOCK_TOKENS = 64


def input_states(
    rows_UD: Tensor,
    index_T: Tensor,
    position_LD: Tensor,
    layout: SequenceLayout,
    *,
    scale: float,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Item vectors and positions: scale * rows[index] + position[p], [T, D]; under autocast in half precision.

    And the rows, for who else needs them: what they get of gradient there is added in the same pass.

    Args:
        rows_UD: the unique item vectors of the batch.
        index_T: index in `rows_UD` of each token's item.
        position_LD: a vector for each position in a sequence.
        layout: where the sequences stand.
        scale: multiplies the item vectors.
        fused: use the fused kernels; by default where they can run.
    """
    kind = rows_UD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows_UD.dtype
    if (index_T.shape[0] > 0 and can_fuse(rows_UD)) if fused is None else fused:
        return _InputStates.apply(rows_UD, index_T, position_LD, layout, scale, dtype)  # type: ignore[no-untyped-call]
    states, rows_UD = reference.input_states(rows_UD, index_T, position_LD, layout, scale=scale)
    return states.to(dtype), rows_UD


class _InputStates(torch.autograd.Function):
    """The fused form; keeps nothing but the index."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        index: Tensor,
        position: Tensor,
        layout: SequenceLayout,
        scale: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        from freescale.kernels.hstu.triton.input import input_kernel

        rows, position, index = rows.contiguous(), position.contiguous(), index.contiguous()
        width = rows.shape[1]
        out = token_room(rows, index.shape[0], width, work=layout.work, dtype=dtype)
        tiles = layout.token_tiles(_BLOCK_TOKENS)
        tensors = {"Rows": rows, "Index": index, "Position": position, "Tiles": tiles, "Out": out}
        tensors["Offsets"] = layout.device_offsets
        block = max(16, 1 << (width - 1).bit_length())
        together = min(_BLOCK_TOKENS, max(1, 4096 // block))
        shape = {"WIDTH": width, "BLOCK": block, "ROWS": together, "num_warps": 4 if block <= 1024 else 8}
        grid = tiles.shape[0], _BLOCK_TOKENS // together
        start_kernel(input_kernel, grid, tensors, {"scale": float(scale)}, shape)
        ctx.save_for_backward(index)
        ctx.layout, ctx.scale = layout, scale
        ctx.kinds = (rows.shape[0], rows.dtype), (position.shape[0], position.dtype)
        return out, rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, past: Tensor) -> tuple[Tensor | None, ...]:
        from freescale.kernels.rows import sum_by_index, sum_by_position

        (index,) = ctx.saved_tensors
        (num_rows, row_dtype), (num_positions, position_dtype) = ctx.kinds
        grad = grad.contiguous()
        d_rows = sum_by_index(grad, index, num_rows, scale=ctx.scale, onto=past).to(row_dtype)
        sequences = ctx.layout.by_length
        d_position = sum_by_position(grad, sequences.first, sequences.reach, num_positions).to(position_dtype)
        return d_rows, None, d_position, None, None, None
