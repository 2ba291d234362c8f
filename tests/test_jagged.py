"""Jagged pieces and ascending ids against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freescale.jagged import find_sorted, group_index, offsets_of, spans

SIZES = st.lists(st.integers(0, 5), max_size=12)
IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), max_size=12)
KINDS = st.sampled_from([np.int64, np.int32, np.uint8])


@given(sizes=SIZES, kind=KINDS)
@example(sizes=[], kind=np.int64)
@example(sizes=[0], kind=np.int64)
@example(sizes=[0, 0, 3, 0], kind=np.int32)
def test_offsets_are_running_sums(sizes, kind):
    found = offsets_of(np.array(sizes, kind))
    assert found.dtype == np.int64
    assert found.tolist() == [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    assert offsets_of(sizes).tolist() == found.tolist()


@pytest.mark.parametrize("flags", [[], [True], [True, False, True]])
def test_offsets_of_flags_count_them(flags):
    assert offsets_of(np.array(flags, bool)).tolist() == [sum(flags[:n]) for n in range(len(flags) + 1)]


@given(pieces=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5)), max_size=12), kind=KINDS)
@example(pieces=[], kind=np.int64)
@example(pieces=[(7, 0)], kind=np.int64)
@example(pieces=[(7, 0), (3, 2), (3, 2)], kind=np.int32)
def test_spans_are_one_range_a_piece(pieces, kind):
    starts, lengths = np.array(pieces, kind).reshape(-1, 2).T
    index, offsets = spans(starts, lengths)
    assert index.dtype == offsets.dtype == np.int64
    assert index.tolist() == [place for start, length in pieces for place in range(start, start + length)]
    assert offsets.tolist() == offsets_of(lengths).tolist()


@given(counts=SIZES, kind=st.sampled_from([np.int64, np.int32]))
@example(counts=[], kind=np.int64)
@example(counts=[0, 0], kind=np.int64)
@example(counts=[1], kind=np.int64)
def test_group_index_counts_inside_every_group(counts, kind):
    group, number = group_index(np.array(counts, kind))
    assert group.dtype == number.dtype == np.int64
    members = [(which, inside) for which, count in enumerate(counts) for inside in range(count)]
    assert list(zip(group.tolist(), number.tolist())) == members


@given(among=IDS, ids=IDS)
@example(among=[], ids=[])
@example(among=[], ids=[3, -1])
@example(among=[5], ids=[4, 5, 6])
@example(among=[3, 3], ids=[3])
def test_ids_are_found_where_they_stand(among, ids):
    among = sorted(among)
    index, found = find_sorted(np.array(among, np.int64), np.array(ids, np.int64))
    assert found.tolist() == [each in among for each in ids]
    assert index[found].tolist() == [among.index(each) for each in ids if each in among]
    # Whatever was asked for, what is not there may be looked up and thrown away.
    assert ((index >= 0) & (index < max(1, len(among)))).all()


def test_ids_may_have_any_shape():
    index, found = find_sorted(np.array([2, 4]), np.array([[4, 2], [1, 9]]))
    assert index.tolist() == [[1, 0], [0, 1]]
    assert found.tolist() == [[True, True], [False, False]]
    assert [each.shape for each in find_sorted(np.zeros(0, np.int64), np.zeros((2, 3)))] == [(2, 3)] * 2
