"""Rows of a table on a GPU: planned once, gathered straight from the table, summed and updated in one pass.

    plan    = plan_keys(ids)             one sort; can be made ahead of the compute
    vectors = gather_rows(table, ids)    no copy of the unique rows in between
    update_rows(table, plan, gradients)  sums and updates; the sums never go to memory

Nothing here waits for the device. On a CPU, and where `update_reason` says why not, the functions of `api` do the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.rows.plan import RowPlan, UpdateRule
from freescale.kernels.rows.recorded_plan import use_plan
from freescale.kernels.runtime import has_triton, kernels_of

NO_ROW = -(2**63)
"""What the flag of a table holds while nobody has asked for a row outside it."""

_WIDEST = 8192


def update_reason(weight: Tensor, rule: UpdateRule | None) -> str | None:
    """Why rows of this table cannot be updated by the fused kernel; None where they can."""
    if not weight.is_cuda:
        return "the table is not on a GPU"
    if not has_triton():
        return "triton is not installed"
    if rule is None:
        return "its optimizer is known by `move` alone"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"it is stored in {str(weight.dtype).removeprefix('torch.')}"
    if weight.shape[1] > _WIDEST:
        return f"its rows are wider than {_WIDEST}"
    return None


def no_bad_row(device: torch.device) -> Tensor:
    """[1] the flag of a table: kernels write a row there that lies outside, in memory which the host can read."""
    return torch.full((1,), NO_ROW, dtype=torch.int64, pin_memory=device.type == "cuda")


def plan_keys(ids: Tensor, num_rows: int, bad: Tensor) -> RowPlan:
    """The plan of these row numbers, of any shape; `bad` hears of one outside the table."""
    kernels = kernels_of("rows.triton.plan")
    plan: RowPlan = kernels.make_plan(kernels.make_keys(ids, num_rows, bad))
    return plan


def plan_again(keys: Tensor) -> RowPlan:
    """The plan of keys that have been checked."""
    plan: RowPlan = kernels_of("rows.triton.plan").make_plan(keys)
    return plan


def unique_of(plan: RowPlan, ids: Tensor) -> tuple[Tensor, Tensor]:
    """As `api.unique`, of the ids planned; the host waits for their number."""
    inverse = torch.empty(plan.num_values, dtype=torch.int64, device=ids.device)
    inverse.index_copy_(0, plan.order, plan.index[: plan.num_values].long())
    return plan.rows[: int(plan.count)].long(), inverse.view(ids.shape)


def gather_rows(
    weight: Tensor, ids: Tensor, bad: Tensor, *, keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[N, dim] float32 the rows of these numbers, zeros for one outside the table, and [N] their keys.

    `keys`: those of a plan, where there is one already.
    """
    rows: tuple[Tensor, Tensor] = kernels_of("rows.triton.plan").gather(weight, ids, bad, keys=keys)
    return rows


def step_numbers(rule: UpdateRule, *, lr: float, step: int, out: Tensor) -> Tensor:
    """What changes from step to step, written into [4] float32 on the device, where `update_rows` reads it."""
    numbers: Tensor = kernels_of("rows.triton.update").write_numbers(rule, lr=lr, step=step, out=out)
    return numbers


def update_rows(
    weight: Tensor,
    state: tuple[Tensor, ...],
    rows: RowPlan | Tensor,
    values: Tensor,
    rule: UpdateRule,
    *,
    lr: float = 0.0,
    step: int = 1,
    numbers: Tensor | None = None,
    first_row: int = 0,
    count: Tensor | None = None,
) -> None:
    """Update rows in place with the sums of the values planned for them; or unique rows with a gradient each.

    Args:
        weight: [rows, dim] the table.
        state: in the order of the rule's names.
        rows: which values belong to which row; or [U] unique rows.
        values: [N, dim]; or [U, dim].
        rule: what becomes of a row.
        lr: learning rate.
        step: counts from 1.
        numbers: of `step_numbers`, instead of both: read when the kernel runs, so a captured one can be replayed.
        first_row: number of the table's first row in the whole table: rounding is keyed by it.
        count: [1] how many of unique rows are real, where the host does not know.
    """
    kernels = kernels_of("rows.triton.update")
    options = {"lr": lr, "step": step, "numbers": numbers, "first_row": first_row}
    if isinstance(rows, RowPlan):
        kernels.update_planned(weight, state, rows, values, rule, **options)
    else:
        kernels.update_summed(weight, state, rows, values, rule, count=count, **options)


def update_keys(
    weight: Tensor,
    state: tuple[Tensor, ...],
    keys: Tensor,
    values: Tensor,
    rule: UpdateRule,
    *,
    lr: float,
    step: int,
    first_row: int = 0,
) -> None:
    """As `update_rows` with the plan of these keys, which nobody else needs: its sort is a recorded graph."""
    update = kernels_of("rows.triton.update").update_planned
    options = {"lr": lr, "step": step, "first_row": first_row}
    use_plan(keys, lambda plan: update(weight, state, plan, values, rule, **options))


def sum_planned(values: Tensor, plan: RowPlan, num_rows: int) -> Tensor:
    """[num_rows, dim] float32 the sums of the values of each row of a plan, which has so many rows."""
    sums: Tensor = kernels_of("rows.triton.update").sum_planned(plan, values, num_rows)
    return sums
