"""Who owns which rows, what it costs in memory and what it is expected to cost in traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from freescale.embedding.optimizer import SparseOptimizer, check_state
from freescale.errors import PlanError

_MIB = 1 << 20

STORED = (torch.float32, torch.bfloat16, torch.float64)
"""What rows may be stored as."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table as the user asks for it.

    Args:
        name: unique name.
        num_rows: rows over all ranks.
        dim: width.
        optimizer: update rule.
        dtype: storage type.
        seed: of the initial values.
        init_std: their standard deviation.
        row_group: rows that always stay together on one rank, and are never replicated if there is more than one
            (buckets of a zero-collision table); num_rows is a multiple of it.
        lr_scale: multiplies the learning rate of updates.
        replicate: every rank holds the whole table; None: by its size.
    """

    name: str
    num_rows: int
    dim: int
    optimizer: SparseOptimizer
    dtype: torch.dtype = torch.float32
    seed: int = 0
    init_std: float = 0.02
    row_group: int = 1
    lr_scale: float = 1.0
    replicate: bool | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise PlanError(
                f"table {self.name!r} has no rows or no width",
                got=f"num_rows={self.num_rows}, dim={self.dim}",
                allowed="1 or more each",
            )
        if self.dtype not in STORED:
            raise PlanError(
                f"table {self.name!r} cannot be stored so",
                got=f"dtype={self.dtype}",
                allowed=", ".join(map(str, STORED)),
            )
        if isinstance(self.optimizer, type):
            raise PlanError(
                f"table {self.name!r} needs an optimizer, not its class",
                got=f"optimizer={self.optimizer.__name__}",
                next_step=f"optimizer={self.optimizer.__name__}()",
            )
        check_state(self.optimizer, self.dim)

    @property
    def bytes_per_row(self) -> int:
        """Weight and optimizer state of one row."""
        wide = 8 if self.dtype == torch.float64 else 4
        shapes = self.optimizer.state_shapes(1, self.dim).values()
        return self.dim * self.dtype.itemsize + sum(wide * shape[1] for shape in shapes)


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where the rows of one table live.

    Args:
        spec: the table.
        num_ranks: ranks of the run.
        replicated: every rank holds the whole table; otherwise rank r holds one contiguous block.
    """

    spec: TableSpec
    num_ranks: int
    replicated: bool

    @property
    def block_rows(self) -> int:
        """Rows of a full block; the last ranks may hold fewer or none."""
        if self.replicated:
            return self.spec.num_rows
        groups = -(-self.spec.num_rows // self.spec.row_group)
        return -(-groups // self.num_ranks) * self.spec.row_group

    def block(self, rank: int) -> tuple[int, int]:
        """First row and number of rows that a rank holds."""
        if self.replicated:
            return 0, self.spec.num_rows
        first = min(rank * self.block_rows, self.spec.num_rows)
        return first, min(self.block_rows, self.spec.num_rows - first)

    def edges(self) -> list[int]:
        """First row of every rank's block, and the end: [num_ranks + 1]."""
        return [min(rank * self.block_rows, self.spec.num_rows) for rank in range(self.num_ranks + 1)]

    def memory_mib(self, rank: int) -> float:
        """Weights and optimizer state on a rank."""
        return self.block(rank)[1] * self.spec.bytes_per_row / _MIB

    def traffic_mib(self, unique_ids: int) -> float:
        """Bytes one rank sends and receives a step when it asks for this many unique ids.

        Ids (8 bytes) and rows travel for the share of ids that other ranks own; gradients travel back in float32,
        or in float64 where the table is stored so.
        """
        if self.num_ranks == 1:
            return 0.0
        wide = max(4, self.spec.dtype.itemsize)
        if self.replicated:
            return 2 * self.spec.num_rows * (self.spec.dim + 1) * wide / _MIB
        away = unique_ids * (self.num_ranks - 1) / self.num_ranks
        per_id = 8 + self.spec.dim * (self.spec.dtype.itemsize + wide)
        return 2 * away * per_id / _MIB


def plan_tables(
    specs: Sequence[TableSpec], *, num_ranks: int, replicate_below_mb: float = 0.0
) -> list[TablePlan]:
    """Replicate tables under the limit, shard the others by rows."""
    if not isinstance(specs, Sequence) or not all(isinstance(spec, TableSpec) for spec in specs):
        raise PlanError(
            "tables are a list of TableSpec", got=f"a {type(specs).__name__}", next_step="[spec, ...]"
        )
    for n, spec in enumerate(specs):
        if spec.name in {other.name for other in specs[:n]}:
            raise PlanError("two tables have the same name", got=spec.name)
    return [
        TablePlan(
            spec=spec,
            num_ranks=num_ranks,
            replicated=num_ranks == 1
            or (
                spec.row_group == 1
                and (fits_below(spec, replicate_below_mb) if spec.replicate is None else spec.replicate)
            ),
        )
        for spec in specs
    ]


def fits_below(spec: TableSpec, limit_mb: float) -> bool:
    """Whether a table, its state included, is smaller than a limit."""
    return spec.num_rows * spec.bytes_per_row < limit_mb * _MIB


def plan_rows(plans: Sequence[TablePlan], *, unique_ids: int | Mapping[str, int]) -> list[dict[str, str]]:
    """The plan as rows of a table to print: one for each rank and table.

    `unique_ids` is what a rank asks of every table in a step, or what it asks of each by name; never more than all
    rows.
    """
    if not plans:
        return []

    def traffic(plan: TablePlan) -> float:
        asked = unique_ids if isinstance(unique_ids, int) else unique_ids.get(plan.spec.name, 0)
        return plan.traffic_mib(min(asked, plan.spec.num_rows))

    return [
        {
            "rank": str(rank),
            "table": plan.spec.name,
            "kind": "replicated" if plan.replicated and plan.num_ranks > 1 else "rows",
            "first row": f"{plan.block(rank)[0]:,}",
            "rows": f"{plan.block(rank)[1]:,}",
            "MiB": f"{plan.memory_mib(rank):,.1f}",
            "traffic MiB/step": f"{traffic(plan):,.2f}",
        }
        for rank in range(plans[0].num_ranks)
        for plan in plans
    ]
