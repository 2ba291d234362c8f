"""What a step of a small model asks of Python on CPU ranks: calls of the training thread, and its length.

The same recipe by this code and by an earlier checkout, in turns. Calls are counted by the interpreter, in runs of
their own: two runs of different length differ by whole steps, so what begins and ends a run drops out. Lengths are
medians of the steps behind the warm-up, from metrics.jsonl, of runs nobody counts in. Checked first: both learn.

    python benchmarks/cpu_calls.py --before ROOT [--rounds 3] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KEYS = (
    "run.device=cpu",
    "model.dim=64",
    "model.layers=2",
    "model.dropout=0",
    "data.global_batch=32",
    "data.workers=0",
    "run.eval_every=100000",
    "eval.max_users=16",
    "run.checkpoint_every=100000",
    "run.tensorboard=false",
)
SHORT, LONG, WARM = 80, 160, 60
COUNTED = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.argv = ["freescale", *sys.argv[1:]]
import runpy
import torch
sys.setprofile(count)
try:
    runpy.run_module("freescale", run_name="__main__")
except SystemExit:
    pass
sys.setprofile(None)
print("calls", calls)
"""


def run(root: Path, folder: Path, *, steps: int, ranks: int, keys: list[str], counted: bool = False) -> str:
    """The output of a training by the code under `root`."""
    program = ["-c", COUNTED] if counted else ["-m", "freescale"]
    many = [f"--nproc={ranks}"] if ranks > 1 else []
    given = [*KEYS, *keys, f"run.steps={steps}", f"run.out={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *program, "train", *many, *given],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"FAILED: {root}: {done.stderr[-1500:]}")
    return done.stdout


def calls_a_step(root: Path, folder: Path, keys: list[str]) -> float:
    """Python functions that the training thread calls in a step of one rank."""
    found = []
    # What is compiled once is in no difference.
    run(root, folder / "compiled", steps=SHORT, ranks=1, keys=keys)
    for steps in (SHORT, LONG):
        out = run(root, folder / f"calls-{steps}", steps=steps, ranks=1, keys=keys, counted=True)
        found.append(int(out.rsplit("calls ", 1)[1]))
    return (found[1] - found[0]) / (LONG - SHORT)


def step_ms(root: Path, folder: Path, *, ranks: int, keys: list[str]) -> float:
    """Median of the steps behind the warm-up."""
    run(root, folder, steps=LONG, ranks=ranks, keys=keys)
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    if not steps[-1]["loss"] < steps[0]["loss"]:
        raise SystemExit(f"FAILED: {root}: the loss went from {steps[0]['loss']} to {steps[-1]['loss']}")
    return statistics.median(event["step_ms"] for event in steps if event["step"] > WARM)


def main() -> None:
    """Measure, print a table, and the same as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="root of an earlier checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    now = Path(__file__).parents[1]
    sides = {"now": now, **({"before": options.before.resolve()} if options.before else {})}
    for root in sides.values():
        if not (root / "freescale" / "__main__.py").exists():
            raise SystemExit(f"FAILED: {root} is no checkout: it has no freescale/__main__.py")
    rows: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, root in sides.items():
            (place / name).mkdir()
            rows[name] = {"calls": round(calls_a_step(root, place / name, options.keys))}
        for ranks in (1, 2):
            times: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(options.rounds):
                for name, root in sides.items():
                    out = place / name / f"{ranks}-{turn}"
                    times[name].append(step_ms(root, out, ranks=ranks, keys=options.keys))
            for name, found in times.items():
                rows[name][f"ms on {ranks}"] = [round(each, 2) for each in sorted(found)]
    print(f"{'':8}{'calls a step':>14}{'one rank, ms':>26}{'two ranks, ms':>26}")
    for name, row in rows.items():
        print(f"{name:8}{row['calls']:>14}{row['ms on 1']!s:>26}{row['ms on 2']!s:>26}")
    hardware = f"{os.cpu_count()} cores, {platform.machine()}"
    date = datetime.date.today().isoformat()
    print(json.dumps({"claim": "cpu_calls", "rows": rows, "hardware": hardware, "date": date}))


if __name__ == "__main__":
    main()
