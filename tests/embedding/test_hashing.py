"""Keyed numbers: the finaliser on plain integers, and the laws the numbers should follow."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data.negatives import mix64 as numpy_mix64
from freescale.embedding.hashing import keyed, keyed_normal, mix64

INT64 = st.integers(-(2**63), 2**63 - 1)
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def slow_mix(x: int) -> int:
    """The splitmix64 finaliser on unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@settings(deadline=None)
@given(st.lists(INT64, min_size=1))
def test_mix64_is_the_finaliser_of_splitmix64(values):
    wanted = [signed(slow_mix(x & MASK)) for x in values]
    assert mix64(torch.tensor(values)).tolist() == wanted
    assert numpy_mix64(np.array(values, np.int64).view(np.uint64)).view(np.int64).tolist() == wanted


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), keys=st.lists(INT64, min_size=1))
def test_keyed_is_a_pure_function_of_seed_and_key(seed, keys):
    salt = slow_mix((seed * GOLDEN + 1) & MASK)
    wanted = [signed(slow_mix((key * GOLDEN + salt) & MASK)) for key in keys]
    assert keyed(seed, torch.tensor(keys)).tolist() == wanted


def test_narrow_keys_give_the_numbers_of_wide_ones():
    keys = torch.arange(-5, 100)
    assert torch.equal(keyed(3, keys.int()), keyed(3, keys))
    assert torch.equal(keyed_normal(3, keys.int(), 4), keyed_normal(3, keys, 4))


def test_every_input_bit_flips_about_half_of_the_output_bits():
    keys = torch.arange(2000)
    for bit in (0, 1, 7, 31, 40, 62):
        changed = keyed(1, keys) ^ keyed(1, keys ^ (1 << bit))
        flipped = sum(int((changed >> n & 1).sum()) for n in range(64)) / (64 * len(keys))
        assert abs(flipped - 0.5) < 0.01


@settings(deadline=None)
@given(seed=st.integers(0, 99), rows=st.lists(st.integers(0, 2**40), max_size=9), dim=st.integers(1, 7))
def test_normals_of_a_row_do_not_depend_on_the_other_rows(seed, rows, dim):
    together = keyed_normal(seed, torch.tensor(rows, dtype=torch.int64), dim)
    assert together.shape == (len(rows), dim)
    for row, values in zip(rows, together):
        assert torch.equal(keyed_normal(seed, torch.tensor([row]), dim)[0], values)


def test_normals_have_the_moments_and_tails_of_the_normal_law():
    x = keyed_normal(5, torch.arange(100_000), 4).flatten()
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.var()) - 1) < 0.01
    assert abs(float((x**3).mean())) < 0.03
    assert abs(float((x**4).mean()) - 3) < 0.08
    for bound in (0.5, 1.0, 2.0, 3.0):
        assert abs(float((x.abs() < bound).double().mean()) - math.erf(bound / math.sqrt(2))) < 0.004


def test_neighbouring_rows_columns_and_seeds_are_uncorrelated():
    one, other = keyed_normal(5, torch.arange(20_000), 4), keyed_normal(6, torch.arange(20_000), 4)
    pairs = [(one, other), (one[1:], one[:-1]), (one[:, 0], one[:, 1]), (one[:, 0], one[:, 2])]
    for x, y in pairs:
        assert abs(float((x * y).mean())) < 0.03
