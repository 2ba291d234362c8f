"""local: rows and sums between CPU ranks of one machine, over unix sockets that the ranks serve themselves.

gloo serves its sockets from three threads a rank. On a machine with about as many cores as ranks these threads take
the cores from the ranks they serve, above all by spinning in epoll_wait: of a step of 19.8 ms on two ranks and two
cores (benchmarks/embedding_step.py) they took 3.5 ms. Here the thread that waits for rows is the one that moves them:
14.9 ms.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Transport
from freescale.comm.world import GroupFacts, PrivateListener, call, gather, poll_in_background
from freescale.registry import register

_BUFFER_BYTES = 4 << 20
# Transfers that nobody waits for are polled this often; most are small enough to leave at once.
_NUDGE_S = 0.02


@register("transport", "local")
class LocalRoute:
    """CPU ranks of one machine."""

    keeps_group = False

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        """What keeps a group from using it."""
        if facts.on_gpu:
            return "sockets carry CPU tensors only"
        if facts.one_machine:
            return None
        return "the ranks are on several machines, or see nothing of each other's processes"

    @staticmethod
    def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
        """Open it for a group."""
        return SocketTransport(group, timeout_s=timeout_s)


class _SocketTransfer:
    """A transfer on its way."""

    def __init__(self, transport: SocketTransport, received: Tensor, sent: Tensor) -> None:
        self._transport, self._received, self._sent = transport, received, sent
        self.num_left = 0

    def wait(self) -> Tensor:
        """Move bytes until everything has left and arrived."""
        self._transport.finish(self)
        return self._received


class _Peer:
    """The socket to one rank, and what still has to go through it, first come first served."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.outgoing: deque[tuple[memoryview, _SocketTransfer]] = deque()
        self.incoming: deque[tuple[memoryview, _SocketTransfer]] = deque()

    def events(self) -> int:
        """What to wait for."""
        return (select.POLLOUT if self.outgoing else 0) | (select.POLLIN if self.incoming else 0)

    def move(self) -> bool:
        """Send and receive what can be moved without waiting; whether that was anything."""
        sent = _drain(self.outgoing, self._send)
        return _drain(self.incoming, self._receive) or sent

    def _send(self, view: memoryview) -> int:
        return self.connection.send(view)

    def _receive(self, view: memoryview) -> int:
        count = self.connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("end of stream")
        return count


class SocketTransport:
    """All-to-all between ranks of one machine; every rank must start the same transfers in the same order.

    A transfer moves while some call of `start` or `wait` runs. So that a rank busy elsewhere (in a collective of
    another kind, say) holds nobody up, a thread moves transfers that nobody is waiting for.

    Args:
        group: the ranks that exchange; used once, to find each other.
        timeout_s: how long to wait for another rank.
        members: those of the group that exchange, ascending, where not all do; each is one of some members.
    """

    name = "local"
    engine = "unix sockets"
    sm_free = True
    reason = "the CPU moves the bytes"

    def __init__(
        self, group: dist.ProcessGroup, *, timeout_s: float = 600.0, members: Sequence[int] | None = None
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._members = list(range(dist.get_world_size(group)) if members is None else members)
        self.num_ranks = len(self._members)
        self.rank = self._members.index(dist.get_rank(group))
        self._peers: dict[int, _Peer] | None = None
        self._lock = threading.Lock()
        self._num_waiting = 0

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> _SocketTransfer:
        """Begin to send; returns at once."""
        peers = self.connect()
        tensor = tensor.detach().contiguous()
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        transfer = _SocketTransfer(self, received, tensor)
        outgoing, incoming = _blocks(tensor, send), _blocks(received, receive)
        incoming[self.rank][:] = outgoing[self.rank]
        with self._lock:
            for rank, peer in peers.items():
                for queue, view in ((peer.outgoing, outgoing[rank]), (peer.incoming, incoming[rank])):
                    if len(view):
                        queue.append((view, transfer))
                        transfer.num_left += 1
            self._move()
        return transfer

    def finish(self, transfer: _SocketTransfer) -> None:
        """Move bytes until a transfer is complete."""
        if not transfer.num_left:
            return
        deadline = time.monotonic() + self._timeout_s
        self._num_waiting += 1
        try:
            with self._lock:
                self._move()
                while transfer.num_left:
                    # Only those that can move: with eight ranks, asking all of them whenever one can is 49 calls.
                    ready = self._poll(deadline - time.monotonic())
                    if not ready:
                        self._give_up()
                    self._move(ready)
        finally:
            self._num_waiting -= 1

    def _move(self, peers: Collection[_Peer] | None = None) -> bool:
        """Move what can be moved without waiting, to and from all ranks or some; whether that was anything."""
        moved = False
        for peer in (self._peers or {}).values() if peers is None else peers:
            try:
                moved |= peer.move()
            except OSError as error:
                who = self._members[peer.rank]
                raise ConnectionError(f"rank {who} has closed its connection ({error})") from None
        return moved

    def _poll(self, timeout_s: float) -> list[_Peer]:
        """Wait until something can be moved; with whom, nobody when the time is over."""
        poll, asked = select.poll(), {}
        for peer in (self._peers or {}).values():
            if peer.events():
                poll.register(peer.connection, peer.events())
                asked[peer.connection.fileno()] = peer
        if timeout_s <= 0:
            return []
        return [asked[file] for file, _ in poll.poll(1000 * timeout_s)]

    def _give_up(self) -> None:
        late = [self._members[peer.rank] for peer in (self._peers or {}).values() if peer.events()]
        raise TimeoutError(f"ranks {late} did not exchange rows within {self._timeout_s:.0f} s")

    def _poll_transfers(self) -> None:
        """Keep transfers moving that nobody waits for."""
        while (
            self._num_waiting == 0
            and any(peer.events() for peer in (self._peers or {}).values())
            and self._lock.acquire(blocking=False)
        ):
            try:
                if not self._move():
                    self._poll(0.001)  # no longer: somebody may begin to wait
            except ConnectionError:
                return  # whoever waits for it will hear of it
            finally:
                self._lock.release()

    def connect(self) -> dict[int, _Peer]:
        """Find each other, where that has not happened; every rank of the group must call it."""
        if self._peers is None:
            connections = _connect(self._group, self._members, self._timeout_s)
            self._peers = {rank: _Peer(rank, connection) for rank, connection in connections.items()}
            poll_in_background(self, SocketTransport._poll_transfers, every_s=_NUDGE_S)
        return self._peers


def _drain(queue: deque[tuple[memoryview, _SocketTransfer]], move: Callable[[memoryview], int]) -> bool:
    """Move the views of a queue in order, until the socket would block; whether anything moved."""
    moved = False
    while queue:
        view, transfer = queue[0]
        try:
            count = move(view)
        except BlockingIOError:
            break
        moved = True
        if count < len(view):
            queue[0] = (view[count:], transfer)
        else:
            queue.popleft()
            transfer.num_left -= 1
    return moved


def _blocks(tensor: Tensor, counts: Sequence[int]) -> list[memoryview]:
    """The bytes of consecutive row blocks."""
    everything = tensor.view(-1).view(torch.uint8).numpy().data
    row_bytes = tensor.shape[1:].numel() * tensor.itemsize
    ends = accumulate((count * row_bytes for count in counts), initial=0)
    return [everything[start:stop] for start, stop in pairwise(ends)]


def _connect(group: dist.ProcessGroup, members: Sequence[int], timeout_s: float) -> dict[int, socket.socket]:
    """A connection to every other member, by its place among them: each one listens, and calls those before it."""
    rank = dist.get_rank(group)
    own = members.index(rank)
    with PrivateListener(len(members)) as listener:
        names = gather(listener.name, group=group)
        found = {other: call(names[other], rank=rank, timeout_s=timeout_s) for other in members[:own]}
        found |= listener.accept(members[own + 1 :], timeout_s=timeout_s)
    connections = {members.index(other): connection for other, connection in found.items()}
    for connection in connections.values():
        connection.setblocking(False)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    return connections
