"""host_staged: rows travel through memory of the host, which all ranks of a machine share."""

from __future__ import annotations

import torch.distributed as dist

from freescale.comm.facts import GroupFacts
from freescale.comm.processes import other_processes
from freescale.comm.ring_transport import RingTransport
from freescale.comm.rings import Rings
from freescale.comm.shared_rings import SharedRings
from freescale.comm.transport import Transport, own_group


def why_not(facts: GroupFacts) -> str | None:
    """What keeps a group from using it."""
    if not facts.one_machine:
        return "the ranks are not on one Linux machine"
    return None


def build(
    group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float, *, rings: Rings | None = None
) -> Transport:
    """Open it for a group; every rank must call it."""
    control = own_group(group, backend="gloo", timeout_s=timeout_s)
    engine = SharedRings(control, processes=other_processes(facts), timeout_s=timeout_s)
    return RingTransport("host_staged", engine, control=control, rings=rings)
