"""Rings of slots: every schedule of every rank delivers every byte, and none can stop all of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freescale.comm.rings.rounds import (
    CPU_CUT,
    EPOCHS,
    GPU_CUT,
    Cut,
    Planner,
    Rings,
    Round,
    offsets,
    power_of_two_at_least,
    reached,
    rings_of_gpus,
)
from tests.effort import examples


@given(st.integers(0, EPOCHS - 1), st.integers(0, (1 << 31) - 1))
def test_epochs_are_compared_around_the_wrap(target: int, ahead: int) -> None:
    assert reached((target + ahead) % EPOCHS, target)
    assert ahead == 0 or not reached((target - ahead) % EPOCHS, target)


@given(st.integers(1, 5), st.sampled_from([1, 2, 8]), st.sampled_from([4096, 1 << 18]))
def test_flags_and_slots_do_not_overlap(num_ranks: int, num_slots: int, slot_bytes: int) -> None:
    rings = Rings(num_ranks, slot_bytes=slot_bytes, num_slots=num_slots)
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks)]
    flags = [rings.arrived(*pair) for pair in pairs] + [rings.released(*pair) for pair in pairs]
    assert [rings.ranks_of(flag) for flag in flags] == pairs + pairs
    flags += [rings.bell(rank) for rank in range(num_ranks)]
    assert sorted(flags) == list(range(rings.num_flags))
    slots = {rings.slot(*pair, epoch) for pair in pairs for epoch in range(num_slots)}
    assert slots == set(range(num_slots * num_ranks**2))
    places = sorted(rings.slot_offset(slot) for slot in slots)
    assert places[0] >= 64 * rings.num_flags
    assert places[-1] + slot_bytes == rings.total_bytes
    assert all(place % 4096 == 0 for place in places)


@given(st.integers(0, 1 << 30))
def test_a_message_is_cut_into_few_chunks_that_fit(num_bytes: int) -> None:
    for cut in (CPU_CUT, GPU_CUT):
        for slot_bytes in (1 << 18, cut.most):
            chunk = Rings(2, slot_bytes=slot_bytes, cut=cut).chunk_bytes(num_bytes)
            assert min(cut.least, slot_bytes) <= chunk <= slot_bytes
            assert chunk == power_of_two_at_least(chunk)
            assert num_bytes <= cut.pieces * chunk or chunk == slot_bytes


@given(st.integers(0, 1 << 30))
def test_slots_grow_to_what_a_message_is_cut_into_and_never_shrink(num_bytes: int) -> None:
    for rings in (Rings(2), rings_of_gpus(2)):
        grown = rings.grown(num_bytes)
        assert grown is rings or rings.slot_bytes < grown.slot_bytes <= rings.cut.most
        assert grown.grown(num_bytes) is grown
        # A chunk of its own choice fits, and a slot is at most twice the message.
        assert grown.chunk_bytes(num_bytes) == min(rings.cut.chunk(num_bytes), grown.slot_bytes)
        assert num_bytes <= grown.slot_bytes * rings.cut.pieces or grown.slot_bytes == rings.cut.most
        assert grown is rings or grown.slot_bytes < 2 * num_bytes


class Machine:
    """All ranks in one process, flags and slots in one array, every single operation in an order of our choice."""

    def __init__(self, rings: Rings) -> None:
        self.rings = rings
        self.flags = np.full(rings.num_flags, rings.first_epoch, dtype=np.uint32)
        self.slots = np.zeros((rings.num_ranks**2 * rings.num_slots, rings.slot_bytes), dtype=np.uint8)
        self.full: set[int] = set()
        self.planners = [Planner(rings, rank=r) for r in range(rings.num_ranks)]
        self.sides: list[deque[tuple[list[Round], np.ndarray, bool]]] = [
            deque() for _ in range(2 * rings.num_ranks)
        ]
        self.steps: list[Iterator[bool] | None] = [None] * len(self.sides)

    def start(
        self, rank: int, send: list[int], receive: list[int], sent: np.ndarray, got: np.ndarray
    ) -> None:
        exchange = self.planners[rank].plan(send=send, receive=receive)
        self.sides[2 * rank].append((exchange.outgoing, sent, True))
        self.sides[2 * rank + 1].append((exchange.incoming, got, False))

    def run(self, side: int) -> bool:
        """One operation of one side; False if it is blocked or has nothing to do."""
        if self.steps[side] is None:
            if not self.sides[side]:
                return False
            self.steps[side] = self._operations(*self.sides[side].popleft())
        moved = next(self.steps[side], None)  # type: ignore[arg-type]
        if moved is None:
            self.steps[side] = None
            return True
        return moved

    def idle(self) -> bool:
        return not any(self.sides) and not any(self.steps)

    def _operations(self, rounds: list[Round], data: np.ndarray, sends: bool) -> Iterator[bool]:
        for waits, moves, signals in rounds:
            for flag, value in waits:
                while not reached(int(self.flags[flag]), value):
                    yield False
                yield True
            for slot, first, size in moves:
                if sends:
                    assert slot not in self.full, "a slot was filled before it was empty"
                    self.full.add(slot)
                    self.slots[slot, :size] = data[first : first + size]
                else:
                    assert slot in self.full, "a slot was read before it was full"
                    self.full.remove(slot)
                    data[first : first + size] = self.slots[slot, :size]
                    self.slots[slot] = 0xEE
                yield True
            for flag, value in signals:
                self.flags[flag] = value
                yield True


def exchange_all(
    seed: int,
    *,
    num_ranks: int,
    num_slots: int,
    first_epoch: int,
    exchanges: list[list[list[int]]] | None = None,
) -> int:
    """Several exchanges of random sizes under way at once, every operation in random order; the number of them."""
    rng = random.Random(seed)
    rings = Rings(
        num_ranks, slot_bytes=64, num_slots=num_slots, first_epoch=first_epoch, cut=Cut(least=1, most=64)
    )
    machine = Machine(rings)
    # Some ranks run far ahead of others: each starts its exchanges when its turn comes.
    exchanges = exchanges or [random_sizes(rng, num_ranks) for _ in range(rng.randint(1, 5))]
    sent, got = {}, {}
    for number, sizes in enumerate(exchanges):
        for rank in range(num_ranks):
            sent[number, rank] = np.frombuffer(rng.randbytes(sum(sizes[rank])), dtype=np.uint8)
            got[number, rank] = np.full(sum(row[rank] for row in sizes), 0xAA, dtype=np.uint8)
    next_start = [0] * num_ranks
    lazy = [rng.random() < 0.3 for _ in range(2 * num_ranks)]
    num_operations = in_vain = 0
    while min(next_start) < len(exchanges) or not machine.idle():
        side = int(rng.random() * 2 * num_ranks)
        rank = side // 2
        if lazy[side] and rng.random() < 0.9:
            continue
        if next_start[rank] < len(exchanges) and rng.random() < 0.1:
            number, sizes = next_start[rank], exchanges[next_start[rank]]
            machine.start(
                rank, sizes[rank], [row[rank] for row in sizes], sent[number, rank], got[number, rank]
            )
            next_start[rank] += 1
        else:
            done = machine.run(side)
            num_operations, in_vain = num_operations + done, 0 if done else in_vain + 1
        if in_vain > 100 and min(next_start) == len(exchanges) and not machine.idle():
            progress = [machine.run(side) for side in range(2 * num_ranks)]
            assert any(progress), "everybody waits"
    for number, sizes in enumerate(exchanges):
        for rank in range(num_ranks):
            starts = [offsets(row) for row in sizes]
            for source in range(num_ranks):
                if source == rank:  # copied in place by the engine
                    continue
                wanted = sent[number, source][starts[source][rank] : starts[source][rank + 1]]
                first = offsets([row[rank] for row in sizes])[source]
                assert np.array_equal(got[number, rank][first : first + len(wanted)], wanted)
    assert not machine.full
    return num_operations


def random_sizes(rng: random.Random, num_ranks: int) -> list[list[int]]:
    most = rng.choice([0, 10, 64, 200, 400])
    return [[rng.choice([0, rng.randint(0, most)]) for _ in range(num_ranks)] for _ in range(num_ranks)]


def many_interleavings(seeds: range, num_ranks: int) -> int:
    done = 0
    for seed in seeds:
        rng = random.Random(seed)
        done += exchange_all(
            seed,
            num_ranks=num_ranks,
            num_slots=rng.choice([1, 2, 8]),
            first_epoch=rng.choice([0, 5, EPOCHS - 3, EPOCHS // 2 - 2]),
        )
    return done


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_interleaving_delivers_every_byte(num_ranks: int) -> None:
    done = many_interleavings(range(400 // num_ranks), num_ranks)
    assert done > 5_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_thousands_of_interleavings_deliver_every_byte(num_ranks: int) -> None:
    many_interleavings(range(1000, 2000), num_ranks)


SIZES = st.integers(2, 3).flatmap(
    lambda ranks: st.lists(
        st.lists(
            st.lists(st.one_of(st.just(0), st.integers(0, 300)), min_size=ranks, max_size=ranks),
            min_size=ranks,
            max_size=ranks,
        ),
        min_size=1,
        max_size=4,
    )
)


@examples(13, thorough=200)
@given(SIZES, st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
@example([[[0, 300], [65, 64]]], 0, 1)
def test_an_interleaving_of_sizes_hypothesis_thinks_of(
    sizes: list[list[list[int]]], seed: int, num_slots: int
) -> None:
    exchange_all(
        seed,
        num_ranks=len(sizes[0]),
        num_slots=num_slots,
        first_epoch=EPOCHS - 1,
        exchanges=sizes,
    )


def test_peers_without_bytes_are_signalled_and_not_copied() -> None:
    planner = Planner(Rings(3), rank=1)
    exchange = planner.plan(send=[0, 9, 4], receive=[0, 9, 0])
    (outgoing,), (incoming,) = exchange
    rings = planner.rings
    # Rotated: rank 2 first, then rank 0.
    assert [flag for flag, _ in outgoing.signals] == [rings.arrived(1, 2), rings.arrived(1, 0)]
    assert [move[1:] for move in outgoing.moves] == [(9, 4)]
    assert [flag for flag, _ in incoming.waits] == [rings.arrived(0, 1), rings.arrived(2, 1)]
    assert incoming.moves == []


def test_every_rank_is_the_first_target_of_one_other() -> None:
    firsts = []
    for rank in range(4):
        exchange = Planner(Rings(4), rank=rank).plan(send=[1] * 4, receive=[1] * 4)
        first = exchange.outgoing[0].moves[0][0] // (8 * 4)
        assert first == rank
        firsts.append(exchange.outgoing[0].moves[0][0] // 8 % 4)
    assert sorted(firsts) == [0, 1, 2, 3]
