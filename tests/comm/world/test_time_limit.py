"""Calls of libraries that may never come back: opening NCCL's communicators, closing process groups."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm.world import joining
from freescale.comm.world.time_limit import within
from freescale.comm.world.watch import Watch
from freescale.errors import TrainingError


@pytest.fixture
def stuck():
    """A call that does not come back before the test is over."""
    over = threading.Event()
    yield lambda *args, **options: over.wait(10.0)
    over.set()


def test_work_in_time_raises_what_it_raises(stuck):
    assert within(5.0, lambda: None, name="nothing")
    assert not within(0.05, stuck, name="too long")
    with pytest.raises(ValueError, match="broken"):
        within(5.0, lambda: (_ for _ in ()).throw(ValueError("broken")).__next__(), name="fails")


def test_a_run_that_is_over_ends_though_a_rank_does_not_close_its_groups(stuck, monkeypatch, capfd):
    monkeypatch.setattr(dist, "destroy_process_group", stuck)
    monkeypatch.setattr(joining, "_CLOSE_S", 0.05, raising=False)
    began = time.monotonic()
    joining._part(Watch())
    assert time.monotonic() - began < 5.0
    assert "process groups of this run were not closed" in capfd.readouterr().err


def test_a_communicator_that_is_never_opened_is_an_error(stuck, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", stuck)
    monkeypatch.setattr(joining, "_TRY_S", 0.05)
    monkeypatch.setattr(joining, "virtual_gpus_here", lambda: 4)
    began = time.monotonic()
    with pytest.raises(TrainingError, match="does not come to an end between 4 ranks"):
        joining._try_nccl(torch.device("cpu"))
    assert time.monotonic() - began < 5.0
