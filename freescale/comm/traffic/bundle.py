"""Bundle: several tensors that go the same way as one transfer, whatever their types and widths.

    tables          message to rank 0            message to rank 1
    A [rows, 64]    ┃ A's rows for 0             ┃ A's rows for 1
    B [rows, 8]     ┃ B's rows for 0 ┃ filler    ┃ B's rows for 1 ┃ filler

A transfer costs a wait, whatever its size: eleven tables would wait eleven times. Both sides know the counts of every
tensor, so nothing is told about the bundle itself. One tensor alone travels as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.comm import Pending, Transport

Counts = Sequence[int]

WORD = 256
"""Bytes: what goes to one rank is filled up to a multiple, so that a message has rows of one width."""


@dataclass(frozen=True)
class Bundle:
    """A message made of the parts of several tensors; `open` gives the tensors that arrive.

    Args:
        message: what `Transport.start` takes; rows of WORD bytes, or the only tensor.
        send: its rows for each rank.
        receive: its rows from each rank.
        largest: the most rows any rank sends to any other; 0 where nobody asked.
    """

    message: Tensor
    send: Counts
    receive: Counts
    largest: int
    _kinds: tuple[tuple[torch.dtype, torch.Size], ...]
    _coming: tuple[Counts, ...]

    @classmethod
    def of(
        cls,
        values: Sequence[Tensor],
        *,
        send: Sequence[Counts],
        receive: Sequence[Counts],
        largest: Sequence[int] = (),
    ) -> Bundle:
        """From at least one tensor and its counts, in an order that is the same on every rank.

        Args:
            values: each [rows, ...], by receiving rank.
            send: of each, rows for every rank.
            receive: of each, rows from every rank.
            largest: of each, the most rows between any two ranks, where transfers are cut into pieces.
        """
        kinds = tuple((each.dtype, each.shape[1:]) for each in values)
        if len(values) == 1:
            return cls(values[0], send[0], receive[0], sum(largest), kinds, tuple(receive))
        widths = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        most = _words(sum(width * count for width, count in zip(widths, largest))) if largest else 0
        return cls(
            _message(values, send, widths),
            _sizes(send, widths),
            _sizes(receive, widths),
            most,
            kinds,
            tuple(receive),
        )

    def start(self, channel: Transport) -> PendingBundle:
        """Begin to send; returns at once."""
        return PendingBundle(self, channel.start(self.message, send=self.send, receive=self.receive))

    def open(self, arrived: Tensor) -> list[Tensor]:
        """The tensors that came, each by sending rank, from the message that did."""
        if len(self._kinds) == 1:
            return [arrived]
        flat = arrived.view(-1)
        widths = [math.prod(shape) * dtype.itemsize for dtype, shape in self._kinds]
        starts = [WORD * first for first in itertools.accumulate(self.receive, initial=0)]
        found = []
        for (dtype, shape), width, counts in zip(self._kinds, widths, self._coming):
            pieces = []
            for rank, count in enumerate(counts):
                pieces.append(flat[starts[rank] : starts[rank] + count * width])
                starts[rank] += count * width
            found.append(torch.cat(pieces).view(dtype).view(sum(counts), *shape))
        return found


class PendingBundle:
    """A bundle on its way."""

    def __init__(self, bundle: Bundle, pending: Pending) -> None:
        self._bundle, self._pending = bundle, pending

    def wait(self) -> list[Tensor]:
        """The tensors that came, in the order of those that left."""
        return self._bundle.open(self._pending.wait())


def _words(num_bytes: int) -> int:
    return -(-num_bytes // WORD)


def _sizes(counts: Sequence[Counts], widths: Sequence[int]) -> list[int]:
    """Words that go to, or come from, each rank."""
    return [_words(sum(map(int.__mul__, widths, of_rank))) for of_rank in zip(*counts)]


def _message(values: Sequence[Tensor], send: Sequence[Counts], widths: Sequence[int]) -> Tensor:
    flat = [each.contiguous().view(-1).view(torch.uint8) for each in values]
    filler = flat[0].new_zeros(WORD)
    starts = [0] * len(values)
    pieces = []
    for of_rank in zip(*send):
        filled = 0
        for n, (count, width) in enumerate(zip(of_rank, widths)):
            pieces.append(flat[n][starts[n] : starts[n] + count * width])
            starts[n] += count * width
            filled += count * width
        pieces.append(filler[: _words(filled) * WORD - filled])
    return torch.cat(pieces).view(-1, WORD)
