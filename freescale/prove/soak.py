"""Many exchanges with random uneven splits, every number of every row checked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from freescale.comm import Transport
from freescale.comm.world import Ranks

SIZES = (0, 0, 1, 3, 17, 100, 1000)
LARGE = 30_000
"""Rows of 64 bytes to one rank: mostly small, a fifth of them none, now and then 2 MB."""

WINDOW = 3
"""Exchanges on the way at a time."""


def splits(exchange: int, num_ranks: int) -> list[list[int]]:
    """Rows from every rank to every rank; the same on all of them."""
    rng = random.Random(exchange)
    sizes = (*SIZES, LARGE) if exchange % 50 == 0 else SIZES
    return [[rng.choice(sizes) for _ in range(num_ranks)] for _ in range(num_ranks)]


class Checker:
    """Makes rows that name their exchange, source, target and place, and counts those that arrive otherwise."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._num_ranks = ranks.rank, ranks.num_ranks
        place = torch.arange(16 * LARGE, dtype=torch.int32, device=ranks.device)
        self._place = place.view(LARGE, 16)
        self._bad = torch.zeros(ranks.num_ranks, dtype=torch.int64, device=ranks.device)
        self._none = self._place[:0]

    def rows(self, exchange: int, counts: list[int]) -> torch.Tensor:
        """What this rank sends."""
        return torch.cat(
            [self._block(exchange, self._rank, target, count) for target, count in enumerate(counts)]
        )

    def check(self, exchange: int, received: torch.Tensor, counts: list[int]) -> None:
        """Compare on the device; nobody waits."""
        for source, part in enumerate(received.split(counts)):
            if len(part):
                wanted = self._block(exchange, source, self._rank, len(part))
                self._bad[source] += (part != wanted).sum()

    def bad_by_source(self) -> list[int]:
        """Numbers that arrived wrong so far, by the rank they came from."""
        return [int(count) for count in self._bad.tolist()]

    def num_bad(self) -> int:
        """Numbers that arrived wrong so far."""
        return int(self._bad.sum())

    def _block(self, exchange: int, source: int, target: int, count: int) -> torch.Tensor:
        name = (exchange * 1_000_003 + source * 1009 + target * 17) % 1_000_000_007
        return self._place[:count] + name if count else self._none


@dataclass
class Soak:
    """Exchanges under way, some at a time.

    Args:
        ranks: who takes part.
        transport: what carries them.
        checker: what compares.
    """

    ranks: Ranks
    transport: Transport
    checker: Checker

    def exchanges(self, count: int) -> Iterator[int]:
        """Numbers of exchanges that are about to start; after the last one all have been checked."""
        flying: deque[tuple[int, Any, list[int]]] = deque()
        for exchange in range(count):
            yield exchange
            table = splits(exchange, self.ranks.num_ranks)
            send, receive = table[self.ranks.rank], [row[self.ranks.rank] for row in table]
            rows = self.checker.rows(exchange, send)
            flying.append((exchange, self.transport.start(rows, send=send, receive=receive), receive))
            if len(flying) >= WINDOW:
                self._check(*flying.popleft())
        while flying:
            self._check(*flying.popleft())

    def _check(self, exchange: int, pending: Any, receive: list[int]) -> None:
        self.checker.check(exchange, pending.wait(), receive)
