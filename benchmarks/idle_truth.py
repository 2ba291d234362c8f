r"""Is host time what it says it is? The accounts of a run beside the kernels of the same steps, seen by the profiler.

Five workloads: spins of known length with a host that dawdles (5 to 95 % idle), a small HSTU on histories like those of
ML-1M, one of 4 x 512 on short histories with a Pareto tail, one of 4 x 512 on histories of 400, and four virtual GPUs.
A run is warmed up until it has settled; meanwhile the accounts see some steps kernel by kernel. Then, in rounds: free
steps, whose time counts, and traced steps, of which kernels and accounts are compared: what share of the time did
nothing run? The profiler slows the host of traced steps down, so their idle share is another than that of free ones;
both columns of a comparison are of the same steps. "before" is what the accounts said when gaps between kernels counted
as compute.

    python benchmarks/idle_truth.py [--only spins,ml1m,imdb,mean400,virtual] [--rounds 3]      # one GPU
    python benchmarks/idle_truth.py --device cpu --only ml1m          # tries the code; there is no kernel to see
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_truth import Kernels

from freescale import trace
from freescale.balance import MeasuredStep
from freescale.comm.world import Ranks, as_rank, join_ranks, launch, virtual_gpus
from freescale.data import SyntheticSource, legacy_schema
from freescale.recipe import build_run, build_source, load_config
from freescale.trace import Recorder
from freescale.train.accounts.accountant import ClosedStep
from freescale.train.accounts.accounting import AccountedStep, Accounts
from freescale.train.accounts.busy_meter import BusyMeter
from freescale.train.accounts.cuda_clock import CudaClock
from freescale.train.accounts.driver_counter import open_nvml
from freescale.train.accounts.kernel_watch import KernelWatch
from freescale.train.log.events import Progress
from freescale.train.loop import reports_of, steady_state, steps_of
from freescale.train.run import Run

WARM, WARM_SPINS, TRACED_SPINS = 216, 60, 30
LIMIT = 0.02
IDLE = (0.05, 0.25, 0.5, 0.75, 0.95)
COMMON = (
    "model.kind=hstu",
    "model.dropout=0",
    "run.steps=100000",
    "run.eval_every=1000000",
    "eval.max_users=16",
    "balance.refit_every=null",
    "pipeline.decide_every=null",
    "run.log_every=10",
)
BIG = ("model.layers=4", "model.dim=512", "model.heads=4", "model.dtype=bfloat16", "head.num_negatives=128")
WORKLOADS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ml1m": (
        100,
        (
            "synthetic.users=6040",
            "synthetic.items=3416",
            "synthetic.mean_length=165",
            "synthetic.max_length=2277",
            "data.max_length=200",
            "data.global_batch=128",
            "model.layers=2",
            "model.dim=64",
            "model.heads=2",
            "model.dtype=bfloat16",
            "head.num_negatives=128",
        ),
    ),
    "imdb": (80, (*BIG, "synthetic.items=18000", "data.max_length=4096", "data.global_batch=384")),
    "mean400": (
        60,
        (
            *BIG,
            "synthetic.users=4096",
            "synthetic.items=18000",
            "synthetic.mean_length=400",
            "synthetic.max_length=2000",
            "data.max_length=2048",
            "data.global_batch=256",
        ),
    ),
}
"""Name -> free steps a round and as many traced ones, keys. Four virtual GPUs share the second."""


class ShortHistories(SyntheticSource):
    """20,000 histories of 25 events on average, whose Pareto tail ends at 3,107; items by Zipf's law."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        raw = 6.3 * (1 + rng.pareto(1.25, 20_000))
        self._lengths = np.clip(raw, 4, 3107).astype(np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        self._num_items = 18_000
        weights = 1 / np.arange(1, self._num_items + 1)
        num_events = int(self._offsets[-1])
        items = 1 + rng.choice(self._num_items, size=num_events, p=weights / weights.sum())
        self._columns = {"item": items, "time": np.arange(num_events)}
        self.schema, self.statistics = legacy_schema(self.features), {}
        self._user_columns, self._item_columns = {}, {}


class Beside(list[AccountedStep]):
    """Takes accounted steps, and what the accounts would have said of them before."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self.stretches: dict[int, float] = {}
        accounts.write = self.append
        closed = accounts._closed

        def both(steps: Sequence[ClosedStep]) -> Any:
            self.stretches.update({one.step: one.lengths.parts().compute for one in steps})
            return closed(steps)

        accounts._closed = both  # type: ignore[method-assign]

    def shares(self, first: int, last: int, rank: int = 0) -> dict[str, float]:
        """Of the time of some steps of a rank: T in ms, and shares."""
        steps = [one for one in self if first <= one.step <= last]
        own = [one.ranks[rank] if rank < len(one.ranks) else one.ranks[0] for one in steps]
        seconds = sum(one.total for one in own)
        names = ("compute", "straggler", "comm", "host")
        before = sum(self.stretches[one.step] for one in steps)
        found = {name: sum(getattr(one, name) for one in own) / seconds for name in names}
        return {
            "step_ms": 1000 * seconds / len(steps),
            **found,
            "before": 1 - found["straggler"] - found["comm"] - before / seconds,
            "dry": statistics.fmean(one.dry or 0.0 for one in steps),
            "unknown": float(any(one.unknown for one in steps)),
        }


def measure_run(name: str, ranks: Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of free and traced steps of one workload on this rank."""
    free, keys = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            None, [*COMMON, *keys, f"run.device={options.device}", f"run.out={folder}", *options.keys]
        )
        source = ShortHistories() if name == "imdb" else build_source(config)
        run = build_run(config, source, ranks, Progress())
        found = Beside(run.accounts)
        watches = timed_watches(run.accounts)
        with run.open_schedule(0) as schedule, steady_state(run) as loaded:
            reports = reports_of(run)
            steps = steps_of(run, schedule, reports, loaded, first_step=0)

            def take(count: int, last: int, whole: AbstractContextManager[Any] | None = None) -> int:
                with whole or nullcontext():  # it ends with the last step: what follows belongs to none
                    for _ in range(count):
                        next(steps)
                reports.flush()
                schedule.flush()
                run.accounts.pause()
                return last + count

            done = take(WARM, 0)
            rounds = []
            for _ in range(options.rounds):
                ranks.barrier()  # traces of other ranks take up to a second to be read
                run.accounts.begin(done + 1)
                first, done = done + 1, take(free * options.free_times, done)
                row: dict[str, Any] = {"free": found.shares(first, done)}
                row["nvml"] = options.nvml() if options.nvml is not None else None
                rounds.append(row | traced(run, found, ranks, first=done + 1, count=free, take=take))
                done += free
        trace.record_into(None)
        run.accounts.close()
        meter = run.accounts.busy
        for row in rounds:
            row["problem"] = "" if meter is None else meter.times.problem
            row["watch_ms"] = watches
            row["around_watch_ms"] = [usual_ms(found, 4, 8), usual_ms(found, 24, 48)]
        return rounds


def timed_watches(accounts: Accounts) -> list[float]:
    """Milliseconds that opening and closing watches takes, as they come."""
    found: list[float] = []
    watch = accounts._watch

    def timed(busy: BusyMeter, recorder: Recorder) -> None:
        began, was_open = time.monotonic(), busy.is_open
        watch(busy, recorder)
        if busy.is_open != was_open:
            found.append(round(1000 * (time.monotonic() - began), 1))

    accounts._watch = timed  # type: ignore[method-assign]
    return found


def usual_ms(found: Beside, first: int, last: int) -> float:
    """The median step."""
    return 1000 * statistics.median(one.ranks[0].total for one in found if first <= one.step <= last)


def traced(run: Run, found: Beside, ranks: Ranks, *, first: int, count: int, take: Any) -> dict[str, Any]:
    """Steps seen by the profiler beside what their accounts say: as many as free ones, so that the edges are few."""
    last = first + count - 1
    if ranks.device.type != "cuda":
        run.accounts.begin(first)
        take(count, first - 1)
        return {"traced": found.shares(first, last), "idle": None, "kernels": 0, "computes": None}
    ranks.barrier()
    kernels = Kernels(ranks.device, meet=ranks.barrier, then=lambda: run.accounts.begin(first))
    take(count, first - 1, kernels)
    told = found.shares(first, last)
    return {
        "traced": told,
        "idle": 1 - kernels.busy / kernels.seconds,
        "computes": kernels.compute / kernels.seconds,
        "kernels": kernels.num / count,
    }


def measure_spins(idle: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A program of spins: 20 a step, of about 0.1 ms, launched by a host that needs longer for a launch."""
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = Recorder(CudaClock(device))
    trace.record_into(recorder)
    accounts = Accounts(
        ranks=Ranks(0, 1, device),
        recorder=recorder,
        write=lambda step: None,
        busy=BusyMeter(watch=KernelWatch(device, recorder.clock), clock=recorder.clock),
    )
    found = Beside(accounts)
    steps = spinning(accounts, recorder, period=1e-4 / (1 - idle), cycles_a_us=cycles_a_us())

    def take(count: int, last: int, whole: AbstractContextManager[Any] | None = None) -> int:
        with whole or nullcontext():
            for _ in range(count):
                next(steps)
        accounts.pause()
        return last + count

    accounts.begin(1)
    done = take(WARM_SPINS, 0)
    rows = []
    for _ in range(options.rounds):
        accounts.begin(done + 1)
        first, done = done + 1, take(30, done)
        row: dict[str, Any] = {"free": found.shares(first, done), "nvml": None}
        first = done + 1
        kernels = Kernels(device, then=partial(accounts.begin, first))
        done = take(TRACED_SPINS, done, kernels)
        row |= {"traced": found.shares(first, done), "idle": 1 - kernels.busy / kernels.seconds}
        rows.append(row | {"kernels": kernels.num / TRACED_SPINS, "problem": accounts.busy.times.problem})  # type: ignore[union-attr]
    trace.record_into(None)
    return rows


def spinning(accounts: Accounts, recorder: Recorder, *, period: float, cycles_a_us: float) -> Iterator[None]:
    """Steps without end; the host is at most two ahead."""
    rng, step, queued = np.random.default_rng(1), 0, [recorder.clock.mark()] * 2
    while True:
        step += 1
        tokens = int(rng.integers(800, 1200))
        with trace.stage("train", step=step), trace.compute("forward and backward"):
            for _ in range(20):
                until = time.perf_counter() + period
                torch.cuda._sleep(int(cycles_a_us * tokens / 10))
                while time.perf_counter() < until:
                    pass
        trace.describe(MeasuredStep(num_samples=8, tokens=tokens, squares=1.0, ms=0.0))
        accounts.end_step()
        accounts.add(step, {"n": step})
        queued = [queued[1], recorder.clock.mark()]
        while recorder.clock.read(queued[0]) is None:
            pass
        yield


def cycles_a_us() -> float:
    """What `torch.cuda._sleep` counts."""
    cycles, began, ended = 20_000_000, *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    began.record()
    torch.cuda._sleep(cycles)
    ended.record()
    torch.cuda.synchronize()
    return cycles / (1000 * began.elapsed_time(ended))


def measure_virtual(options: argparse.Namespace, num_ranks: int = 4) -> list[list[dict[str, Any]]]:
    """[ranks][rounds] of ranks that share the GPU."""
    with tempfile.TemporaryDirectory() as folder, virtual_gpus(num_ranks) as shared:
        print(shared.message, file=sys.stderr)
        own = {key: getattr(options, key) for key in ("rounds", "free_times", "keys")}
        plan = {"folder": folder, **own}
        launch([json.dumps(plan)], num_ranks=num_ranks, environment=shared.environment, program=(__file__,))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def on_rank(plan: dict[str, Any]) -> None:
    options = argparse.Namespace(device="cuda", nvml=None, **plan)
    with join_ranks(device="cuda") as ranks:
        rows = measure_run("imdb", ranks, options)
        (Path(plan["folder"]) / f"{ranks.rank}.json").write_text(json.dumps(rows))
        ranks.barrier()


def table(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over the rounds, the largest error, and how they look."""
    print(f"{'':12} {'step ms':>8} {'host':>7} {'before':>7} {'driver':>7} | traced: host    idle   error")
    rows = []
    for name, rounds in results.items():
        errors = [abs(one["traced"][part] - truth) for one in rounds for part, truth in truths(one)]
        free = [one["free"] for one in rounds]
        nvml = [one["nvml"] for one in rounds if one.get("nvml") is not None]
        row = {
            "workload": name,
            **{key: _middle(one[key] for one in free) for key in ("step_ms", "host", "before", "dry")},
            "host_spread": max(one["host"] for one in free) - min(one["host"] for one in free),
            "driver_idle": 1 - _middle(nvml) if nvml else None,
            "traced_host": _middle(one["traced"]["host"] for one in rounds),
            "traced_ms": _middle(one["traced"]["step_ms"] for one in rounds),
            "traced_compute": _middle(one["traced"]["compute"] for one in rounds),
            "kernel_compute": _middle([one["computes"] for one in rounds])
            if rounds[0].get("computes")
            else None,
            "idle": None if rounds[0]["idle"] is None else _middle(one["idle"] for one in rounds),
            "worst_error": max(errors, default=None),
            "kernels_a_step": rounds[-1]["kernels"],
            "problem": rounds[-1]["problem"],
            "watch_ms": rounds[-1].get("watch_ms"),
            "around_watch_ms": rounds[-1].get("around_watch_ms"),
        }
        rows.append(row)
        shown = (_percent(row[key]) for key in ("host", "before", "driver_idle"))
        beside = (_percent(row[key]) for key in ("traced_host", "idle", "worst_error"))
        print(
            f"{name:12} {row['step_ms']:8.2f} {' '.join(shown)} |      {' '.join(beside)}  {row['problem']}"
        )
    return rows


def _middle(values: Any) -> float:
    return statistics.median(values)


def _percent(value: Any) -> str:
    return "      -" if value is None else f"{value:7.2%}"


def truths(one: dict[str, Any]) -> list[tuple[str, float]]:
    """Which part is held against which share of the trace: alone, all that is not busy is host."""
    if one["idle"] is None:
        return []
    return [("compute", one["computes"])] if one.get("shared") else [("host", one["idle"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="spins,ml1m,imdb,mean400,virtual")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--free-times", type=int, default=1, help="as many times the free steps: NVML looks over a second"
    )
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the recipes")
    options = parser.parse_args()
    wanted = options.only.split(",")
    results: dict[str, list[dict[str, Any]]] = {}
    if "virtual" in wanted:  # first: this process must not hold the GPU beside the daemon
        for rank, rows in enumerate(measure_virtual(options)):
            results[f"virtual {rank}"] = [{**row, "shared": True} for row in rows]
    if wanted == ["virtual"]:
        conclude(results, hardware="NVIDIA GPU shared by 4 ranks")
        return
    device = torch.device(options.device)
    reader = open_nvml(torch.device("cuda", 0)) if device.type == "cuda" else "there is no GPU"
    options.nvml = None if isinstance(reader, str) else reader
    if isinstance(reader, str):
        print(f"the driver is not asked: {reader}")
    if "spins" in wanted:
        for idle in IDLE:
            results[f"spins {idle:.0%}"] = measure_spins(idle, options)
    for name in WORKLOADS:
        if name in wanted:
            began = time.monotonic()
            results[name] = measure_run(name, Ranks(rank=0, num_ranks=1, device=device), options)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    conclude(results, hardware=torch.cuda.get_device_name() if device.type == "cuda" else platform.machine())


def conclude(results: dict[str, list[dict[str, Any]]], *, hardware: str) -> None:
    """The table, whether all is well, and everything as JSON."""
    rows = table(results)
    errors = [row["worst_error"] for row in rows if row["worst_error"] is not None]
    passed = all(error <= LIMIT for error in errors) and not any(row["problem"] for row in rows)
    print(
        f"{'ok' if passed else 'FAILED'}: at most {100 * max(errors, default=0.0):.2f} points from the kernels"
    )
    facts = {"hardware": hardware, "torch": torch.__version__, "date": str(datetime.date.today())}
    print(json.dumps({"claim": "idle_truth", "passed": passed, "rows": rows, **facts}))
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        as_rank(lambda: on_rank(json.loads(sys.argv[1])))
    else:
        main()
