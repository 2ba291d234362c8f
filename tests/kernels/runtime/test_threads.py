"""Every thread that may use a GPU uses that of its rank: a stand-in for CUDA tells which device each thread chose."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

import freescale
from freescale.comm.traffic import TrafficQueue
from freescale.comm.world.background_poll import poll_in_background
from freescale.kernels.runtime.threads import same_device, start_thread
from freescale.pipeline.loading.ahead import Ahead


@pytest.fixture
def devices(monkeypatch):
    """CUDA on the second of two GPUs, for the thread of the test; others begin on the first."""
    chosen = {threading.get_ident(): 1}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.get(threading.get_ident(), 0))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.__setitem__(threading.get_ident(), device)
    )
    return chosen


def test_the_communication_thread_uses_the_device_of_its_rank(devices):
    queue = TrafficQueue()
    assert queue.submit(torch.cuda.current_device).wait() == 1
    queue.close()


def test_the_thread_that_makes_batches_ready_uses_the_device_of_its_rank(devices):
    ahead = Ahead(lambda: torch.cuda.current_device(), device=torch.device("cpu"))
    try:
        assert next(iter(ahead)) == 1
    finally:
        ahead.close()


def test_a_thread_that_looks_now_and_then_uses_the_device_of_its_rank(devices):
    class Subject:
        pass

    subject, seen, looked = Subject(), [], threading.Event()

    def look(_: Subject) -> None:
        seen.append(torch.cuda.current_device())
        looked.set()

    poll_in_background(subject, look, every_s=0.001)
    assert looked.wait(10)
    assert seen[0] == 1


def test_without_cuda_nothing_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("there is none"))
    same_device()()
    done = threading.Event()
    start_thread(done.set).join(10)
    assert done.is_set()


def test_rooms_that_handle_tensors_start_threads_in_no_other_way():
    starts = re.compile(r"threading\.Thread\(|(?<!import )ThreadPoolExecutor\((?!.*same_device)")
    found = [
        str(path)
        for room in ("comm/rings", "comm/traffic", "comm/transports", "embedding", "pipeline")
        for path in (Path(freescale.__file__).parent / room).rglob("*.py")
        if starts.search(path.read_text())
    ]
    assert found == []
