"""Id maps: one-to-one and spread out, or any id to any row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import DirectMap, HashMap, NumberedMap, needs_numbers
from freescale.errors import DataError


@settings(deadline=None)
@given(st.integers(1, 3000))
def test_direct_map_is_one_to_one(num_rows):
    rows = DirectMap(num_rows).rows(torch.arange(num_rows))
    assert sorted(rows.tolist()) == list(range(num_rows))


@settings(deadline=None)
@given(num_rows=st.integers(2**20, 2**31 - 1), ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=30))
def test_direct_map_of_a_large_table_stays_inside_and_apart(num_rows, ids):
    unique = sorted({i % num_rows for i in ids} | {0, num_rows - 1})
    rows = DirectMap(num_rows).rows(torch.tensor(unique)).tolist()
    assert len(set(rows)) == len(unique)
    assert min(rows) >= 0
    assert max(rows) < num_rows


@pytest.mark.parametrize("num_rows", [3417, 10_000, 65_536, 99_991])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_run_of_ids_is_spread_evenly_over_the_blocks(num_rows, num_ranks):
    for first in (0, 17, num_rows // 2):
        rows = DirectMap(num_rows).rows(torch.arange(first, first + 1000)).numpy()
        counts = np.bincount(rows * num_ranks // num_rows, minlength=num_ranks)
        assert abs(counts - 1000 / num_ranks).max() < 0.1 * 1000 / num_ranks


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_direct_map_names_the_id_outside_the_table(bad):
    with pytest.raises(DataError, match=f"id {bad}") as caught:
        DirectMap(10).rows(torch.tensor([[0, 9], [bad, 3]]))
    assert "0 to 9" in str(caught.value)


@pytest.mark.parametrize("num_rows", [0, -3, 2**31])
def test_direct_map_refuses_sizes_it_cannot_hold(num_rows):
    with pytest.raises(DataError, match="id_map=hash"):
        DirectMap(num_rows)


@pytest.mark.parametrize("make", [DirectMap, HashMap])
def test_shape_is_kept_and_narrow_ids_give_the_same_rows(make):
    id_map = make(2**31 - 1)
    ids = torch.tensor([[5, 2**30], [2**31 - 2, 77]])
    rows = id_map.rows(ids)
    assert rows.shape == (2, 2)
    assert rows.dtype == torch.int64
    assert torch.equal(id_map.rows(ids.int()), rows)
    assert id_map.rows(ids[:0]).shape == (0, 2)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_hash_map_takes_any_id_and_stays_inside(num_rows, ids):
    rows = HashMap(num_rows).rows(torch.tensor(ids))
    assert bool(((rows >= 0) & (rows < num_rows)).all())
    assert rows.tolist() == [int(HashMap(num_rows).rows(torch.tensor(i))) for i in ids]


def test_hash_map_is_uniform_and_its_seed_picks_another_hash():
    ids = torch.arange(0, 10**7, 100)
    counts = np.bincount(HashMap(1000).rows(ids).numpy(), minlength=1000)
    chi2 = ((counts - 100) ** 2 / 100).sum()
    assert abs(chi2 - 999) < 6 * np.sqrt(2 * 999)
    same = HashMap(1000, seed=1).rows(ids) == HashMap(1000).rows(ids)
    assert float(same.double().mean()) < 0.01


def test_ids_that_are_no_numbers_from_0_on_are_numbered():
    ids = np.array([-(2**63), -5, 0, 7, 2**63 - 1])
    numbered = NumberedMap(ids, DirectMap(5))
    rows = numbered.rows(torch.from_numpy(ids))
    assert sorted(rows.tolist()) == list(range(5))
    asked = torch.tensor([[7, -5], [7, 0]])
    assert numbered.rows(asked).tolist() == [[rows[3], rows[1]], [rows[3], rows[2]]]
    with pytest.raises(DataError, match=r"(?s)an id has no row.*id 6.*zero_collision"):
        numbered.rows(torch.tensor([7, 6]))


@pytest.mark.parametrize(
    ("ids", "rows", "needed"),
    [
        ([0, 5, 10**6], None, False),
        ([-1, 5], None, True),
        ([-1, 5], 10, True),
        ([0, 2**31 - 1], None, True),
        ([0, 2**24], None, True),
        ([0, 2**24], 2**25, False),
    ],
)
def test_ids_are_numbered_where_a_row_for_each_number_would_be_impossible_or_a_waste(ids, rows, needed):
    assert needs_numbers(np.array(ids), rows=rows) == needed
