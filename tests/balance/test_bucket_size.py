"""Buckets of dense gradients: about eight, none tiny, none larger than DDP's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance.bucket_size import BUCKETS, LEAST_BYTES, MOST_BYTES, bucket_bytes
from freescale.sim.inputs.workload import Workload


@given(st.integers(0, 1 << 34))
def test_a_bucket_is_a_whole_number_of_mib_within_its_bounds(dense):
    size = bucket_bytes(dense)
    assert size % (1 << 20) == 0
    assert LEAST_BYTES <= size <= MOST_BYTES
    if LEAST_BYTES < size < MOST_BYTES:
        assert size * BUCKETS >= dense > (size - (1 << 20)) * BUCKETS


@pytest.mark.parametrize(("dense", "mib"), [(0, 2), (21 << 20, 3), (42e6, 6), (1 << 30, 25)])
def test_some_models(dense, mib):
    assert bucket_bytes(dense) == mib << 20


def test_the_simulator_cuts_as_training_does():
    assert Workload(dense_bytes=42e6).bucket_bytes == 6 << 20
    assert Workload(dense_bytes=42e6, bucket_bytes=5e6).bucket_bytes == 5e6
