"""two_stage: few messages between many hosts, as ids, counts and numbers of a step need it.

    one stage     a message to every other rank                                  255 of 32 nodes with 8 ranks each
    two stages    a message to the rank of every other node that has the same    31
                  number there, with what is for all ranks of that node;
                  those hand it on, in a node over unix sockets                  and 7

A small message costs the host as much as a large one, so the number of them is what such an exchange costs. Bytes
travel between nodes once, as before. Sizes are told in the messages themselves (`framed.py`), so counts need no
exchange of their own: `exchange_unsized` is for those who do not know yet what will come.

What arrives is what one stage would have brought, in the same order.
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Transport, open_privately
from freescale.comm.transports.framed import (
    Blocks,
    FramedExchange,
    GlooCarrier,
    IntArray,
    PendingFrames,
    SocketCarrier,
)
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.world import GroupFacts, poll_in_background
from freescale.errors import TrainingError
from freescale.registry import register

# Exchanges that nobody waits for are brought further this often.
_NUDGE_S = 0.02


@register("transport", "two_stage")
class TwoStageRoute:
    """CPU tensors between nodes with equally many ranks."""

    keeps_group = False

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        """What keeps a group from using it."""
        if facts.on_gpu:
            return "it carries CPU tensors only: ids, counts and numbers (comm.ids)"
        sizes = sorted({len(ranks) for ranks in facts.nodes})
        if len(sizes) > 1:
            return f"nodes have {sizes[0]} to {sizes[-1]} ranks, and it needs equally many on each"
        return None

    @staticmethod
    def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
        """Open it for a group; every rank must call it."""
        return TwoStageTransport(group, facts.nodes, timeout_s=timeout_s)


class TwoStageTransport:
    """All-to-all of CPU tensors, first between nodes, then inside them. Exchanges go one after the other.

    Args:
        group: the ranks that exchange; used to find each other.
        nodes: the ranks of each node, equally many.
        timeout_s: how long to wait for another rank.
    """

    name = "two_stage"
    engine = "gloo between nodes, unix sockets inside"
    sm_free = True

    def __init__(
        self, group: dist.ProcessGroup, nodes: Sequence[Sequence[int]], *, timeout_s: float = 600.0
    ) -> None:
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        grid: IntArray = np.array([sorted(ranks) for ranks in nodes], dtype=np.int64)
        num_nodes, local = grid.shape
        self.reason = (
            f"{num_nodes} nodes of {local}: {num_nodes - 1} messages between nodes and {local - 1} inside "
            f"for each exchange of a rank, not {self.num_ranks - 1}"
        )
        (node,), (place,) = np.where(grid == self.rank)
        self._orders = functools.lru_cache(functools.partial(_orders, grid, int(place)))
        self._between = self._inside = None
        if num_nodes > 1:
            self._between = FramedExchange(
                GlooCarrier(_group_of(group, sorted(grid[:, place].tolist()), timeout_s))
            )
        if local > 1:
            members = grid[node].tolist()
            sockets = SocketTransport(group, timeout_s=timeout_s, members=members)
            sockets.connect()  # now: the group may be busy when an exchange comes to it
            self._inside = FramedExchange(SocketCarrier(sockets))
        self._lock = threading.Lock()
        self._under_way: deque[PendingExchange] = deque()
        self._failure: BaseException | None = None
        poll_in_background(self, TwoStageTransport.poll, every_s=_NUDGE_S)

    @property
    def num_messages(self) -> int:
        """Sent by this rank so far, between nodes and inside."""
        return sum(stage.num_messages for stage in (self._between, self._inside) if stage is not None)

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> _Sized:
        """Begin to send."""
        return _Sized(self._start([tensor], [send]), list(receive), self.rank)

    def exchange_unsized(
        self, values: Sequence[Tensor], *, send: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Row blocks of several tensors as for `start`; of each what came, and how many rows from each rank."""
        received = self._start(values, send).wait()
        return [rows for rows, _ in received], [counts for _, counts in received]

    def _start(self, values: Sequence[Tensor], send: Sequence[Sequence[int]]) -> PendingExchange:
        with self._lock:
            self._go_on(
                block=True
            )  # what is expected of messages is known to both sides when the last are through
            pending = PendingExchange(self, values, send)
            self._under_way.append(pending)
        return pending

    def finish(self, pending: PendingExchange) -> None:
        """Go on until an exchange is complete."""
        with self._lock:
            if pending.result is None:
                self._go_on(block=True)

    def poll(self) -> None:
        """Keep exchanges moving that nobody waits for."""
        if self._under_way and self._lock.acquire(blocking=False):
            try:
                self._go_on(block=False)
            except Exception:
                return  # whoever waits for it will hear of it
            finally:
                self._lock.release()

    def _go_on(self, *, block: bool) -> None:
        """Bring what is under way further, in order."""
        if self._failure is not None:
            raise self._failure
        try:
            while self._under_way and self._under_way[0].advance(block=block):
                self._under_way.popleft()
        except BaseException as error:
            self._failure = error
            raise

    # The stages, for `PendingExchange`.

    def begin_between(self, blocks: Blocks, num: int, kind: object) -> PendingFrames | Blocks:
        """Send what is for each node to the rank there that has this one's number; blocks by tensor and rank."""
        order = self._orders(num).between
        if self._between is None:
            return Blocks(blocks.buffer, blocks.begins[order], blocks.sizes[order])
        return self._between.begin(blocks, order, kind=kind)

    def begin_inside(self, came: Blocks, num: int, kind: object) -> PendingFrames | Blocks:
        """Hand on what has come for each rank of this node; blocks by node, number and tensor."""
        order = self._orders(num).inside
        if self._inside is None:
            return Blocks(came.buffer, came.begins[order], came.sizes[order])
        return self._inside.begin(came, order, kind=kind)

    def in_rank_order(self, num: int) -> IntArray:
        """[tensors, ranks] the numbers of the blocks that have come, by the rank that has sent them."""
        return self._orders(num).final


class _Orders(NamedTuple):
    """In which order blocks of so many tensors leave for the stages, and where they have come at the end."""

    between: IntArray
    inside: IntArray
    final: IntArray


def _orders(grid: IntArray, place: int, num: int) -> _Orders:
    """For nodes x ranks of a node, the rank that is the n-th of its node, and a number of tensors."""
    num_nodes, local = grid.shape
    # Peers stand in the order of a group, by rank: that of the nodes for one number may not be that for another.
    targets = grid[np.argsort(grid[:, place])]
    between = targets[:, :, None] + grid.size * np.arange(num)
    came = np.arange(grid.size * num).reshape(num_nodes, local, num)
    senders = np.sort(grid, axis=0).T.reshape(-1)
    final = np.argsort(senders)[None, :] * num + np.arange(num)[:, None]
    inside = np.ascontiguousarray(came.transpose(1, 0, 2)).reshape(-1)
    return _Orders(np.ascontiguousarray(between).reshape(-1), inside, np.ascontiguousarray(final))


class PendingExchange:
    """An exchange of several tensors on its way through its stages."""

    def __init__(
        self, transport: TwoStageTransport, values: Sequence[Tensor], send: Sequence[Sequence[int]]
    ) -> None:
        self._transport = transport
        self._kind = tuple((each.dtype, each.shape[1:]) for each in values)
        parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in values]
        self._row_bytes = [each.shape[1:].numel() * each.itemsize for each in values]
        sizes = np.array(send, np.int64) * np.array(self._row_bytes)[:, None]
        flat = sizes.reshape(-1)
        # Rows of a tensor stand without a gap, and so do the tensors: a block begins where the one before it ends.
        buffer = (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()
        self._stage = transport.begin_between(
            Blocks(buffer, np.cumsum(flat) - flat, flat), len(values), self._kind
        )
        self._is_inside = False
        self.result: list[tuple[Tensor, list[int]]] | None = None

    def advance(self, *, block: bool) -> bool:
        """Go on; whether it is complete."""
        while self.result is None:
            stage = self._stage
            came = stage if isinstance(stage, Blocks) else stage.advance(block=block)
            if came is None:
                return False
            if self._is_inside:
                self.result = self._tensors(came)
            else:
                self._stage = self._transport.begin_inside(came, len(self._kind), self._kind)
                self._is_inside = True
        return True

    def wait(self) -> list[tuple[Tensor, list[int]]]:
        """Of each tensor what came from all ranks in their order, and how many rows from each."""
        self._transport.finish(self)
        assert self.result is not None
        return self.result

    def _tensors(self, came: Blocks) -> list[tuple[Tensor, list[int]]]:
        found = []
        orders = self._transport.in_rank_order(len(self._kind))
        for (dtype, shape), row_bytes, order in zip(self._kind, self._row_bytes, orders):
            counts = came.sizes[order] // max(1, row_bytes)
            rows = came.joined(order)
            if row_bytes:
                found.append((rows.view(dtype).view(-1, *shape), counts.tolist()))
            else:
                found.append((torch.empty(0, *shape, dtype=dtype), counts.tolist()))
        return found


class _Sized:
    """An exchange whose sizes both sides know."""

    def __init__(self, pending: PendingExchange, receive: list[int], rank: int) -> None:
        self._pending, self._receive, self._rank = pending, receive, rank

    def wait(self) -> Tensor:
        ((received, counts),) = self._pending.wait()
        if not received.shape[1:].numel():
            return received.new_empty(
                sum(self._receive), *received.shape[1:]
            )  # rows of no bytes are not told
        if counts != self._receive:
            other = next(n for n, pair in enumerate(zip(counts, self._receive)) if pair[0] != pair[1])
            raise TrainingError(
                f"rank {other} has sent rank {self._rank} {counts[other]} rows, not {self._receive[other]}",
                next_step="every rank must start the same transfers in the same order",
            )
        return received


def _group_of(group: dist.ProcessGroup, members: list[int], timeout_s: float) -> dist.ProcessGroup:
    """A group of gloo of some ranks of another one; each rank calls it with its own members."""
    everybody = dist.get_process_group_ranks(group)
    return open_privately(
        lambda: dist.new_group(
            [everybody[rank] for rank in members],
            timeout=datetime.timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=len(members) < dist.get_world_size(),
        )
    )
