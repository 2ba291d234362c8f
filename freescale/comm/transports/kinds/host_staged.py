"""host_staged: rows travel through memory of the host, which all ranks of a machine share.

    CPU ranks, one machine         the ranks copy themselves (rings/cpu_engine.py)
    GPU ranks, one machine         pinned copies down and up, by copy engines; flags by the streams
    GPU ranks, several machines    pinned copies down, gloo in one thread, pinned copies up: experimental,
                                   nobody has run it on two machines with GPUs (host_staged_multinode.py)

No kernel runs for rows that travel. Those that stay on their rank are copied in place, which is a kernel; staged as
well, they took a link that 8 ranks share 8 % of a step longer.
"""

from __future__ import annotations

import torch.distributed as dist

from freescale.comm import Transport, own_group
from freescale.comm.rings import (
    CudaDriver,
    Driver,
    PinnedFlags,
    Rings,
    RingTransport,
    SharedRings,
    StreamEngine,
    index_of,
    missing_driver,
    rings_of_gpus,
    share_memory,
    together,
)
from freescale.comm.transports.host_staged_multinode import MultinodeStagedTransport
from freescale.comm.world import GroupFacts, other_processes
from freescale.registry import register


class HostMappedRings:
    """Slots and flags in shared memory that this rank's GPU reaches.

    Args:
        flags: those of the memory, at whose beginning they lie.
    """

    def __init__(self, flags: PinnedFlags) -> None:
        self.rings, self.flags = flags.rings, flags.places
        self.slots = [
            flags.begins + self.rings.slot_offset(number) for number in range(self.rings.total_slots)
        ]
        self.read, self.write, self.close = flags.read, flags.write, flags.close


@register("transport", "host_staged")
class HostStagedRoute:
    """Ranks of one machine, and (experimental) GPU ranks of several."""

    keeps_group = False

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        """What keeps a group from using it."""
        if facts.on_gpu:
            return missing_driver()
        return (
            None
            if facts.one_machine
            else "CPU ranks stage in shared memory, and these are not on one Linux machine"
        )

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
        if facts.on_gpu and not facts.one_machine:
            return MultinodeStagedTransport(control, driver=driver or CudaDriver(), device=facts.device)
        processes = other_processes(facts)
        if not facts.on_gpu:
            cpu = SharedRings(control, processes=processes, timeout_s=timeout_s)
            return RingTransport("host_staged", cpu, control=control, processes=processes, rings=rings)
        # Copies to or from several ranks by one call: pieces of 0.5 MiB moved 45 GB/s instead of 37 on an H200.
        driver, gpu = driver or CudaDriver(batched=True), index_of(facts.device)

        def open_rings(rings: Rings) -> HostMappedRings:
            memory = share_memory(control, rings, timeout_s=timeout_s)
            return together(
                control,
                lambda: HostMappedRings(PinnedFlags(rings, memory, driver, gpu)),
                what="memory cannot be pinned",
            )

        engine = StreamEngine(
            open_rings,
            driver=driver,
            device=facts.device,
            rank=facts.rank,
            processes=processes,
            timeout_s=timeout_s,
            engine="copy engines to and from pinned memory",
            sm_free=True,
            reason="pinned copies and stream memory operations run beside the SMs; rows that stay are copied in place",
        )
        rings = rings or rings_of_gpus(dist.get_world_size(control))
        return RingTransport("host_staged", engine, control=control, processes=processes, rings=rings)
