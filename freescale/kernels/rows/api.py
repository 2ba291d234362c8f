"""What a table does with the rows of a batch: find the unique ones, spread them out, add gradients up.

On the CPU the loops of `loops` do it, on a GPU torch and the kernels of `triton`. All add in the order the values
stand. What they compute says `reference`, which is also what other devices and types are computed by.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.rows import reference

_COMPILED = (torch.float32, torch.float64)
_WIDEST = 8192
_WORTH_COMPILED = 512
"""Ids; fewer are hashed before a process that has loaded no loops would have loaded them."""
_HASH_LOOPS = "freescale.kernels.rows.hash_loops"
IntArray = npt.NDArray[np.int64]


def unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Unique values of int64 ids, ascending, and the position of every id among them, in the shape of the ids."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return reference.unique(ids)
    from freescale.kernels.rows import loops as row_loops

    values, inverse = row_loops.unique(ids.contiguous().view(-1).numpy())
    return torch.from_numpy(values), torch.from_numpy(inverse).view(ids.shape)


def find_sorted(among: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where each id stands among ascending ones, and whether it is there at all, in the shape of the ids.

    The index of one that is not there means nothing; it is 0 where there are none to look among.
    """
    ids = ids.contiguous()
    if not len(among):
        return torch.zeros_like(ids, dtype=torch.int64), torch.zeros_like(ids, dtype=torch.bool)
    index = torch.searchsorted(among, ids).clamp_(max=len(among) - 1)
    return index, among[index] == ids


def hashed_rows(ids: Tensor, start: int, num_rows: int) -> Tensor:
    """A row for every id, by its 64-bit hash; `start` picks another one. In the shape of the ids."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return reference.hashed_rows(ids, start, num_rows)
    from freescale.kernels.rows import hash_loops

    flat = ids.long().contiguous().view(-1).numpy()
    rows = hash_loops.hashed_rows(flat, np.int64(start).astype(np.uint64), num_rows)
    return torch.from_numpy(rows).view(ids.shape)


def scattered_rows(ids: Tensor, factor: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """A row for every id from 0 to num_rows - 1, id * factor modulo num_rows; and the first id that is none of those.

    Where all are, that is empty.
    """
    if ids.device.type != "cpu" or ids.numel() == 0:
        return reference.scattered_rows(ids, factor, num_rows)
    from freescale.kernels.rows import hash_loops

    flat = ids.long().contiguous().view(-1)
    rows, bad = hash_loops.scattered_rows(flat.numpy(), factor, num_rows)
    return torch.from_numpy(rows).view(ids.shape), flat[bad : bad + 1] if bad >= 0 else flat[:0]


def crossed_ids(start: int, members: Sequence[IntArray], none: int) -> IntArray:
    """[n] one 64-bit id of several: h = mix64(h + GOLDEN ^ id) for one after the other; `none` where one of them is.

    Args:
        start: what h is at first.
        members: [n] ids each.
        none: says that there is no id.
    """
    if len(members[0]) < _WORTH_COMPILED and _HASH_LOOPS not in sys.modules:
        return reference.crossed_ids(start, members, none)
    from freescale.kernels.rows import hash_loops

    return hash_loops.crossed_ids(np.uint64(start), np.stack(members), none)


def sum_by_row(index: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """Sum of the values with the same index, added up in the order they stand, on every device."""
    shape = (num_rows, *values.shape[1:])
    if values.is_cuda:
        # CUDA's index_add_ races; index_put_ with accumulate sorts first (stable), so its order is fixed.
        return values.new_zeros(shape).index_put_((index,), values, accumulate=True)
    if values.device.type != "cpu" or values.dtype not in _COMPILED or values.dim() != 2:
        return values.new_zeros(shape).index_add_(0, index, values)
    from freescale.kernels.rows import loops as row_loops

    out = values.new_empty(shape)
    row_loops.sum_by_row(index.contiguous().numpy(), values.detach().contiguous().numpy(), out.numpy())
    return out


def take(rows: Tensor, index: Tensor) -> Tensor:
    """[..., dim] rows[index], differentiable; the gradients of a row add up in an order of their own."""
    if rows.device.type != "cpu" and not _sorts(rows):
        return reference.take(rows, index)
    return _Take.apply(rows, index)  # type: ignore[no-untyped-call]


def take_sums(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """[n, dim] sum over j of weights[n, j] * rows[index[n, j]], differentiable in the rows; index is [n, j]."""
    if rows.device.type == "cpu":
        summed: Tensor = _TakeSums.apply(rows, index, weights)  # type: ignore[no-untyped-call]
        return summed
    taken = take(rows, index)
    return taken.sum(1) if weights is None else torch.einsum("njd,nj->nd", taken, weights.to(taken.dtype))


def sum_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[num_rows, dim] sum of the values with the same index, in the order they stand; differentiable."""
    return _Sum.apply(values, index, num_rows)  # type: ignore[no-untyped-call]


def add_scaled(table: Tensor, rows: Tensor, values: Tensor, scale: Tensor) -> None:
    """table[rows[n]] += scale[n] * values[n] for unique rows, in place."""
    if _on_gpu(table) and table.is_contiguous():
        from freescale.kernels.rows.triton import table as triton_table

        triton_table.add_scaled(table, rows, values, scale)
        return
    if table.device.type != "cpu" or table.dtype not in _COMPILED:
        reference.add_scaled(table, rows, values, scale)
        return
    from freescale.kernels.rows import loops as row_loops

    row_loops.add_scaled(
        table.numpy(), rows.contiguous().numpy(), values.contiguous().numpy(), scale.contiguous().numpy()
    )


def overlap(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """For two ascending lists of unique int64 on the CPU: which values of each stand in the other, too."""
    from freescale.kernels.rows import loops as row_loops

    masks = torch.zeros(len(first), dtype=torch.bool), torch.zeros(len(second), dtype=torch.bool)
    row_loops.overlap(
        first.contiguous().numpy(), second.contiguous().numpy(), masks[0].numpy(), masks[1].numpy()
    )
    return masks


def mean_squares(values: Tensor) -> Tensor:
    """[U] mean of the squares of each row, the same bits whatever other rows stand beside it.

    torch does not promise that its reductions and vector loops add and round alike wherever a row stands and however
    many there are (on one machine tried they did). The updates of parts of a batch rely on it, so it is made sure here.
    """
    if _on_gpu(values):
        from freescale.kernels.rows.triton import table as triton_table

        return triton_table.mean_squares(values)
    if values.device.type != "cpu" or values.dtype not in _COMPILED:
        return _halved_sum(values.square()) / values.shape[1]
    from freescale.kernels.rows import loops as row_loops

    out = values.new_empty(len(values))
    row_loops.mean_squares(values.contiguous().numpy(), out.numpy())
    return out


def _halved_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension by adding its second half to its first: element by element, in one fixed order."""
    while values.shape[1] > 1:
        half = (values.shape[1] + 1) // 2
        rest = values[:, half:]
        values = torch.cat([values[:, : rest.shape[1]] + rest, values[:, rest.shape[1] : half]], dim=1)
    return values[:, 0]


def adam_direction(
    grad: Tensor, moment1: Tensor, moment2: Tensor, *, beta1: float, beta2: float, step: int, eps: float
) -> Tensor:
    """Moves both moments, in place; the direction of Adam, each row the same bits whatever stands beside it."""
    correction2 = 1 - beta2**step
    if _on_gpu(grad) and moment1.is_contiguous() and moment2.is_contiguous():
        from freescale.kernels.rows.triton import table as triton_table

        return triton_table.adam_direction(
            grad, moment1, moment2, beta1=beta1, beta2=beta2, correction2=correction2, eps=eps
        )
    if grad.device.type != "cpu" or grad.dtype not in _COMPILED:
        return reference.adam_direction(grad, moment1, moment2, beta1=beta1, beta2=beta2, step=step, eps=eps)
    from freescale.kernels.rows import loops as row_loops

    kind: Any = np.float64 if grad.dtype == torch.float64 else np.float32
    direction = torch.empty_like(grad, memory_format=torch.contiguous_format)
    row_loops.adam(
        grad.contiguous().numpy(),
        moment1.numpy(),
        moment2.numpy(),
        direction.numpy(),
        kind(beta1),
        kind(beta2),
        kind(correction2),
        kind(eps),
    )
    return direction


def sum_gradients(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[num_rows, dim] sum of the values of each index, in an order that depends on nothing but their own."""
    if not _sorts(values):
        return sum_by_row(index.long(), values, num_rows)
    from freescale.kernels.rows.triton import sums as triton_row_sums

    return triton_row_sums.sum_by_index(values, index, num_rows).to(values.dtype)


def _sorts(x: Tensor) -> bool:
    """Whether the kernels of `triton_row_sums` can be used."""
    from freescale.kernels.runtime import has_triton

    return x.is_cuda and x.is_floating_point() and has_triton()


def _on_gpu(x: Tensor) -> bool:
    """Whether the kernels of `triton_table` can be used."""
    from freescale.kernels.runtime import has_triton

    return x.is_cuda and x.dtype == torch.float32 and x.shape[-1] <= _WIDEST and has_triton()


class _TakeSums(torch.autograd.Function):
    """Sums without the [n, j, dim] in between; gradients of a row add up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, weights)
        ctx.num_rows = len(rows)
        return F.embedding_bag(index, rows, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, weights = ctx.saved_tensors
        each = grads[0][:, None].expand(*index.shape, grads[0].shape[1])
        each = each if weights is None else each * weights[..., None]
        return (
            sum_gradients(each.reshape(index.numel(), grads[0].shape[1]), index.flatten(), ctx.num_rows),
            None,
            None,
        )


class _Take(torch.autograd.Function):
    """Half the time of F.embedding, whose backward on the CPU calls BLAS for every single row; on a GPU a third."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return reference.take(rows, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _Sum.apply(grads[0], index, ctx.num_rows), None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The backward of `_Take`, as a function that has a gradient itself."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return sum_gradients(values.reshape(-1, values.shape[-1]), index.flatten(), num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _Take.apply(grads[0], index), None, None  # type: ignore[no-untyped-call]
