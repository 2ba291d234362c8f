"""What a batch asks for, cut in two by the compiled loops, against the reference."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.rows import reference, split_index, split_values, split_wanted
from tests.effort import examples

SIZES = st.lists(st.integers(0, 7), max_size=6)


def check_equal(ours, truth):
    """Values and types alike."""
    assert len(ours) == len(truth)
    for got, wanted in zip(ours, truth, strict=True):
        assert got.dtype == wanted.dtype == np.int64
        assert got.tolist() == wanted.tolist()


def drawn(data, count, least, most):
    """So many whole numbers from least to most."""
    return np.array(data.draw(st.lists(st.integers(least, most), min_size=count, max_size=count)), np.int64)


@examples(20, thorough=200)
@given(sizes=SIZES, data=st.data())
def test_positions_and_values_are_split_by_their_marks(sizes, data):
    count = sum(sizes)
    marks, values = drawn(data, count, 0, 1).astype(bool), drawn(data, count, 0, 99)
    check_equal(
        split_index(marks, np.array(sizes, np.int64)), reference.split_index(marks, np.array(sizes, np.int64))
    )
    check_equal(split_values(marks, values), reference.split_values(marks, values))


@examples(20, thorough=200)
@given(sizes=SIZES, num_unique=st.integers(1, 9), data=st.data())
def test_rows_wanted_go_where_their_unique_row_goes(sizes, num_unique, data):
    marks = drawn(data, num_unique, 0, 1).astype(bool)
    owned = drawn(data, num_unique, 0, 99)
    inverse = drawn(data, sum(sizes), 0, num_unique - 1)
    number = reference.split_values(marks, owned)[2]
    given_ = (marks, number, owned[inverse], inverse, np.array(sizes, np.int64))
    found = split_wanted(*given_)
    check_equal(found, reference.split_wanted(*given_))
    # Each row is found again by its number.
    assert owned[marks][found[1]].tolist() == found[0].tolist()
    assert owned[~marks][found[3]].tolist() == found[2].tolist()


def test_a_split_written_out():
    marks, sizes = np.array([True, False, False, True, True]), np.array([2, 0, 3])
    check_equal(
        reference.split_index(marks, sizes),
        [np.array(x, np.int64) for x in ([0, 3, 4], [1, 2], [1, 0, 2])],
    )
    check_equal(
        reference.split_values(marks, np.array([10, 11, 12, 13, 14])),
        [np.array(x, np.int64) for x in ([10, 13, 14], [11, 12], [0, 0, 1, 1, 2])],
    )
