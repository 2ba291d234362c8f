"""Messages of which only the sender knows the size, over exchanges whose sizes both sides must know.

    message to a peer      ┃ header: rows of each of its blocks ┃ rows ... ┃ filler
                           │<──────────── what both sides expect ─────────────>│

What is expected of a pair follows from the messages before, which both of its sides know: an eighth more than the
largest of late. So nothing is told beforehand, and most messages are one. What a message has beyond that follows it,
between that pair alone: the header has told how much it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from freescale.comm import IntArray, ends_of
from freescale.comm.transports.kinds.local import SocketTransport

Bytes = NDArray[np.uint8]

_FIRST = 256
"""Bytes of rows that are expected where nothing is known yet."""
_UNIT = 64
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


class Frame(NamedTuple):
    """What a member has for every other one, or has got from them.

    Args:
        header: [members, blocks] rows of each block.
        rows: [rows, bytes] all blocks, member after member.
    """

    header: IntArray
    rows: Bytes

    @property
    def sizes(self) -> IntArray:
        """[members] bytes of each message."""
        row_bytes = self.rows.shape[1]
        return _WORD * self.header.shape[1] + row_bytes * self.header.sum(1)


class FramedExchange:
    """Exchanges frames; one at a time.

    Args:
        carrier: moves the bytes.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._expected: dict[tuple[Hashable, bool], IntArray] = {}
        self.num_messages = 0
        """Sent so far, those to this member itself not counted."""

    def begin(self, frame: Frame, *, kind: Hashable) -> PendingFrame:
        """Begin to send.

        Args:
            frame: what leaves.
            kind: what is expected of a message follows from those of its kind.
        """
        return PendingFrame(self, frame, kind)

    def expected(self, kind: Hashable, header: int, *, leaving: bool) -> IntArray:
        """[members] bytes that messages of a kind are made of, or filled up to."""
        known = self._expected.get((kind, leaving))
        if known is None:
            known = np.full(self.carrier.num_peers, _WORD * header + _FIRST)
            self._expected[kind, leaving] = known
        return -(-(known + known // 8) // _UNIT) * _UNIT

    def learn(self, kind: Hashable, sizes: IntArray, *, leaving: bool) -> None:
        """Of these sizes messages were: larger ones count at once, smaller ones by and by."""
        known = self._expected[kind, leaving]
        self._expected[kind, leaving] = np.maximum(sizes, known - (known - sizes) // 8)


class PendingFrame:
    """A frame on its way; `advance` brings it further."""

    def __init__(self, exchange: FramedExchange, frame: Frame, kind: Hashable) -> None:
        self._exchange, self._kind = exchange, kind
        self._row_bytes, self._blocks = frame.rows.shape[1], frame.header.shape[1]
        carrier = exchange.carrier
        sizes = frame.sizes
        self._out = exchange.expected(kind, self._blocks, leaving=True)
        self._in = exchange.expected(kind, self._blocks, leaving=False)
        self._out[carrier.own] = self._in[carrier.own] = sizes[carrier.own]
        self._message, self._beyond = _packed(frame, sizes, self._out)
        exchange.learn(kind, sizes, leaving=True)
        exchange.num_messages += carrier.num_peers - 1 + len(self._beyond)
        self._posted = carrier.post(self._message, send=self._out.tolist(), receive=self._in.tolist())
        self._first: tuple[Tensor, IntArray, IntArray] | None = None
        self._result: Frame | None = None

    def advance(self, *, block: bool) -> Frame | None:
        """What has come; None where that would take a wait and none is wanted."""
        while self._result is None:
            if not block and not self._posted.done():
                return None
            arrived = self._posted.wait()
            if self._first is None:
                self._open(arrived[0])
            else:
                self._result = self._assembled(arrived)
        return self._result

    def _open(self, message: Tensor) -> None:
        """Read the headers, and ask for what is beyond the messages."""
        starts, width = ends_of(self._in), _WORD * self._blocks
        flat = message.numpy()
        headers = np.empty((len(self._in), self._blocks), np.int64)
        for peer, start in enumerate(starts[:-1]):
            headers[peer] = flat[start : start + width].view(np.int64)
        sizes = width + self._row_bytes * headers.sum(1)
        self._exchange.learn(self._kind, sizes, leaving=False)
        missing = np.maximum(sizes - self._in, 0)
        self._first = message, headers, sizes
        if not self._beyond and not missing.any():
            self._result = self._assembled([])
            return
        self._coming = {peer: int(count) for peer, count in enumerate(missing.tolist()) if count}
        self._posted = self._exchange.carrier.post_rest(self._beyond, self._coming)

    def _assembled(self, rest: Sequence[Tensor]) -> Frame:
        assert self._first is not None
        message, headers, sizes = self._first
        more = dict(zip(self._coming, rest)) if rest else {}
        flat, width, pieces = message.numpy(), _WORD * self._blocks, []
        for peer, (start, size, room) in enumerate(zip(ends_of(self._in), sizes.tolist(), self._in.tolist())):
            pieces.append(flat[start + width : start + min(size, room)])
            if peer in more:
                pieces.append(more[peer].numpy())
        return Frame(headers, np.concatenate(pieces).reshape(int(headers.sum()), self._row_bytes))


def _packed(frame: Frame, sizes: IntArray, room: IntArray) -> tuple[Tensor, dict[int, Tensor]]:
    """One message a member, filled up to its room, and what does not fit."""
    message = torch.zeros(int(room.sum()), dtype=torch.uint8)
    flat, beyond, width = message.numpy(), {}, _WORD * frame.header.shape[1]
    rows, header, first = frame.rows.reshape(-1), frame.header.astype(np.int64).view(np.uint8), 0
    for peer, (start, size, most) in enumerate(zip(ends_of(room), sizes.tolist(), room.tolist())):
        flat[start : start + width] = header[peer]
        fits, last = min(size, most) - width, first + size - width
        flat[start + width : start + width + fits] = rows[first : first + fits]
        if first + fits < last:
            beyond[peer] = torch.from_numpy(rows[first + fits : last].copy())
        first = last
    return message, beyond


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
        return _OnSockets(self._transport.start(message, send=send, receive=receive), [sum(receive)])

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
    def __init__(self, transfer: Any, sizes: list[int]) -> None:
        self._transfer, self._sizes = transfer, sizes

    def done(self) -> bool:
        return not self._transfer.num_left

    def wait(self) -> list[Tensor]:
        return list(self._transfer.wait().split(self._sizes))


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
