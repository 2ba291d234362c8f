"""What is left of a GPU, for a process that may have a part of it only."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.cuda._utils import _get_device_index

from freescale.kernels.runtime.memory import free_bytes


@pytest.mark.parametrize(
    ("fraction", "free", "left"),
    [(1.0, 40, 44), (0.125, 40, 9), (0.125, 2, 6), (0.05, 40, 4)],
    ids=["all of it", "a share", "others took it", "a share that is used up"],
)
def test_a_rank_has_what_its_share_of_a_gpu_leaves(fraction, free, left, monkeypatch):
    """Eight ranks of one GPU saw all of its memory, recorded steps, and ran out of their part."""
    made = {"mem_get_info": (free, 140), "memory_reserved": 12, "memory_allocated": 8}
    made["get_per_process_memory_fraction"] = fraction
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def asked(device, value):
        _get_device_index(device)  # as the real ones do: without a number there is an error
        return value

    for name, value in made.items():
        monkeypatch.setattr(torch.cuda, name, partial(asked, value=value))
    for name in ("cuda", "cuda:0"):
        assert free_bytes(torch.device(name)) == left
