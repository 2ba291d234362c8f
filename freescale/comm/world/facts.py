"""What the ranks of a group tell each other before they choose a transport: machine, process, GPU."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.comm import backend_of
from freescale.comm.world.agreement import gather


@dataclass(frozen=True)
class RankFacts:
    """One rank, as the others see it.

    Args:
        machine: the same text for all processes of one running system, and for no other.
        pid: its process.
        processes: the namespace its number counts in; pids of another one mean nothing here.
        gpu: the GPU it computes on, by an id that is the same in every process; "" on a CPU.
        reaches: GPUs its own can map, by id, as far as this process sees them.
        host: its machine's name, for messages.
        node: the number of its node, as its launcher counts them; 0 where nobody says.
    """

    machine: str
    pid: int
    processes: str
    gpu: str = ""
    reaches: frozenset[str] = field(default_factory=frozenset)
    host: str = ""
    node: int = 0


@dataclass(frozen=True)
class GroupFacts:
    """All ranks of a group.

    Args:
        ranks: in the order of the group.
        rank: this one.
        device: where tensors are that travel.
        backend: what serves tensors of this device in the group: nccl, gloo or none.
        launched_here: whether a launcher says that it started all of them on this machine.
    """

    ranks: Sequence[RankFacts]
    rank: int
    device: torch.device
    backend: str
    launched_here: bool = False

    @property
    def one_machine(self) -> bool:
        """Whether all of them can share memory: on one machine, and they see each other's processes."""
        places = {(each.machine, each.processes) for each in self.ranks}
        return sys.platform == "linux" and len(places) == 1

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node, ascending: those of one machine that see each other's processes."""
        found: dict[tuple[str, str, int], list[int]] = {}
        for rank, each in enumerate(self.ranks):
            found.setdefault((each.machine, each.processes, each.node), []).append(rank)
        return list(found.values())

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on GPUs."""
        return self.device.type == "cuda"

    @property
    def shared_gpu(self) -> bool:
        """Whether two of them compute on one GPU."""
        gpus = [each.gpu for each in self.ranks if each.gpu]
        return len(set(gpus)) < len(gpus)

    @property
    def one_gpu(self) -> bool:
        """Whether all of them compute on the same GPU."""
        return self.shared_gpu and len({each.gpu for each in self.ranks}) == 1

    @property
    def unreachable(self) -> tuple[int, int] | None:
        """Two ranks of which the first cannot map the memory of the second's GPU; None if there are none."""
        for a, first in enumerate(self.ranks):
            for b, second in enumerate(self.ranks):
                if first.gpu != second.gpu and second.gpu not in first.reaches:
                    return a, b
        return None


def gather_facts(group: dist.ProcessGroup, device: torch.device) -> GroupFacts:
    """Tell the ranks of a group about each other; every rank must call it."""
    known = gather(own_facts(device), group=group)
    return GroupFacts(known, dist.get_rank(group), device, backend_of(group, device), on_one_machine())


def on_one_machine() -> bool:
    """Whether torchrun or `freescale train` started all ranks on this machine, and it is one with unix sockets."""
    local, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return sys.platform == "linux" and local is not None and local == everywhere


def sharing_machine(num_ranks: int) -> int:
    """How many of so many ranks share this machine, as their launcher says; all of them where nobody says."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) else num_ranks


def own_facts(device: torch.device) -> RankFacts:
    """What this rank tells."""
    gpu, reaches = "", frozenset[str]()
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        others = [n for n in range(torch.cuda.device_count()) if n != index]
        gpu = _gpu_id(index)
        reaches = frozenset(_gpu_id(n) for n in others if torch.cuda.can_device_access_peer(index, n))
    return RankFacts(
        machine=_machine(),
        pid=os.getpid(),
        processes=namespace("pid"),
        gpu=gpu,
        reaches=reaches,
        host=platform.node(),
        node=_node(),
    )


def _node(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this rank's node: agents of one machine (two launchers, a test) are as many nodes."""
    if (said := environment.get("GROUP_RANK", "")).isdecimal():
        return int(said)
    rank, local = (environment.get(name, "") for name in ("RANK", "LOCAL_WORLD_SIZE"))
    return int(rank) // max(1, int(local)) if rank.isdecimal() and local.isdecimal() else 0


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _machine() -> str:
    """What one running system has to itself: its boot, its name (clones share a boot), its network."""
    return f"{boot_id()} {platform.node()} {namespace('net')}"


def boot_id() -> str:
    """A number the kernel draws when it starts; "" where it tells none. Copies of a running machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace(kind: str) -> str:
    """The namespace of a kind (pid, net, time) that this process lives in; "" where there are none."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
