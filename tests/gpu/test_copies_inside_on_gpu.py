"""Copies inside a GPU: all bytes, whatever they lie at; they are kernels, and copies to the host are not."""

from __future__ import annotations

import random
import time

import pytest
import torch

from freescale.comm.rings.copies_inside import MOST_COPIES, WORDS, DriverInside
from freescale.prove.hog import Hog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("word", WORDS)
def test_every_byte_arrives_and_nothing_else_changes(word: int) -> None:
    torch.zeros(1, device=GPU)
    driver, rng = DriverInside(0), random.Random(word)
    source = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, device=GPU)
    for most, count in ((0, 2), (40, MOST_COPIES + 5), (20_000, 40), (6 << 20, 7)):
        target, wanted = torch.zeros_like(source), torch.zeros_like(source)
        copies, place = [], 0
        for _ in range(count):
            size = word * rng.randint(0, most // word)
            begin = word * rng.randint(0, (source.numel() - size) // word)
            place += word * rng.randint(0, 3)
            wanted[place : place + size] = source[begin : begin + size]
            copies.append((target.data_ptr() + place, source.data_ptr() + begin, size))
            place += size
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        driver.copy(copies, stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(target, wanted), (word, most)


def test_a_copy_inside_the_gpu_waits_for_sms_and_one_to_the_host_does_not() -> None:
    """The first hog left threads free, and let the driver's own kernels in: copies seemed to take no SM."""
    rows, there = (torch.ones(1 << 20, device=GPU) for _ in range(2))
    host, stream = torch.zeros(1 << 20, pin_memory=True), torch.cuda.Stream(priority=-1)
    for target in (there, host):
        target.copy_(rows)
    hog = Hog(GPU)
    torch.cuda.synchronize()
    for target, ends in ((there, False), (host, True)):
        hog.hold()
        with torch.cuda.stream(stream):
            target.copy_(rows, non_blocking=True)
        deadline = time.monotonic() + 0.3
        while not stream.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen, held = stream.query(), hog.holds
        hog.release()
        torch.cuda.synchronize()
        assert (seen, held) == (ends, True)
