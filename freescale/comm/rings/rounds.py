"""Rings of slots: how an uneven all-to-all becomes copies and flags. Pure arithmetic, for every kind of memory.

A slot is a cell of a ring: memory for one chunk, used again when its reader has taken the chunk out.

Each ordered pair of ranks has a ring of slots in memory that both reach, and two counters beside it:

    source                        ring of this pair                         target
    copy chunk into slot e % 8 ──> [ ][ ][x][x][x][ ][ ][ ] ──> copy it out of the slot
    write arrived  = e + 1   ─────────────────────────────────> wait: arrived  >= e + 1
    wait: released >= e - 7  <───────────────────────────────── write released = e + 1

e is the pair's epoch, the number of chunks before this one. It grows by one with every chunk and wraps at 2^32, so it
is compared by cyclic difference. A long message is cut into a few chunks (`Cut`), so that its first is on the way out
of the slots while its last is on the way in, and two messages fit a ring. A message of no bytes is a chunk of no bytes:
flags without a copy. So whoever has waited for an exchange knows that every rank has come to it.

Chunk k of all messages of an exchange is round k. Each rank does its outgoing rounds in order, and beside them its
incoming rounds in order; all ranks start the same exchanges in the same order. So no wait is ever for a later round
than its own (an epoch's credit is given in an earlier round, its arrival in the same one), and the least round that is
not done can always go on: nothing can deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

CACHE_LINE = 64
PAGE = 4096
EPOCHS = 1 << 32
FIRST_SLOT_BYTES = 256 << 10


Move = tuple[int, int, int]
"""A slot, a first byte and a number of bytes of a tensor: out of the tensor when sending, into it when receiving."""
FlagValue = tuple[int, int]
"""A flag and the value it must have reached, or is given."""


class Round(NamedTuple):
    """One chunk of every message on one side: wait for all of these, then copy, then write all of those."""

    waits: list[FlagValue]
    moves: list[Move]
    signals: list[FlagValue]


class ExchangeRounds(NamedTuple):
    """What one rank does in one exchange, on its two sides."""

    outgoing: list[Round]
    incoming: list[Round]


@dataclass(frozen=True)
class Cut:
    """How messages become chunks; source and target know a message's length, so they agree.

    Args:
        pieces: about as many chunks a message.
        least: a smaller chunk costs its launch, not its bytes.
        most: the largest slot.
    """

    pieces: int = 4
    least: int = 64 << 10
    most: int = 2 << 20

    def chunk(self, num_bytes: int) -> int:
        """Size of the chunks of a message, a power of two."""
        wanted = power_of_two_at_least(-(-num_bytes // self.pieces))
        return min(self.most, max(self.least, wanted))

    def slot(self, num_bytes: int) -> int:
        """Size of the slots that a longest message would like."""
        return min(self.chunk(num_bytes), power_of_two_at_least(num_bytes))


CPU_CUT = Cut()
# Copies of four ranks under one GPU lose 4 us each between them: 0.5 MiB at a time moved 36 GB/s through an H200's
# pinned memory, 2 MiB 45, 16 MiB 49. Two pieces are enough for one to come in while the other goes out.
GPU_CUT = Cut(pieces=2, least=4 << 20, most=8 << 20)


@dataclass(frozen=True)
class Rings:
    """Where the rings of a group lie; the same on all ranks.

    Args:
        num_ranks: of the group.
        slot_bytes: the largest chunk.
        num_slots: of each ring; a power of two, so that slots stay in turn when epochs wrap, or 0 (`flags_alone`).
        first_epoch: where counting starts.
        cut: how messages become chunks.
    """

    num_ranks: int
    slot_bytes: int = FIRST_SLOT_BYTES
    num_slots: int = 8
    first_epoch: int = 0
    cut: Cut = CPU_CUT

    def arrived(self, source: int, target: int) -> int:
        """The flag that counts chunks put into a ring."""
        return source * self.num_ranks + target

    def released(self, source: int, target: int) -> int:
        """The flag that counts chunks taken out of a ring."""
        return self.num_ranks**2 + source * self.num_ranks + target

    def bell(self, rank: int) -> int:
        """A flag that changes whenever another flag does that this rank may wait for."""
        return 2 * self.num_ranks**2 + rank

    @property
    def num_flags(self) -> int:
        """All of them; each has a cache line of its own, at the beginning of the memory."""
        return 2 * self.num_ranks**2 + self.num_ranks

    def ranks_of(self, flag: int) -> tuple[int, int]:
        """Source and target of a flag that is no bell."""
        return divmod(flag % self.num_ranks**2, self.num_ranks)

    def slot(self, source: int, target: int, epoch: int) -> int:
        """The slot of a chunk."""
        return (source * self.num_ranks + target) * self.num_slots + epoch % self.num_slots

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins, in bytes."""
        return round_up(self.num_flags * CACHE_LINE, PAGE) + slot * self.slot_bytes

    @property
    def total_slots(self) -> int:
        """Of all rings."""
        return self.num_ranks**2 * self.num_slots

    @property
    def total_bytes(self) -> int:
        """Flags and slots."""
        return self.slot_offset(self.total_slots)

    def flags_alone(self) -> Rings:
        """The same flags in memory that has no slots: those lie elsewhere, and are not asked from this one."""
        return replace(self, num_slots=0)

    def chunk_bytes(self, num_bytes: int) -> int:
        """Size of the chunks of a message."""
        return min(self.slot_bytes, self.cut.chunk(num_bytes))

    def grown(self, num_bytes: int) -> Rings:
        """Rings that suit a longest message; these, if it fits them."""
        wanted = self.cut.slot(num_bytes)
        return replace(self, slot_bytes=wanted) if wanted > self.slot_bytes else self


def rings_of_gpus(num_ranks: int) -> Rings:
    """What ranks that move rows by copy engines begin with; half as many slots, because they grow larger.

    Not fewer: streams that share a hardware queue would wait for credit that is written behind their own wait.
    """
    return Rings(num_ranks, num_slots=4, cut=GPU_CUT)


class Planner:
    """Turns the splits of one rank into rounds, and counts epochs. Rows that stay on the rank are in none.

    Args:
        rings: where the slots are.
        rank: this rank.
    """

    def __init__(self, rings: Rings, *, rank: int) -> None:
        self.rings = rings
        ahead = range(1, rings.num_ranks)
        # Rotated, so that in every round each rank is the first target of one other rank.
        targets = [(rank + step) % rings.num_ranks for step in ahead]
        sources = [(rank - step) % rings.num_ranks for step in ahead]
        self._out = [
            _Ring(
                each,
                rings,
                wait=rings.released(rank, each),
                signal=rings.arrived(rank, each),
                slot=rings.slot(rank, each, 0),
            )
            for each in targets
        ]
        self._in = [
            _Ring(
                each,
                rings,
                wait=rings.arrived(each, rank),
                signal=rings.released(each, rank),
                slot=rings.slot(each, rank, 0),
            )
            for each in sources
        ]

    def plan(self, *, send: Sequence[int], receive: Sequence[int]) -> ExchangeRounds:
        """The rounds of an exchange of this many bytes to and from each rank."""
        # A chunk may enter its slot when the one before it there has been taken, and leave it when it has arrived.
        return ExchangeRounds(
            self._rounds(self._out, send, ahead=1 - self.rings.num_slots),
            self._rounds(self._in, receive, ahead=1),
        )

    def _rounds(self, ends: list[_Ring], sizes: Sequence[int], *, ahead: int) -> list[Round]:
        starts, rounds = offsets(sizes), list[Round]()
        for ring in ends:
            first, left = starts[ring.peer], sizes[ring.peer]
            step, epoch, number = self.rings.chunk_bytes(left), ring.epoch, 0
            while True:
                if number == len(rounds):
                    rounds.append(Round([], [], []))
                waits, moves, signals = rounds[number]
                waits.append((ring.wait, (epoch + ahead) % EPOCHS))
                if left:
                    size = step if left > step else left
                    moves.append((ring.slot + epoch % ring.num_slots, first, size))
                    first, left = first + size, left - size
                epoch, number = (epoch + 1) % EPOCHS, number + 1
                signals.append((ring.signal, epoch))
                if not left:
                    break
            ring.epoch = epoch
        return rounds


class _Ring:
    """This rank's end of a ring: the flag it waits for, the flag it writes, and how far it is."""

    __slots__ = ("epoch", "num_slots", "peer", "signal", "slot", "wait")

    def __init__(self, peer: int, rings: Rings, *, wait: int, signal: int, slot: int) -> None:
        self.peer, self.wait, self.signal, self.slot = peer, wait, signal, slot
        self.epoch, self.num_slots = rings.first_epoch, rings.num_slots


def reached(value: int, target: int) -> bool:
    """Whether a counter that wraps has come to a target: their cyclic difference is not negative."""
    return (value - target) % EPOCHS < EPOCHS // 2


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each of consecutive blocks begins, and where the last ends."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def power_of_two_at_least(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def round_up(number: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-number // unit) * unit
