"""A user's call of `ZeroCollisionMap.insert` costs little more than the loop inside it, whose rate results show."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from freescale.embedding import ZeroCollisionMap
from freescale.kernels.id_table.api import claim
from freescale.kernels.id_table.layout import EMPTY, make_layout

NUM_IDS = 200_000
NUM_ROWS = NUM_IDS * 4 // 3


def cpu_time(work: Callable[[], object]) -> float:
    """Of this thread: what other programs do is not counted."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def test_the_call_takes_at_most_twice_as_long_as_its_loop() -> None:
    """1.0 to 1.1 times on a quiet machine. Before: 2.8 to 4.6 times, as overflow rows were worked out for every id."""
    ids = torch.randint(2**62, (NUM_IDS,), generator=torch.Generator().manual_seed(1))
    layout = make_layout(NUM_ROWS, max_probe=128)
    loop, call = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(7):  # in turns, and the best of each: caches are shared with other programs
            identity = torch.full((layout.held_rows,), EMPTY)
            loop.append(cpu_time(partial(claim, ids, identity, None, layout)))
            call.append(cpu_time(partial(ZeroCollisionMap(NUM_ROWS, max_probe=128).insert, ids)))
    finally:
        torch.set_num_threads(threads)
    assert min(call) < 2 * min(loop), (loop, call)
