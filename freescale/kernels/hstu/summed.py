"""sum_taken: states as sums of rows out of several tables, each picked by an index of its own.

The input of a model with ids, actions, positions and times is such a sum. In plain PyTorch every part is a pass over
all tokens in float32, and its sum another; fused, all rows are read and one state is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.rows import take
from freescale.kernels.runtime import can_fuse, start_kernel

MOST_PARTS = 5
_FEW_ROWS = 32


class Taken(NamedTuple):
    """One part of a sum.

    Args:
        table: [rows, D].
        picks: [T] the row of each state; below 0: it has none.
        scale: multiplies the rows.
    """

    table: Tensor
    picks: Tensor
    scale: float = 1.0

    def states(self) -> Tensor:
        """[T, D] this part alone."""
        found = take(self.table, self.picks.clamp(min=0))
        return torch.where((self.picks >= 0)[:, None], found * self.scale, 0)


class Sum(NamedTuple):
    """States that have not been added up yet: what `sum_taken` is given."""

    parts: tuple[Taken, ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of the first table, which the states have outside of autocast."""
        return self.parts[0].table.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.parts[0].table.device

    def states(self) -> Tensor:
        """[T, D]."""
        return sum_taken(self.parts)


def sum_taken(parts: Sequence[Taken], *, fused: bool | None = None) -> Tensor:
    """[T, D] sum over the parts of scale * table[index]; under autocast in half precision.

    Args:
        parts: at most five where it is fused.
        fused: use the fused kernel; by default where it can run.
    """
    first = parts[0].table
    kind = first.device.type
    dtype = first.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    usual = can_fuse(first) and len(parts) <= MOST_PARTS and len(parts[0].picks) > 0
    if usual if fused is None else fused:
        tables, indices, scales = zip(*parts)
        return _SumTaken.apply(indices, scales, dtype, *tables)  # type: ignore[no-untyped-call]
    total = parts[0].states()
    for part in parts[1:]:
        total = total + part.states()
    return total.to(dtype)


class _SumTaken(torch.autograd.Function):
    """The fused form; keeps the indices alone."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: tuple[Tensor, ...],
        scales: tuple[float, ...],
        dtype: torch.dtype,
        *tables: Tensor,
    ) -> Tensor:
        from freescale.kernels.hstu.triton.summed import sum_taken_kernel

        tables = tuple(each if each.stride(-1) == 1 else each.contiguous() for each in tables)
        indices = tuple(each.contiguous() for each in indices)
        num, width = len(indices[0]), tables[0].shape[1]
        out = torch.empty(num, width, dtype=dtype, device=tables[0].device)
        block = max(16, 1 << (width - 1).bit_length())
        rows = max(1, 2048 // block)
        tensors = {"Out": out}
        constants: dict[str, Any] = {"PARTS": len(tables), "WIDTH": width, "BLOCK": block, "ROWS": rows}
        for n in range(MOST_PARTS):
            used = n if n < len(tables) else 0
            tensors |= {f"Table{n}": tables[used], f"Index{n}": indices[used]}
            constants |= {f"STRIDE{n}": tables[used].stride(0), f"SCALE{n}": float(scales[used])}
        start_kernel(
            sum_taken_kernel, (-(-num // rows),), tensors, {"num_rows": num}, {**constants, "num_warps": 4}
        )
        ctx.save_for_backward(*indices)
        ctx.scales = scales
        ctx.kinds = [(len(each), each.dtype) for each in tables]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = grad.contiguous()
        found: list[Tensor | None] = []
        for number, (index, scale, (rows, dtype)) in enumerate(zip(ctx.saved_tensors, ctx.scales, ctx.kinds)):
            if not ctx.needs_input_grad[3 + number]:
                found.append(None)
                continue
            found.append(_of_table(grad, index, rows, scale).to(dtype))
        return None, None, None, *found


def _of_table(grad: Tensor, index: Tensor, rows: int, scale: float) -> Tensor:
    """[rows, D] what the gradients of all states add to each row."""
    if rows <= _FEW_ROWS:
        # Rows that a large part of all tokens share would each be summed by one program: a product adds them all.
        places = torch.arange(rows, device=index.device)
        shares = (index[:, None] == places).to(grad.dtype)
        return shares.t().matmul(grad).to(torch.promote_types(grad.dtype, torch.float32)) * scale
    # What has no row adds to one behind the last.
    own = torch.where(index < 0, rows, index)
    from freescale.kernels.rows import sum_by_index  # a Triton kernel: only where there is one

    return sum_by_index(grad, own, rows + 1, scale=scale)[:rows]
