"""Ranks: who takes part in a run, on which device, and over which process groups they talk."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from freescale.comm import supports_device
from freescale.comm.world.agreement import gather
from freescale.comm.world.facts import RankFacts
from freescale.comm.world.shared_gpu import virtual_gpus_here
from freescale.comm.world.watch import Watch
from freescale.errors import FreeScaleError, TrainingError
from freescale.trace import exchange


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run as one of them sees it.

    Args:
        rank: this process.
        num_ranks: all processes.
        device: where this rank computes.
        group: carries rows and gradients; None when there is one rank only.
        control: CPU group for small agreements and sums.
        background: CPU group for work in other threads (checkpoints). Collectives of one group must start in the
            same order everywhere, so threads never share one.
        timeout_s: how long to wait for another rank.
        watch: tells the others of a failure here, and this rank of one elsewhere.
    """

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None
    timeout_s: float = 600.0
    watch: Watch = field(default_factory=Watch)

    @property
    def is_first(self) -> bool:
        """Rank 0 writes logs and reports."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.control is not None:
            dist.barrier(group=self.control)

    @property
    def sums_on_device(self) -> bool:
        """Whether `sum` takes what lies on the device as it is, so that nobody waits for it."""
        return self.group is None or supports_device(self.group, self.device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks, on every rank."""
        if self.group is not None:
            all_reduce(values, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The values of all ranks, which must have one shape, on every rank."""
        if self.group is None:
            return [values]
        here = values if supports_device(self.group, values.device) else values.cpu()
        parts = [torch.empty_like(here) for _ in range(self.num_ranks)]
        dist.all_gather(parts, here, group=self.group)
        return [part.to(values.device) for part in parts]

    def sum_on_cpu(self, values: torch.Tensor, *, what: str = "sum over ranks") -> torch.Tensor:
        """The same for a tensor that lives on the CPU; `what` is its name in a timeline."""
        if self.control is not None:
            with exchange(what):
                dist.all_reduce(values, group=self.control)
        return values

    def agree(self, what: dict[str, Any], *, subject: str) -> None:
        """Refuse to go on when ranks see different values; says which rank and what differs."""
        if self.control is None:
            return
        texts = gather(json.dumps(what, sort_keys=True), group=self.control)
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            other = json.loads(text)
            for key in sorted({*first, *other}):
                if first.get(key) != other.get(key):
                    raise FreeScaleError(
                        f"ranks disagree on {subject}: rank {rank} differs from rank 0 in {key}",
                        got=f"rank 0: {first.get(key)!r}, rank {rank}: {other.get(key)!r}",
                        next_step="start every rank with the same code, recipe and data",
                    )


def all_reduce(values: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Element-wise sum over a group, in place; by way of the CPU where the group cannot read the device."""
    if supports_device(group, values.device):
        dist.all_reduce(values, group=group)
        return
    here = values.cpu()
    dist.all_reduce(here, group=group)
    values.copy_(here)


def pick_device(wanted: str, *, local_rank: int = 0) -> torch.device:
    """The device a rank computes on; CUDA asked for but absent is an error, never a silent fall-back.

    A launcher may show every rank all GPUs of the machine, or each its own, which is then number 0 to all of them. So
    ranks count through what they see, and `refuse_shared_gpu` finds those that have met on one.
    """
    shared = virtual_gpus_here()
    if wanted != "cpu" and shared and not torch.cuda.is_available():
        raise TrainingError(
            "this rank cannot use the GPU it was to share",
            got=f"{shared} virtual GPUs, torch {torch.__version__} sees no CUDA device",
            next_step="`freescale doctor` shows what is there; CUDA MPS may be switched off in this container",
        )
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TrainingError(
            "run.device=cuda, but this machine has no usable CUDA device",
            got=f"torch {torch.__version__}, CUDA build: {torch.version.cuda or 'none'}",
            next_step="use run.device=cpu, or `freescale doctor` to see what torch finds",
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if shared:
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def refuse_shared_gpu(facts: Sequence[RankFacts]) -> None:
    """Refuse two ranks on one GPU that nobody asked to share; every rank must call it with the facts of all."""
    seen: dict[str, int] = {}
    for rank, each in enumerate(facts):
        if each.gpu and seen.setdefault(each.gpu, rank) != rank:
            raise TrainingError(
                f"ranks {seen[each.gpu]} and {rank} would compute on one GPU: more ranks on a machine than GPUs, "
                "or a launcher that shows the same GPU to both",
                got=f"{each.gpu} on {each.host}",
                next_step="start at most one rank a GPU (torchrun --nproc-per-node, srun --gpus-per-task=1), "
                "share one with --virtual-gpus N, or use run.device=cpu",
            )


def device_name(device: torch.device) -> str:
    """What measurements on this device are filed under."""
    if device.type == "cuda":
        shared = virtual_gpus_here()
        return torch.cuda.get_device_name(device) + (f", shared by {shared}" if shared else "")
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
