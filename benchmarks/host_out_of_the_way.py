"""Steps of small models on one GPU: replayed as CUDA graphs, computed as usual, and by an earlier version.

First the proof, then the speed: over 50 steps of batches of several sizes, replayed steps leave the same bits as the
same padded batches computed as usual (losses, weights, moments, table), with and without NaN in all memory that nobody
has written; padded and plain batches follow one curve. Then whole training steps, loading and updates included, in
rounds that take turns. --before names the root of another checkout, whose steps are measured by a process of its own.

    python benchmarks/host_out_of_the_way.py [--rounds 3] [--steps 150] [--before PATH] [--only A,B,C,E] [--profile]
    python benchmarks/host_out_of_the_way.py --only A --ways replayed,unwatched,unaccounted --steps 600    # accounts

--profile shows instead what the threads of a rank do in a steady step: core time of each, and calls of the one that
trains and of the one that makes batches ready.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ONE_GPU = (
    "run.device=cuda",
    "run.eval_every=0",
    "model.dropout=0",
    "model.dtype=bfloat16",
    "data.use_time=false",
)
WORKLOADS = {
    "A": (
        "HSTU 2 x 64, 128 histories <= 200",
        (
            "synthetic.users=6040",
            "synthetic.items=3416",
            "synthetic.mean_length=165",
            "synthetic.max_length=2277",
            "data.global_batch=128",
            "data.max_length=200",
            "model.dim=64",
            "model.layers=2",
            "head.num_negatives=128",
        ),
    ),
    "B": (
        "HSTU 4 x 512, 384 histories, mean 25, tail to 3,107",
        (
            "synthetic.users=20000",
            "synthetic.items=18000",
            "synthetic.mean_length=25",
            "synthetic.sigma=1.3",
            "synthetic.max_length=3107",
            "data.global_batch=384",
            "data.max_length=4096",
            "model.dim=512",
            "model.layers=4",
            "model.heads=4",
            "head.num_negatives=128",
        ),
    ),
    "C": (
        "HSTU 8 x 512, 256 histories, mean 400, tail to 4,096",
        (
            "synthetic.users=6000",
            "synthetic.items=20000",
            "synthetic.mean_length=400",
            "synthetic.sigma=0.9",
            "synthetic.max_length=4100",
            "data.global_batch=256",
            "data.max_length=4096",
            "model.dim=512",
            "model.layers=8",
            "model.heads=4",
            "head.num_negatives=128",
        ),
    ),
}
EXPERTS = ("ffn.kind=moe", "ffn.hidden=120", "moe.experts=8", "moe.top_k=2")
WORKLOADS["E"] = (
    "HSTU 2 x 128 with 8 experts a layer, two a token, histories of the first",
    (*WORKLOADS["A"][1], "model.dim=128", *EXPERTS),
)
WAYS = {
    "usual": ("run.capture='off'",),
    "replayed": ("run.capture=auto",),
    "unwatched": ("run.capture=auto", "trace.kernels=false"),
    "unaccounted": ("run.capture=auto", "trace.enabled=false"),
}
"""Name -> keys; the last two replay without kernels being seen, and without any accounts."""
PEAK_TFLOPS = 989.4
CHECKED = (
    "synthetic.users=2000",
    "synthetic.items=900",
    "synthetic.mean_length=40",
    "synthetic.sigma=0.6",
    "data.global_batch=128",
    "data.max_length=150",
    "model.dim=64",
    "model.heads=2",
    "head.num_negatives=32",
    "optim.clip_norm=0.5",
)


def make_run(keys: tuple[str, ...], steps: int) -> Any:
    from freescale.comm.world.ranks import Ranks
    from freescale.recipe import build_run, build_source, load_config
    from freescale.train.log.events import Progress

    out = tempfile.mkdtemp()
    config = load_config(None, [*ONE_GPU, *keys, f"run.steps={steps}", f"run.out={out}"])
    device = torch.device("cuda")
    ranks = Ranks(rank=0, num_ranks=1, device=device)
    return build_run(config, build_source(config), ranks, Progress([Notices()]))


class Notices:
    """A sink that shows what a run wants to be known."""

    def write(self, event: dict[str, Any]) -> None:
        """Show notices."""
        if event["event"] == "notice":
            print(f"note   {event['text']}", file=sys.stderr)

    def close(self) -> None:
        """Nothing to close."""


def train(keys: tuple[str, ...], steps: int, *, records: bool = True) -> dict[str, Any]:
    """Train, and return losses, how many steps were replayed, and every tensor a checkpoint would keep."""
    from freescale.train.loop import take_steps
    from freescale.train.state.run_state import run_tensors

    run = make_run(keys, steps)
    losses, captured = [], []
    original = run.train_step.run
    if not records:
        run.train_step.padded._recorder._failures = 10**6

    def kept(ready: Any, schedule: Any) -> Any:
        result = original(ready, schedule)
        losses.append(result.losses)
        captured.append(bool(result.captured))
        return result

    run.train_step.run = kept
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    torch.cuda.synchronize()
    padded = run.train_step.padded
    return {
        "losses": [float(loss.read()) for loss in losses],
        "captured": sum(captured),
        "recordings": 0 if padded is None else len(padded.compute.recordings.made),
        "tensors": {name: tensor.clone() for name, tensor in run_tensors(run).items()},
    }


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    tensors = a["tensors"], b["tensors"]
    return a["losses"] == b["losses"] and all(
        torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]
    )


def check() -> dict[str, Any]:
    steps = 50
    replayed = train(CHECKED, steps)
    usual = train(CHECKED, steps, records=False)
    assert replayed["captured"] > 20, f"only {replayed['captured']} of {steps} steps were replayed"
    assert replayed["recordings"] > 1, "all batches had one size"
    assert usual["captured"] == 0
    assert same_bits(replayed, usual), "FAILED: replayed and usual steps differ"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    poisoned = train(CHECKED, steps)
    torch.use_deterministic_algorithms(False)
    assert same_bits(replayed, poisoned), "FAILED: what stands in memory nobody has written changes results"
    plain = train((*CHECKED, "run.capture='off'"), steps)
    worst = max(abs(a / b - 1) for a, b in zip(replayed["losses"], plain["losses"], strict=True))
    assert worst < 2e-2, f"FAILED: padded and plain batches differ by {worst:.1e}"
    exact = [
        (*CHECKED, "model.dtype=float32", capture) for capture in ("run.capture=auto", "run.capture='off'")
    ]
    curves = [train(keys, steps)["losses"] for keys in exact]
    single = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
    assert single < 1e-3, f"FAILED: padded and plain batches differ by {single:.1e} in float32"
    return {
        "replayed": replayed["captured"],
        "of": steps,
        "recordings": replayed["recordings"],
        "padded_against_plain_bf16": worst,
        "padded_against_plain_fp32": single,
    }


def step_times(keys: tuple[str, ...], *, steps: int, warm: int) -> dict[str, float]:
    """Mean and median milliseconds of the steps after the first ones, and the share of them that was replayed."""
    from freescale.train.loop import take_steps

    run = make_run(keys, steps)
    moments: list[float] = []
    captured: list[bool] = []
    tokens: list[int] = []
    squares: list[float] = []
    original = run.train_step.run

    def timed(ready: Any, schedule: Any) -> Any:
        if len(moments) == warm:
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
        tokens.append(ready.plan.global_tokens)
        squares.append(float(ready.batch.lengths.double().square().sum()))
        result = original(ready, schedule)
        captured.append(bool(getattr(result, "captured", False)))
        return result

    run.train_step.run = timed
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    torch.cuda.synchronize()
    end = time.perf_counter()
    gaps = [b - a for a, b in zip(moments[warm:], moments[warm + 1 :])]
    return {
        "mean_ms": 1e3 * (end - moments[warm]) / (steps - warm),
        "median_ms": 1e3 * statistics.median(gaps),
        "captured": sum(captured[warm:]) / (steps - warm),
        "tokens": sum(tokens[warm:]) / (steps - warm),
        "squares": sum(squares[warm:]) / (steps - warm),
    }


def mfu(name: str, row: dict[str, Any]) -> float | None:
    """Share of the peak: products of layers and attention, forward and backward; none with feed-forward parts."""
    keys = dict(key.split("=") for key in WORKLOADS[name][1])
    if "ffn.kind" in keys:
        return None
    dim, layers = int(keys["model.dim"]), int(keys["model.layers"])
    work = 6 * row["tokens"] * layers * 5 * dim**2 + 7 * dim * layers * row["squares"]
    return work / (row["ms"] / 1e3) / (PEAK_TFLOPS * 1e12)


def core_times() -> dict[str, float]:
    """Seconds of a core that each Python thread of this process has taken so far."""
    found = {}
    for thread in threading.enumerate():
        with suppress(OSError, AttributeError):
            found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    return found


def profile(name: str, watched: str, *, steps: int, warm: int) -> None:
    """Where a steady step's host time goes: core time by thread, then the calls of one of them."""
    from freescale.pipeline.schedule import PlainSchedule
    from freescale.train.loop import take_steps

    run = make_run((*WORKLOADS[name][1], "run.capture=auto"), steps)
    calls, marks, counted = cProfile.Profile(), {"wall": 0.0}, {"steps": 0, "batches": 0}
    original, prepare = run.train_step.run, PlainSchedule._prepare

    def timed(ready: Any, schedule: Any) -> Any:
        counted["steps"] += 1
        if counted["steps"] == warm:
            torch.cuda.synchronize()
            marks.update(core_times(), wall=time.perf_counter())
            if watched == "train":
                calls.enable()
        if counted["steps"] == steps:
            calls.disable()
            now = {**core_times(), "wall": time.perf_counter()}
            marks.update({each: now[each] - marks.get(each, 0.0) for each in now})
        return original(ready, schedule)

    def prepared(self: Any) -> Any:
        counted["batches"] += 1
        if watched != "ahead" or not warm <= counted["batches"] < steps:
            return prepare(self)
        calls.enable()
        try:
            return prepare(self)
        finally:
            calls.disable()

    run.train_step.run, PlainSchedule._prepare = timed, prepared
    try:
        with run.open_schedule(0) as schedule:
            take_steps(run, schedule)
    finally:
        PlainSchedule._prepare = prepare
    each = 1e3 / (steps - warm)
    print(f"{name} calls of: {watched}; ms a step:", {k: round(v * each, 3) for k, v in marks.items()})
    if watched != "nothing":
        text = io.StringIO()
        pstats.Stats(calls, stream=text).sort_stats("tottime").print_stats(45)
        print("\n".join(line[:150] for line in text.getvalue().splitlines()[6:]))


def measure(
    name: str, *, rounds: int, steps: int, warm: int, before: str | None, wanted: list[str]
) -> dict[str, Any]:
    _, keys = WORKLOADS[name]
    ways = {way: (*keys, *WAYS[way]) for way in wanted}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in (*(["before"] if before else []), *ways)}
    for _ in range(rounds):
        if before:
            found["before"].append(_elsewhere(before, keys, steps=steps, warm=warm))
        for way, own in ways.items():
            found[way].append(step_times(own, steps=steps, warm=warm))
    return {way: _summed(times) for way, times in found.items()}


def _elsewhere(root: str, keys: tuple[str, ...], *, steps: int, warm: int) -> dict[str, float]:
    code = [sys.executable, str(Path(__file__).resolve()), "--one", json.dumps([list(keys), steps, warm])]
    done = subprocess.run(
        code, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"FAILED: the other version: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _summed(times: list[dict[str, float]]) -> dict[str, Any]:
    means = sorted(each["mean_ms"] for each in times)
    return {
        "ms": round(statistics.median(means), 3),
        "from": round(means[0], 3),
        "to": round(means[-1], 3),
        "median_step_ms": round(statistics.median(each["median_ms"] for each in times), 3),
        "captured": round(statistics.mean(each["captured"] for each in times), 3),
        "tokens": round(times[0]["tokens"]),
        "squares": times[0].get("squares", 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm", type=int, default=80)
    parser.add_argument("--before", default=None)
    parser.add_argument("--only", default="A,B")
    parser.add_argument("--ways", default="usual,replayed")
    parser.add_argument("--profile", action="store_true", help="what the threads do, instead of times")
    parser.add_argument("--no-check", action="store_true", help="where the check has just passed")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.only.split(",") if name not in WORKLOADS]
    unknown += [way for way in options.ways.split(",") if way not in WAYS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: --only takes {', '.join(WORKLOADS)}, --ways {', '.join(WAYS)}")
    if options.one:
        keys, steps, warm = json.loads(options.one)
        print(json.dumps(step_times(tuple(keys), steps=steps, warm=warm)))
        return
    if options.profile:
        for name in options.only.split(","):
            for watched in ("nothing", "train", "ahead"):
                profile(name, watched, steps=options.steps, warm=options.warm)
        return
    checked = None if options.no_check else check()
    if checked:
        print(
            f"{checked['replayed']} of {checked['of']} steps replayed, {checked['recordings']} recordings: the bits "
            f"of padded batches computed as usual, also with NaN in unwritten memory; plain batches differ by "
            f"{checked['padded_against_plain_fp32']:.1e} (float32) "
            f"and {checked['padded_against_plain_bf16']:.1e} (bf16)"
        )
    rows = {}
    print(f"{'':4}{'steps':<13}{'ms':>8}{'range':>18}{'median':>9}{'replayed':>10}{'tokens':>9}{'MFU':>8}")
    for name in options.only.split(","):
        rows[name] = measure(
            name,
            rounds=options.rounds,
            steps=options.steps,
            warm=options.warm,
            before=options.before,
            wanted=options.ways.split(","),
        )
        print(WORKLOADS[name][0])
        for way, row in rows[name].items():
            share = mfu(name, row)
            row["mfu"] = None if share is None else round(share, 4)
            span = f"{row['from']:.2f} - {row['to']:.2f}"
            print(
                f"{name:4}{way:<13}{row['ms']:>8.2f}{span:>18}{row['median_step_ms']:>9.2f}"
                f"{row['captured']:>10.0%}{row['tokens']:>9,}{'-' if share is None else f'{share:.1%}':>8}",
                flush=True,
            )
    print(
        json.dumps(
            {
                "claim": "host_out_of_the_way",
                "check": checked,
                "rows": rows,
                "hardware": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "date": str(datetime.date.today()),
            }
        )
    )


if __name__ == "__main__":
    main()
