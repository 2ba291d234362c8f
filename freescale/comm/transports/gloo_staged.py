"""GPU rows over a group that reads CPU memory only: copied out, exchanged by gloo, copied in.

This is `collective` for ranks that share one GPU where NCCL is older than 2.30 and takes one rank a GPU. The host waits
for the rows to be copied out before gloo may read them, so it is the plain way that other transports are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _PendingStaged:
    """Rows exchanged by gloo, in page-locked memory."""

    def __init__(self, work: dist.Work, received: Tensor, sent: Tensor, device: torch.device) -> None:
        self._work, self._received, self._sent, self._device = work, received, sent, device

    def wait(self) -> Tensor:
        """On the device, as far as the current stream is concerned."""
        self._work.wait()
        return self._received.to(self._device, non_blocking=True)


class GlooStagedTransport:
    """All-to-all by gloo for tensors that live elsewhere, through page-locked memory.

    Args:
        group: the ranks that exchange.
        device: where the tensors live.
    """

    name = "collective"
    engine = "gloo, staged through page-locked memory"
    sm_free = True
    reason = "the ranks share one GPU, which this NCCL does not allow, and gloo cannot read GPU memory"

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device | str) -> None:
        self._group, self._device = group, torch.device(device)
        self._pin = self._device.type == "cuda"
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> _PendingStaged:
        """Begin to send; returns when the rows have left the device."""
        sent = self._staging(tensor.shape, tensor.dtype)
        sent.copy_(tensor.detach(), non_blocking=True)
        if self._pin:
            torch.cuda.current_stream(self._device).synchronize()
        received = self._staging((sum(receive), *tensor.shape[1:]), tensor.dtype)
        work = dist.all_to_all_single(
            received, sent, list(receive), list(send), group=self._group, async_op=True
        )
        assert work is not None
        return _PendingStaged(work, received, sent, tensor.device)

    def _staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=self._pin)
