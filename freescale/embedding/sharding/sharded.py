"""ShardedEmbedding: tables cut into row blocks over the ranks; ids go out, rows come back, gradients go home.

One lookup on one rank:

    rows asked for ──unique──> unique rows ──ids──> their owners ──rows──> leaf tensor [U, dim] ──inverse──> model
                                                                                  │ .grad after backward
    owner: sum in rank order, update in place  <─────────────gradients───────────┘

`comm/traffic/routing.py` says how ids, rows and gradients travel. Blocks are contiguous, so the sorted unique rows
already stand grouped by owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from freescale import trace
from freescale.comm import Transport
from freescale.comm.traffic import NodeStages, OwnedKeys
from freescale.comm.transports import make_transport
from freescale.comm.world import all_reduce
from freescale.embedding.sharding.plan import TableSpec, plan_tables
from freescale.embedding.sharding.request import check_range
from freescale.embedding.sharding.row_exchange import RowExchange
from freescale.embedding.sharding.table_state import TableState
from freescale.embedding.tables.direct import DirectLookup, PlannedRows
from freescale.embedding.tables.home import Home, merged
from freescale.embedding.tables.lookup import Lookup, UniqueRows, as_leaf
from freescale.embedding.whole_numbers import check_whole
from freescale.errors import ConfigError, DataError
from freescale.kernels.rows import RowPlan, unique, unique_of
from freescale.kernels.runtime import on_device
from freescale.trace import compute


@dataclass
class _Pending:
    """Calls whose gradients the next step takes home, and how many steps there were.

    No attributes of the module, of which torch takes microseconds for each that is given.
    """

    lookups: list[Lookup | DirectLookup] = field(default_factory=list)
    num_steps: int = 0


class ShardedEmbedding(TableState):
    """Embedding tables spread over the ranks of a group, with their optimizers.

    A torch.nn.Module, so that a model can hold it and has its rows in `state_dict`. It has no `parameters()`: rows have
    optimizers of their own, and none of torch's may move them, too. `to` does not move it; `device` says where it is.

    Args:
        specs: the tables.
        group: the ranks; "world": all of torch.distributed, where that is set up. None: this process alone.
        device: where the rows live.
        replicate_below_mb: tables smaller than this (state included) are held by every rank.
        transport: how rows travel; chosen by device and machine unless given.
        stages: connections by which rows travel once a node (`comm/traffic/node_stages.py`), not once a rank.
        replay_sorts: the sort of an update of one GPU may be a recorded CUDA graph (`kernels/rows/recorded_plan.py`).

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
        group: dist.ProcessGroup | Literal["world"] | None = "world",
        device: torch.device | str = "cpu",
        replicate_below_mb: float = 0.0,
        transport: Transport | None = None,
        stages: NodeStages | None = None,
        replay_sorts: bool = True,
    ) -> None:
        ranks = _world() if group == "world" else group
        channel = transport or make_transport(ranks, device=device)
        plans = plan_tables(specs, num_ranks=channel.num_ranks, replicate_below_mb=replicate_below_mb)
        super().__init__(plans, rank=channel.rank, group=ranks, device=device)
        self.transport, self.num_ranks, self.stages = channel, channel.num_ranks, stages
        self._exchange = RowExchange(plans, transport=channel, stages=stages, device=device)
        for table in self.tables.values():
            table.replays_sorts = replay_sorts
        self._pending = _Pending()

    def forward(self, rows: Mapping[str, Tensor | PlannedRows | UniqueRows]) -> dict[str, Tensor]:
        """Vectors of the rows of each table; remembers what `step` must send home (nothing under no_grad)."""
        if not isinstance(rows, Mapping):
            raise DataError(
                "a call names its tables",
                got=f"a {type(rows).__name__}",
                next_step=f"embedding({{{next(iter(self.plans))!r}: rows}})",
            )
        lookups = self._look_up(rows)
        if torch.is_grad_enabled():
            self._pending.lookups += lookups
        return {lookup.table: lookup.vectors() for lookup in lookups}

    def prepare(self, name: str, rows: Tensor) -> PlannedRows | UniqueRows:
        """What of a call follows from row numbers alone: call this ahead, on another stream if you like.

        On one GPU that is the only sort of a step, and nothing waits for the device.
        """
        if not self._is_direct(name):
            return self.find(name, rows)
        check_whole(rows, what="rows")
        rows = on_device(rows, self.device)
        return PlannedRows(rows, self.tables[name].plan(rows), self.tables[name])

    def step(self, *, lr: float) -> None:
        """Send the gradients of all calls since the last step home and update; every rank must call it.

        A row that several calls looked up is updated once, with the sum of its gradients.
        """
        if not isinstance(lr, Real) or not 0 <= lr < math.inf:
            raise ConfigError(
                "this is no learning rate", got=repr(lr), allowed="a number from 0 on, and finite"
            )
        pending = self._pending
        lookups, pending.lookups = pending.lookups, []
        pending.num_steps += 1
        self._update(lookups, lr=lr, step=pending.num_steps)
        for lookup in lookups:
            lookup.close()

    def find(self, name: str, asked: Tensor) -> UniqueRows:
        """The unique rows of one batch: a matter of its ids alone, so it can be done under the compute of another.

        Ids on the CPU are sorted there, from any thread, and nobody waits for a GPU.
        """
        return self.find_all({name: asked})[name]

    def find_all(self, asked: Mapping[str, Tensor]) -> dict[str, UniqueRows]:
        """The same of several tables."""
        for name, rows in asked.items():
            self.plan_of(name)
            check_whole(rows, what="rows")
        with compute("find distinct rows"):
            return {name: self._find(name, rows) for name, rows in asked.items()}

    def _find(self, name: str, asked: Tensor) -> UniqueRows:
        spec = self.plans[name].spec
        if asked.is_cuda and self.tables[name].not_fused is None:
            found = UniqueRows(*unique_of(self.tables[name].plan(asked, num_rows=spec.num_rows), asked))
            self._check_rows(name)
            return found
        found = UniqueRows(*unique(asked.long()))
        check_range(spec, found.unique)
        if self.device.type == "cuda" and not asked.is_cuda:
            return UniqueRows(found.unique.pin_memory(), found.inverse.pin_memory())
        return found

    def lookup(self, name: str, asked: Tensor | UniqueRows, *, updates_done: bool = False) -> Lookup:
        """Fetch the unique rows of one batch from their owners; `updates_done`: no update of theirs is under way."""
        return self.lookups({name: asked}, updates_done=updates_done)[name]

    def lookups(
        self, asked: Mapping[str, Tensor | UniqueRows], *, updates_done: bool = False
    ) -> dict[str, Lookup]:
        """The same for several tables: one exchange of counts, one of ids and one of rows, whatever their number.

        Every rank must name the same tables in the same order.
        """
        if not updates_done:
            self.wait_for_updates()
        unknown = {name: rows for name, rows in asked.items() if not isinstance(rows, UniqueRows)}
        new = self.find_all(unknown) if unknown else {}
        found = {
            name: (rows if isinstance(rows, UniqueRows) else new[name]).to(self.device)
            for name, rows in asked.items()
        }
        sharded = {name: rows for name, rows in found.items() if not self.plan_of(name).replicated}
        fetched = self._fetch(sharded) if sharded else {}
        if len(fetched) < len(found):
            with compute("gather rows"):
                fetched |= {
                    name: self._read(name, rows) for name, rows in found.items() if name not in fetched
                }
        return {name: fetched[name] for name in found}

    def update(self, lookup: Lookup, *, lr: float, step: int) -> None:
        """Send the gradients of one lookup home, sum them in rank order and update the rows; step counts from 1."""
        self.update_all([lookup], lr=lr, step=step)

    def update_all(self, lookups: Sequence[Lookup], *, lr: float, step: int) -> None:
        """The same for lookups of several tables, in one exchange."""
        self._update(lookups, lr=lr, step=step)

    def _is_direct(self, name: str) -> bool:
        """Whether calls read rows straight from the table: one rank has it, and its update is fused."""
        return self.plan_of(name).replicated and self.num_ranks == 1 and self.tables[name].not_fused is None

    def _look_up(self, asked: Mapping[str, Tensor | PlannedRows | UniqueRows]) -> list[Lookup | DirectLookup]:
        """For a call: straight from the table where that can be done, the others together."""
        usual: dict[str, Tensor | UniqueRows] = {}
        direct: dict[str, DirectLookup] = {}
        for name, rows in asked.items():
            if isinstance(rows, UniqueRows) or not self._is_direct(name):
                if isinstance(rows, PlannedRows):
                    raise DataError(
                        f"the rows of table {name!r} were prepared by another embedding",
                        next_step="ask the embedding that looks them up to `prepare` them",
                    )
                usual[name] = rows
            else:
                direct[name] = self._read_directly(name, rows)
        found = self.lookups(usual) if usual else {}
        return [direct.get(name) or found[name] for name in asked]

    def _read_directly(self, name: str, asked: Tensor | PlannedRows) -> DirectLookup:
        if isinstance(asked, PlannedRows) and asked.table is not self.tables[name]:
            raise DataError(
                f"rows prepared for another table were given to {name!r}",
                next_step=f"embedding.prepare({name!r}, rows)",
            )
        self.wait_for_updates()
        self._check_rows(name)
        if isinstance(asked, Tensor):
            check_whole(asked, what="rows")
            asked = on_device(asked, self.device)
        return DirectLookup(name, self.tables[name], asked)

    def _read(self, name: str, found: UniqueRows) -> Lookup:
        """Rows of a table that every rank holds."""
        return Lookup(name, as_leaf(self.tables[name].gather(found.unique)), found.inverse, found.unique)

    def _fetch(self, found: Mapping[str, UniqueRows]) -> dict[str, Lookup]:
        """Rows of tables that are spread over the ranks."""
        tables = [self.tables[name] for name in found]
        asked = self._exchange.ask(list(found), [each.unique for each in found.values()])
        with compute("gather rows"):
            gathered = [table.gather(each) for table, each in zip(tables, asked.wanted)]
        owned: list[OwnedKeys | RowPlan] = []

        def find_own() -> None:
            with compute("find own rows"):  # needed for the update only
                owned.extend(
                    OwnedKeys.of(each) if table.not_fused is not None else table.plan(each)
                    for table, each in zip(tables, asked.wanted)
                )

        arrived = self._exchange.deliver(gathered, asked, meanwhile=find_own)
        return {
            name: Lookup(name, as_leaf(values), each.inverse, each.unique, route, own, relay)
            for (name, each), values, route, own, relay in zip(
                found.items(), arrived, asked.routes, owned, asked.relays
            )
        }

    def _update(self, lookups: Sequence[Lookup | DirectLookup], *, lr: float, step: int) -> None:
        """Gradients of all lookups go home; a row that several of them looked up is updated once, with the sum."""
        home: dict[str, list[Home]] = {}
        for lookup, part in zip(lookups, self._send_home(lookups)):
            home.setdefault(lookup.table, []).append(part)
        if not home:
            return
        # One span for all tables: a dozen of them would cost as much to account for as the rows to update.
        with compute("update rows"):
            for name, parts in home.items():
                merged(parts, self.tables[name]).apply(self.tables[name], lr=lr, step=step)

    def _send_home(self, lookups: Sequence[Lookup | DirectLookup]) -> list[Home]:
        """Of each, the local rows that any rank looked up, and their gradients in rank order, summed or planned."""
        travelling = [each for each in lookups if isinstance(each, Lookup) and each.route is not None]
        arrived = iter(self._travel(travelling))
        return [
            next(arrived) if isinstance(each, Lookup) and each.route is not None else self._at_home(each)
            for each in lookups
        ]

    def _travel(self, lookups: Sequence[Lookup]) -> list[Home]:
        if not lookups:
            return []
        routes = [lookup.route for lookup in lookups if lookup.route is not None]
        grads, relays = [lookup.gradient() for lookup in lookups], [lookup.relay for lookup in lookups]
        arrived = self._exchange.collect(grads, routes, relays)
        with compute("sum row gradients"):
            return [self._summed(lookup, values) for lookup, values in zip(lookups, arrived)]

    def _summed(self, lookup: Lookup, values: Tensor) -> Home:
        owned = lookup.owned
        if isinstance(owned, RowPlan):
            assert owned.keys is not None
            return Home(owned.keys, values, owned, summed=False)
        assert owned is not None
        return Home(owned.unique, owned.sum(values))

    def _at_home(self, lookup: Lookup | DirectLookup) -> Home:
        """Gradients of rows that every rank holds."""
        grad = lookup.gradient()
        if isinstance(lookup, DirectLookup):
            return Home(lookup.keys, grad, lookup.plan, summed=False)
        return Home(*self._sum_replicated(lookup, grad))

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
        touched, values = dense[:, -1] > 0, dense[:, :-1]
        if self.tables[lookup.table].not_fused is None:
            # A row outside of the table is not written, so the host need not know how many are, and wait for it.
            every = torch.arange(num_rows, device=dense.device)
            return torch.where(touched, every, num_rows), values
        rows = touched.nonzero().flatten()
        return rows, values[rows]


def _world() -> dist.ProcessGroup | None:
    """All ranks there are; None where this process is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD
