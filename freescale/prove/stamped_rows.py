"""Rows that name their source, their target and their place, and transports that carry them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freescale.comm import Transport
from freescale.comm.transports import make_transport
from freescale.comm.world import Ranks
from freescale.errors import FreeScaleError


def rows_of(ranks: Ranks, num_bytes: int, *, own: bool = True) -> tuple[torch.Tensor, list[int]]:
    """int32 rows of 64 bytes for every rank, itself only with `own`; each names its source, its target, its place."""
    counts = _counts(ranks, num_bytes, own=own)
    blocks = [_places(count) + 1000 * ranks.rank + 100_000 * target for target, count in enumerate(counts)]
    return torch.cat(blocks).to(ranks.device), counts


def wanted_at(ranks: Ranks, num_bytes: int, *, own: bool = True) -> torch.Tensor:
    """What must arrive at this rank, on the CPU."""
    counts = _counts(ranks, num_bytes, own=own)
    blocks = [_places(count) + 1000 * source + 100_000 * ranks.rank for source, count in enumerate(counts)]
    return torch.cat(blocks)


def _counts(ranks: Ranks, num_bytes: int, *, own: bool) -> list[int]:
    count = max(1, num_bytes // 64)
    return [count if own or rank != ranks.rank else 0 for rank in range(ranks.num_ranks)]


def _places(count: int) -> torch.Tensor:
    return torch.arange(count * 16, dtype=torch.int32).view(count, 16) % 1000


def open_all(ranks: Ranks, kinds: Sequence[str]) -> tuple[dict[str, Transport], dict[str, str]]:
    """The transports that can be used here, and why the others cannot."""
    assert ranks.group is not None
    found: dict[str, Transport] = {}
    problems: dict[str, str] = {}
    for kind in kinds:
        try:
            transport = make_transport(ranks.group, device=ranks.device, kind=kind, timeout_s=60)
        except FreeScaleError as error:
            problems[kind] = str(error).splitlines()[0]
            continue
        found[kind] = transport
    return found, problems


def exchange(transport: Transport, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """To its end, as far as the current stream is concerned."""
    return transport.start(rows, send=counts, receive=counts).wait()


def warm_up(transport: Transport, ranks: Ranks, num_bytes: int, *, times: int = 80) -> None:
    """Let buffers grow and kernels load, and check that rows arrive whole."""
    rows, counts = rows_of(ranks, num_bytes)
    wanted = wanted_at(ranks, num_bytes)
    for turn in range(times):
        received = exchange(transport, rows, counts)
        if turn in (0, times - 1) and not torch.equal(received.cpu(), wanted):
            raise SystemExit(f"FAILED: {transport.name} delivers wrong rows")


def synchronize_all(ranks: Ranks) -> None:
    """The device is idle and every rank is here."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    ranks.barrier()
