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
import threading
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import IntArray, Transport, open_privately, reorder_blocks, turned
from freescale.comm.transports.framed import (
    Bytes,
    Frame,
    FramedExchange,
    GlooCarrier,
    PendingFrame,
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
        # Peers stand in the order of a group, by rank: that of the nodes for one number may not be that for another.
        self._targets = grid[np.argsort(grid[:, place])]
        self._senders = np.sort(grid, axis=0).T.reshape(-1)
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
        return _Sized(self.start_unsized(tensor, send=send), list(receive), self.rank)

    def start_unsized(self, tensor: Tensor, *, send: Sequence[int]) -> PendingExchange:
        """Begin to send what the others do not know the size of yet."""
        tensor = tensor.detach().contiguous()
        with self._lock:
            self._go_on(
                block=True
            )  # what is expected of messages is known to both sides when the last are through
            pending = PendingExchange(self, tensor, list(send))
            self._under_way.append(pending)
        return pending

    def exchange_unsized(self, tensor: Tensor, *, send: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Row blocks of ranks 0, 1, ... as for `start`; what came from each rank, and how many rows it was."""
        return self.start_unsized(tensor, send=send).wait()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """counts[r] of this rank becomes entry [this rank] of rank r's result."""
        ones = [1] * self.num_ranks
        return self.start(counts, send=ones, receive=ones).wait()

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

    def begin_between(self, rows: Bytes, counts: IntArray, kind: Hashable) -> PendingFrame | Frame:
        """Send what is for each node to the rank there that has this one's number; blocks by node and number."""
        frame = Frame(counts[self._targets], reorder_blocks(rows, counts, self._targets.reshape(-1)))
        return frame if self._between is None else self._between.begin(frame, kind=kind)

    def begin_inside(self, came: Frame, kind: Hashable) -> PendingFrame | Frame:
        """Hand on what has come for each rank of this node; blocks by number and node."""
        rows = reorder_blocks(came.rows, came.header.reshape(-1), turned(*came.header.shape))
        frame = Frame(np.ascontiguousarray(came.header.T), rows)
        return frame if self._inside is None else self._inside.begin(frame, kind=kind)

    def in_rank_order(self, came: Frame) -> tuple[Bytes, IntArray]:
        """Rows and counts by the rank that has sent them."""
        order, counts = np.argsort(self._senders), came.header.reshape(-1)
        return reorder_blocks(came.rows, counts, order), counts[order]


class PendingExchange:
    """An exchange on its way through its stages."""

    def __init__(self, transport: TwoStageTransport, tensor: Tensor, send: list[int]) -> None:
        self._transport = transport
        self._dtype, self._shape = tensor.dtype, tensor.shape[1:]
        self._kind = (tensor.dtype, tuple(tensor.shape[1:]))
        row_bytes = tensor.shape[1:].numel() * tensor.itemsize
        rows = tensor.view(-1).view(torch.uint8).numpy().reshape(len(tensor), row_bytes)
        self._stage = transport.begin_between(rows, np.array(send, np.int64), self._kind)
        self._is_inside = False
        self.result: tuple[Tensor, list[int]] | None = None

    def advance(self, *, block: bool) -> bool:
        """Go on; whether it is complete."""
        while self.result is None:
            stage = self._stage
            came = stage if isinstance(stage, Frame) else stage.advance(block=block)
            if came is None:
                return False
            if self._is_inside:
                self.result = self._as_tensor(*self._transport.in_rank_order(came))
            else:
                self._stage, self._is_inside = self._transport.begin_inside(came, self._kind), True
        return True

    def wait(self) -> tuple[Tensor, list[int]]:
        """What came from all ranks in their order, and how many rows from each."""
        self._transport.finish(self)
        assert self.result is not None
        return self.result

    def _as_tensor(self, rows: Bytes, counts: IntArray) -> tuple[Tensor, list[int]]:
        received = torch.empty(len(rows), *self._shape, dtype=self._dtype)
        received.view(-1).view(torch.uint8).numpy()[:] = rows.reshape(-1)
        return received, counts.tolist()


class _Sized:
    """An exchange whose sizes both sides know."""

    def __init__(self, pending: PendingExchange, receive: list[int], rank: int) -> None:
        self._pending, self._receive, self._rank = pending, receive, rank

    def wait(self) -> Tensor:
        received, counts = self._pending.wait()
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
