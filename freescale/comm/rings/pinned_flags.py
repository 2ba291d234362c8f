"""Flags in memory of the host that ranks share and their GPUs reach: streams write them and wait for them.

The CPU reads and writes them without CUDA. So the thread beside the streams is never kept from it by the driver's lock,
which a caller keeps that stands before a full queue.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from freescale.comm.rings.cuda_driver import Driver
from freescale.comm.rings.rounds import CACHE_LINE, FlagValue, Rings
from freescale.comm.rings.shared_memory import WORDS_A_FLAG, SharedMemory


class PinnedFlags:
    """The flags of rings, at the beginning of shared memory that this rank's GPU reaches.

    Args:
        rings: what the memory holds.
        memory: shared by the ranks.
        driver: pins it.
        device: number of the GPU.

    `begins` and `places` are addresses for the GPU: of the memory and of each flag.
    """

    def __init__(self, rings: Rings, memory: SharedMemory, driver: Driver, device: int) -> None:
        self.rings, self._memory = rings, memory
        self.begins = driver.register(memory.address, rings.total_bytes)
        self.places = [self.begins + CACHE_LINE * number for number in range(rings.num_flags)]
        # Whichever thread drops it last: the memory stays mapped until it is unpinned.
        self._release = weakref.finalize(self, _unpin, driver, device, memory)
        self._release.atexit = False  # the end of the process lets go of everything

    def read(self, flags: Sequence[int]) -> list[int]:
        """Values of flags, read by the CPU."""
        return [int(self._memory.words[WORDS_A_FLAG * flag]) for flag in flags]

    def write(self, flags: Sequence[FlagValue]) -> None:
        """Flags, written by the CPU."""
        for flag, value in flags:
            self._memory.words[WORDS_A_FLAG * flag] = value

    def close(self) -> None:
        """Let go of the memory; nothing is under way."""
        self._release()


def _unpin(driver: Driver, device: int, memory: SharedMemory) -> None:
    driver.use(device)
    driver.unregister(memory.address)
