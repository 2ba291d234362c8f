"""Compiled CPU loops that write the lists of a padded batch straight to where they travel from.

Import this module where it is used. The same in numpy, a hundred small calls for each batch, keeps the interpreter from
the training thread for longer than a step of a small model takes; these loops hold no lock. Lists have room for more
than a batch has (`room.LayoutRoom`): the rest is filled with zeros, which stand for a sequence without tokens. What
they hold says `schedule`, whose numpy is the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, int64, njit, void
from numpy.typing import NDArray

Ints = NDArray[Any]
ROW = int64[::1]
TABLE = int64[:, ::1]


@njit(void(ROW, ROW), cache=True, nogil=True, error_model="numpy")
def longest_first(starts: Ints, order: Ints) -> None:
    """Numbers of the sequences, longest first, equal ones as they stand."""
    longest = 0
    for b in range(len(order)):
        longest = max(longest, starts[b + 1] - starts[b])
    places = np.zeros(longest + 2, np.int64)
    for b in range(len(order)):
        places[longest - (starts[b + 1] - starts[b]) + 1] += 1
    for length in range(longest + 1):
        places[length + 1] += places[length]
    for b in range(len(order)):
        rank = longest - (starts[b + 1] - starts[b])
        order[places[rank]] = b
        places[rank] += 1


@njit(void(ROW, ROW, TABLE), cache=True, nogil=True, error_model="numpy")
def by_length(starts: Ints, order: Ints, table: Ints) -> None:
    """Rows of `ByLength`: sequences, their first tokens, and how many reach each position."""
    table[:] = 0
    for rank in range(len(order)):
        b = order[rank]
        table[0, rank], table[1, rank] = b, starts[b]
    for rank in range(len(order)):
        b = order[rank]
        following = starts[order[rank + 1] + 1] - starts[order[rank + 1]] if rank + 1 < len(order) else 0
        # Sequences up to this one are longer than the next.
        for position in range(following, starts[b + 1] - starts[b]):
            table[2, position] = rank + 1


@njit(void(ROW, int64, TABLE), cache=True, nogil=True, error_model="numpy")
def token_tiles(starts: Ints, block: int, table: Ints) -> None:
    """Sequence, first token and number of tokens of each run of up to `block` tokens of a sequence."""
    n = 0
    for b in range(len(starts) - 1):
        for first in range(starts[b], starts[b + 1], block):
            table[n, 0], table[n, 1], table[n, 2] = b, first, min(block, starts[b + 1] - first)
            n += 1
    table[n:] = 0


@njit(void(ROW, int64, ROW), cache=True, nogil=True, error_model="numpy")
def blocks_before(starts: Ints, size: int, before: Ints) -> None:
    """Square blocks of the bias store before those of each sequence."""
    total = 0
    for b in range(len(starts) - 1):
        before[b] = total
        blocks = (starts[b + 1] - starts[b] + size - 1) // size
        total += blocks * (blocks + 1) // 2


@njit(void(ROW, ROW, ROW, boolean, int64, TABLE), cache=True, nogil=True, error_model="numpy")
def tiles(starts: Ints, order: Ints, before: Ints, queries: bool, block: int, table: Ints) -> None:
    """The work list of one side: queries at the end of a sequence and keys at its start come first."""
    n = 0
    table[:] = 0
    for rank in range(len(order)):
        b = order[rank]
        length = starts[b + 1] - starts[b]
        count = (length + block - 1) // block
        for number in range(count):
            table[n, 0], table[n, 1], table[n, 6], table[n, 7] = starts[b], length, length, before[b]
            table[n, 2] = count - 1 - number if queries else number
            n += 1


@njit(void(ROW, int64, TABLE, TABLE, TABLE), cache=True, nogil=True, error_model="numpy")
def bias_store(starts: Ints, size: int, blocks: Ints, rows: Ints, pieces: Ints) -> None:
    """The tables of a `BiasStore` whose rows see what came before."""
    n = piece = 0
    blocks[:] = 0
    rows[:] = 0
    for b in range(len(starts) - 1):
        length = starts[b + 1] - starts[b]
        for number in range((length + size - 1) // size):
            blocks[n, 0], blocks[n, 1] = piece * size * size, (number + 1) * size
            rows[n, 0], rows[n, 1], rows[n, 2] = starts[b], length, number * size
            for column in range(number + 1):
                pieces[piece, 0], pieces[piece, 1] = n, column + 1
                piece += 1
            n += 1
    pieces[piece:] = 0


@njit(
    void(ROW, ROW, int64, int64, int64, int64, TABLE, ROW, ROW, ROW),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def bias_plan(
    starts: Ints,
    before: Ints,
    size: int,
    programs: int,
    chunk: int,
    buckets: int,
    runs: Ints,
    members: Ints,
    chunk_starts: Ints,
    group_starts: Ints,
) -> None:
    """Runs of square tiles by diagonal, and who adds up which of their rows of sums, as `BiasPlan` says.

    Rows of sums: of each run two by distance, then as many as `buckets`. There is a group for each diagonal and one
    more, then those of the buckets; `group_starts` has their number.
    """
    num_groups = len(group_starts) - 1 - buckets
    total = 0
    for b in range(len(starts) - 1):
        count = (starts[b + 1] - starts[b] + size - 1) // size
        total += count * (count + 1) // 2
    limit = max(1, (total + programs - 1) // programs)
    # How many runs each diagonal has, and where they begin.
    first_run = np.zeros(num_groups + 1, np.int64)
    for b in range(len(starts) - 1):
        count = (starts[b + 1] - starts[b] + size - 1) // size
        for diagonal in range(count):
            first_run[diagonal + 1] += (count - diagonal + limit - 1) // limit
    for diagonal in range(num_groups):
        first_run[diagonal + 1] += first_run[diagonal]
    num_runs = first_run[num_groups]
    place = first_run.copy()
    for b in range(len(starts) - 1):
        length = starts[b + 1] - starts[b]
        count = (length + size - 1) // size
        for diagonal in range(count):
            for first in range(0, count - diagonal, limit):
                n = place[diagonal]
                place[diagonal] += 1
                runs[n, 0], runs[n, 1], runs[n, 6], runs[n, 7] = starts[b], length, length, before[b]
                runs[n, 2], runs[n, 3] = diagonal + first, first
                runs[n, 4], runs[n, 5] = min(limit, count - diagonal - first), 0
    runs[num_runs:] = 0
    rows = 2 + buckets
    num_chunks = member = 0
    for group in range(num_groups):
        group_starts[group] = num_chunks
        begin = member
        if group:
            for n in range(first_run[group - 1], first_run[group]):
                members[member] = n * rows + 1
                member += 1
        for n in range(first_run[group], first_run[group + 1]):
            members[member] = n * rows
            member += 1
        for at in range(begin, member, chunk):
            chunk_starts[num_chunks] = at
            num_chunks += 1
    most = len(runs)
    # As many chunks as distances may take at most; those without rows belong to the last group, and add nothing.
    room = (2 * most + chunk - 1) // chunk + num_groups
    for n in range(num_chunks, room):
        chunk_starts[n] = member
    num_chunks = room
    for bucket in range(buckets):
        group_starts[num_groups + bucket] = num_chunks
        begin = member
        for n in range(num_runs):
            members[member] = n * rows + 2 + bucket
            member += 1
        for at in range(begin, member, chunk):
            chunk_starts[num_chunks] = at
            num_chunks += 1
    group_starts[num_groups + buckets] = num_chunks
    chunk_starts[num_chunks:] = member
    members[member:] = 0
