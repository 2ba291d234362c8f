"""Hashes by compiled loops against operations on whole arrays."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding import HashMap
from freescale.embedding.hashing import keyed, start_of
from freescale.kernels.rows import crossed_ids, hash_loops, hashed_rows, reference, scattered_rows
from tests.effort import examples

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(INT64 | st.integers(0, 5), max_size=20)


@examples(40, 500)
@given(ids=IDS, seed=st.integers(-5, 1000), num_rows=st.integers(1, 2**40))
def test_rows_are_those_of_the_formula(ids: list[int], seed: int, num_rows: int) -> None:
    asked, start = torch.tensor(ids, dtype=torch.int64), start_of(seed)
    rows = hashed_rows(asked, start, num_rows)
    assert torch.equal(rows, reference.hashed_rows(asked, start, num_rows))
    assert torch.equal(rows, keyed(seed, asked).remainder(num_rows))
    assert torch.equal(rows, HashMap(num_rows, seed=seed).rows(asked))


def test_ids_of_any_shape_and_type_have_rows() -> None:
    ids = torch.arange(12, dtype=torch.int32).view(3, 4).T
    rows = HashMap(7).rows(ids)
    assert rows.shape == (4, 3)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, keyed(0, ids).remainder(7))


@examples(40, 500)
@given(ids=IDS | st.lists(st.integers(0, 99)), factor=st.integers(1, 200), num_rows=st.integers(1, 100))
def test_scattered_rows_are_those_of_the_formula(ids: list[int], factor: int, num_rows: int) -> None:
    asked = torch.tensor(ids, dtype=torch.int64)
    rows, bad = scattered_rows(asked, factor, num_rows)
    outside = [each for each in ids if not 0 <= each < num_rows]
    assert bad.tolist() == outside[:1] == reference.scattered_rows(asked, factor, num_rows)[1].tolist()
    if not outside:
        assert rows.tolist() == [each * factor % num_rows for each in ids]


NONE = -(2**63)


@examples(40, 500)
@given(
    members=st.integers(1, 4).flatmap(
        lambda num: st.lists(st.lists(INT64 | st.just(NONE), min_size=num, max_size=num), min_size=1)
    ),
    start=st.integers(0, 2**64 - 1),
)
def test_crosses_are_those_of_the_formula(members: list[list[int]], start: int) -> None:
    columns = list(np.ascontiguousarray(np.array(members, np.int64).T))
    truth = reference.crossed_ids(start, columns, NONE)
    assert hash_loops.crossed_ids(np.uint64(start), np.stack(columns), NONE).tolist() == truth.tolist()
    assert [each == NONE for each in truth] == [NONE in row for row in members]
    many = [np.tile(column, 600) for column in columns]
    assert crossed_ids(start, many, NONE).tolist() == truth.tolist() * 600


def test_a_cross_whose_hash_says_nothing_is_the_next_number() -> None:
    wanted = np.uint64(2**63)  # as a signed number: none
    ids = _unmixed(wanted) ^ (np.uint64(7) + hash_loops.GOLDEN)
    members = [np.array([ids], np.uint64).view(np.int64)]
    assert reference.crossed_ids(7, members, NONE).tolist() == [NONE + 1]
    assert hash_loops.crossed_ids(np.uint64(7), np.stack(members), NONE).tolist() == [NONE + 1]


def _unmixed(value: np.uint64) -> np.uint64:
    """What splitmix64's last steps give this value for."""
    number = int(value)
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = number
        for _ in range(64 // shift + 1):
            unshifted = number ^ (unshifted >> shift)
        number = unshifted * pow(factor, -1, 2**64) % 2**64
    return np.uint64(number)
