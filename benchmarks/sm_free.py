r"""Does an exchange take SMs? Proof, cost and speed of the transports, among ranks that share one GPU.

    python benchmarks/sm_free.py --part hog          # SM-hog: which exchanges finish while a kernel holds every SM
    python benchmarks/sm_free.py --part profiler     # kernels the profiler links to an exchange
    python benchmarks/sm_free.py --part contention   # compute beside communication: slowdown, and rate under load
    python benchmarks/sm_free.py --part rate         # GB/s and latency by size, against pinned copies
    python benchmarks/sm_free.py --device cpu --ranks 2 --part rate --largest-kib 256     # to try it out

Without --part all of them run, in that order. Every part first checks that rows arrive whole.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from freescale.comm.choose import make_transport
from freescale.comm.launch import launch
from freescale.comm.ranks import Ranks, join_ranks
from freescale.comm.transport import Pending, Transport
from freescale.comm.virtual_gpus import virtual_gpus
from freescale.errors import FreeScaleError

PARTS = ("hog", "profiler", "contention", "rate")
WHOLE_GPU = {"hog", "contention"}
"""Parts whose ranks may use every SM: one of them computes, or holds, on the whole GPU."""

CONTROLS = ("a tiny kernel", "a copy kernel of 8 blocks", "symmetric-memory barrier")
"""What must not finish while every SM is held."""

GATE_CYCLES = 60_000_000
"""About 30 ms."""

WAITS = ("Event", "Sync")

WAIT_S = 1.0
"""What is not through by then, beside a kernel that holds every SM, waits for that kernel."""


def rows_of(ranks: Ranks, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
    """int32 rows of 64 bytes; each names its source, its target and its place."""
    count = max(1, num_bytes // 64)
    place = torch.arange(count * 16, dtype=torch.int32).view(count, 16) % 1000
    blocks = [place + 1000 * ranks.rank + 100_000 * target for target in range(ranks.num_ranks)]
    return torch.cat(blocks).to(ranks.device), [count] * ranks.num_ranks


def wanted_at(ranks: Ranks, num_bytes: int) -> torch.Tensor:
    """What must arrive at this rank, on the CPU."""
    count = max(1, num_bytes // 64)
    place = torch.arange(count * 16, dtype=torch.int32).view(count, 16) % 1000
    return torch.cat([place + 1000 * source + 100_000 * ranks.rank for source in range(ranks.num_ranks)])


def open_all(ranks: Ranks, kinds: Sequence[str]) -> tuple[dict[str, Transport], dict[str, str]]:
    """The transports that can be used here, warmed up, and why the others cannot."""
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
    return transport.start(rows, send=counts, receive=counts).wait()


def warm_up(transport: Transport, ranks: Ranks, num_bytes: int, *, times: int = 80) -> None:
    """Let buffers grow and kernels load, and check that rows arrive whole."""
    rows, counts = rows_of(ranks, num_bytes)
    wanted = wanted_at(ranks, num_bytes)
    for turn in range(times):
        received = exchange(transport, rows, counts)
        if turn in (0, times - 1) and not torch.equal(received.cpu(), wanted):
            raise SystemExit(f"FAILED: {transport.name} delivers wrong rows")


def settle(ranks: Ranks) -> None:
    """The device is idle and every rank is here."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    ranks.barrier()


def finishes(event: torch.cuda.Event) -> bool:
    """Whether a stream gets there within the time, without the host waiting in the driver."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if event.query():
            return True
        time.sleep(0.001)
    return False


def part_hog(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Which calls finish while rank 0 holds every SM; ranks cannot hold a share each, because shares overlap."""
    from gpu_kernels import BlockCopy, Hog

    num_bytes = options.hog_kib << 10
    found, problems = open_all(ranks, options.kinds)
    rows, counts = rows_of(ranks, num_bytes)
    wanted = wanted_at(ranks, num_bytes)
    landing = torch.empty_like(wanted, pin_memory=True)
    for transport in found.values():
        warm_up(transport, ranks, num_bytes)
    target, block_copy, small = torch.empty_like(rows), BlockCopy(8), torch.zeros(64, device=ranks.device)
    handle = symmetric_handle(ranks)

    def by(transport: Transport) -> Callable[[], None]:
        def act() -> None:
            landing.copy_(exchange(transport, rows, counts), non_blocking=True)

        return act

    tries: dict[str, Callable[[], None]] = {
        "a tiny kernel": lambda: small.add_(1),
        "a copy kernel of 8 blocks": lambda: block_copy(target, rows),
        "copy_ on the same GPU": lambda: target.copy_(rows),
    }
    if handle is not None:
        tries["symmetric-memory barrier"] = lambda: handle.barrier(channel=0)
    tries |= {name: by(transport) for name, transport in found.items()}
    # Every kernel is loaded before one spins, and every buffer of this stream is in its cache.
    stream = torch.cuda.Stream(ranks.device)
    for act in (*tries.values(), *tries.values()):
        with torch.cuda.stream(stream):
            act()
        settle(ranks)
    hog = Hog(ranks.device)
    holds = ranks.is_first
    results: dict[str, Any] = {}
    for name, act in tries.items():
        landing.zero_()
        settle(ranks)
        if holds:
            hog.hold()
        ranks.barrier()
        began = time.perf_counter()
        with torch.cuda.stream(stream):
            act()
            event = torch.cuda.Event()
            event.record()
        done = finishes(event)
        seconds = time.perf_counter() - began
        still = hog.holds if holds else True
        right = torch.equal(landing, wanted) if name in found else None
        ranks.barrier()  # nobody gives SMs back before all have looked
        if holds:
            hog.release()
        stream.synchronize()
        after = torch.equal(landing, wanted) if name in found else None
        everybody = ranks.sum_on_cpu(
            torch.tensor([float(done), float(still), float(right is not False), float(after is not False)])
        )
        results[name] = {
            "finished_on": int(everybody[0]),
            "held_on": int(everybody[1]),
            "right_while_held": right is not None and int(everybody[2]) == ranks.num_ranks,
            "right_afterwards": int(everybody[3]) == ranks.num_ranks,
            "ms": 1000 * seconds,
        }
    engines = {name: [one.engine, one.sm_free] for name, one in found.items()}
    return {"sms": hog.num_sms, "results": results, "engines": engines, "not_available": problems}


def symmetric_handle(ranks: Ranks) -> Any:
    """Symmetric memory of these ranks, for its barrier; None where it cannot be set up."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        assert ranks.group is not None
        return symmetric.rendezvous(symmetric.empty(1024, device=ranks.device), ranks.group)
    except Exception as error:
        if ranks.is_first:
            print(f"no symmetric memory: {error}", file=sys.stderr)
        return None


def part_profiler(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """What runs on the GPU during five exchanges, by the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    found, problems = open_all(ranks, options.kinds)
    rows, counts = rows_of(ranks, 1 << 20)
    seen: dict[str, Any] = {}
    for name, transport in found.items():
        warm_up(transport, ranks, 1 << 20)
        settle(ranks)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            for _ in range(5):
                exchange(transport, rows, counts)
            torch.cuda.synchronize()
        settle(ranks)
        names = [event.name for event in record.events() if event.device_type == DeviceType.CUDA]
        copies = [one for one in names if one.startswith(("Memcpy", "Memset"))]
        # The profiler may also tell of waits ("Stream Wait Event", "Context Sync"): nothing runs for them.
        kernels = sorted({one for one in names if one not in copies and not any(w in one for w in WAITS)})
        seen[name] = {"copies": len(copies), "kernels": kernels, "profiler_saw_anything": bool(names)}
    return {"results": seen, "not_available": problems}


def compute_jobs(device: torch.device, size: int) -> dict[str, Callable[[], Any]]:
    """A GEMM, and forward and backward of an HSTU layer on long-tailed sequences."""
    from freescale.data.sequence_batch import SequenceBatch
    from freescale.kernels import SequenceLayout
    from freescale.model.hstu import HSTU

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
        print(f"no CUDA graph of the HSTU layer, its launches are timed, too: {error}", file=sys.stderr)
        return job


def part_contention(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 computes on the whole GPU while all ranks exchange, or a copy kernel runs beside."""
    from gpu_kernels import BlockCopy

    num_bytes = 4 << 20
    found, problems = open_all(ranks, [kind for kind in options.kinds if kind != "collective"])
    rows, counts = rows_of(ranks, num_bytes)
    for transport in found.values():
        warm_up(transport, ranks, num_bytes)
    jobs = compute_jobs(ranks.device, options.gemm)
    source, target = (torch.zeros(64 << 20, dtype=torch.uint8, device=ranks.device) for _ in range(2))
    comms: dict[str, Callable[[], Any]] = {
        name: lambda t=transport: exchange(t, rows, counts)  # type: ignore[misc]
        for name, transport in found.items()
    }
    comms["plain pinned copies"] = pinned_copies(ranks.device, num_bytes * (ranks.num_ranks - 1))
    blocks = {f"copy kernel, {n} blocks": BlockCopy(n) for n in (8, 16, 24, 32)}
    results = []
    for job, compute in jobs.items():
        for name in (*blocks, *comms):
            everybody = name in comms
            comm = comms[name] if everybody else lambda c=blocks[name]: c(target, source)  # type: ignore[misc]
            moved = num_bytes * (ranks.num_ranks - 1) if everybody else source.nbytes
            if not everybody and not ranks.is_first:
                comm = nothing
            results.append({"compute": job, "beside": name, **beside(ranks, compute, comm, moved)})
    return {"results": results, "not_available": problems}


def pinned_copies(device: torch.device, num_bytes: int) -> Callable[[], Any]:
    """As many bytes out of the GPU and into it as an exchange has, without flags: what the hardware itself takes."""
    on_gpu, there = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    out, back = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    other = torch.cuda.Stream(device, priority=-1)

    def copies() -> None:
        now = torch.cuda.current_stream()
        other.wait_stream(now)
        out.copy_(on_gpu, non_blocking=True)
        with torch.cuda.stream(other):
            there.copy_(back, non_blocking=True)
        now.wait_stream(other)

    return copies


def nothing() -> None:
    """What other ranks do beside a copy kernel of rank 0."""


def beside(
    ranks: Ranks,
    compute: Callable[[], Any],
    comm: Callable[[], Any],
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
    ranks: Ranks, compute: Callable[[], Any], comm: Callable[[], Any], num_compute: int, num_comm: int
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
        for _ in range(num_comm):
            comm()
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


def part_rate(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """GB/s a direction, summed over the ranks, and microseconds of one exchange, by bytes a pair."""
    ceiling = pinned_ceiling(ranks) if ranks.device.type == "cuda" else 0.0
    table, engines = [], {}
    num_bytes = 4 << 10
    while num_bytes <= options.largest_kib << 10:
        row: dict[str, Any] = {"bytes_a_pair": num_bytes}
        # Opened for each size: slots grow with the messages, and do so at fixed exchanges.
        found, problems = open_all(ranks, options.kinds)
        for name, transport in found.items():
            warm_up(transport, ranks, num_bytes)
            row[name] = rate_of(transport, ranks, num_bytes)
            engines[name] = [transport.engine, transport.sm_free]
        table.append(row)
        num_bytes *= 4
    return {"results": table, "ceiling_gb_s": ceiling, "engines": engines, "not_available": problems}


def rate_of(transport: Transport, ranks: Ranks, num_bytes: int) -> dict[str, float]:
    """Many exchanges, three on the way at a time as a pipeline has them; one after the other; and one alone."""
    rows, counts = rows_of(ranks, num_bytes)
    moved = num_bytes * (ranks.num_ranks - 1)
    times = max(12, min(400, (512 << 20) // max(1, moved)))
    seconds = {under_way: many(transport, ranks, rows, counts, times, under_way) for under_way in (3, 1)}
    single = []
    for _ in range(20):
        settle(ranks)
        began = time.perf_counter()
        exchange(transport, rows, counts)
        if ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        single.append(time.perf_counter() - began)
    slowest = ranks.sum_on_cpu(torch.tensor([sorted(single)[10]], dtype=torch.float64)) / ranks.num_ranks
    return {
        "gb_s": ranks.num_ranks * moved / seconds[3] / 1e9,
        "gb_s_in_a_row": ranks.num_ranks * moved / seconds[1] / 1e9,
        "us_alone": 1e6 * float(slowest),
    }


def many(
    transport: Transport,
    ranks: Ranks,
    rows: torch.Tensor,
    counts: list[int],
    times: int,
    under_way: int,
) -> float:
    """Seconds an exchange."""
    pending: deque[Pending] = deque()
    settle(ranks)
    began = time.perf_counter()
    for _ in range(times):
        pending.append(transport.start(rows, send=counts, receive=counts))
        if len(pending) == under_way:
            pending.popleft().wait()
    while pending:
        pending.popleft().wait()
    settle(ranks)
    return (time.perf_counter() - began) / times


def pinned_ceiling(ranks: Ranks) -> float:
    """GB/s a direction of plain pinned copies, both directions and all ranks at once."""
    device = torch.zeros(64 << 20, dtype=torch.uint8, device=ranks.device)
    out, back = (torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there = torch.empty_like(device)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for times in (2, 20):
        settle(ranks)
        began = time.perf_counter()
        for _ in range(times):
            with torch.cuda.stream(streams[0]):
                out.copy_(device, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                there.copy_(back, non_blocking=True)
        settle(ranks)
        seconds = (time.perf_counter() - began) / times
    return ranks.num_ranks * device.nbytes / seconds / 1e9


def as_rank(options: argparse.Namespace) -> None:
    """One rank of a part; rank 0 leaves the results in a file."""
    if options.device == "cuda":
        from copy_kernel import register

        register()
    with join_ranks(device=options.device, timeout_s=120) as ranks:
        measure = {
            "hog": part_hog,
            "profiler": part_profiler,
            "contention": part_contention,
            "rate": part_rate,
        }
        result = measure[options.part](ranks, options)
        ranks.barrier()
        if ranks.is_first:
            Path(options.result).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # threads of a transport may outlive their use


def start(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part on ranks of its own; a failure is part of the result."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = ["--rank", "--part", part, "--result", str(result), "--device", options.device]
        command += ["--transports", ",".join(options.kinds), "--largest-kib", str(options.largest_kib)]
        command += ["--gemm", str(options.gemm), "--hog-kib", str(options.hog_kib)]
        try:
            if options.device == "cpu":
                launch(command, num_ranks=options.ranks, program=(__file__,))
            else:
                with virtual_gpus(options.ranks) as shared:
                    print(f"{part}: {shared.message}", file=sys.stderr)
                    whole = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"} if part in WHOLE_GPU else {}
                    environment = {**shared.environment, **whole}
                    launch(command, num_ranks=options.ranks, program=(__file__,), environment=environment)
            return json.loads(result.read_text())
        except (FreeScaleError, OSError) as error:
            return {"failed": str(error)}


def show(part: str, result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Print a part; returns what it was to show and does not."""
    print(f"\n{part}, {options.ranks} ranks")
    if "failed" in result:
        print(f"  FAILED: {result['failed']}")
        return [f"{part}: {result['failed']}"]
    for name, problem in result.get("not_available", {}).items():
        print(f"  not available: {name}: {problem}")
    return {
        "hog": show_hog,
        "profiler": show_profiler,
        "contention": show_contention,
        "rate": show_rate,
    }[part](result, options)


def show_hog(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    print(f"  {'while every SM is held':<28} {'finished on':>12} {'rows right':>11} {'ms':>8}")
    missed = []
    for name, row in result["results"].items():
        right = "-" if name not in result["engines"] else "yes" if row["right_while_held"] else "no"
        print(f"  {name:<28} {row['finished_on']:>9} / {options.ranks} {right:>11} {row['ms']:8.2f}")
        if name == "host_staged" and not (row["finished_on"] == options.ranks and row["right_while_held"]):
            missed.append("host_staged did not finish with the right rows while every SM was held")
        if name in CONTROLS and row["finished_on"]:
            missed.append(
                f"negative control: {name} finished on {row['finished_on']} ranks, so SMs were free"
            )
        if not row["right_afterwards"]:
            missed.append(f"{name}: wrong rows afterwards")
    return missed


def show_profiler(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    missed = []
    for name, row in result["results"].items():
        print(f"  {name:<15} {row['copies']:>4} copies, kernels: {', '.join(row['kernels']) or 'none'}")
        if name == "host_staged" and (row["kernels"] or not row["profiler_saw_anything"]):
            missed.append("host_staged: kernels in the trace, or the profiler saw nothing")
    return missed


def show_contention(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    names = ("compute ms", "slowdown", "GB/s alone", "GB/s loaded", "kept")
    print(f"  {'':<58}" + "".join(f"{name:>12}" for name in names))
    missed = []
    for row in result["results"]:
        cells = f"{row['compute_ms']:12.3f}{row['slowdown']:11.3f}x{row['gb_s_alone']:12.1f}"
        cells += f"{row['gb_s_loaded']:12.1f}{row['rate_kept']:12.1%}"
        print(f"  {row['compute'] + ' + ' + row['beside']:<58}" + cells)
        if row["beside"] == "host_staged" and (row["slowdown"] > 1.02 or row["rate_kept"] < 0.95):
            missed.append(f"host_staged beside {row['compute']}: at most 1.02x and at least 95 % were asked")
    return missed


def show_rate(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    names = list(result["engines"])
    ceiling = result["ceiling_gb_s"]
    print(f"  pinned copies, all ranks at once: {ceiling:.1f} GB/s a direction")
    print("  GB/s: three on the way / one after the other")
    heads = (f"{name}: GB/s" for name in names), (f"{name}: us" for name in names)
    print(f"  {'KiB a pair':>10}" + "".join(f"{head:>20}" for group in heads for head in group))
    missed = []
    for row in result["results"]:
        rates = "".join(f"{row[n]['gb_s']:12.2f} /{row[n]['gb_s_in_a_row']:6.2f}" for n in names)
        print(
            f"  {row['bytes_a_pair'] >> 10:>10}"
            + rates
            + "".join(f"{row[n]['us_alone']:20.1f}" for n in names)
        )
        if "host_staged" not in row or not ceiling:
            continue
        if row["bytes_a_pair"] >= 1 << 20 and row["host_staged"]["gb_s"] < 0.85 * ceiling:
            share = row["host_staged"]["gb_s"] / ceiling
            missed.append(
                f"{row['bytes_a_pair'] >> 20} MiB a pair: {share:.0%} of the pinned copies, 85 % asked"
            )
        best = min(row[name]["us_alone"] for name in names)
        if row["bytes_a_pair"] == 4 << 10 and row["host_staged"]["us_alone"] > 2 * best:
            missed.append("4 KiB a pair: host_staged takes more than twice the best transport's time")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--transports", help="comma-separated")
    parser.add_argument("--largest-kib", type=int, default=16 << 10, help="bytes a pair, at most, of `rate`")
    parser.add_argument("--gemm", type=int, default=8192)
    parser.add_argument("--hog-kib", type=int, default=1024, help="bytes a pair while SMs are held")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no part after this time")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    default = (
        "host_staged,copy_engine,collective" if options.device == "cuda" else "host_staged,collective,local"
    )
    options.kinds = (options.transports or default).split(",")
    if options.rank:
        as_rank(options)
    parts = [options.part] if options.part else list(PARTS)
    if options.device == "cpu":
        parts = ["rate"]
    deadline = time.monotonic() + options.budget_s
    results, missed = {}, []
    for part in parts:
        if time.monotonic() > deadline:
            missed.append(f"{part}: no time left")
            continue
        results[part] = start(part, options)
        missed += show(part, results[part], options)
    shown = "all that was asked is there" if options.device == "cuda" else "CPU ranks have nothing to show"
    print("\nnot shown: " + ("; ".join(missed) or f"nothing; {shown}"))
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    facts = {
        "gpu": gpu,
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
        "ranks": options.ranks,
    }
    print(json.dumps({"claim": "sm_free", "results": results, "not_shown": missed, **facts}))


if __name__ == "__main__":
    main()
