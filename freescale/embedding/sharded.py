"""ShardedEmbedding: tables cut into row blocks over the ranks; ids go out, rows come back, gradients go home.

One lookup on one rank:

    rows asked for ──unique──> unique rows ──ids──> their owners ──rows──> leaf tensor [U, dim] ──inverse──> model
                                                                                  │ .grad after backward
    owner: sum in rank order, update in place  <─────────────gradients───────────┘

`comm/traffic/routing.py` says how ids, rows and gradients travel. Blocks are contiguous, so the sorted unique rows
already stand grouped by owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale import trace
from freescale.comm import Transport
from freescale.comm.traffic import OwnedKeys, route_by_edges
from freescale.comm.transports import make_transport
from freescale.comm.world import all_reduce
from freescale.embedding.direct import DirectLookup, PlannedRows
from freescale.embedding.id_map import check_whole
from freescale.embedding.lookup import Lookup, UniqueRows, as_leaf
from freescale.embedding.plan import TablePlan, TableSpec, plan_tables
from freescale.embedding.request import check_range, outside
from freescale.embedding.table import EmbeddingTable
from freescale.errors import DataError
from freescale.kernels.rows import RowPlan, plan_again, sum_by_row, unique, unique_of
from freescale.kernels.runtime import on_device
from freescale.trace import compute, stage


@dataclass(frozen=True)
class _Home:
    """Gradients that have come home.

    Args:
        rows: [W] the local row of each; unique where there is no plan.
        values: [W, dim] summed where there is no plan.
        plan: which of them belong together.
    """

    rows: Tensor
    values: Tensor
    plan: RowPlan | None = None


class ShardedEmbedding:
    """Embedding tables spread over the ranks of a group, with their optimizers.

    Args:
        specs: the tables.
        group: the ranks; None for a single process.
        device: where the rows live.
        replicate_below_mb: tables smaller than this (state included) are held by every rank.
        transport: how rows travel; chosen by device and machine unless given.

    Examples:
        >>> embedding = ShardedEmbedding([TableSpec(name="item", num_rows=1000, dim=64, optimizer=SGD())])
        >>> vectors = embedding({"item": rows})["item"]     # differentiable
        >>> loss(vectors).backward()
        >>> embedding.step(lr=0.1)                          # gradients go home, rows change in place
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        replicate_below_mb: float = 0.0,
        transport: Transport | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.transport = transport or make_transport(group, device=device)
        self.rank, self.num_ranks = self.transport.rank, self.transport.num_ranks
        plans = plan_tables(specs, num_ranks=self.num_ranks, replicate_below_mb=replicate_below_mb)
        self.plans = {plan.spec.name: plan for plan in plans}
        self.group = group
        self._mesh: DeviceMesh | None = None
        self._edges = {name: torch.tensor(plan.edges(), device=device) for name, plan in self.plans.items()}
        self.tables = {name: self._make_table(plan) for name, plan in self.plans.items()}
        self.before_reading: Callable[[], None] | None = None
        self._pending: list[Lookup | DirectLookup] = []
        self._num_steps = 0

    def __call__(self, rows: Mapping[str, Tensor | PlannedRows | UniqueRows]) -> dict[str, Tensor]:
        """Vectors of the rows of each table; remembers what `step` must send home (nothing under no_grad)."""
        lookups = [self._look_up(name, asked) for name, asked in rows.items()]
        if torch.is_grad_enabled():
            self._pending += lookups
        return {lookup.table: lookup.vectors() for lookup in lookups}

    def prepare(self, name: str, rows: Tensor) -> PlannedRows | UniqueRows:
        """What of a call follows from row numbers alone: call this ahead, on another stream if you like.

        On one GPU that is the only sort of a step, and nothing waits for the device.
        """
        if not self._is_direct(name):
            return self.find(name, rows)
        check_whole(rows, what="rows")
        rows = on_device(rows, self.device)
        return PlannedRows(rows, self.tables[name].plan(rows))

    def step(self, *, lr: float) -> None:
        """Send the gradients of all calls since the last step home and update; every rank must call it.

        A row that several calls looked up is updated once, with the sum of its gradients.
        """
        self._num_steps += 1
        home: dict[str, list[_Home]] = {}
        for lookup in self._pending:
            home.setdefault(lookup.table, []).append(self._scatter_gradients(lookup))
        self._pending = []
        for name, parts in home.items():
            self._apply(name, _merge_gradients(parts, self.tables[name]), lr=lr, step=self._num_steps)

    def find(self, name: str, asked: Tensor) -> UniqueRows:
        """The unique rows of one batch: a matter of its ids alone, so it can be done under the compute of another.

        Ids on the CPU are sorted there, from any thread, and nobody waits for a GPU.
        """
        spec = self.plan_of(name).spec
        check_whole(asked, what="rows")
        if asked.is_cuda and self.tables[name].not_fused is None:
            with compute("find distinct rows"):
                found = UniqueRows(*unique_of(self.tables[name].plan(asked, num_rows=spec.num_rows), asked))
            self._check_rows(name)
            return found
        with compute("find distinct rows"):
            found = UniqueRows(*unique(asked.long()))
        check_range(spec, found.unique)
        if self.device.type == "cuda" and not asked.is_cuda:
            return UniqueRows(found.unique.pin_memory(), found.inverse.pin_memory())
        return found

    def lookup(self, name: str, asked: Tensor | UniqueRows, *, updates_done: bool = False) -> Lookup:
        """Fetch the unique rows of one batch from their owners; `updates_done`: no update of theirs is under way."""
        if not updates_done:
            self.wait_for_updates()
        plan, table = self.plan_of(name), self.tables[name]
        found = (asked if isinstance(asked, UniqueRows) else self.find(name, asked)).to(self.device)
        rows, inverse = found.unique, found.inverse
        if plan.replicated:
            with compute("gather rows"):
                return Lookup(name, as_leaf(table.gather(rows)), inverse, rows)
        with stage("exchange counts"):
            route = route_by_edges(rows, self._edges[name], channel=self.transport)
        with stage("exchange ids"):
            wanted = route.to_owners(rows, channel=self.transport).wait() - table.first_row
        with compute("gather rows"):
            gathered = table.gather(wanted)
        with stage("exchange rows"):
            arriving = route.to_askers(gathered, channel=self.transport)
            with compute("find own rows"):
                # Needed for the update only, so done while rows travel.
                owned = OwnedKeys.of(wanted) if table.not_fused is not None else table.plan(wanted)
            return Lookup(name, as_leaf(arriving.wait()), inverse, rows, route, owned)

    def update(self, lookup: Lookup, *, lr: float, step: int) -> None:
        """Send the gradients of one lookup home, sum them in rank order and update the rows; step counts from 1."""
        self._apply(lookup.table, self._scatter_gradients(lookup), lr=lr, step=step)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and optimizer state; sharded tables as DTensors, so that any number of ranks can load them."""
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

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fill every table from `state_dict` of as many ranks, or from its tensors made whole, on any number of ranks.

        There are no `parameters()`: rows have optimizers of their own, and none of torch's may move them, too.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            raise DataError("a state of other tables", got=", ".join(state), allowed=", ".join(own))
        for path, values in own.items():
            given = state[path]
            if given.shape != values.shape:
                raise DataError(
                    f"{path} has another shape", got=tuple(given.shape), allowed=tuple(values.shape)
                )
            mine = values.to_local() if isinstance(values, DTensor) else values
            if isinstance(given, DTensor):
                given = given.to_local()
            elif isinstance(values, DTensor):
                plan = self.plans[path.rpartition(".")[0]]
                first = plan.block(self.rank)[0] // plan.spec.row_group
                given = given[first : first + len(mine)]
            mine.copy_(given)

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
        )

    def _is_direct(self, name: str) -> bool:
        """Whether calls read rows straight from the table: one rank has it, and its update is fused."""
        return self.plan_of(name).replicated and self.num_ranks == 1 and self.tables[name].not_fused is None

    def _look_up(self, name: str, asked: Tensor | PlannedRows | UniqueRows) -> Lookup | DirectLookup:
        """For a call: straight from the table where that can be done."""
        if isinstance(asked, UniqueRows) or not self._is_direct(name):
            assert not isinstance(asked, PlannedRows), "rows were planned for another embedding"
            return self.lookup(name, asked)
        self.wait_for_updates()
        self._check_rows(name)
        if isinstance(asked, Tensor):
            check_whole(asked, what="rows")
            asked = on_device(asked, self.device)
        return DirectLookup(name, self.tables[name], asked)

    def _check_rows(self, name: str) -> None:
        """Refuse a row outside the table that a kernel has met."""
        if (bad := self.tables[name].bad_row()) is not None:
            raise outside(self.plans[name].spec, bad)

    def _apply(self, name: str, home: _Home, *, lr: float, step: int) -> None:
        """Update the rows whose gradients are home."""
        table = self.tables[name]
        with compute("update rows"):
            if home.plan is not None:
                table.apply_sums(home.plan, home.values, lr=lr, step=step)
            else:
                table.apply(home.rows, home.values, lr=lr, step=step)

    def _scatter_gradients(self, lookup: Lookup | DirectLookup) -> _Home:
        """The local rows that any rank looked up, and their gradients in rank order, summed or planned."""
        grad = lookup.gradient()
        if isinstance(lookup, DirectLookup):
            return _Home(lookup.keys, grad, lookup.plan or plan_again(lookup.keys))
        route, owned = lookup.route, lookup.owned
        if route is None or owned is None:
            return _Home(*self._sum_replicated(lookup, grad))
        with stage("send row gradients home"):
            home = route.to_owners(grad, channel=self.transport).wait()
        if isinstance(owned, RowPlan):
            assert owned.keys is not None
            return _Home(owned.keys, home, owned)
        with compute("sum row gradients"):
            return _Home(owned.unique, owned.sum(home))

    def _sum_replicated(self, lookup: Lookup, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank gets the summed gradients of all rows that any rank touched."""
        if self.num_ranks == 1:
            return lookup.unique, grad
        num_rows = self.plans[lookup.table].spec.num_rows
        # The extra column counts who touched the row: a zero gradient still ages a row's moments.
        dense = grad.new_zeros(num_rows, grad.shape[1] + 1)
        dense[lookup.unique] = torch.cat([grad, grad.new_ones(len(grad), 1)], dim=1)
        arrival = trace.arrive("sum replicated rows", on_device=dense.is_cuda)
        assert self.group is not None
        all_reduce(dense, group=self.group)
        if arrival is not None:
            trace.waited(arrival, arrival.mark, on_device=dense.is_cuda)
        rows = dense[:, -1].nonzero().flatten()
        return rows, dense[rows, :-1]

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


def _merge_gradients(parts: list[_Home], table: EmbeddingTable) -> _Home:
    """Gradients of several calls, to be summed in the order given."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values for part in parts])
    if table.not_fused is None:
        keys = torch.cat([part.rows for part in parts])
        return _Home(keys, values, plan_again(keys))
    rows, inverse = unique(torch.cat([part.rows for part in parts]))
    return _Home(rows, sum_by_row(inverse, values, len(rows)))
