"""Hashes by compiled loops against operations on whole arrays."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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
