"""What one batch asks of one table, seen from both sides: who asks for which rows, and who owns them.

    asking rank                                owner
    unique rows, ascending     ──ids──>        owned: what all ranks asked for
    a bit for each of them     <──1 bit──      which of it the neighbouring batch uses, too

Two batches that follow each other may share rows. Only the owner of a row knows, because only it hears from all ranks.
It tells each rank with one bit for every row asked for: this one is shared. From the bits both sides derive the same
`RowSubset` of the batch, so subsets travel without a word about their sizes.

Where rows are asked for once a node (`comm/traffic/node_stages.py`), a relay stands between both: it asks the owner for
its neighbours, and hands the bits on. A row is shared or not for all of a node, so what relays do splits as rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from freescale.comm import Transport
from freescale.comm.traffic import OwnedKeys, Relay, Route, TravelOrder, send_keys, send_keys_by_node
from freescale.embedding.sharding.plan import TablePlan, TableSpec
from freescale.embedding.whole_numbers import check_whole
from freescale.errors import DataError
from freescale.jagged import spans
from freescale.kernels.rows import RowPlan, overlap, plan_of_unique, unique
from freescale.kernels.runtime import on_device


@dataclass(frozen=True)
class RowSubset:
    """Some of the rows of a batch, as both sides know them.

    Args:
        index: [P] where they stand among this rank's unique rows, in the order in which they travel.
        route: between this rank and their owners; where there are relays, between this one and those owners.
        owned: the local rows among them that all ranks, or relays, asked from this one.
        plan: which of the gradients that come home belong to which of them, where one kernel sums and updates.
        relay: what the ranks of this node ask this one to fetch; None where every rank asks the owners itself.
    """

    index: Tensor
    route: Route
    owned: OwnedKeys
    plan: RowPlan | None = None
    relay: Relay | None = None

    def planned(self, device: torch.device) -> RowSubset:
        """The same for an update on a GPU: its kernel takes a plan, and what is owned stays on the CPU."""
        plan = plan_of_unique(self.owned.unique, self.owned.inverse, device)
        return replace(self, index=on_device(self.index, device), plan=plan, relay=self._relay_on(device))

    def to(self, device: torch.device) -> RowSubset:
        """The same with its tensors on a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            index=on_device(self.index, device),
            owned=self.owned.to(device),
            relay=self._relay_on(device),
        )

    def _relay_on(self, device: torch.device) -> Relay | None:
        return None if self.relay is None else self.relay.to(device)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        planned = () if self.plan is None else self.plan.tensors()
        relayed = () if self.relay is None else (self.relay.inverse,)
        return self.index, *self.owned.tensors(), *planned, *relayed


@dataclass(frozen=True)
class Request:
    """The rows of one batch and table; all tensors on the CPU.

    Args:
        table: its name.
        inverse: where each id asked for stands in `unique`.
        unique: [U] row numbers, ascending.
        route: between this rank and their owners; knows the most rows any rank asks from any other.
        owned: the local rows that all ranks asked from this one.
        relay: what the ranks of this node ask this one to fetch; then `route` and `owned` are about relays.
    """

    table: str
    inverse: Tensor
    unique: Tensor
    route: Route
    owned: OwnedKeys
    relay: Relay | None = None

    def whole(self) -> RowSubset:
        """All rows."""
        if self.relay is None:
            return RowSubset(torch.arange(len(self.unique)), self.route, self.owned)
        order = self.relay.route.order
        assert order is not None
        return RowSubset(order, self.route, self.owned, relay=self.relay)

    def split(self, marks: Overlap) -> tuple[RowSubset, RowSubset]:
        """The rows marked, and the others."""
        if self.relay is None:
            return _split(self.route, self.owned, marks.asked, marks.owned)
        assert marks.relayed is not None
        order = self.relay.route.order
        assert order is not None
        at_owners = _split(self.route, self.owned, marks.relayed, marks.owned)
        at_relays = _split(self.relay.route, self.relay.keys, marks.asked, marks.relayed)
        first, second = (
            replace(owner, index=order[at.index], relay=Relay(at.route, at.owned, at.owned.inverse))
            for owner, at in zip(at_owners, at_relays)
        )
        return first, second


@dataclass(frozen=True)
class Overlap:
    """Which rows of a batch a neighbouring batch uses, too.

    Args:
        asked: [U] bits of the asking side, in the order of travel.
        owned: [O] those of the owner.
        relayed: [M] those of a relay's unique keys, where there are relays.
    """

    asked: Tensor
    owned: Tensor
    relayed: Tensor | None = None


def exchange_ids(plan: TablePlan, rows: Tensor, *, channel: Transport) -> Request:
    """Tell the owners which rows of a table this rank's batch needs; every rank must call it."""
    return exchange_all_ids([plan], [rows], channel=channel)[0]


def exchange_all_ids(
    plans: Sequence[TablePlan],
    rows: Sequence[Tensor],
    *,
    channel: Transport,
    inside: Transport | None = None,
    orders: Sequence[TravelOrder] = (),
) -> list[Request]:
    """The same for several tables: counts travel together, and so do ids.

    Args:
        plans: where the rows of each table live.
        rows: what this rank's batch needs of each.
        channel: how ids travel to the owners; from relays, where rows are asked for once a node.
        inside: how they travel to relays then.
        orders: of each table, the order of travel then.
    """
    found = []
    for plan, asked in zip(plans, rows):
        check_whole(asked, what="rows")
        found.append(unique(asked.long()))
        check_range(plan.spec, found[-1][0])
    own = [distinct for distinct, _ in found]
    if inside is not None:
        routes, relays, asked_here = send_keys_by_node(own, orders, inside=inside, between=channel)
        return [
            Request(plan.spec.name, inverse, distinct, route, OwnedKeys.of(asked), relay)
            for plan, (distinct, inverse), route, asked, relay in zip(
                plans, found, routes, asked_here, relays
            )
        ]
    edges = [torch.tensor(plan.edges()) for plan in plans]
    routes, wanted = send_keys(own, edges, channel=channel)
    return [
        Request(plan.spec.name, inverse, distinct, route, OwnedKeys.of(asked - plan.block(channel.rank)[0]))
        for plan, (distinct, inverse), route, asked in zip(plans, found, routes, wanted)
    ]


def find_overlaps(
    pairs: Sequence[tuple[Request, Request]], *, channel: Transport, inside: Transport | None = None
) -> list[tuple[Overlap, Overlap]]:
    """The rows that two batches share, marked in each of them: (batch, next batch) for each of several tables.

    One bit for every unique id and batch travels, those of all tables together, by relays if there are some.
    """
    requests = [request for pair in pairs for request in pair]
    owned = [mark for before, after in pairs for mark in overlap(before.owned.unique, after.owned.unique)]
    heard = _tell(owned, [request.owned for request in requests], [each.route for each in requests], channel)
    if inside is None:
        found = [Overlap(asked, own) for asked, own in zip(heard, owned)]
    else:
        relays = [request.relay for request in requests if request.relay is not None]
        told = _tell(heard, [relay.keys for relay in relays], [relay.route for relay in relays], inside)
        found = [Overlap(*bits) for bits in zip(told, owned, heard, strict=True)]
    return list(zip(found[::2], found[1::2]))


def _tell(
    marks: Sequence[Tensor], keys: Sequence[OwnedKeys], routes: Sequence[Route], channel: Transport
) -> list[Tensor]:
    """Bits of unique keys, several lists of them, to everybody who asked for them."""
    told = [mark[each.inverse].numpy() for mark, each in zip(marks, keys)]
    asked = [route.send for route in routes]
    message, sizes = _pack(told, [route.receive for route in routes])
    coming = _bit_places(asked)[1].tolist()
    heard = channel.start(torch.from_numpy(message), send=sizes, receive=coming).wait()
    return [torch.from_numpy(bits) for bits in _unpack(heard.numpy(), asked)]


def check_range(spec: TableSpec, rows: Tensor) -> None:
    """Refuse rows outside the table. Unique rows are sorted, so the first and the last tell."""
    if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= spec.num_rows):
        raise outside(spec, int(rows[0]) if int(rows[0]) < 0 else int(rows[-1]))


def outside(spec: TableSpec, row: int) -> DataError:
    """That a row is none of the table's."""
    return DataError(
        f"row {row} lies outside table {spec.name!r}", got=row, allowed=f"0 to {spec.num_rows - 1}"
    )


def _split(route: Route, keys: OwnedKeys, asked: Tensor, marks: Tensor) -> tuple[RowSubset, RowSubset]:
    """What is marked of keys that travel by a route, and the others; `asked` are the bits of those who ask."""
    from freescale.kernels.rows import split_index, split_values, split_wanted

    marked = marks.numpy()
    send, receive = (np.array(each, np.int64) for each in (route.send, route.receive))
    wanted, owned, inverse = (each.numpy() for each in keys.tensors())
    index_in, index_out, send_in = split_index(asked.numpy(), send)
    owned_in, owned_out, number = split_values(marked, owned)
    wanted_in, inverse_in, wanted_out, inverse_out, receive_in = split_wanted(
        marked, number, wanted, inverse, receive
    )
    return (
        _subset(send_in, receive_in, index_in, wanted_in, owned_in, inverse_in),
        _subset(send - send_in, receive - receive_in, index_out, wanted_out, owned_out, inverse_out),
    )


def _subset(send: np.ndarray, receive: np.ndarray, *arrays: np.ndarray) -> RowSubset:
    index, *owned = (torch.from_numpy(each) for each in arrays)
    return RowSubset(index, Route(send.tolist(), receive.tolist()), OwnedKeys(*owned))


def _pack(marks: Sequence[np.ndarray], sizes: Sequence[list[int]]) -> tuple[np.ndarray, list[int]]:
    """For each rank its bits of every batch and table in turn, each on full bytes."""
    places, rank_bytes = _bit_places(sizes)
    bits = np.zeros(8 * int(rank_bytes.sum()), np.uint8)
    for mark, place in zip(marks, places):
        bits[place] = mark
    return np.packbits(bits), rank_bytes.tolist()


def _unpack(message: np.ndarray, sizes: Sequence[list[int]]) -> list[np.ndarray]:
    """The bits of every batch and table, as one list each."""
    bits = np.unpackbits(message).astype(bool)
    return [bits[place] for place in _bit_places(sizes)[0]]


def _bit_places(sizes: Sequence[list[int]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Where every bit of each list stands in a message, and the bytes of the message for each rank."""
    counts = np.array(sizes, np.int64)  # [lists, ranks]
    block_bytes = (counts + 7) // 8
    # Blocks stand by rank, then by list: each begins where those before it end.
    first = (np.cumsum(block_bytes.T.reshape(-1)) - block_bytes.T.reshape(-1)).reshape(block_bytes.T.shape).T
    places = [spans(begins, count)[0] for begins, count in zip(8 * first, counts)]
    return places, block_bytes.sum(0)
