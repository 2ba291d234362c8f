"""Messages of which only the sender knows the size, over exchanges whose sizes both sides must know.

    message to a peer      ┃ header: sizes of its blocks ┃ blocks ... ┃ filler
                           │<───────── what both sides expect ─────────>│

What is expected of a pair follows from the messages before, which both of its sides know: an eighth more than the
largest of late. So nothing is told beforehand, and most messages are one. What a message has beyond that follows it,
between that pair alone: the header has told how much it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from freescale.comm.transports.kinds.local import SocketTransport

Bytes = NDArray[np.uint8]
IntArray = NDArray[np.int64]

_FIRST = 256
"""Bytes of rows that are expected where nothing is known yet."""
_WORD = 8


class Posted(Protocol):
    """Bytes on their way."""

    def done(self) -> bool:
        """Whether `wait` returns at once, or nothing but a wait brings it further."""

    def wait(self) -> list[Tensor]:
        """What has come."""


class Carrier(Protocol):
    """Moves bytes between the members of a stage; all of them post the same messages in the same order.

    Args:
        num_peers: members, this one too.
        own: the place of this one among them.
    """

    num_peers: int
    own: int

    def post(self, message: Tensor, *, send: list[int], receive: list[int]) -> Posted:
        """Begin an exchange of bytes; its wait gives one tensor with what came from all of them."""

    def post_rest(self, leaving: Mapping[int, Tensor], coming: Mapping[int, int]) -> Posted:
        """Begin to move more between some pairs; both sides of each know. Its wait gives a tensor for each coming."""


@dataclass(frozen=True)
class Blocks:
    """Runs of bytes in a buffer.

    Args:
        buffer: holds them.
        begins: of each.
        sizes: of each.
    """

    buffer: Bytes
    begins: IntArray
    sizes: IntArray

    def joined(self, order: IntArray) -> Tensor:
        """The bytes of these blocks, one after the other."""
        from freescale.kernels.runtime import join_blocks

        found = torch.empty(int(self.sizes[order].sum()), dtype=torch.uint8)
        join_blocks(self.buffer, self.begins, self.sizes, order, found.numpy())
        return found


class FramedExchange:
    """Exchanges equally many blocks with every member; one exchange at a time.

    Args:
        carrier: moves the bytes.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._known: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self.num_messages = 0
        """Sent so far, those to this member itself not counted."""

    def begin(self, blocks: Blocks, order: IntArray, *, kind: Hashable) -> PendingFrames:
        """Begin to send.

        Args:
            blocks: what leaves.
            order: their numbers, member after member.
            kind: what is expected of a message follows from those of its kind.
        """
        return PendingFrames(self, blocks, order, kind)

    def known(self, kind: Hashable, header: int) -> tuple[IntArray, IntArray]:
        """How large frames of a kind were of late, to each member and from each; whoever reads them adds to it."""
        found = self._known.get(kind)
        if found is None:
            first = np.full(self.carrier.num_peers, header + _FIRST)
            found = self._known[kind] = first, first.copy()
        return found


class PendingFrames:
    """Frames on their way; `advance` brings them further."""

    def __init__(self, exchange: FramedExchange, blocks: Blocks, order: IntArray, kind: Hashable) -> None:
        from freescale.kernels.runtime import pack_frames, size_frames

        self._exchange, carrier = exchange, exchange.carrier
        peers = carrier.num_peers
        self._num_blocks = len(order) // peers
        header = _WORD * self._num_blocks
        known_out, self._known_in = exchange.known(kind, header)
        totals, out, self._room = np.empty((3, peers), np.int64)
        sizing = (known_out, self._known_in, totals, out, self._room)
        beyond = size_frames(blocks.sizes, order, self._num_blocks, carrier.own, *sizing)
        message = torch.empty(int(out.sum()), dtype=torch.uint8)
        pack_frames(blocks.buffer, blocks.begins, blocks.sizes, order, self._num_blocks, out, message.numpy())
        self._beyond: dict[int, Tensor] = {}
        for peer in np.flatnonzero(totals > out).tolist() if beyond else ():
            rows = blocks.joined(order.reshape(peers, -1)[peer])
            self._beyond[peer] = rows[int(out[peer]) - header :]
        exchange.num_messages += peers - 1 + beyond
        self._posted = carrier.post(message, send=out.tolist(), receive=self._room.tolist())
        self._first: Tensor | None = None
        self._missing: dict[int, int] = {}
        self._result: Blocks | None = None

    def advance(self, *, block: bool) -> Blocks | None:
        """What has come, member after member; None where that would take a wait and none is wanted."""
        while self._result is None:
            if not block and not self._posted.done():
                return None
            arrived = self._posted.wait()
            if self._first is None:
                self._first = arrived[0]
                self._open()
            else:
                self._result = self._with_rest(dict(zip(self._missing, arrived)))
        return self._result

    def _open(self) -> None:
        """Read the headers, and ask for what is beyond the messages."""
        from freescale.kernels.runtime import read_frames

        assert self._first is not None
        peers, message = len(self._room), self._first.numpy()
        begins, sizes = np.empty((2, peers * self._num_blocks), np.int64)
        totals = np.empty(peers, np.int64)
        late = read_frames(message, self._room, self._num_blocks, begins, sizes, totals, self._known_in)
        found = Blocks(message, begins, sizes)
        if not self._beyond and not late:
            self._result = found
            return
        self._found = found
        missing = np.maximum(totals - self._room, 0).tolist()
        self._missing = {peer: count for peer, count in enumerate(missing) if count}
        self._posted = self._exchange.carrier.post_rest(self._beyond, self._missing)

    def _with_rest(self, rest: dict[int, Tensor]) -> Blocks:
        """The same blocks in a buffer that has all of them."""
        starts, pieces = np.cumsum(self._room) - self._room, []
        begins, shift = self._found.begins.reshape(len(self._room), -1).copy(), 0
        for peer, (start, room) in enumerate(zip(starts.tolist(), self._room.tolist())):
            begins[peer] += shift
            pieces.append(self._found.buffer[start : start + room])
            if peer in rest:
                pieces.append(rest[peer].numpy())
                shift += len(rest[peer])
        return Blocks(np.concatenate(pieces), begins.reshape(-1), self._found.sizes)


class SocketCarrier:
    """Between ranks of one machine, over their unix sockets.

    Args:
        transport: whose transfers of nothing to anybody are no messages: so only those concerned move a rest.
    """

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport
        self.num_peers, self.own = transport.num_ranks, transport.rank

    def post(self, message: Tensor, *, send: list[int], receive: list[int]) -> Posted:
        """Begin an exchange of bytes."""
        return _OnSockets(self._transport.start(message, send=send, receive=receive), None)

    def post_rest(self, leaving: Mapping[int, Tensor], coming: Mapping[int, int]) -> Posted:
        """Begin to move more between some pairs."""
        send, receive = ([0] * self.num_peers for _ in range(2))
        for peer, part in leaving.items():
            send[peer] = len(part)
        for peer, count in coming.items():
            receive[peer] = count
        message = torch.cat(list(leaving.values())) if leaving else torch.empty(0, dtype=torch.uint8)
        return _OnSockets(self._transport.start(message, send=send, receive=receive), list(coming.values()))


class _OnSockets:
    def __init__(self, transfer: Any, sizes: list[int] | None) -> None:
        self._transfer, self._sizes = transfer, sizes

    def done(self) -> bool:
        return not self._transfer.num_left

    def wait(self) -> list[Tensor]:
        received = self._transfer.wait()
        return [received] if self._sizes is None else list(received.split(self._sizes))


class GlooCarrier:
    """Between ranks of several machines, by gloo.

    Args:
        group: of gloo, that nothing else uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.num_peers, self.own = dist.get_world_size(group), dist.get_rank(group)

    def post(self, message: Tensor, *, send: list[int], receive: list[int]) -> Posted:
        """Begin an exchange of bytes."""
        received = message.new_empty(sum(receive))
        work = dist.all_to_all_single(received, message, receive, send, group=self._group, async_op=True)
        assert work is not None
        return _ByGloo([work], [received], sent=message, tells=True)

    def post_rest(self, leaving: Mapping[int, Tensor], coming: Mapping[int, int]) -> Posted:
        """Begin to move more between some pairs."""
        received = {peer: torch.empty(count, dtype=torch.uint8) for peer, count in coming.items()}
        works = [dist.isend(part, group=self._group, group_dst=peer) for peer, part in leaving.items()]
        works += [dist.irecv(part, group=self._group, group_src=peer) for peer, part in received.items()]
        under_way = [work for work in works if work is not None]
        return _ByGloo(under_way, list(received.values()), sent=leaving, tells=False)


class _ByGloo:
    def __init__(self, works: list[dist.Work], received: list[Tensor], *, sent: object, tells: bool) -> None:
        self._works, self._received, self._sent, self._tells = works, received, sent, tells

    def done(self) -> bool:
        # Messages of one pair never tell that they are through; but then the other side has come to them, too.
        return not self._tells or all(work.is_completed() for work in self._works)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received
