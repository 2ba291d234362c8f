"""Open the connections of a rank's channels; every rank must do it at the same moment of its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from freescale.comm import AloneTransport, Transport, exchange_counts
from freescale.comm.traffic.node_stages import NodeGroups, NodeStages
from freescale.comm.traffic.priority import Channels
from freescale.comm.transports import is_foreign, kind_for_cpu, kind_for_ids, make_transport


def open_channels(
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    ids: str = "auto",
    timeout_s: float = 600.0,
    nodes: NodeGroups | None = None,
) -> Channels:
    """Connections between the ranks of a group that nothing else uses: rows travel by `kind`, ids by `ids`.

    With `nodes` they travel once a node: connections are those between nodes, and others inside this one.
    """
    if group is None:
        alone = AloneTransport()
        return Channels(express=alone, bulk=alone, ids=alone)
    device = torch.device(device)
    if nodes is not None:
        inside, between = (
            open_channels(members, device=device, kind=way, ids=ids_way, timeout_s=timeout_s)
            for members, way, ids_way in _ways(nodes, device, kind, ids)
        )
        return replace(between, inside=inside)
    express, bulk = (open_channel(group, device=device, kind=kind, timeout_s=timeout_s) for _ in range(2))
    way, _ = kind_for_ids(group, kind, device=device, ids=ids)
    if device.type == "cpu" and way in (kind, bulk.name):
        return Channels(express=express, bulk=bulk, ids=bulk)
    # Ids come from the CPU and are split there. A way of their own spares a GPU rank every wait for its device.
    own = open_ids_channel(group, device=device, kind=kind, ids=ids, timeout_s=timeout_s)
    return Channels(express=express, bulk=bulk, ids=own)


def open_node_stages(
    groups: NodeGroups,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    timeout_s: float = 600.0,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
) -> NodeStages:
    """The connections of a table's own exchanges, where rows travel once a node; `wrap` is put around each."""
    inside, between = (
        wrap(open_channel(members, device=device, kind=way, timeout_s=timeout_s))
        for members, way, _ in _ways(groups, torch.device(device), kind)
    )
    return NodeStages(groups, inside, between)


def _ways(
    nodes: NodeGroups, device: torch.device, kind: str, ids: str = "auto"
) -> tuple[tuple[dist.ProcessGroup, str, str], tuple[dist.ProcessGroup, str, str]]:
    """How rows and ids travel inside a node and between nodes; by itself CPU values of a node go by sockets."""
    by_sockets = kind == "auto" and device.type == "cpu"
    ids_by_sockets = ids == "auto" and (kind == "auto" or not is_foreign(kind))
    inside = "local" if by_sockets else kind, "local" if ids_by_sockets else ids
    return (nodes.inside, *inside), (nodes.between, kind, ids)


def open_channel(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    timeout_s: float = 600.0,
    why: str = "as the recipe says",
    key: str = "comm.transport",
) -> Transport:
    """One connection between the ranks of a group that nothing else uses; `why` its kind is named, by this `key`."""
    transport = make_transport(
        group, device=device, kind=kind, timeout_s=timeout_s, alone=True, why=why, key=key
    )
    # Connect now, in one order on all ranks; later it would be whichever thread comes first.
    exchange_counts(transport, torch.zeros(transport.num_ranks, dtype=torch.int64, device=device))
    return transport


def open_cpu_channel(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    timeout_s: float = 600.0,
) -> Transport:
    """A connection for values that are on the CPU, of ranks that compute on `device`."""
    kind = kind_for_cpu(group, kind, device=torch.device(device))
    return open_channel(group, kind=kind, timeout_s=timeout_s)


def open_ids_channel(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    ids: str = "auto",
    timeout_s: float = 600.0,
) -> Transport:
    """A connection for ids and what is told about them, of ranks whose rows travel by `kind`."""
    way, why = kind_for_ids(group, kind, device=torch.device(device), ids=ids)
    key = "comm.transport" if ids == "auto" else "comm.ids"
    return open_channel(group, kind=way, timeout_s=timeout_s, why=why, key=key)
