"""Routing by owner, written once: unique keys go to the ranks that own them, values come back or follow them.

    asking rank                                     owner
    unique keys, by owner    ──to_owners──>         wanted: what every rank asked for, by rank
                                                    unique, inverse: each wanted key once, ascending
    values, in key order     <──to_askers──         one value for each of wanted
    values, in key order     ──to_owners──>         summed by key, in rank order

A row of a table, an item to compute and an id without a row travel alike: only who owns a key differs. Keys are unique
before they travel, so each crosses the wire once each way for each rank. What an owner adds up stands in rank order:
the same sum in every run.

Experts are not routed by this: a token has several owners, and its results are added up where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.comm import (
    Pending,
    Transport,
    UnsizedTransport,
    agree_on_counts,
    sends_unsized,
)
from freescale.comm.traffic.bundle import Bundle
from freescale.kernels.rows import sum_by_row, unique
from freescale.kernels.runtime import on_device, to_host


@dataclass(frozen=True)
class Route:
    """How many keys each rank asks of each other one. The same route serves any channel and any values.

    Args:
        send: keys this rank asks from each rank.
        receive: keys each rank asks from this one.
        order: [U] the keys grouped by owner; None where they stand so already.
        largest: the most keys any rank asks from any other, over all pairs; 0 where nobody asked for it.
    """

    send: list[int]
    receive: list[int]
    order: Tensor | None = None
    largest: int = 0

    def to_owners(self, values: Tensor, *, channel: Transport) -> Pending:
        """[U, ...] one value for each key of this rank -> [W, ...] one for each key asked from it, by asking rank."""
        leaving = values if self.order is None else values[self.order]
        return channel.start(leaving, send=self.send, receive=self.receive)

    def to_askers(self, values: Tensor, *, channel: Transport) -> Pending:
        """[W, ...] one value for each key asked from this rank -> [U, ...] one for each of its own keys."""
        pending = channel.start(values, send=self.receive, receive=self.send)
        return pending if self.order is None else _InKeyOrder(pending, self.order)


@dataclass(frozen=True)
class OwnedKeys:
    """What all ranks ask from this one.

    Args:
        wanted: [W] keys, by asking rank.
        unique: [O] each of them once, ascending.
        inverse: [W] where each of `wanted` stands in `unique`.
    """

    wanted: Tensor
    unique: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, wanted: Tensor) -> OwnedKeys:
        """From the keys that arrived."""
        return cls(wanted, *unique(wanted))

    def spread(self, values: Tensor) -> Tensor:
        """[O, ...] one value for each unique key -> [W, ...] one for everybody who asked for it."""
        return values.index_select(0, on_device(self.inverse, values.device))

    def sum(self, values: Tensor) -> Tensor:
        """[W, dim] -> [O, dim] the values of each unique key, summed in rank order."""
        return sum_by_row(on_device(self.inverse, values.device), values, len(self.unique))

    def to(self, device: torch.device) -> OwnedKeys:
        """The same on a device; the copies only queue."""
        return OwnedKeys(*(on_device(each, device) for each in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them."""
        return self.wanted, self.unique, self.inverse


def routes_by_edges(
    keys: Sequence[Tensor], edges: Sequence[Tensor], *, channel: Transport, tell_largest: bool = False
) -> list[Route]:
    """The routes of several lists of ascending keys; all counts travel together, and every rank must call it.

    Args:
        keys: lists of them.
        edges: for each list; rank r owns the keys edges[r] up to edges[r + 1].
        channel: what they travel by.
        tell_largest: everybody also learns the largest number of keys that travels between any two ranks.
    """
    counts = _counts(keys, edges)
    if len(counts) == 1 and not tell_largest:
        return [Route(*agree_on_counts(channel, counts[0]))]
    told = torch.stack(counts, dim=1)
    if tell_largest:
        # Beside its counts everybody gets the sender's largest ones, so that all ranks know the largest of all.
        told = torch.cat([told, told.amax(0).expand_as(told)], dim=1)
    ones = [1] * channel.num_ranks
    heard = to_host(channel.start(told.contiguous(), send=ones, receive=ones).wait())
    own, num = to_host(told), len(counts)
    largest = heard[:, num:].amax(0).tolist() if tell_largest else [0] * num
    return [Route(own[:, n].tolist(), heard[:, n].tolist(), largest=int(largest[n])) for n in range(num)]


def send_keys(
    keys: Sequence[Tensor], edges: Sequence[Tensor], *, channel: Transport
) -> tuple[list[Route], list[Tensor]]:
    """Send several lists of ascending keys to their owners; every rank must call it.

    Returns the route of each list, which knows its largest number of keys between any two ranks, and what has come of
    it. Counts travel before the keys, or with them where messages tell their sizes.
    """
    if sends_unsized(channel):
        return _send_with_counts(keys, _counts(keys, edges), channel)
    routes = routes_by_edges(keys, edges, channel=channel, tell_largest=True)
    send, receive = [route.send for route in routes], [route.receive for route in routes]
    return routes, Bundle.of(keys, send=send, receive=receive).start(channel).wait()


def _send_with_counts(
    keys: Sequence[Tensor], counts: Sequence[Tensor], channel: UnsizedTransport
) -> tuple[list[Route], list[Tensor]]:
    """The keys, and to everybody the largest of this rank's counts: so all ranks know the largest of all."""
    num, ranks, own = len(keys), channel.num_ranks, [each.tolist() for each in counts]
    largest = torch.stack([each.max() for each in counts]).expand(ranks, num).contiguous()
    (heard, *wanted), (_, *receive) = channel.exchange_unsized([largest, *keys], send=[[1] * ranks, *own])
    most = heard.amax(0).tolist()
    return [Route(own[n], receive[n], largest=most[n]) for n in range(num)], wanted


def _counts(keys: Sequence[Tensor], edges: Sequence[Tensor]) -> list[Tensor]:
    """Of each list, the keys that each rank owns."""
    return [torch.searchsorted(one, borders).diff() for one, borders in zip(keys, edges)]


def route_by_owner(owner: Tensor, *, channel: Transport) -> Route:
    """The route of keys of which any rank may own any; `owner` [U] is the rank of each. Every rank must call it."""
    counts = torch.bincount(owner, minlength=channel.num_ranks)
    return Route(*agree_on_counts(channel, counts), order=owner.argsort(stable=True))


def ask_owners(
    keys: Tensor, *, owner: Callable[[Tensor], Tensor], answer: Callable[[Tensor], Tensor], channel: Transport
) -> Tensor:
    """[U] what the owner of each key answers; every rank must call it.

    Args:
        keys: [U] unique, ascending, where the channel takes them.
        owner: keys -> the rank of each.
        answer: asked at the owner once for all ranks, with unique keys, ascending -> one number for each.
        channel: how keys and answers travel.
    """
    if channel.num_ranks == 1:
        return answer(keys)
    route, wanted = _send_by_owner(keys, owner(keys), channel)
    owned = OwnedKeys.of(wanted)
    answers = owned.spread(answer(owned.unique).to(keys.device))
    return route.to_askers(answers, channel=channel).wait()


def _send_by_owner(keys: Tensor, owner: Tensor, channel: Transport) -> tuple[Route, Tensor]:
    """The route of keys of which any rank may own any, and what has come."""
    if not sends_unsized(channel):
        route = route_by_owner(owner, channel=channel)
        return route, route.to_owners(keys, channel=channel).wait()
    order = owner.argsort(stable=True)
    send = torch.bincount(owner, minlength=channel.num_ranks).tolist()
    (wanted,), (receive,) = channel.exchange_unsized([keys[order]], send=[send])
    return Route(send, receive, order=order), wanted


class _InKeyOrder:
    """A transfer whose result is put back into the order of the keys."""

    def __init__(self, pending: Pending, order: Tensor) -> None:
        self._pending, self._order = pending, order

    def wait(self) -> Tensor:
        arrived = self._pending.wait()
        return torch.empty_like(arrived).index_copy_(0, self._order, arrived)
