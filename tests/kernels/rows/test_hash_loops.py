"""Hashes by compiled loops against operations on whole arrays."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.features.cross_hash import _key_of, cross_ids
from freescale.data.negatives import mix64
from freescale.data.schema.vocabulary import NONE
from freescale.embedding import HashMap
from freescale.embedding.hashing import keyed, start_of
from freescale.kernels.rows import hashed_rows, reference
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
@given(st.lists(st.tuples(INT64, st.just(NONE) | INT64, st.integers(0, 3)), min_size=1, max_size=12))
def test_crosses_are_those_of_the_formula(rows: list[tuple[int, int, int]]) -> None:
    members = [np.array(column, dtype=np.int64) for column in zip(*rows)]
    with np.errstate(over="ignore"):
        wanted = np.full(len(rows), _key_of("taste"), dtype=np.uint64)
        for ids in members:
            wanted = mix64((wanted + np.uint64(0x9E3779B97F4A7C15)) ^ ids.view(np.uint64))
    signed = wanted.view(np.int64).copy()
    signed[signed == NONE] += 1
    signed[np.any([ids == NONE for ids in members], axis=0)] = NONE
    np.testing.assert_array_equal(cross_ids("taste", members), signed)
    hashes = np.full(len(rows), _key_of("taste"), dtype=np.uint64)
    for ids in members:
        reference.cross_member(hashes, ids, NONE, np.zeros(len(rows), dtype=np.int64))
    np.testing.assert_array_equal(hashes, wanted)
