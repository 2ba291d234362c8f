"""What accounting costs: the same training with it on and off, in alternating blocks of steps of one run.

All ranks switch together, block by block, and every block is trained twice, once on each side: the same samples, the
same model, the same machine within seconds. Checked first: accounting changes no bit of the losses.

    python benchmarks/trace_overhead.py --ranks 2 --blocks 12
    python benchmarks/trace_overhead.py --gpu A --blocks 40     # replayed steps of one run on a GPU, in turns

With --gpu: a workload of `host_out_of_the_way.py`; one run, whose accounts are switched on and off every 50 steps,
after the watches of its first 220. What those take is told apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import host_out_of_the_way as host
import torch
import torch.distributed as dist

from freescale.balance import MeasuredStep
from freescale.comm.world.joining import join_ranks
from freescale.comm.world.ranks import Ranks
from freescale.recipe import build_run, build_source, load_config, open_span_file
from freescale.trace import stages
from freescale.trace.spans import Recorder
from freescale.train.accounts.accounting import Accounts
from freescale.train.accounts.busy import SeenStep
from freescale.train.accounts.busy_meter import BusyMeter
from freescale.train.log.events import Progress
from freescale.train.loop import reports_of, steady_state, steps_of, take_steps, timed_batches
from freescale.train.run import Run

BLOCK = 20
GPU_WARM, GPU_EDGE, GPU_BLOCK = 220, 10, 40
LOAD = MeasuredStep(num_samples=8, tokens=1000, squares=1e5, ms=0.0)
RECIPE = ("model.dropout=0", "run.log_every=20", "run.eval_every=1000000", "balance.refit_every=null")


class Lines:
    """Keeps the losses; stands in for the files."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def write(self, event: dict[str, Any]) -> None:
        """Take an event."""
        if event["event"] == "step":
            self.losses.append(event["loss"])

    def close(self) -> None:
        """Nothing is open."""


def open_run(config: Any, lines: Lines, ranks: Any) -> Run:
    run = build_run(config, build_source(config), ranks, Progress([lines]))
    open_span_file(run, config)
    return run


def train_block(run: Run, block: int, *, on: bool, recorder: Any) -> tuple[float, float]:
    """Wall and CPU seconds of a block, the account at its end included."""
    schedule = run.open_schedule(block * BLOCK)
    batches = timed_batches(schedule, block * BLOCK)
    stages.record_into(recorder if on else None)
    run.accounts.recorder = recorder if on else None
    run.ranks.barrier()
    reports = reports_of(run)
    wall, cpu = time.perf_counter(), time.process_time()
    for place in range(BLOCK):
        ready = next(batches)
        if place == 0:
            run.accounts.begin(ready.plan.step + 1)
        with stages.stage("train", step=ready.plan.step + 1):
            result = run.train_step.run(ready, schedule)
        reports.add(ready, result, seconds=run.accounts.end_step())
    reports.flush()
    run.accounts.pause()
    return time.perf_counter() - wall, time.process_time() - cpu


def on_rank(rank: int, options: argparse.Namespace, folder: str, answers: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks),
        FREESCALE_RENDEZVOUS=f"file://{folder}/store",
    )
    torch.set_num_threads(1)
    steps = (options.blocks + 1) * BLOCK
    config = load_config(None, [*RECIPE, f"run.steps={steps}", f"run.out={folder}", *options.keys])
    with join_ranks(device=config.run.device) as ranks:
        lines = Lines()
        run = open_run(config, lines, ranks)
        recorder = run.accounts.recorder
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for block in range(options.blocks + 1):
            # on off, off on, ...: a machine that slows down or speeds up favours neither side
            for on in (True, False) if block % 2 else (False, True):
                measured = train_block(run, block, on=on, recorder=recorder)
                if block > 0:
                    times[on].append(measured)
        answers.put((rank, times, lines.losses))
        dist.barrier()


class DeviceLike:
    """The host's clock in the role of a GPU's: its moments have lags, and are read one by one."""

    idle_lag = 5e-6
    lag = 0
    mark = staticmethod(time.monotonic)

    def read(self, mark: Any) -> float | None:
        """At once."""
        return float(mark)

    def wait_for_marks(self) -> None:
        """Nothing is ever pending."""

    def lag_of(self, mark: Any) -> float | None:
        """Always the same."""
        return 1e-5

    def start(self) -> None:
        """Nothing to see."""

    def stop(self) -> list[tuple[float, float]]:
        """It never worked."""
        return []


def busy_us_a_step() -> float:
    """What telling work from gaps adds to a step: lags, and the busy time of its size. The shortest of nine turns."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(9):
        for known in (True, False):
            found[known].append(calls_a_step(known=known)["us_a_step"])
    return min(found[True]) - min(found[False])


class _Known(BusyMeter):
    """A meter whose watches are over."""

    def begin(self, step: int) -> None:
        """No watch is planned."""
        self._num_watches = 1


def accounts_of(recorder: Recorder | None, *, known: bool) -> Accounts:
    """Of a rank alone, whose spans go there from now on; with the busy time of a size, if that is `known`."""
    stages.record_into(recorder)
    accounts = Accounts(ranks=Ranks(0, 1, torch.device("cpu")), recorder=recorder, write=lambda step: None)
    if known:
        accounts.busy = _Known(watch=DeviceLike())
        accounts.busy.times.learn(
            [SeenStep(LOAD._replace(tokens=n), 1.0, 0.1, 0.1, False, False) for n in range(20)]
        )
    return accounts


def calls_a_step(steps: int = 400, *, known: bool | None = None) -> dict[str, float]:
    """What a rank's calls cost without any training around them: the spans of a step of the plain schedule, split.

    Args:
        steps: so many.
        known: on a clock like a GPU's, with or without its busy time; on the host's clock unless given.
    """
    accounts = accounts_of(Recorder(None if known is None else DeviceLike()), known=bool(known))
    accounts.begin(1)
    begin = time.process_time()
    for step in range(1, steps + 1):
        with stages.stage("load and look up", step=step):
            for _ in range(6):
                with stages.compute("work"):
                    pass
        with stages.stage("train", step=step):
            for _ in range(8):
                with stages.stage("exchange"), stages.exchange("exchange"):
                    pass
        if known:
            stages.describe(LOAD)
        accounts.end_step()
        accounts.add(step, {})
    seconds = time.process_time() - begin
    accounts.pause()
    stages.record_into(None)
    return {"us_a_step": 1e6 * seconds / steps}


def alone_us_a_step(steps: int = 2000, *, on: bool = True) -> float:
    """What Python takes of a replayed step of a rank alone: its stretch, the load, its line; no event of a GPU."""
    accounts = accounts_of(Recorder(DeviceLike(), shows=lambda step: False) if on else None, known=on)
    accounts.begin(1)
    begin = time.process_time()
    for step in range(1, steps + 1):
        with stages.stage("load and look up", step=step):
            pass
        with stages.stage("train", step=step):
            start = stages.mark()
            stages.add("forward and backward", kind="compute", start=start, end=stages.mark())
            stages.describe(LOAD)
        accounts.add(step, {}, seconds=accounts.end_step())
    seconds = time.process_time() - begin
    accounts.pause()
    stages.record_into(None)
    return 1e6 * seconds / steps


def losses_with(on: bool, options: argparse.Namespace) -> list[float]:
    """Losses of a short run on this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            *RECIPE,
            "run.steps=8",
            f"run.out={folder}",
            f"trace.enabled={str(on).lower()}",
            *options.keys,
        ]
        config = load_config(None, keys)
        lines = Lines()
        with join_ranks(device=config.run.device) as ranks:
            run = open_run(config, lines, ranks)
            take_steps(run, run.open_schedule(0))
        return lines.losses


def turns_on_gpu(options: argparse.Namespace) -> None:
    """Wall and CPU time of replayed steps of one run with accounts and without, in turns."""
    keys = (*host.WORKLOADS[options.gpu][1], "run.capture=auto", *options.keys)
    run = host.make_run(keys, GPU_WARM + 2 * options.blocks * (GPU_EDGE + GPU_BLOCK) + 1)
    recorder = run.accounts.recorder
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with run.open_schedule(0) as schedule, steady_state(run) as loaded:
        reports = reports_of(run)
        steps = steps_of(run, schedule, reports, loaded, first_step=0)
        done = take(steps, GPU_WARM, 0)
        for turn in range(2 * options.blocks):
            on = turn % 2 == turn // 2 % 2
            reports.flush()
            run.accounts.pause()
            stages.record_into(recorder if on else None)
            run.accounts.recorder = recorder if on else None
            run.accounts.begin(done + 1)
            done = take(steps, GPU_EDGE, done)
            wall, cpu = time.perf_counter(), time.process_time()
            done = take(steps, GPU_BLOCK, done)
            pair = time.perf_counter() - wall, time.process_time() - cpu
            times[on].append((1000 * pair[0] / GPU_BLOCK, 1000 * pair[1] / GPU_BLOCK))
        reports.flush()
        run.accounts.pause()
    stages.record_into(None)
    run.accounts.close()
    rows: dict[str, Any] = {}
    for place, name in enumerate(("wall", "cpu")):
        on_ms, off_ms = ([pair[place] for pair in times[side]] for side in (True, False))
        apart = [a - b for a, b in zip(on_ms, off_ms)]
        with_it, without, more = (statistics.median(values) for values in (on_ms, off_ms, apart))
        low, _, high = statistics.quantiles(apart, n=4)
        rows[name] = {"on_ms": with_it, "off_ms": without, "ms_more": more, "quartiles_ms": (low, high)}
        print(
            f"{name:>5}: off {without:.3f} ms, on {with_it:.3f} ms; {more:+.3f} ms a step "
            f"(median of {options.blocks} pairs, half of them {low:+.3f} to {high:+.3f})"
        )
    rows["watches_s"] = run.accounts.busy.took_s if run.accounts.busy is not None else 0.0
    print(f"watches of the first {GPU_WARM} steps: {rows['watches_s']:.2f} s")
    facts = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"claim": "trace_overhead", **rows, **facts, "date": str(datetime.date.today())}))


def take(steps: Iterator[Any], count: int, done: int) -> int:
    """So many steps; how many there were then."""
    for _ in range(count):
        next(steps)
    return done + count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12, help=f"measured blocks of {BLOCK} steps")
    parser.add_argument("--gpu", choices=sorted(host.WORKLOADS), help="replayed steps of this workload")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the default recipe")
    options = parser.parse_args()
    if options.gpu:
        turns_on_gpu(options)
        return
    with_it, without = losses_with(True, options), losses_with(False, options)
    if with_it != without or len(with_it) != 8:
        raise SystemExit(f"FAILED: accounting changes the losses: {with_it} {without}")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=on_rank, args=(rank, options, folder, answers))
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        gathered = [answers.get(timeout=1800) for _ in processes]
        for process in processes:
            process.join()
        size = sum(path.stat().st_size for path in Path(folder).glob("spans/*"))
    rows = {}
    for place, name in enumerate(("wall", "cpu")):
        on, off = (
            [[pair[place] / BLOCK for pair in times[side]] for _, times, _ in gathered]
            for side in (True, False)
        )
        ratios = [a / b for one, other in zip(on, off) for a, b in zip(one, other)]
        rows[name] = {
            "on_ms": 1000 * statistics.median(value for one in on for value in one),
            "off_ms": 1000 * statistics.median(value for one in off for value in one),
            "overhead": statistics.median(ratios) - 1,
        }
    rows["calls"] = calls_a_step()
    print(f"{options.ranks} ranks, {options.blocks} blocks of {BLOCK} steps, medians of a step")
    for name in ("wall", "cpu"):
        row = rows[name]
        times = f"off {row['off_ms']:8.3f} ms   on {row['on_ms']:8.3f} ms"
        print(f"{name:>5}: {times}   {row['overhead']:+.2%} (median of pairs)")
    cost = rows["calls"]["us_a_step"]
    share = cost / 1000 / rows["cpu"]["off_ms"]
    print(f"calls: {cost:.0f} us a step for recording and splitting alone, {share:.2%} of its CPU time")
    rows["busy"] = {"us_a_step": busy_us_a_step()}
    print(
        f"busy: {rows['busy']['us_a_step']:.0f} us a step more on a GPU, to tell work from gaps between kernels"
    )
    rows["alone"] = {
        "us_a_step": min(alone_us_a_step() for _ in range(9))
        - min(alone_us_a_step(on=False) for _ in range(9))
    }
    print(f"alone: {rows['alone']['us_a_step']:.0f} us a replayed step of one rank, events of the GPU aside")
    print(f"span files: {size / 1e6:.2f} MB")
    facts = {"hardware": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}
    print(json.dumps({"claim": "trace_overhead", **rows, **facts, "date": str(datetime.date.today())}))


if __name__ == "__main__":
    main()
