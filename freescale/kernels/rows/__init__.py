"""What a batch does with the rows of a table: unique rows, sums of gradients, updates."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.rows.api import (
        adam_direction,
        add_scaled,
        crossed_ids,
        find_sorted,
        hashed_rows,
        mean_squares,
        overlap,
        scattered_rows,
        sum_by_row,
        sum_gradients,
        sum_rows,
        take,
        take_sums,
        unique,
    )
    from freescale.kernels.rows.fused import (
        NO_ROW,
        gather_rows,
        no_bad_row,
        plan_again,
        plan_keys,
        step_numbers,
        sum_planned,
        unique_of,
        update_keys,
        update_reason,
        update_rows,
    )
    from freescale.kernels.rows.plan import RowPlan, UpdateRule, plan_of_unique
    from freescale.kernels.rows.reference import GOLDEN, mix64
    from freescale.kernels.rows.split_loops import split_index, split_values, split_wanted
    from freescale.kernels.rows.triton.sums import sum_by_index, sum_by_position
else:
    __getattr__, __dir__ = open_door(__name__)
