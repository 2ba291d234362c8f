"""RowExchange: how a lookup and its update travel, of all tables together, once a rank or once a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.comm import Transport
from freescale.comm.traffic import (
    Bundle,
    NodeStages,
    Relay,
    Route,
    TravelOrder,
    carry_to_askers,
    carry_to_owners,
    routes_by_edges,
    send_keys_by_node,
)
from freescale.embedding.sharding.plan import TablePlan
from freescale.trace import stage


class Asked(NamedTuple):
    """What ranks ask of each other, of several tables.

    Args:
        routes: how rows of each come from their owners.
        relays: who collects them for a node; None each where every rank asks itself.
        wanted: the local rows of each that others ask from this rank.
    """

    routes: list[Route]
    relays: Sequence[Relay | None]
    wanted: list[Tensor]


class RowExchange:
    """Ids out, rows back, gradients home; every rank must make the same calls.

    Args:
        plans: where the rows of each table live.
        transport: between all ranks.
        stages: where rows travel once a node, the connections they take; None: every rank asks the owners itself.
        device: where rows are.
    """

    def __init__(
        self,
        plans: Sequence[TablePlan],
        *,
        transport: Transport,
        stages: NodeStages | None,
        device: torch.device | str,
    ) -> None:
        self._transport, self._stages = transport, stages
        sharded = [plan for plan in plans if not plan.replicated]
        self._first = {plan.spec.name: plan.block(transport.rank)[0] for plan in sharded}
        self._edges = {plan.spec.name: torch.tensor(plan.edges(), device=device) for plan in sharded}
        self._orders: dict[str, TravelOrder] = {}
        if stages is not None:
            self._orders = {
                plan.spec.name: TravelOrder(stages.groups, block_rows=plan.block_rows, device=device)
                for plan in sharded
            }

    def ask(self, names: Sequence[str], rows: Sequence[Tensor]) -> Asked:
        """Tell the owners which unique rows of tables this rank needs."""
        if self._stages is not None:
            with stage("exchange ids"):
                orders = [self._orders[name] for name in names]
                inside, between = self._stages.inside, self._stages.between
                return Asked(*send_keys_by_node(rows, orders, inside=inside, between=between))
        with stage("exchange counts"):
            routes = routes_by_edges(rows, [self._edges[name] for name in names], channel=self._transport)
        with stage("exchange ids"):
            send, receive = [route.send for route in routes], [route.receive for route in routes]
            asked = Bundle.of(rows, send=send, receive=receive).start(self._transport).wait()
            wanted = [each - self._first[name] for each, name in zip(asked, names)]
        return Asked(routes, [None] * len(routes), wanted)

    def deliver(
        self, gathered: Sequence[Tensor], asked: Asked, *, meanwhile: Callable[[], None]
    ) -> list[Tensor]:
        """The rows this rank has asked for, in the order of its unique rows; `meanwhile` is done while they travel."""
        waiting = [meanwhile]

        def carry(
            values: Sequence[Tensor], send: Sequence[list[int]], receive: Sequence[list[int]], inside: bool
        ) -> list[Tensor]:
            coming = Bundle.of(values, send=send, receive=receive).start(self._channel(inside))
            while waiting:
                waiting.pop()()
            return coming.wait()

        with stage("exchange rows"):
            arrived = carry_to_askers(gathered, asked.routes, asked.relays, carry)
            return [_in_key_order(rows, relay) for rows, relay in zip(arrived, asked.relays)]

    def collect(
        self, grads: Sequence[Tensor], routes: Sequence[Route], relays: Sequence[Relay | None]
    ) -> list[Tensor]:
        """The gradients of this rank's rows, by rank or by node, for those of the rows it has asked for."""

        def carry(
            values: Sequence[Tensor], send: Sequence[list[int]], receive: Sequence[list[int]], inside: bool
        ) -> list[Tensor]:
            return Bundle.of(values, send=send, receive=receive).start(self._channel(inside)).wait()

        with stage("send row gradients home"):
            leaving = [_in_travel_order(grad, relay) for grad, relay in zip(grads, relays)]
            return carry_to_owners(leaving, routes, relays, carry)

    def _channel(self, inside: bool) -> Transport:
        if self._stages is None:
            return self._transport
        return self._stages.inside if inside else self._stages.between


def _in_key_order(rows: Tensor, relay: Relay | None) -> Tensor:
    if relay is None or relay.route.order is None:
        return rows
    return torch.empty_like(rows).index_copy_(0, relay.route.order, rows)


def _in_travel_order(grad: Tensor, relay: Relay | None) -> Tensor:
    if relay is None or relay.route.order is None:
        return grad
    return grad.index_select(0, relay.route.order)
