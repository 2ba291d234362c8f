"""collective: torch.distributed's own all-to-all, the reference and the fallback everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Pending, Transport, backend_of, supports_device
from freescale.comm.transports.gloo_staged import GlooStagedTransport
from freescale.comm.world import GroupFacts, no_shared_nccl
from freescale.registry import register

_REASONS = {
    "nccl": "NCCL moves uneven splits with send and receive kernels, on SMs",
    "gloo": "the CPU moves the bytes, with threads of gloo",
}


@register("transport", "collective")
class CollectiveRoute:
    """Any ranks whose group exchanges CPU tensors, or those of the device itself."""

    keeps_group = True

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        """What keeps a group from using it."""
        if facts.backend == "nccl" and facts.shared_gpu:
            return no_shared_nccl()
        return (
            None if facts.backend != "none" else f"the group has no backend for {facts.device.type} tensors"
        )

    @staticmethod
    def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
        """Open it for a group, whose own time limit applies."""
        if not supports_device(group, facts.device):
            return GlooStagedTransport(group, device=facts.device)
        return CollectiveTransport(group, device=facts.device)


class CollectiveTransport:
    """All-to-all by torch.distributed's all_to_all_single over NCCL or gloo.

    Args:
        group: the ranks that exchange.
        device: where their tensors are.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device | str = "cpu") -> None:
        self._group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.engine = backend_of(group, device)
        self.sm_free = self.engine != "nccl"
        self.reason = _REASONS.get(self.engine, "")

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; returns at once."""
        tensor = tensor.contiguous()
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        work = dist.all_to_all_single(
            received, tensor, list(receive), list(send), group=self._group, async_op=True
        )
        assert work is not None
        return _PendingCollective(work, received, tensor)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """counts[r] of this rank becomes entry [this rank] of rank r's result."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        return received


class _PendingCollective:
    """A collective under way, and the memory it uses."""

    def __init__(self, work: dist.Work, received: Tensor, sent: Tensor) -> None:
        self._work, self._received, self._sent = work, received, sent

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received
