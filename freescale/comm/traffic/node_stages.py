"""Rows once a node: a rank of the asking node collects what its neighbours want of one owner, and shares it with them.

    asking rank (node A)       relay (node A)                          owner (node B)
    unique keys  ──inside──>   unique keys of the node  ──between──>   wanted: what every node asks for
    rows         <──inside──   one row for all of them  <──between──   each row once a node
    gradients    ──inside──>   summed in rank order     ──between──>   summed in the order of nodes

The relay of a row is the rank of the asking node that stands at the same place there as the owner in its own node. So a
rank talks to the ranks of its node and to one rank of every other, and what it owns itself it needs no relay for.
Sums are made in an order that follows from ranks and nodes alone: the same bits in every run.

Keys that travel so are not row numbers: they count rows by the place of their owner, then by its node, then by row
(`TravelOrder`). Ascending keys stand grouped for both stages.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Transport, open_privately
from freescale.comm.traffic.routing import OwnedKeys, Route, send_keys
from freescale.comm.world import gather_facts
from freescale.errors import ConfigError
from freescale.kernels.rows import sum_gradients
from freescale.kernels.runtime import on_device

Counts = Sequence[list[int]]
Carry = Callable[[Sequence[Tensor], Counts, Counts, bool], list[Tensor]]
"""(values, rows to every rank, rows from every rank, whether inside the node) -> what arrives, of several tables."""


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of a group as nodes with equally many each.

    Args:
        inside: the ranks of this rank's node.
        between: of every node the rank at this one's place.
        position: of every rank of the group, where its rows stand in the order of travel.
        num_nodes: how many.
        rank: this one, within the whole group.
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup
    position: tuple[int, ...]
    num_nodes: int
    rank: int


@dataclass(frozen=True)
class NodeStages:
    """The connections of both stages.

    Args:
        groups: who talks to whom.
        inside: between the ranks of a node.
        between: between ranks at the same place of their nodes.
    """

    groups: NodeGroups
    inside: Transport
    between: Transport


def why_no_node_stages(nodes: Sequence[Sequence[int]]) -> str | None:
    """What keeps ranks on these nodes from asking for rows once a node; None if nothing does."""
    sizes = sorted({len(ranks) for ranks in nodes})
    if len(nodes) == 1:
        return "all ranks are on one node"
    if len(sizes) > 1:
        return f"nodes have {sizes[0]} to {sizes[-1]} ranks, and it needs equally many on each"
    return "there is one rank a node, which has nobody to share rows with" if sizes == [1] else None


def open_node_groups(group: dist.ProcessGroup, *, timeout_s: float = 600.0) -> NodeGroups:
    """Find out which ranks share a node, and open both groups of this one; every rank must call it.

    Raises:
        ConfigError: rows cannot be asked for once a node.
    """
    nodes = gather_facts(group, torch.device("cpu")).nodes
    if (problem := why_no_node_stages(nodes)) is not None:
        raise ConfigError(
            f"comm.dedup=node cannot be used here: {problem}", next_step="leave it at comm.dedup=rank"
        )
    rank = dist.get_rank(group)
    node = next(ranks for ranks in nodes if rank in ranks)
    columns = [sorted(column) for column in zip(*map(sorted, nodes))]
    order = [owner for column in columns for owner in column]
    position = tuple(order.index(owner) for owner in range(len(order)))
    between = next(column for column in columns if rank in column)
    members = dist.get_process_group_ranks(group)
    inside_group, between_group = (
        _open_group([members[each] for each in ranks], timeout_s) for ranks in (sorted(node), between)
    )
    return NodeGroups(inside_group, between_group, position, len(nodes), rank)


def _open_group(members: list[int], timeout_s: float) -> dist.ProcessGroup:
    return open_privately(
        lambda: dist.new_group(
            members, timeout=datetime.timedelta(seconds=timeout_s), use_local_synchronization=True
        )
    )


class TravelOrder:
    """The rows of one table in the order in which they travel; see above.

    Args:
        groups: the ranks.
        block_rows: rows of a rank's block.
        device: where keys are.
    """

    def __init__(self, groups: NodeGroups, *, block_rows: int, device: torch.device | str = "cpu") -> None:
        num_ranks, num_nodes = len(groups.position), groups.num_nodes
        blocks = [block_rows * position for position in groups.position]
        shift = [first - block_rows * owner for owner, first in enumerate(blocks)]
        self.first_key = blocks[groups.rank]
        self._block_rows = block_rows
        self._shift = torch.tensor(shift, device=device)
        own_place = groups.position[groups.rank] // num_nodes
        relays = range(0, num_ranks + 1, num_nodes)
        owners = range(own_place * num_nodes, (own_place + 1) * num_nodes + 1)
        self.relay_edges, self.owner_edges = (
            block_rows * torch.tensor(list(each), device=device) for each in (relays, owners)
        )

    def keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of unique rows the keys, ascending, and where the row of each stands among those given."""
        keys, order = torch.sort(rows + self._shift[rows // self._block_rows])
        return keys, order


@dataclass(frozen=True)
class Relay:
    """What ranks of a node ask of this one, which asks the owners for all of them.

    Args:
        route: between this rank and the relays of its node; `order` puts its unique rows into the order of travel.
        keys: what they want; `unique` is what is asked of the owners.
        inverse: that of the keys, where rows are.
    """

    route: Route
    keys: OwnedKeys
    inverse: Tensor

    def to(self, device: torch.device) -> Relay:
        """The same for rows on a device."""
        return replace(self, inverse=on_device(self.inverse, device))

    def spread(self, rows: Tensor) -> Tensor:
        """[M, dim] a row for each unique key -> [W, dim] one for everybody who wants it."""
        return rows.index_select(0, self.inverse)

    def sum(self, grads: Tensor) -> Tensor:
        """[W, dim] -> [M, dim] gradients of each unique key, summed in rank order, whatever other keys there are."""
        return sum_gradients(grads, self.inverse, len(self.keys.unique))


def send_keys_by_node(
    rows: Sequence[Tensor], orders: Sequence[TravelOrder], *, inside: Transport, between: Transport
) -> tuple[list[Route], list[Relay], list[Tensor]]:
    """Send unique rows of several tables to their relays, and from there to their owners; every rank must call it.

    Returns of each table the route between relays and owners, the relay of this rank, and the local rows that relays of
    all nodes ask from it.
    """
    travelling = [order.keys(each) for order, each in zip(orders, rows)]
    first, came = send_keys(
        [keys for keys, _ in travelling], [order.relay_edges for order in orders], channel=inside
    )
    relays = []
    for route, (_, own), wanted in zip(first, travelling, came):
        keys = OwnedKeys.of(wanted)
        relays.append(Relay(replace(route, order=own), keys, keys.inverse))
    routes, asked = send_keys(
        [relay.keys.unique for relay in relays], [order.owner_edges for order in orders], channel=between
    )
    return routes, relays, [each - order.first_key for each, order in zip(asked, orders)]


def carry_to_askers(
    rows: Sequence[Tensor], routes: Sequence[Route], relays: Sequence[Relay | None], carry: Carry
) -> list[Tensor]:
    """Rows from their owners to those who asked, of several tables: in one stage, or by relays where there are some."""
    arrived = carry(rows, [route.receive for route in routes], [route.send for route in routes], False)
    at = [relay for relay in relays if relay is not None]
    if not at:
        return arrived
    shared = [relay.spread(each) for relay, each in zip(at, arrived, strict=True)]
    return carry(shared, [relay.route.receive for relay in at], [relay.route.send for relay in at], True)


def carry_to_owners(
    grads: Sequence[Tensor], routes: Sequence[Route], relays: Sequence[Relay | None], carry: Carry
) -> list[Tensor]:
    """Gradients home, summed on the way where there are relays."""
    at = [relay for relay in relays if relay is not None]
    if at:
        shared = carry(grads, [relay.route.send for relay in at], [relay.route.receive for relay in at], True)
        grads = [relay.sum(each) for relay, each in zip(at, shared, strict=True)]
    return carry(grads, [route.send for route in routes], [route.receive for route in routes], False)
