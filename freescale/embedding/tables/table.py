"""EmbeddingTable: a block of rows with their optimizer state. This unsharded module is the specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.hashing import keyed, keyed_normal
from freescale.embedding.optimizer import SparseOptimizer, rule_of, updated
from freescale.kernels.rows import (
    NO_ROW,
    RowPlan,
    add_scaled,
    gather_rows,
    no_bad_row,
    plan_again,
    plan_keys,
    update_keys,
    update_reason,
    update_rows,
)

_INIT_CHUNK_ROWS = 1 << 16
# Values drawn by key must not be those drawn by row number.
_KEYED_SEED = 0x1D5_0F_04E


class EmbeddingTable:
    """Rows first_row .. first_row + num_rows - 1 of a table, updated in place.

    Initial values depend on (seed, row, column) alone, so a table is the same however it is cut into blocks.

    Args:
        num_rows: rows held here.
        dim: width.
        optimizer: rule for updates.
        seed: of the initial values.
        init_std: their standard deviation.
        dtype: storage type. bfloat16 rows are rounded stochastically, keyed by (step, row, column): plain rounding
            would lose updates smaller than 1/256 of a weight.
        device: where the rows live.
        first_row: number of the first row in the whole table.
        lr_scale: multiplies the learning rate of updates.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        optimizer: SparseOptimizer,
        seed: int = 0,
        init_std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        first_row: int = 0,
        lr_scale: float = 1.0,
    ) -> None:
        self.first_row = first_row
        self._lr_scale = lr_scale
        self.dim = dim
        self.optimizer = optimizer
        self._seed = seed
        self._init_std = init_std
        self.before_writing: Callable[[Tensor], None] | None = None
        """Told the local rows that are about to change: a snapshot under way keeps them as they are."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight = torch.empty(num_rows, dim, dtype=dtype, device=device)
        self.state = {
            name: torch.zeros(shape, dtype=wide, device=device)
            for name, shape in optimizer.state_shapes(num_rows, dim).items()
        }
        for start in range(0, num_rows, _INIT_CHUNK_ROWS):
            rows = torch.arange(start, min(start + _INIT_CHUNK_ROWS, num_rows), device=device)
            self.weight[rows] = self.initial(rows)
        self._rule = rule_of(optimizer)
        self.not_fused = update_reason(self.weight, self._rule)
        """Why sums and updates of rows are not one kernel here; None where they are."""
        self.replays_sorts = True
        """Whether the sort of an update may be a recorded CUDA graph."""
        self._bad = no_bad_row(self.weight.device)

    @property
    def num_rows(self) -> int:
        """Rows held here."""
        return len(self.weight)

    def initial(self, rows: Tensor) -> Tensor:
        """Fresh values of these local rows."""
        normals = keyed_normal(self._seed, rows + self.first_row, self.dim)
        return (normals * self._init_std).to(self.weight.dtype)

    def reset(self, rows: Tensor, keys: Tensor) -> None:
        """Local rows that change owner: fresh values, a function of (seed, key) alone, and no trace of old state."""
        self._tell(rows)
        for part, owners in zip(rows.split(_INIT_CHUNK_ROWS), keys.split(_INIT_CHUNK_ROWS)):
            normals = keyed_normal(self._seed + _KEYED_SEED, owners, self.dim)
            self.weight.index_copy_(0, part, (normals * self._init_std).to(self.weight.dtype))
            for values in self.state.values():
                values.index_fill_(0, part, 0)

    def gather(self, rows: Tensor) -> Tensor:
        """Copies of these local rows in storage type."""
        return self.weight.index_select(0, rows)

    def read(self, asked: Tensor, *, plan: RowPlan | None = None) -> tuple[Tensor, Tensor]:
        """[..., dim] float32 vectors straight from these local rows, and [N] their keys; for fused tables.

        A row outside the table is read as zeros, and `bad_row` will tell.
        """
        keys = None if plan is None else plan.keys
        vectors, keys = gather_rows(self.weight, asked, self._bad, keys=keys)
        return vectors.view(*asked.shape, self.dim), keys

    def plan(self, asked: Tensor, *, num_rows: int | None = None) -> RowPlan:
        """Which of these rows are the same; follows from their numbers alone. For fused tables.

        `num_rows`: of the whole table, where they are rows of other ranks, too.
        """
        return plan_keys(asked, self.num_rows if num_rows is None else num_rows, self._bad)

    def bad_row(self) -> int | None:
        """A row outside the table that a kernel has met since the last call; waits for no kernel."""
        bad = int(self._bad)
        if bad == NO_ROW:
            return None
        self._bad.fill_(NO_ROW)
        return bad

    def apply_sums(self, plan: RowPlan, values: Tensor, *, lr: float, step: int) -> None:
        """Update the local rows of a plan with the sums of their values, in one pass; for fused tables."""
        if self.before_writing is not None:
            self._tell(plan.rows[: int(plan.count)].long())
        self._fused(plan, values, lr=lr * self._lr_scale, step=step)

    def apply_keys(self, keys: Tensor, values: Tensor, *, lr: float, step: int) -> None:
        """The same of keys that were not planned, as `read` tells them."""
        if self.before_writing is not None or not self.replays_sorts:
            self.apply_sums(plan_again(keys), values, lr=lr, step=step)
        else:
            self._fused(keys, values, lr=lr * self._lr_scale, step=step, update=update_keys)

    def step_numbers(self, *, lr: float, step: int) -> tuple[float, float, float, float]:
        """What `apply_counted` reads of a step, which counts from 1."""
        own = lr * self._lr_scale
        if self._rule is None:
            return (own, 1.0, step % 65536, step // 65536)
        return (*self._rule.numbers(lr=own, step=step), step % 65536, step // 65536)

    def apply_counted(self, rows: Tensor, grad: Tensor, *, numbers: Tensor, count: Tensor) -> None:
        """Update the first `count` of these unique local rows.

        All that changes from step to step is read on the device, so that it can be recorded and replayed. For fused
        tables, and those of a CPU.

        Args:
            rows: [U] unique rows; behind `count` anything.
            grad: [U, dim] their gradients.
            numbers: [4] float64 of `step_numbers`.
            count: [1] int64.
        """
        if self.not_fused is None:
            rule = self._rule
            assert rule is not None
            state = tuple(self.state[name] for name in rule.state)
            single, first = numbers.float(), self.first_row
            update_rows(self.weight, state, rows, grad, rule, numbers=single, count=count, first_row=first)
            return
        real = int(count)
        rate, _, low, high = numbers.tolist()
        step = int(low + 65536 * high)
        adam = self._rule is not None and self._rule.kind == "adam"
        lr = rate if self._rule is None else -rate * ((1 - self._rule.beta1**step) if adam else 1.0)
        self._tell(rows[:real])
        self._apply_plainly(rows[:real], grad[:real], lr=lr, step=step)

    def apply(self, rows: Tensor, grad: Tensor, *, lr: float, step: int) -> None:
        """Update these unique local rows with their summed gradients; step counts from 1.

        In fused tables those outside, of which there may be many, are left out.
        """
        if self.not_fused is None and self.before_writing is not None:
            self._tell(rows[rows < self.num_rows])
        else:
            self._tell(rows)
        update = self._apply_plainly if self.not_fused is not None else self._fused
        update(rows, grad, lr=lr * self._lr_scale, step=step)

    def _fused(
        self,
        rows: Any,
        values: Tensor,
        *,
        lr: float,
        step: int,
        update: Callable[..., None] = update_rows,
    ) -> None:
        rule = self._rule
        assert rule is not None
        state = tuple(self.state[name] for name in rule.state)
        update(self.weight, state, rows, values, rule, lr=lr, step=step, first_row=self.first_row)

    def _apply_plainly(self, rows: Tensor, grad: Tensor, *, lr: float, step: int) -> None:
        """Operation by operation: what the fused kernel must compute."""
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        state = {name: values.index_select(0, rows) for name, values in self.state.items()}
        if self.weight.dtype == wide:
            # Rows change where they lie: a copy out and back would cost more than the update.
            direction, scale = self.optimizer.move(state, grad.to(wide), lr=lr, step=step)
            add_scaled(self.weight, rows, direction, scale)
        else:
            current = self.gather(rows).to(wide)
            new = updated(self.optimizer, current, state, grad.to(wide), lr=lr, step=step)
            if self.weight.dtype == torch.bfloat16:
                new = self._round_to_bfloat16(new, rows, step)
            self.weight.index_copy_(0, rows, new.to(self.weight.dtype))
        for name, values in state.items():
            self.state[name].index_copy_(0, rows, values)

    def _tell(self, rows: Tensor) -> None:
        if (tell := self.before_writing) is not None:  # may be taken away by another thread
            tell(rows)

    def _round_to_bfloat16(self, values: Tensor, rows: Tensor, step: int) -> Tensor:
        """Round up or down at random, so that the mean is exact: add 16 random low bits, then cut them off."""
        columns = torch.arange(self.dim, device=values.device)
        noise = keyed(step, (rows + self.first_row)[:, None] * self.dim + columns) & 0xFFFF
        bits = values.view(torch.int32).to(torch.int64) + noise
        return (bits & ~0xFFFF).to(torch.int32).view(torch.float32)


def as_compute(rows: Tensor) -> Tensor:
    """Rows in the type they are computed with: float32, or float64 where they are stored so."""
    return rows if rows.dtype == torch.float64 else rows.float()
