"""The plain truth of the row kernels: one value after the other, no tricks, autograd does the backward.

Sums add in the order the values stand. Kernels may add in another order of their own, as long as it depends on nothing
but the values of the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


# Constants of splitmix64 as signed numbers.
GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Unique values of ids, ascending, and the position of every id among them, in the shape of the ids."""
    return torch.unique(ids, return_inverse=True)


def find_sorted(among: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where each id stands among others, looked for one by one, and whether it is there at all; else it stands at 0."""
    same = ids[..., None] == among
    there = same.any(-1)
    index = (same * torch.arange(len(among), device=ids.device)).sum(-1)
    return index, there


def mix64(x: Tensor) -> Tensor:
    """Every input bit reaches every output bit; int64 in, int64 out. int64 arithmetic wraps."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def hashed_rows(ids: Tensor, start: int, num_rows: int) -> Tensor:
    """A row for every id, by its hash."""
    return mix64(ids.long() * GOLDEN + start).remainder(num_rows)


def scattered_rows(ids: Tensor, factor: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """A row for every id from 0 to num_rows - 1, and the first id that is none of those, if there is one."""
    bad = ids[(ids < 0) | (ids >= num_rows)]
    return ids.long() * factor % num_rows, bad[:1]


def crossed_ids(start: int, members: Sequence[IntArray], none: int) -> IntArray:
    """One id of several: their hash, `none` where one of them is none, and one more where a hash would say so."""
    ids = [torch.tensor(each) for each in members]
    crossed = torch.full_like(ids[0], int(np.uint64(start).astype(np.int64)))
    for each in ids:
        crossed = mix64((crossed + GOLDEN) ^ each)
    crossed[crossed == none] += 1
    for each in ids:
        crossed[each == none] = none
    found: IntArray = crossed.numpy()
    return found


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the sign bits are cleared."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def row_plan(keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys by their row, equal ones as they stand; the rows; where each begins; the row of each key in that order."""
    rows, counts = torch.unique(keys, return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return keys.argsort(stable=True), rows, starts, torch.arange(len(rows)).repeat_interleave(counts)


def gather_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """[N, dim] float32 weight[ids]; zeros for a row outside the table."""
    inside = (ids >= 0) & (ids < len(weight))
    return weight[ids.clamp(0, len(weight) - 1)].float() * inside[:, None]


def sum_planned(values: Tensor, keys: Tensor) -> Tensor:
    """[rows, dim] float32 the sums of the values of each key, in the order of the keys."""
    rows, inverse = torch.unique(keys, return_inverse=True)
    return sum_by_row(inverse, values.float(), len(rows))


def overlap(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Which values of each list stand in the other, too."""
    return torch.isin(first, second), torch.isin(second, first)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """[..., dim] rows[index]."""
    return F.embedding(index, rows)


def take_sums(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """[n, dim] sum over j of weights[n, j] * rows[index[n, j]]."""
    taken = take(rows, index)
    return taken.sum(1) if weights is None else (taken * weights[..., None]).sum(1)


def sum_by_row(index: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """out[index[n]] += values[n] for n = 0, 1, ...: rows that no value belongs to are zero."""
    out = values.new_zeros(num_rows, *values.shape[1:])
    for row, value in zip(index.tolist(), values):
        out[row] += value
    return out


def sum_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[num_rows, dim] sum of the values [..., dim] with the same slot."""
    return sum_by_row(index.flatten(), values.reshape(-1, values.shape[-1]), num_rows)


def sum_gradients(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[num_rows, dim] sum of the values of each index; a GPU adds half precision up in float32 and rounds once."""
    return sum_by_row(index, values, num_rows)


def sum_by_index(
    values: Tensor, index: Tensor, num_rows: int, *, scale: float = 1.0, onto: Tensor | None = None
) -> Tensor:
    """[num_rows, width] scale * sum of the values of each index, and `onto`, in float32 or better."""
    out = scale * sum_by_row(index, _wide(values), num_rows)
    return out if onto is None else out + onto


def sum_by_position(values: Tensor, first: Tensor, reach: Tensor, num_positions: int) -> Tensor:
    """[num_positions, width] sum of the tokens' values at each position of the sequences, in float32 or better.

    Sequences come longest first: `first` are their first tokens, `reach` tells how many have a token at each position.
    """
    wide = _wide(values)
    out = wide.new_zeros(num_positions, values.shape[1])
    for position, count in enumerate(reach.tolist()):
        for start in first[:count].tolist():
            out[position] += wide[start + position]
    return out


def add_scaled(table: Tensor, rows: Tensor, values: Tensor, scale: Tensor) -> None:
    """table[rows[n]] += scale[n] * values[n] for unique rows, in place."""
    table.index_add_(0, rows, values * scale[:, None])


def mean_squares(values: Tensor) -> Tensor:
    """[U] mean of the squares of each row."""
    return values.square().mean(dim=1)


def adam_direction(
    grad: Tensor, moment1: Tensor, moment2: Tensor, *, beta1: float, beta2: float, step: int, eps: float
) -> Tensor:
    """Moves both moments towards grad and grad^2, in place; moment1 / (sqrt(moment2 / (1 - beta2^step)) + eps)."""
    moment1.lerp_(grad, 1 - beta1)
    moment2.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return moment1 / (moment2 / (1 - beta2**step)).sqrt_().add_(eps)


def split_index(marks: BoolArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Positions that are marked, positions that are not, and how many are marked in each of consecutive blocks."""
    return np.flatnonzero(marks), np.flatnonzero(~marks), _marked_by_block(marks, sizes)


def split_values(marks: BoolArray, values: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Values that are marked, values that are not, and the position of each within its own list."""
    number = np.where(marks, np.cumsum(marks), np.cumsum(~marks)) - 1
    return values[marks], values[~marks], number


def split_wanted(
    marks: BoolArray, number: IntArray, wanted: IntArray, inverse: IntArray, sizes: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Rows wanted whose unique row is marked, and those whose is not, each with the `number` of that unique row.

    In this order: rows marked, their numbers, rows not marked, their numbers, how many are marked in each of
    consecutive blocks.
    """
    marked, own = marks[inverse], number[inverse]
    return wanted[marked], own[marked], wanted[~marked], own[~marked], _marked_by_block(marked, sizes)


def _marked_by_block(marks: BoolArray, sizes: IntArray) -> IntArray:
    """How many are marked in each of consecutive blocks."""
    return np.array([marks[end - size : end].sum() for size, end in zip(sizes, np.cumsum(sizes))], np.int64)


def _wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x if x.dtype == torch.float64 else x.float()
