"""Compute of one rank beside communication of all: what each costs the other."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from freescale.comm import Pending, Transport
from freescale.comm.world import Ranks
from freescale.data import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model import HSTU

GATE_CYCLES = 60_000_000
"""About 30 ms."""


Times = Callable[[int], None]
"""Communication, so many times, given to the current stream."""


def exchanges(
    transports: Sequence[Transport], rows: torch.Tensor, counts: list[int], *, on_the_way: int = 1
) -> Times:
    """Exchanges of the same rows, over these transports in turn; at the end the stream waits for all of them."""

    def go(times: int) -> None:
        pending: deque[Pending] = deque()
        for number in range(times):
            transport = transports[number % len(transports)]
            pending.append(transport.start(rows, send=counts, receive=counts))
            if len(pending) == on_the_way:
                pending.popleft().wait()
        while pending:
            pending.popleft().wait()

    return go


def pinned_copies(device: torch.device, num_bytes: int, *, pieces: int) -> Times:
    """Pieces of so many bytes out of the GPU and into it, without flags: what the hardware itself takes.

    By two streams of their own: on a stream that has made copies, later exchanges were seen to take 2.5 times as long.
    """
    on_gpu, there = (torch.zeros(pieces, num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    out, back = (torch.zeros(pieces, num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    ways = [
        (torch.cuda.Stream(device, priority=-1), target, source)
        for target, source in ((out, on_gpu), (there, back))
    ]

    def go(times: int) -> None:
        now = torch.cuda.current_stream()
        for stream, _, _ in ways:
            stream.wait_stream(now)
        for _ in range(times):
            for stream, target, source in ways:
                with torch.cuda.stream(stream):
                    for piece in range(pieces):
                        target[piece].copy_(source[piece], non_blocking=True)
        for stream, _, _ in ways:
            now.wait_stream(stream)

    return go


def repeated(call: Callable[[], Any]) -> Times:
    """The same call, so many times."""

    def go(times: int) -> None:
        for _ in range(times):
            call()

    return go


def nothing(times: int) -> None:
    """What other ranks do beside a copy kernel of rank 0."""


def compute_jobs(device: torch.device, size: int) -> dict[str, Callable[[], Any]]:
    """A GEMM, and forward and backward of an HSTU layer on long-tailed sequences."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.manual_seed(0)
    lengths = torch.exp(5.3 + torch.randn(128)).long().clamp(8, 2048)
    layer = HSTU(dim=256, layers=1, heads=4, max_length=2048, dropout=0.0, time_bias=False).to(device)
    values = torch.randn(int(lengths.sum()), 256, device=device, requires_grad=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    batch, layout = SequenceBatch(offsets=offsets), SequenceLayout(offsets, device=device)

    def hstu() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            out = layer(values, batch, layout)
        out.float().square().mean().backward()
        values.grad = None

    out = torch.empty_like(a)
    return {
        f"GEMM {size}^3": lambda: torch.matmul(a, b, out=out),
        "HSTU layer, forward and backward": as_graph(hstu),
    }


def as_graph(job: Callable[[], None]) -> Callable[[], Any]:
    """One launch for a job of many kernels, so that the host is never what it waits for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            job()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        # Not the default: with it, a thread of a transport that looks at an event would end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            job()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay
    except RuntimeError as error:
        warnings.warn(f"no CUDA graph of the HSTU layer: its launches are timed, too ({error})", stacklevel=2)
        return job


def beside(
    ranks: Ranks,
    compute: Callable[[], Any],
    comm: Times,
    num_bytes: int,
    *,
    window_ms: float = 80.0,
) -> dict[str, float]:
    """Each alone, then both with the one lasting longer, then both with the other lasting longer; medians of three."""
    alone = {"compute": run_pair(ranks, compute, comm, 5, 0), "comm": run_pair(ranks, compute, comm, 0, 5)}
    one_compute, one_comm = alone["compute"][0] / 5, alone["comm"][1] / 5
    many, most = max(5, int(window_ms / one_compute)), max(5, int(window_ms / one_comm))
    turns = [
        (
            run_pair(ranks, compute, comm, many, 0)[0],
            run_pair(ranks, compute, comm, 0, most)[1],
            run_pair(ranks, compute, comm, many, int(1.6 * most) + 1)[0],
            run_pair(ranks, compute, comm, int(1.6 * many) + 1, most)[1],
        )
        for _ in range(3)
    ]
    compute_ms, comm_ms, loaded_compute_ms, loaded_comm_ms = (sorted(each)[1] for each in zip(*turns))
    gb = num_bytes * most / 1e6
    return {
        "compute_ms": compute_ms / many,
        "slowdown": loaded_compute_ms / compute_ms,
        "gb_s_alone": gb / comm_ms,
        "gb_s_loaded": gb / loaded_comm_ms,
        "rate_kept": comm_ms / loaded_comm_ms,
    }


def run_pair(
    ranks: Ranks, compute: Callable[[], Any], comm: Times, num_compute: int, num_comm: int
) -> tuple[float, float]:
    """Milliseconds of rank 0's compute and of its communication, started together, agreed by all ranks.

    Other ranks do their part of the communication only; what waits for rank 0 waits for its gate, too.
    """
    torch.cuda.synchronize()
    ranks.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    main, side, gate = streams_of_pairs()
    with torch.cuda.stream(gate):
        torch.cuda._sleep(GATE_CYCLES)  # both are queued when it opens
    for stream in (main, side):
        stream.wait_stream(gate)
    with torch.cuda.stream(main):
        marks[0].record()
        for _ in range(num_compute if ranks.is_first else 0):
            compute()
        marks[1].record()
    with torch.cuda.stream(side):
        marks[2].record()
        comm(num_comm)
        marks[3].record()
    torch.cuda.synchronize()
    mine = torch.tensor(
        [marks[0].elapsed_time(marks[1]), marks[2].elapsed_time(marks[3])], dtype=torch.float64
    )
    if not ranks.is_first:
        mine.zero_()
    mine = ranks.sum_on_cpu(mine)
    return float(mine[0]), float(mine[1])


@functools.cache
def streams_of_pairs() -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """Made once: torch hands out 32 streams in turn, and the 33rd would be one that a transport moves rows on."""
    return torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.Stream()
