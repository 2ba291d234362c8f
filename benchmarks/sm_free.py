r"""Does an exchange take SMs? Proof, cost and speed of the transports, among ranks that share one GPU.

    python benchmarks/sm_free.py --part hog          # SM-hog: which exchanges finish while a kernel holds every SM
    python benchmarks/sm_free.py --part profiler     # kernels the profiler links to an exchange
    python benchmarks/sm_free.py --part contention   # compute beside communication: slowdown, and rate under load
    LD_PRELOAD=libnccl.so.2 python benchmarks/sm_free.py --part contention --ranks 2 \
        --transports nccl:default,nccl:4,nccl:8,nccl:16,copy_engine,host_staged     # NCCL 2.30 or later: the real thing
    python benchmarks/sm_free.py --part rate         # GB/s and latency by size, against pinned copies
    python benchmarks/sm_free.py --part causes       # flags, waits, events and copies one by one beside compute
    python benchmarks/sm_free.py --part inside --ranks 8    # what copies inside a GPU wait for, on 16 SMs
    python benchmarks/sm_free.py --device cpu --ranks 2 --part rate --largest-kib 256     # to try it out

Without --part all of them run, in that order. Every part with transports first checks that rows arrive whole.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from sm_free_parts import causes, contention, hog, inside, profiler, rate

from freescale.comm.world.joining import join_ranks
from freescale.comm.world.launcher import launch
from freescale.comm.world.ranks import Ranks
from freescale.comm.world.shared_gpu.shares import virtual_gpus
from freescale.errors import FreeScaleError


class Part(Protocol):
    """A module of `sm_free_parts`."""

    def measure(self, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
        """What one rank does; the result of rank 0 counts."""

    def show(self, result: dict[str, Any], options: argparse.Namespace) -> list[str]:
        """Print it; what it was to show and does not."""


PARTS: dict[str, Part] = {
    "hog": hog,
    "profiler": profiler,
    "contention": contention,
    "rate": rate,
    "causes": causes,
    "inside": inside,
}
WHOLE_GPU = {"hog", "contention", "causes"}
"""Parts whose ranks may use every SM: one of them computes, or holds, on the whole GPU."""


def as_rank(options: argparse.Namespace) -> None:
    """One rank of a part; rank 0 leaves the results in a file."""
    if options.device == "cuda":
        import copy_kernel
        import nccl_ctas

        copy_kernel.register_all()
        nccl_ctas.register_all()
    with join_ranks(device=options.device, timeout_s=120) as ranks:
        result = PARTS[options.part].measure(ranks, options)
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
        command += ["--window-ms", str(options.window_ms)]
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
    return PARTS[part].show(result, options)


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
    parser.add_argument("--window-ms", type=float, default=80.0, help="of `contention`: length of each turn")
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
