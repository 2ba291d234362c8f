"""The one way rows travel: an all-to-all with uneven splits, started now and waited for later."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm.gloo_sockets import open_privately
from freescale.kernels.runtime import to_host


class Pending(Protocol):
    """A transfer on its way."""

    def wait(self) -> Tensor:
        """Block (a stream or the CPU) until everything has arrived; returns what was received, by source rank."""


class Transport(Protocol):
    """Uneven all-to-all between the ranks of a group: planned from its splits, started now, waited for later.

    Row blocks of `tensor` go to ranks 0, 1, ... in order; `send` and `receive` count rows of the first dimension.
    Every rank must start the same transfers in the same order.

    Args:
        name: what a recipe calls it.
        num_ranks: of the group.
        rank: this one, within the group.
        engine: what moves the bytes.
        sm_free: whether no kernel runs on the GPU for rows that travel, so that they take nothing from compute beside
            them; rows that stay on their rank may be copied in place by one.
        reason: why it was chosen, and why it is free of kernels, or why not.
    """

    name: str
    num_ranks: int
    rank: int
    engine: str
    sm_free: bool
    reason: str

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; returns at once."""


class CountingTransport(Transport, Protocol):
    """A transport that has a shorter way for one number to and from every rank."""

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """As the function `exchange_counts`."""


class UnsizedTransport(Transport, Protocol):
    """A transport whose messages tell their sizes: nobody needs to know beforehand what will come."""

    def exchange_unsized(
        self, values: Sequence[Tensor], *, send: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], list[list[int]]]:
        """As `start` and its wait, of several tensors; of each what came, by source rank, and how many rows from each.

        Args:
            values: each [rows, ...] with rows of at least a byte.
            send: of each, rows for every rank.
        """


class _Arrived:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class AloneTransport:
    """One rank: what is sent is what arrives."""

    name = "alone"
    num_ranks = 1
    rank = 0
    engine = "none"
    sm_free = True
    reason = "one rank: nothing travels"

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Nothing travels."""
        return _Arrived(tensor)


def exchange_counts(transport: Transport, counts: Tensor) -> Tensor:
    """counts[r] of this rank becomes entry [this rank] of rank r's result, as rows that every rank sends one of."""
    if counts_by_itself(transport):
        return transport.exchange_counts(counts)
    ones = [1] * transport.num_ranks
    return transport.start(counts, send=ones, receive=ones).wait()


def agree_on_counts(transport: Transport, counts: Tensor) -> tuple[list[int], list[int]]:
    """Rows that go to every rank and those that come from it, known to the host after one wait."""
    send, receive = to_host(torch.stack([counts, exchange_counts(transport, counts)])).tolist()
    return send, receive


def only_queues(transport: Transport) -> bool:
    """Whether waiting for its transfers lets the current CUDA stream wait, not the CPU; not where it does not say."""
    return bool(getattr(transport, "queued", False))


def counts_by_itself(transport: Transport) -> TypeGuard[CountingTransport]:
    """Whether counts go another way than rows."""
    return callable(getattr(transport, "exchange_counts", None))


def sends_unsized(transport: Transport) -> TypeGuard[UnsizedTransport]:
    """Whether counts need no exchange of their own."""
    return callable(getattr(transport, "exchange_unsized", None))


def supports_device(group: dist.ProcessGroup, device: torch.device | str) -> bool:
    """Whether a group exchanges tensors of a device where they are: gloo those of a CPU, NCCL those of a GPU."""
    return torch.device(device).type == "cpu" or backend_of(group, device).startswith("nccl")


def backend_of(group: dist.ProcessGroup, device: torch.device | str) -> str:
    """The backend of a group that serves tensors of this device: gloo, nccl, or "none"."""
    try:
        return group._get_backend(torch.device(device)).name()
    except RuntimeError:
        return "none"


def own_group(group: dist.ProcessGroup, *, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """The same ranks, with a queue of collectives of their own; every rank must call it at the same moment."""
    members = dist.get_process_group_ranks(group)

    def open_group() -> object:
        return dist.new_group(
            members,
            timeout=datetime.timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=len(members) < dist.get_world_size(),
        )

    own = open_privately(open_group) if backend == "gloo" else open_group()
    assert isinstance(own, dist.ProcessGroup)
    return own
