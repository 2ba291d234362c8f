"""Tables that travel together come out as they went in, each aligned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.runtime.transfers import Parcel, pack, to_device, to_host, unpack
from tests.effort import examples

ARRAYS = st.lists(
    st.tuples(st.sampled_from([np.int64, np.int32, bool]), st.integers(0, 9), st.integers(1, 5)), max_size=5
)


@examples(20, thorough=200)
@given(ARRAYS)
def test_arrays_come_back_from_one_copy(shapes):
    draw = np.random.default_rng(0)
    arrays = tuple(draw.integers(0, 2, (rows, columns)).astype(kind) for kind, rows, columns in shapes)
    back = unpack(pack(arrays, pinned=False).clone(), arrays)
    for x, got, plain in zip(arrays, back, to_device(*arrays, device=torch.device("cpu"))):
        assert np.array_equal(got.numpy(), x)
        assert got.numpy().dtype == x.dtype
        assert got.storage_offset() * got.element_size() % 16 == 0
        assert torch.equal(plain, got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_come_back_whole():
    values = torch.arange(100_000, device="cuda")
    torch.cuda._sleep(10_000_000)
    assert torch.equal(to_host(values * 2), torch.arange(100_000) * 2)


def test_what_is_on_the_cpu_stays_there():
    values = torch.arange(5)
    assert to_host(values) is values


@examples(20, thorough=200)
@given(
    lists=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1), max_size=4),
    more=st.integers(-40, 40),
)
def test_a_parcel_names_all_that_was_filled_into_it(lists, more):
    """Also where it fits exactly: what has no name would be left out when the next parcel is filled."""

    def filled(room):
        parcel = Parcel(torch.device("cpu"), room=max(0, room))
        for n, shapes in enumerate(lists):
            parcel.fill(n, shapes, lambda arrays: [x.fill(1) for x in arrays])
        return parcel

    large = filled(10_000)
    parcel = filled(large.filled + more)
    assert parcel.wanted == large.filled
    assert large.filled_in == list(enumerate(lists))
    if len(parcel.tensors()) == 1:
        assert parcel.filled_in == large.filled_in
        assert parcel.filled == large.filled
