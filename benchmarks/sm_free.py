r"""Does an exchange take SMs? Proof, cost and speed of the transports, among ranks that share one GPU.

    python benchmarks/sm_free.py --part hog          # SM-hog: which exchanges finish while a kernel holds every SM
    python benchmarks/sm_free.py --part profiler     # kernels the profiler links to an exchange
    python benchmarks/sm_free.py --part contention   # compute beside communication: slowdown, and rate under load
    python benchmarks/sm_free.py --part rate         # GB/s and latency by size, against pinned copies
    python benchmarks/sm_free.py --part causes       # flags, waits, events and copies one by one beside compute
    python benchmarks/sm_free.py --device cpu --ranks 2 --part rate --largest-kib 256     # to try it out

Without --part all of them run, in that order. Every part with transports first checks that rows arrive whole.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from beside_compute import Times, beside, compute_jobs, exchanges, nothing, pinned_copies, repeated
from costs_one_by_one import part_causes, show_causes

from freescale.comm.choose import make_transport
from freescale.comm.launch import launch
from freescale.comm.ranks import Ranks, join_ranks
from freescale.comm.transport import Transport
from freescale.comm.virtual_gpus import virtual_gpus
from freescale.errors import FreeScaleError

PARTS = ("hog", "profiler", "contention", "rate", "causes")
WHOLE_GPU = {"hog", "contention", "causes"}
"""Parts whose ranks may use every SM: one of them computes, or holds, on the whole GPU."""

CONTROLS = ("a tiny kernel", "a copy kernel of 8 blocks", "symmetric-memory barrier")
"""What must not finish while every SM is held."""

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


def part_contention(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 computes on the whole GPU while all ranks exchange, or a copy kernel runs beside."""
    from gpu_kernels import BlockCopy

    num_bytes = 4 << 20
    kinds = [kind for kind in options.kinds if kind != "collective"]
    found, problems = open_all(ranks, kinds)
    second, _ = open_all(ranks, kinds)
    rows, counts = rows_of(ranks, num_bytes)
    for transport in (*found.values(), *second.values()):
        warm_up(transport, ranks, num_bytes)
    jobs = compute_jobs(ranks.device, options.gemm)
    source, target = (torch.zeros(64 << 20, dtype=torch.uint8, device=ranks.device) for _ in range(2))
    comms: dict[str, Times] = {}
    for name, transport in found.items():
        comms[name] = exchanges([transport], rows, counts)
        # As a pipeline has them: rows wanted soon and rows wanted later each have a transport.
        comms[f"{name}, four on two"] = exchanges([transport, second[name]], rows, counts, on_the_way=4)
    comms["plain pinned copies"] = pinned_copies(ranks.device, num_bytes, pieces=ranks.num_ranks - 1)
    blocks = {f"copy kernel, {n} blocks": BlockCopy(n) for n in (8, 16, 24, 32)}
    results = []
    for job, compute in jobs.items():
        for name in (*blocks, *comms):
            everybody = name in comms
            moved = num_bytes * (ranks.num_ranks - 1) if everybody else source.nbytes
            if everybody:
                comm = comms[name]
            elif ranks.is_first:
                comm = repeated(functools.partial(blocks[name], target, source))
            else:
                comm = nothing
            results.append({"compute": job, "beside": name, **beside(ranks, compute, comm, moved)})
    return {"results": results, "not_available": problems}


def part_rate(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """GB/s a direction, summed over the ranks, and microseconds of one exchange, by bytes a pair."""
    on_gpu = ranks.device.type == "cuda"
    ceiling = pinned_rate(ranks, 64 << 20, pieces=1) if on_gpu else None
    table, engines = [], {}
    num_bytes = 4 << 10
    while num_bytes <= options.largest_kib << 10:
        row: dict[str, Any] = {"bytes_a_pair": num_bytes}
        if on_gpu:
            row["pinned_gb_s"] = pinned_rate(ranks, num_bytes, pieces=ranks.num_ranks - 1)
        # Opened for each size: slots grow with the messages, and do so at fixed exchanges.
        found, problems = open_all(ranks, options.kinds)
        rows, counts = rows_of(ranks, num_bytes)
        for transport in found.values():
            warm_up(transport, ranks, num_bytes)
        alone = microseconds(ranks, found, rows, counts)
        for name, transport in found.items():
            rates = {
                on_the_way: rate(
                    ranks,
                    exchanges([transport], rows, counts, on_the_way=on_the_way),
                    num_bytes * (ranks.num_ranks - 1),
                )
                for on_the_way in (3, 1)
            }
            row[name] = {"gb_s": rates[3], "gb_s_in_a_row": rates[1], "us_alone": alone[name]}
            engines[name] = [transport.engine, transport.sm_free]
        table.append(row)
        num_bytes *= 4
    return {"results": table, "ceiling_gb_s": ceiling, "engines": engines, "not_available": problems}


def microseconds(
    ranks: Ranks, found: dict[str, Transport], rows: torch.Tensor, counts: list[int], *, turns: int = 40
) -> dict[str, float]:
    """Of one exchange alone, by each transport in turn: medians, averaged over the ranks."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(turns):
        for name, transport in found.items():
            settle(ranks)
            began = time.perf_counter()
            exchange(transport, rows, counts)
            if ranks.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            taken[name].append(time.perf_counter() - began)
    medians = torch.tensor([statistics.median(each) for each in taken.values()], dtype=torch.float64)
    means = ranks.sum_on_cpu(medians) / ranks.num_ranks
    return {name: 1e6 * float(mean) for name, mean in zip(taken, means)}


def rate(ranks: Ranks, comm: Times, num_bytes: int) -> float:
    """GB/s of all ranks together, each of which moves so many bytes a time."""
    times = max(12, min(400, (512 << 20) // max(1, num_bytes)))
    settle(ranks)
    began = time.perf_counter()
    comm(times)
    settle(ranks)
    return ranks.num_ranks * num_bytes * times / (time.perf_counter() - began) / 1e9


def pinned_rate(ranks: Ranks, num_bytes: int, *, pieces: int) -> float:
    """GB/s a direction of plain pinned copies of this size, both directions and all ranks at once."""
    copies = pinned_copies(ranks.device, num_bytes, pieces=pieces)
    copies(2)
    return rate(ranks, copies, num_bytes * pieces)


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
            "causes": part_causes,
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
        "causes": show_causes,
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
    print(f"  {'':<60}" + "".join(f"{name:>12}" for name in names))
    missed = []
    for row in result["results"]:
        cells = f"{row['compute_ms']:12.3f}{row['slowdown']:11.3f}x{row['gb_s_alone']:12.1f}"
        cells += f"{row['gb_s_loaded']:12.1f}{row['rate_kept']:12.1%}"
        print(f"  {row['compute'] + ' + ' + row['beside']:<60}" + cells)
        if row["beside"].startswith("host_staged") and (row["slowdown"] > 1.02 or row["rate_kept"] < 0.95):
            missed.append(
                f"{row['beside']} beside {row['compute']}: at most 1.02x and at least 95 % were asked"
            )
    return missed


def show_rate(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    names = list(result["engines"])
    ceiling = result["ceiling_gb_s"]
    if ceiling:
        print(f"  pinned copies of 64 MiB, all ranks at once: {ceiling:.1f} GB/s a direction")
    print("  GB/s: pinned copies of this size; exchanges, three on the way / one after the other")
    heads = (f"{name}: GB/s" for name in names), (f"{name}: us" for name in names)
    print(
        f"  {'KiB a pair':>10}{'pinned: GB/s':>14}"
        + "".join(f"{head:>20}" for group in heads for head in group)
    )
    missed = []
    for row in result["results"]:
        rates = "".join(f"{row[n]['gb_s']:12.2f} /{row[n]['gb_s_in_a_row']:6.2f}" for n in names)
        print(
            f"  {row['bytes_a_pair'] >> 10:>10}{row.get('pinned_gb_s', 0):14.2f}"
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
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu tries out the rate of CPU ranks")
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
