"""copy_engine: rows are copied straight into windows of other GPUs' memory; flags lie in memory of the host.

Every rank has a window (torch's symmetric memory) with a ring of slots for each source; all other ranks map it. Between
two GPUs such a copy is a copy engine's. The last copy, out of the window into the tensor, stays inside a GPU, and so
does all of it when ranks share one: there a copy is a kernel, under MPS, too (it does not end while another holds every
SM: benchmarks/sm_free.py). So `sm_free` is False and says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from freescale.comm import Transport, own_group
from freescale.comm.rings import (
    CudaDriver,
    Driver,
    DriverInside,
    PinnedFlags,
    Rings,
    RingTransport,
    StreamEngine,
    index_of,
    missing_driver,
    rings_of_gpus,
    share_memory,
    together,
)
from freescale.comm.world import GroupFacts, other_processes
from freescale.errors import TrainingError
from freescale.registry import register

# torch refuses ranks that share a GPU unless it is told that this is meant.
_SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


_SHARED = "ranks share a GPU, and copies inside it are kernels"
_LAST = "copy engines carry rows from GPU to GPU, but the last copy, out of the window, is a kernel"


class GpuMappedRings:
    """Slots in the windows of all ranks, as this one maps them, and flags in shared memory of the host.

    Args:
        rings: what they hold together.
        flags: theirs.
        addresses: where each rank's window begins, for this rank's GPU.
        own: this rank's window.
    """

    def __init__(
        self, rings: Rings, flags: PinnedFlags, *, addresses: Sequence[int], own: torch.Tensor
    ) -> None:
        self.rings, self.flags, self._own = rings, flags.places, own
        ranks = range(rings.num_ranks)
        self.slots = [
            addresses[target] + (source * rings.num_slots + place) * rings.slot_bytes
            for source in ranks
            for target in ranks
            for place in range(rings.num_slots)
        ]
        self.read, self.write, self.close = flags.read, flags.write, flags.close


def symmetric_bytes(rings: Rings) -> int:
    """Size of a window: the slots of all rings that end at one rank."""
    return rings.num_ranks * rings.num_slots * rings.slot_bytes


@register("transport", "copy_engine")
class CopyEngineRoute:
    """GPU ranks of one machine whose GPUs map each other's memory, or that share one."""

    keeps_group = False

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        """What keeps a group from using it."""
        if not facts.on_gpu:
            return "it copies between GPUs, and these ranks compute on CPUs"
        if not facts.one_machine:
            return "the ranks are on several machines, or see nothing of each other's processes"
        apart = facts.unreachable
        if apart is not None:
            return "the GPU of rank {} cannot map memory of the GPU of rank {}".format(*apart)
        return missing_driver()

    @staticmethod
    def build(
        group: dist.ProcessGroup,
        facts: GroupFacts,
        timeout_s: float,
        *,
        rings: Rings | None = None,
        driver: Driver | None = None,
    ) -> Transport:
        """Open it for a group; every rank must call it."""
        control = own_group(group, backend="gloo", timeout_s=timeout_s)
        gpu, processes = index_of(facts.device), other_processes(facts)
        if facts.shared_gpu:
            os.environ.setdefault(_SHARED_GPU, "1")
        reason = _SHARED if facts.shared_gpu else _LAST
        where = "the GPU that the ranks share" if facts.one_gpu else "other GPUs"
        taking = driver
        if driver is None:
            driver, taking, how = _drivers_of(facts, gpu)
            reason += how

        def open_rings(rings: Rings) -> GpuMappedRings:
            own, addresses = together(
                control,
                lambda: map_symmetric_memory(rings, control, facts.device),
                what="windows cannot be mapped",
            )
            alone = rings.flags_alone()
            memory = share_memory(control, alone, timeout_s=timeout_s)
            flags = together(
                control, lambda: PinnedFlags(alone, memory, driver, gpu), what="memory cannot be pinned"
            )
            return GpuMappedRings(rings, flags, addresses=addresses, own=own)

        engine = StreamEngine(
            open_rings,
            driver=driver,
            device=facts.device,
            rank=facts.rank,
            processes=processes,
            timeout_s=timeout_s,
            engine=f"copies into mapped memory of {where}",
            sm_free=False,
            reason=reason,
            taking=taking,
        )
        rings = rings or rings_of_gpus(dist.get_world_size(control))
        return RingTransport("copy_engine", engine, control=control, processes=processes, rings=rings)


def _drivers_of(facts: GroupFacts, gpu: int) -> tuple[Driver, Driver, str]:
    """What queues copies out of tensors, what those into them, inside this GPU, and what is to be said of it."""
    between = CudaDriver(batched=True)
    try:
        inside = DriverInside(gpu)
    except TrainingError as error:
        return between, between, f", one for each of them ({error.what}: {error.got})"
    if facts.one_gpu:
        return inside, inside, ", one for all of a round"
    return between, inside, ", one for all of a round that leave windows"


def map_symmetric_memory(
    rings: Rings, control: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """A window of this rank, and the addresses of all windows."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    # Not `symmetric.empty`, which since torch 2.11 may answer from a pool: what lies where would follow from when each
    # rank let go of its last window. An allocation of its own begins at the same place on every rank.
    own = _SymmetricMemory.empty_strided_p2p((symmetric_bytes(rings),), (1,), torch.uint8, device)
    handle: Any = symmetric.rendezvous(own, control)
    # All windows lie at the same offset of what was mapped.
    addresses = [int(address) for address in handle.buffer_ptrs]
    offset = own.data_ptr() - addresses[handle.rank]
    return own, [address + offset for address in addresses]
