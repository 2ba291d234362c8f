"""Open the connections of a rank's lanes; every rank must do it at the same moment of its program."""

from __future__ import annotations

import torch
import torch.distributed as dist

from freescale.comm import AloneTransport, Transport, backend_of, own_group
from freescale.comm.traffic.priority import Channels
from freescale.comm.transports import make_transport


def open_channels(
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    timeout_s: float = 600.0,
) -> Channels:
    """Connections between the ranks of a group that nothing else uses."""
    if group is None:
        alone = AloneTransport()
        return Channels(express=alone, bulk=alone, ids=alone)
    on_cpu = torch.device(device).type == "cpu"
    express, bulk = (open_channel(group, device=device, kind=kind, timeout_s=timeout_s) for _ in range(2))
    # Ids come from the CPU and are split there. A way of their own spares a GPU rank every wait for its device.
    ids = bulk if on_cpu else open_channel(group, kind=kind_for_ids(kind), timeout_s=timeout_s)
    return Channels(express=express, bulk=bulk, ids=ids)


def kind_for_ids(kind: str) -> str:
    """How ids travel between ranks that compute on GPUs: they are on the CPU, so routes of GPU tensors do not apply."""
    return kind if kind == "collective" else "auto"


def open_channel(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    timeout_s: float = 600.0,
) -> Transport:
    """One connection between the ranks of a group that nothing else uses."""
    device = str(device)
    transport = make_transport(group, device=device, kind=kind, timeout_s=timeout_s)
    if transport.name == "collective":
        transport = make_transport(
            own_group(group, backend=backend_of(group, device), timeout_s=timeout_s),
            device=device,
            kind=kind,
            timeout_s=timeout_s,
        )
    # Connect now, in one order on all ranks; later it would be whichever thread comes first.
    transport.exchange_counts(torch.zeros(transport.num_ranks, dtype=torch.int64, device=device))
    return transport
