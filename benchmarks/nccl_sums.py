r"""Which sums of NCCL hang beside compute, between ranks that share a GPU.

    LD_PRELOAD=libnccl.so.2 PYTHONPATH=. python benchmarks/nccl_sums.py --ranks 8             # NCCL 2.30 or later
    ... --ranks 8 --with "" NCCL_MAX_CTAS=4 COMPUTE=add CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100

Every environment is tried in processes and with a daemon of MPS of its own, since a try may hang. The ranks first add
up tensors of the sizes of dense gradients alone, then beside matrix products, at moments that differ from rank to
rank, then train a few steps of torch's own DistributedDataParallel. Every sum is checked. A try that stands still for
7 s ends, and it is told what each rank's streams had not done by then: its own work before the sum (start), that
beside it (work), or the sum.

COMPUTE says what is beside: products (the default), forward or backward products alone, or add, an elementwise kernel.
A value of "unset" takes a variable away.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from freescale.comm.world.shared_gpu.nccl import loaded_nccl
from freescale.comm.world.shared_gpu.shares import virtual_gpus

SIZES = (1_310_720, 4_203_137, 9_472_516)
"""Numbers of a sum: two buckets and all dense gradients of an HSTU of 4 x 512."""

COMPUTES = ("products", "forward", "backward", "add")
LIMIT_S = 60.0
_STILL_S = 7.0
_TOKENS, _DIM, _WIDE = 40_000, 512, 2048


class Rank:
    """One rank: matrices to multiply, and where it says how far it is."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._place = folder / f"at-{rank}"
        self.at("starting")
        torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=60),
            device_id=torch.device("cuda", 0),
        )
        kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.tokens, self._weight = torch.randn(_TOKENS, _DIM, **kind), torch.randn(_DIM, _WIDE, **kind)
        self._hidden = self.tokens @ self._weight
        self.compute = os.environ.get("COMPUTE", COMPUTES[0])
        self.work(1)  # loads the kernels
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()

    def at(self, what: str) -> None:
        """Say how far it is."""
        self._place.write_text(what)

    def work(self, times: int) -> None:
        """Compute on the current stream."""
        for _ in range(times):
            if self.compute in ("products", "forward"):
                torch.mm(self.tokens, self._weight)
            if self.compute in ("products", "backward"):
                torch.mm(self.tokens.t(), self._hidden)
            if self.compute == "add":
                for _ in range(12):
                    self._hidden.mul_(0.999)

    def settle(self, what: str, **events: torch.cuda.Event) -> None:
        """Wait for what was begun; a rank that stands still says what is left and ends."""
        until = time.monotonic() + _STILL_S
        while left := [name for name, event in events.items() if not event.query()]:
            if time.monotonic() > until:
                self.at(f"{what}: not done: {', '.join(left)}")
                os._exit(4)
            time.sleep(0.002)


def moment() -> torch.cuda.Event:
    """Of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def add_up(rank: Rank, *, beside: bool) -> None:
    """Sums of every size; beside work, ranks come to them at different times."""
    name = f"beside {rank.compute}" if beside else "alone"
    for size in SIZES:
        for turn in range(8):
            what = f"{name}, {size:,} numbers, turn {turn}"
            rank.at(what)
            values = torch.ones(size, device="cuda")
            rank.work((1 + (rank.rank + turn) % 3) if beside else 0)
            start = moment()
            adding = dist.all_reduce(values, async_op=True)
            rank.work(6 if beside else 0)
            work = moment()
            assert adding is not None
            adding.wait()
            rank.settle(what, start=start, work=work, sum=moment())
            if not bool((values == rank.num_ranks).all()):
                raise SystemExit(f"FAILED: {what}: the sum is wrong")


def train(rank: Rank) -> None:
    """Steps whose sums begin inside the backward, and an exchange of counts between them."""
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(_DIM, _WIDE), torch.nn.SiLU(), torch.nn.Linear(_WIDE, _DIM)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), bucket_cap_mb=5)
    for step in range(12):
        what = f"training, step {step}"
        rank.at(what)
        tokens = 8000 + 977 * ((5 * rank.rank + 3 * step) % 32)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(rank.tokens[:tokens].float())
        out.float().square().mean().backward()
        counts = torch.empty(rank.num_ranks, device="cuda")
        dist.all_to_all_single(counts, torch.ones(rank.num_ranks, device="cuda"))
        rank.settle(what, step=moment())


STAGES: tuple[Callable[[Rank], None], ...] = (
    lambda rank: add_up(rank, beside=False),
    lambda rank: add_up(rank, beside=True),
    train,
)


def be_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """All stages; the process ends without closing what may hang."""
    this = Rank(rank, num_ranks, folder)
    for stage in STAGES:
        stage(this)
    this.at("through")
    os._exit(0)


def pairs_of(variant: str) -> list[tuple[str, str]]:
    """Names and values; one that is missing is empty."""
    return [(name, value) for name, _, value in (each.partition("=") for each in variant.split(",") if each)]


def try_with(variant: str, num_ranks: int, environment: dict[str, str]) -> dict[str, Any]:
    """Where the ranks came to, with these variables."""
    changed = dict(pairs_of(variant))
    env = {name: value for name, value in {**environment, **changed}.items() if value != "unset"}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        said = [opened.enter_context(open(folder / f"said-{rank}", "w+")) for rank in range(num_ranks)]
        command = [sys.executable, __file__, "--ranks", str(num_ranks), "--folder", str(folder), "--rank"]
        begun = time.monotonic()
        ranks = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=out, stderr=out)
            for rank, out in enumerate(said)
        ]
        deadline = begun + LIMIT_S
        while time.monotonic() < deadline and any(each.poll() is None for each in ranks):
            if any(each.poll() for each in ranks):
                deadline = min(deadline, time.monotonic() + _STILL_S + 3)
            time.sleep(0.1)
        for each in ranks:
            if each.poll() is None:
                each.kill()
            each.wait()
        places = [folder / f"at-{rank}" for rank in range(num_ranks)]
        came_to = collections.Counter(
            place.read_text() if place.exists() else "not started" for place in places
        )
        errors = []
        for out in said:
            out.seek(0)
            errors += [line for line in out.read().splitlines() if "Error" in line or "FAILED" in line]
    return {
        "with": variant or "as it is",
        "through": came_to == {"through": num_ranks},
        "came_to": dict(came_to),
        "error": errors[-1] if errors else "",
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Each environment in turn; a table, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--with", dest="variants", nargs="+", default=[""], metavar="NAME=VALUE,...")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options.rank, options.ranks, options.folder)
    for name, value in (pair for variant in options.variants for pair in pairs_of(variant)):
        if not name or not value or (name == "COMPUTE" and value not in COMPUTES):
            parser.error(
                f"--with takes NAME=VALUE,...; COMPUTE is one of {', '.join(COMPUTES)}; got {name}={value}"
            )
    answers = []
    for variant in options.variants:
        with virtual_gpus(
            options.ranks
        ) as shared:  # a daemon whose clients were ended takes no others for a while
            environment = {**os.environ, "NCCL_LAUNCH_ORDER_IMPLICIT": "1", **shared.environment}
            answer = try_with(variant, options.ranks, environment)
        answers.append(answer)
        told = "; ".join(f"{count} x {where}" for where, count in answer["came_to"].items())
        if answer["through"]:
            told = "through"
        print(f"{answer['with']:<40} {answer['seconds']:5.0f} s  {told}  {answer['error'][:160]}", flush=True)
    facts = {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, loaded_nccl() or ())),
        "date": str(datetime.date.today()),
    }
    print(json.dumps({"claim": "nccl_sums", "ranks": options.ranks, "tries": answers, **facts}))
    if any("FAILED" in answer["error"] for answer in answers):
        raise SystemExit("FAILED: a sum was wrong")


if __name__ == "__main__":
    main()
