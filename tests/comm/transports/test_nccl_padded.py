"""Uneven messages over an all-to-all of equal ones: what arrives is what was sent, without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.nccl_padded import PaddedTransport
from tests.comm.test_transport import exchange_cases
from tests.ranks import run_on_ranks


class PlainBuffers:
    """Ordinary memory, full of garbage."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)


class CountedTransport(CollectiveTransport):
    """Counts what is given to it."""

    num_started = 0

    def start(self, *args: Any, **kwargs: Any) -> Any:
        self.num_started += 1
        return super().start(*args, **kwargs)


def start_equal(received: torch.Tensor, sent: torch.Tensor) -> Any:
    return dist.all_to_all_single(received, sent, group=dist.group.WORLD, async_op=True)


def padded(rank: int, num_ranks: int) -> None:
    buffers, uneven = PlainBuffers(), CountedTransport(dist.group.WORLD)
    transport = PaddedTransport(
        exchange=start_equal, buffers=buffers, uneven=uneven, control=dist.new_group(), reason="a test"
    )
    exchange_cases(transport, rank, num_ranks)
    assert transport.num_padded >= 40  # the counts at least
    assert (uneven.num_started > 0) == (num_ranks > 1)
    rows = torch.arange(7 * num_ranks, dtype=torch.float64)[:, None] + 1000 * rank
    before = transport.num_padded, uneven.num_started
    for _ in range(5):  # not waited for: slots come round
        nearly = transport.start(rows, send=[7] * num_ranks, receive=[7] * num_ranks)
    wanted = torch.cat([rows[:7] - 1000 * rank + 1000 * source + 7 * rank for source in range(num_ranks)])
    assert torch.equal(nearly.wait(), wanted)
    assert (transport.num_padded, uneven.num_started) == (before[0] + 5, before[1])
    everybody: list[Any] = [None] * num_ranks
    dist.all_gather_object(everybody, buffers.sizes)
    assert all(sizes == buffers.sizes for sizes in everybody), "registering is a collective"
    assert all(size & (size - 1) == 0 for size in buffers.sizes)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_padded_rows_arrive_without_their_padding(num_ranks):
    run_on_ranks(padded, num_ranks, num_ranks)
