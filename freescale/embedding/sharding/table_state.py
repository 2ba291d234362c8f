"""TableState: the tables a rank holds, as a module of torch: what is saved of them, and what they are filled from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.embedding.sharding.plan import TablePlan
from freescale.embedding.sharding.request import outside
from freescale.embedding.tables.table import EmbeddingTable
from freescale.errors import DataError


class TableState(nn.Module):
    """Tables cut into blocks over the ranks, with their optimizers' state.

    Args:
        plans: where the rows of each table live.
        rank: this rank.
        group: the ranks; None: this process alone.
        device: where the rows live.
    """

    def __init__(
        self,
        plans: Sequence[TablePlan],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.device, self.group, self.rank = torch.device(device), group, rank
        self._mesh: DeviceMesh | None = None
        self.plans = {plan.spec.name: plan for plan in plans}
        self.tables = {name: self._make_table(plan) for name, plan in self.plans.items()}
        self.before_reading: Callable[[], None] | None = None

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Weights and optimizer state; sharded tables as DTensors, so that any number of ranks can load them.

        A module that holds this one calls it with its own `destination` and `prefix`.
        """
        found = {} if destination is None else destination
        found.update({prefix + path: values for path, values in self._tensors().items()})
        return found

    def _tensors(self) -> dict[str, Tensor]:
        self.wait_for_updates()
        if self.device.type == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # what is saved must be what every row asked for has been told of
        for name in self.tables:
            self._check_rows(name)
        return {
            f"{name}.{part}": self.global_view(name, values)
            for name, plan in self.plans.items()
            for part, values in {"weight": self.tables[name].weight, **self.tables[name].state}.items()
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Fill every table from `state_dict` of as many ranks, or from its tensors made whole, on any number of ranks.

        Raises:
            DataError: it is of other tables, or of tables of another size.
        """
        own = self._tensors()
        if strict and own.keys() != state_dict.keys():
            raise DataError("a state of other tables", got=", ".join(state_dict), allowed=", ".join(own))
        for path, values in own.items():
            if path in state_dict:
                self._fill(path, values, state_dict[path])

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """The same for a module that holds this one."""
        own = self._tensors()
        given = {path.removeprefix(prefix) for path in state_dict if path.startswith(prefix)}
        missing_keys += [prefix + path for path in own if path not in given]
        unexpected_keys += sorted(prefix + path for path in given - own.keys())
        for path in [path for path in own if path in given]:
            try:
                self._fill(path, own[path], state_dict[prefix + path])
            except DataError as error:
                error_msgs.append(f"{prefix}{error}")

    @torch.no_grad()
    def _fill(self, path: str, own: Tensor, given: Tensor) -> None:
        if given.shape != own.shape:
            raise DataError(f"{path} has another shape", got=tuple(given.shape), allowed=tuple(own.shape))
        mine = own.to_local() if isinstance(own, DTensor) else own
        if isinstance(given, DTensor):
            given = given.to_local()
        elif isinstance(own, DTensor):
            plan = self.plans[path.rpartition(".")[0]]
            first = plan.block(self.rank)[0] // plan.spec.row_group
            given = given[first : first + len(mine)]
        mine.copy_(given)

    def extra_repr(self) -> str:
        """Tables as `print` of a model shows them."""
        return "\n".join(
            f"{name}: {plan.spec.num_rows:,} rows x {plan.spec.dim}, {len(self.tables[name].weight):,} here"
            for name, plan in self.plans.items()
        )

    def wait_for_updates(self) -> None:
        """Wait for updates that a pipeline still has under way; `lookup` and `state_dict` do it themselves."""
        if self.before_reading is not None:
            self.before_reading()

    def plan_of(self, name: str) -> TablePlan:
        """Where the rows of a table live; a table that is not there is refused by name."""
        if name not in self.plans:
            raise DataError(
                "there is no such table", got=repr(name), allowed=", ".join(map(repr, self.plans)) or "none"
            )
        return self.plans[name]

    def memory_mib(self) -> float:
        """Weights and optimizer state held by this rank."""
        return sum(plan.memory_mib(self.rank) for plan in self.plans.values())

    def _make_table(self, plan: TablePlan) -> EmbeddingTable:
        first, count = plan.block(self.rank)
        spec = plan.spec
        return EmbeddingTable(
            count,
            spec.dim,
            optimizer=spec.optimizer,
            seed=spec.seed,
            init_std=spec.init_std,
            dtype=spec.dtype,
            device=self.device,
            first_row=first,
            lr_scale=spec.lr_scale,
        )

    def _check_rows(self, name: str) -> None:
        """Refuse a row outside the table that a kernel has met."""
        if (bad := self.tables[name].bad_row()) is not None:
            raise outside(self.plans[name].spec, bad)

    def global_view(self, name: str, values: Tensor, *, grouped: bool = False) -> Tensor:
        """What this rank holds of a table as its part of one global tensor.

        Args:
            name: of the table.
            values: one entry for each row held here; or, grouped, one for each group of rows that stay together.
            grouped: rows become groups otherwise, so that every cut falls between them.
        """
        plan = self.plans[name]
        group = plan.spec.row_group
        if group > 1 and not grouped:
            values = values.view(len(values) // group, group * values.shape[1])
        if plan.replicated:
            return values
        if self._mesh is None:
            assert self.group is not None
            self._mesh = DeviceMesh.from_group(self.group, self.device.type)
        width = values.shape[1]
        return DTensor.from_local(
            values,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((plan.spec.num_rows // group, width)),
            stride=(width, 1),
        )
