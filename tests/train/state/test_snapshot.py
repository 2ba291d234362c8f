"""Memory that a checkpoint is copied to: pinned as long as anybody holds it, and not a moment longer."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from freescale.train.state.snapshot import Staging

GPU = torch.device("cuda", 0)


class Driver:
    """Notes which addresses it was told to own."""

    def __init__(self, result: int = 0) -> None:
        self.owns: list[int] = []
        self.result = result

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        """Own some memory, or refuse."""
        if not self.result:
            self.owns.append(address)
        return self.result

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Own it no longer."""
        self.owns.remove(address)
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def test_the_driver_lets_go_of_memory_before_it_is_given_back(driver):
    staging = Staging()
    part = staging.room(100, device=GPU)[:10].numpy()
    assert len(driver.owns) == 1
    larger = staging.room(100_000, device=GPU)
    assert len(driver.owns) == 2, "bytes of the smaller room are still read"
    del part
    assert driver.owns == [larger.data_ptr()]
    del staging, larger
    assert driver.owns == []


def test_memory_that_the_driver_refused_is_not_taken_from_it(driver):
    driver.result = 712
    staging = Staging()
    assert len(staging.room(100, device=GPU)) == 100
    del staging
    assert driver.owns == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_addresses_are_free_for_the_next_run():
    for size in (1 << 20, 3 << 20, 2 << 20) * 4:
        staging = Staging()
        room = staging.room(size, device=torch.device("cuda"))
        values = torch.arange(size // 8, device="cuda")
        room.view(torch.int64).copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(room.view(torch.int64), torch.arange(size // 8))
        del staging, room
