"""Zeros at the pads of a batch, and nowhere else: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import LayoutRoom, SequenceLayout
from freescale.kernels.attention import clear_pads, pads, token_room
from tests.effort import examples

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def work_of(starts, room=None):
    return SequenceLayout(torch.tensor(starts), device=DEVICE, room=room).work


@examples(8, thorough=80)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    num_pads=st.sampled_from([0, 1, 7, 300]),
    row=st.sampled_from([(), (1,), (24,), (2, 65)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_pads_become_zeros_and_nothing_else_does(lengths, num_pads, row, dtype):
    tokens = sum(lengths)
    work = work_of([0, *accumulate(lengths)], LayoutRoom(tokens + num_pads, 64))
    values = torch.full((tokens + num_pads, *row), torch.nan, dtype=dtype, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pads, "_SHAPE", {"PROGRAMS": 3, "BLOCK": 16, "num_warps": 4})
        clear_pads(values, work)
    assert values[:tokens].isnan().all()
    assert (values[tokens:] == 0).all()


def test_the_device_says_where_pads_begin():
    """A recorded step meets other batches of its size: their offsets were copied over those of the first."""
    work = work_of([0, 3, 5], LayoutRoom(9, 8))
    work.device_offsets.copy_(torch.tensor([0, 1, 8]))
    values = torch.ones(9, 2, device=DEVICE)
    clear_pads(values, work)
    assert values[:, 0].tolist() == [1] * 8 + [0]


def test_without_room_for_pads_nothing_is_started(monkeypatch):
    monkeypatch.setattr(pads, "start_kernel", None)
    work = work_of([0, 3])
    assert token_room(torch.empty(0), 3, 2, work=work, dtype=torch.float64).shape == (3, 2)
    padded = work_of([0, 3], LayoutRoom(4, 8))
    assert token_room(torch.empty(0), 4, 0, work=padded).shape == (4, 0)
