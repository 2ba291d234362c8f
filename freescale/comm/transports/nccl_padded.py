"""Uneven messages over an all-to-all of equal ones: padded to the longest, which all ranks agree on first.

NCCL moves equal messages between registered buffers with copy engines, and uneven ones with kernels. So where messages
are nearly equal, padding spares the SMs. Buffers come in powers of two, in an order that is the same on every rank,
because registering one is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Pending, Transport
from freescale.comm.transports.nccl_routes import MOST_UNEVEN

_SLOTS = 2


class Buffers(Protocol):
    """Where registered memory comes from."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8; every rank calls it with the same sizes in the same order."""


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Let the current stream, or the CPU, wait for it."""


EqualExchange = Callable[[Tensor, Tensor], Waitable]
"""(received, sent): equal blocks of both, started."""


class _Unpadded:
    def __init__(self, work: Waitable, blocks: Sequence[Tensor], like: Tensor, rows: int) -> None:
        self._work, self._blocks, self._like, self._rows = work, blocks, like, rows
        self._arrived: Tensor | None = None

    def wait(self) -> Tensor:
        """Rows without their padding, out of the registered buffer: it is used again."""
        if self._arrived is None:
            self._work.wait()
            flat = torch.cat([*self._blocks, self._blocks[0][:0]])
            self._arrived = flat.view(self._like.dtype).view(self._rows, *self._like.shape[1:])
            self._blocks = ()
        return self._arrived


class PaddedTransport:
    """All-to-all of nearly equal messages without kernels of NCCL; others go by `uneven`, and are counted.

    Args:
        exchange: the all-to-all of equal blocks.
        buffers: registered memory.
        uneven: for messages that padding would make too long.
        control: a CPU group of these ranks that nothing else uses.
        reason: why this way was chosen.
    """

    name = "experimental_nccl_zero_sm"
    engine = "NCCL all-to-all by copy engines, messages padded"
    sm_free = False

    def __init__(
        self,
        *,
        exchange: EqualExchange,
        buffers: Buffers,
        uneven: Transport,
        control: dist.ProcessGroup,
        reason: str,
    ) -> None:
        self._exchange, self._buffers, self._uneven, self._control = exchange, buffers, uneven, control
        self.num_ranks, self.rank, self.reason = uneven.num_ranks, uneven.rank, reason
        self.num_padded = 0
        self._slots: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._users: dict[tuple[int, int], _Unpadded] = {}

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; all ranks agree on the way, so it waits for them on the CPU."""
        widest, mean = self._agree(send)
        if widest > MOST_UNEVEN * mean:
            return self._uneven.start(tensor, send=send, receive=receive)
        tensor = tensor.detach().contiguous()
        row_bytes = tensor.shape[1:].numel() * tensor.itemsize
        block = widest * row_bytes
        slot = self.num_padded % _SLOTS
        sent, received = self._take(1 << max(0, self.num_ranks * block - 1).bit_length(), slot)
        self.num_padded += 1
        place = 0
        rows = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
        for target, count in enumerate(send):
            size = count * row_bytes
            sent[target * block : target * block + size] = rows[place : place + size]
            place += size
        work = self._exchange(received[: self.num_ranks * block], sent[: self.num_ranks * block])
        blocks = [
            received[source * block : source * block + count * row_bytes]
            for source, count in enumerate(receive)
        ]
        pending = _Unpadded(work, blocks, tensor, sum(receive))
        self._users[len(sent), slot] = pending
        return pending

    def _agree(self, send: Sequence[int]) -> tuple[int, float]:
        """Rows of the longest message of any rank, and of the mean one."""
        facts = torch.tensor([max(send), -sum(send)])
        widest = facts[:1].clone()
        dist.all_reduce(widest, op=dist.ReduceOp.MAX, group=self._control)
        total = -facts[1:]
        dist.all_reduce(total, group=self._control)
        return max(1, int(widest)), max(1.0, int(total) / self.num_ranks**2)

    def _take(self, num_bytes: int, slot: int) -> tuple[Tensor, Tensor]:
        """Two buffers, after whoever used them last has taken its rows out."""
        size = max(num_bytes, 256)
        while len(self._slots.setdefault(size, [])) <= slot:
            pair = self._buffers.allocate(size), self._buffers.allocate(size)
            self._slots[size].append(pair)
        last = self._users.pop((size, slot), None)
        if last is not None:
            last.wait()
        return self._slots[size][slot]
