"""What one batch asks of one table, seen from both sides: who asks for which rows, and who owns them.

    asking rank                                owner
    distinct rows, ascending   ──ids──>        wanted: what every rank asked for, by rank
    places among them          <──1 bit──      owned: the distinct rows among `wanted`

Two batches that follow each other may share rows. Only the owner of a row knows, because only it hears from all ranks.
It tells each rank with one bit for every row asked for: this one is shared. From the bits both sides derive the same
`Part` of the batch, so parts travel without a word about their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.comm import Transport
from freescale.embedding.id_map import check_whole
from freescale.embedding.plan import TablePlan, TableSpec
from freescale.errors import DataError
from freescale.kernels.rows import shared, unique
from freescale.kernels.runtime import on_device


@dataclass(frozen=True)
class Part:
    """Some of the rows of a batch.

    Args:
        places: [P] where they stand among this rank's distinct rows, ascending.
        send: how many of them each rank owns.
        rows: [Q] local rows asked from this rank, by asking rank.
        receive: how many of those each rank asked for.
        owned: distinct local rows among `rows`, ascending.
        slot: [Q] the place of each of `rows` in `owned`.
    """

    places: Tensor
    send: list[int]
    rows: Tensor
    receive: list[int]
    owned: Tensor
    slot: Tensor

    def to(self, device: torch.device) -> Part:
        """The same with its tensors on a device."""
        if device.type == "cpu":
            return self
        places, rows, owned, slot = (on_device(tensor, device) for tensor in self.tensors())
        return Part(places, self.send, rows, self.receive, owned, slot)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them."""
        return self.places, self.rows, self.owned, self.slot


@dataclass(frozen=True)
class Request:
    """The rows of one batch and table; all tensors on the CPU.

    Args:
        table: its name.
        inverse: where each id asked for stands in `unique`.
        unique: [U] row numbers, ascending.
        send: distinct rows asked from each rank.
        largest: the most rows any rank asks from any other, over all pairs; the same number on every rank.
        wanted: [W] local rows asked from this rank, by asking rank.
        receive: how many of them each rank asked for.
        owned: [O] distinct rows among `wanted`, ascending.
        owned_inverse: [W] the place of each of `wanted` in `owned`.
    """

    table: str
    inverse: Tensor
    unique: Tensor
    send: list[int]
    largest: int
    wanted: Tensor
    receive: list[int]
    owned: Tensor
    owned_inverse: Tensor

    def whole(self) -> Part:
        """All rows as one part."""
        places = torch.arange(len(self.unique))
        return Part(places, self.send, self.wanted, self.receive, self.owned, self.owned_inverse)

    def split(self, overlap: Overlap) -> tuple[Part, Part]:
        """The rows marked, and the others."""
        from freescale.kernels.rows import split_places, split_values, split_wanted

        asked, owned = overlap.asked.numpy(), overlap.owned.numpy()
        send, receive = (np.array(each, np.int64) for each in (self.send, self.receive))
        inverse, rows = self.owned_inverse.numpy(), self.wanted.numpy()
        places_in, places_out, send_in = split_places(asked, send)
        owned_in, owned_out, number = split_values(owned, self.owned.numpy())
        rows_in, slots_in, rows_out, slots_out, receive_in = split_wanted(
            owned, number, rows, inverse, receive
        )
        return (
            _part(send_in, receive_in, places_in, rows_in, owned_in, slots_in),
            _part(send - send_in, receive - receive_in, places_out, rows_out, owned_out, slots_out),
        )


@dataclass(frozen=True)
class Overlap:
    """Which rows of a batch a neighbouring batch uses, too: bits of the asking side [U] and of the owner [O]."""

    asked: Tensor
    owned: Tensor


def exchange_ids(plan: TablePlan, rows: Tensor, *, channel: Transport) -> Request:
    """Tell the owners which rows of a table this rank's batch needs; every rank must call it."""
    check_whole(rows, what="rows")
    wanted_here, inverse = unique(rows.long())
    check_range(plan.spec, wanted_here)
    counts = torch.searchsorted(wanted_here, torch.tensor(plan.edges())).diff()
    # Beside its count everybody gets the sender's largest one, so that all ranks know the largest of all.
    told = torch.stack([counts, counts.max().expand_as(counts)], dim=1)
    ones = [1] * channel.num_ranks
    heard = channel.start(told, send=ones, receive=ones).wait()
    send, receive = counts.tolist(), heard[:, 0].tolist()
    wanted = channel.start(wanted_here, send=send, receive=receive).wait() - plan.block(channel.rank)[0]
    owned, owned_inverse = unique(wanted)
    return Request(
        table=plan.spec.name,
        inverse=inverse,
        unique=wanted_here,
        send=send,
        largest=int(heard[:, 1].max()),
        wanted=wanted,
        receive=receive,
        owned=owned,
        owned_inverse=owned_inverse,
    )


def find_overlap(before: Request, after: Request, *, channel: Transport) -> tuple[Overlap, Overlap]:
    """The rows that two batches share, marked in each of them; one bit for every distinct id and batch travels."""
    marks = shared(before.owned, after.owned)
    told = [mark[request.owned_inverse].numpy() for mark, request in zip(marks, (before, after))]
    asked, receive = (before.send, after.send), (before.receive, after.receive)
    message, sizes = _pack(told, receive)
    coming = [sum(map(_bytes, pair)) for pair in zip(*asked)]
    heard = channel.start(torch.from_numpy(message), send=sizes, receive=coming).wait()
    bits = _unpack(heard.numpy(), asked)
    first, second = (Overlap(torch.from_numpy(bit), mark) for bit, mark in zip(bits, marks))
    return first, second


def check_range(spec: TableSpec, rows: Tensor) -> None:
    """Refuse rows outside the table. Distinct rows are sorted, so the first and the last tell."""
    if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= spec.num_rows):
        bad = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
        raise DataError(
            f"row {bad} lies outside table {spec.name!r}", got=bad, allowed=f"0 to {spec.num_rows - 1}"
        )


def _part(send: np.ndarray, receive: np.ndarray, *arrays: np.ndarray) -> Part:
    places, rows, owned, slot = (torch.from_numpy(each) for each in arrays)
    return Part(places, send.tolist(), rows, receive.tolist(), owned, slot)


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _pack(marks: Sequence[np.ndarray], sizes: tuple[list[int], list[int]]) -> tuple[np.ndarray, list[int]]:
    """For each rank its bits of the first batch, then those of the second, each on full bytes."""
    blocks = [np.split(mark, np.cumsum(size)[:-1]) for mark, size in zip(marks, sizes)]
    pieces = [np.packbits(block) for pair in zip(*blocks) for block in pair]
    return np.concatenate(pieces), [sum(map(_bytes, pair)) for pair in zip(*sizes)]


def _unpack(message: np.ndarray, sizes: tuple[list[int], list[int]]) -> list[np.ndarray]:
    """The bits of both batches, as one list each."""
    bits: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    start = 0
    for pair in zip(*sizes):
        for batch, size in enumerate(pair):
            piece = message[start : start + _bytes(size)]
            bits[batch].append(np.unpackbits(piece, count=size).astype(bool))
            start += _bytes(size)
    return [np.concatenate(each) for each in bits]
