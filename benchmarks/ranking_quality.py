"""Candidates in the attention against candidates met late, on MovieLens: ratings as tasks, AUC and NE with intervals.

    python benchmarks/ranking_quality.py --ratings ratings.dat [--seeds 3] [--device cuda] [--at-once 6]
        [--steps 1500] [--seconds 600]

A request is what a user rated in five minutes, its history what was before. Tasks: like (four stars or more, binary),
love (five stars, binary), stars (their number). Ratings of past films are features of the history; those of candidates
are not seen. A user's last request is the test, the one before chooses the checkpoint, by AUC of like. Both sides have
the same data, batches, widths, steps and seeds; `late` meets the state after the last event in the head.

Intervals are of 95 %, from 500 resamples of users (test candidates of one user stay together), of the mean over seeds;
that of the difference resamples the same users for both sides. They say nothing of other data.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SCHEMA: dict[str, Any] = {
    "rating": {"of": "event", "is": "id", "values": ["1", "2", "3", "4", "5"], "outcome": True},
    "stars": {"of": "event", "is": "number", "outcome": True},
}
TASKS = ["like = stars >= 4", "love = stars >= 5", "stars = number stars weight 0.3"]
SIDES = {"in the attention": False, "late": True}
RESAMPLES = 500
Floats = npt.NDArray[np.float64]


def write_events(ratings: Path, path: Path) -> None:
    """Events as CSV, from the file as it is published."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["user", "item", "rating", "stars", "time"])
        for line in ratings.read_text().splitlines():
            parts = line.split("::") if "::" in line else line.split("\t")
            if parts[0].isdigit():
                stars = int(float(parts[2]))
                out.writerow([parts[0], parts[1], stars, stars, int(float(parts[3]))])


def recipe_of(late: bool, data: Path, out: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run."""
    every = max(1, options.steps // 8)
    steps = {"steps": options.steps, "eval_every": every, "checkpoint_every": every}
    return {
        "run": {"out": str(out), "seed": seed, "device": options.device, **steps},
        "data": {"path": str(data), "global_batch": options.batch, "max_length": options.length},
        "model": {"dim": options.dim, "layers": 2, "heads": 2, "dropout": 0.2},
        "head": {
            "kind": "tasks",
            "tasks": TASKS,
            "window": 300,
            "candidates": 8,
            "late": late,
            "towers": "own",
        },
        "features": {"item": {"of": "event", "is": "id"}, "rating": SCHEMA["rating"]},
        "eval": {"metric": "auc/like"},
        "optim": {"lr": options.lr},
    }


def train(late: bool, data: Path, out: Path, options: argparse.Namespace, seed: int) -> dict[str, Floats]:
    """Train and predict the test candidates, in a process of its own, so that several can go on at once."""
    if not (out / "test.npz").exists():
        _train(late, data, out, options, seed)
    with np.load(out / "test.npz") as found:
        return {name: found[name] for name in found.files}


def _train(late: bool, data: Path, out: Path, options: argparse.Namespace, seed: int) -> None:
    import yaml

    out.mkdir(parents=True, exist_ok=True)
    recipe = out.parent / f"{out.name}.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(late, data, out, options, seed)))
    command = [sys.executable, __file__, "--one", str(recipe), "--seconds", str(options.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    print(f"{out.name}: {done.stdout.splitlines()[-1]}", flush=True)


def one(recipe: str, seconds: float) -> None:
    """Train until the time is up, then predict with the best checkpoint."""
    import torch
    import yaml

    from freescale.app.run.opened_run import open_run
    from freescale.kernels import SequenceLayout
    from freescale.model import target_index

    words = yaml.safe_load(Path(recipe).read_text())["run"]
    training = subprocess.Popen(
        [sys.executable, "-m", "freescale", "train", recipe], stdout=subprocess.DEVNULL
    )
    try:
        code = training.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        training.kill()
        code = training.wait()
        print(f"stopped after {seconds:g} s", file=sys.stderr)
    _, run, checkpoint = open_run(Path(words["out"]), device=words["device"])
    evaluator, test = run.evaluation.evaluator, run.evaluation.test
    model = evaluator.model.eval()
    parts: dict[str, list[Any]] = {"logits": [], "labels": [], "weights": [], "users": []}
    catalogue = evaluator.items.catalogue(test.source.items.ids, chunk=1 << 16)
    for rows in np.array_split(np.arange(len(test.lengths())), max(1, len(test.lengths()) // 400)):
        found = catalogue.look_up(test.batch(rows))
        batch = found.batch
        layout = SequenceLayout(batch.offsets, device=run.ranks.device)
        with torch.no_grad():
            states = model.states(found.rows, batch, layout, found.tables)
            items = found.rows[batch.tokens["item_index"][target_index(batch)]]
            logits = model.head.logits(states.to(items.dtype), items)
            labels, weights = model.head.labels(batch)
        users = batch.samples["request_user"].cpu().repeat_interleave(batch.targets)
        for name, values in zip(parts, (logits, labels, weights, users)):
            parts[name].append(values.double().cpu().numpy())
    np.savez(Path(words["out"]) / "test.npz", **{name: np.concatenate(each) for name, each in parts.items()})
    print(f"{checkpoint.name}, exit code {code}, {sum(map(len, parts['users'])):,} test candidates")


def auc(score: Floats, label: Floats, weight: Floats) -> float:
    """Ties as half; score is what they are sorted by."""
    order = np.argsort(score, kind="stable")
    score, label, weight = score[order], label[order], weight[order]
    new = np.append(True, np.diff(score) > 0)
    group = np.cumsum(new) - 1
    true, false = (np.bincount(group, weights=weight * x) for x in (label, 1 - label))
    below = np.cumsum(false) - false
    return float((true * (below + false / 2)).sum() / (true.sum() * false.sum()))


def entropy(score: Floats, label: Floats, weight: Floats) -> float:
    """Log loss over that of the constant."""
    loss = np.logaddexp(0, score) - label * score
    rate = (weight * label).sum() / weight.sum()
    constant = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return float((weight * loss).sum() / weight.sum() / constant)


def square(score: Floats, label: Floats, weight: Floats) -> float:
    """Mean squared error."""
    return float((weight * (score - label) ** 2).sum() / weight.sum())


MEASURES = {
    "auc/like": (0, auc), "ne/like": (0, entropy), "auc/love": (1, auc), "ne/love": (1, entropy),
    "mse/stars": (2, square),
}  # fmt: skip


def measured(runs: list[dict[str, Floats]], times: Floats) -> dict[str, float]:
    """Every measure, mean over seeds, where user n counts times[n] times."""
    found = {}
    for name, (task, measure) in MEASURES.items():
        values = []
        for run in runs:
            weight = run["weights"][:, task] * times[run["users"].astype(np.int64)]
            kept = weight > 0
            values.append(measure(run["logits"][kept, task], run["labels"][kept, task], weight[kept]))
        found[name] = float(np.mean(values))
    return found


def main() -> None:
    """Prepare, train both sides with every seed, print the table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=256, help="requests a step")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600, help="of training, at most")
    parser.add_argument("--length", type=int, default=200, help="events kept of a history")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help="keep runs here; those that are done are not trained again")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.seconds)
        return
    # Both measures against brute force, before anything is said of them.
    draw = np.random.default_rng(0)
    score, label, weight = (
        draw.integers(0, 9, 60) / 4,
        draw.integers(0, 2, 60) * 1.0,
        draw.integers(1, 4, 60) * 1.0,
    )
    pairs = [(i, j) for i in range(60) for j in range(60) if label[i] > label[j]]
    won = sum(weight[i] * weight[j] * ((score[i] > score[j]) + (score[i] == score[j]) / 2) for i, j in pairs)
    assert abs(auc(score, label, weight) - won / sum(weight[i] * weight[j] for i, j in pairs)) < 1e-12
    from freescale.data import prepare

    with tempfile.TemporaryDirectory() as folder:
        place = options.out or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "data").exists():
            write_events(options.ratings, place / "events.csv")
            prepare(place / "events.csv", place / "data", schema=SCHEMA)
        with ThreadPoolExecutor(options.at_once) as pool:
            jobs = {
                (side, seed): pool.submit(
                    train, late, place / "data", place / f"{side}-{seed}", options, seed
                )
                for side, late in SIDES.items()
                for seed in range(options.seeds)
            }
            runs = {side: [jobs[side, seed].result() for seed in range(options.seeds)] for side in SIDES}
    users = 1 + int(max(run["users"].max() for each in runs.values() for run in each))
    whole = {side: measured(each, np.ones(users)) for side, each in runs.items()}
    each_seed = {side: [measured([run], np.ones(users)) for run in each] for side, each in runs.items()}
    resampled: list[dict[str, dict[str, float]]] = []
    for _ in range(RESAMPLES):
        times = np.bincount(draw.integers(0, users, users), minlength=users).astype(np.float64)
        resampled.append({side: measured(each, times) for side, each in runs.items()})
    rows = {}
    for name in MEASURES:
        ours, late = (np.array([sample[side][name] for sample in resampled]) for side in SIDES)
        cells = []
        for side, values in zip((*SIDES, "difference"), (ours, late, ours - late)):
            middle = (
                whole[side][name] if side in whole else whole["in the attention"][name] - whole["late"][name]
            )
            low, high = np.quantile(values, [0.025, 0.975])
            cells.append([middle, float(low), float(high)])
        rows[name] = cells
        print(f"{name:10}" + "".join(f"  {m:8.4f} ({a:.4f} to {b:.4f})" for m, a, b in cells), flush=True)
    print(json.dumps({"benchmark": "ranking_quality", "rows": rows, "seeds": each_seed}))


if __name__ == "__main__":
    main()
