"""DLRMv4 on the made-up log: how close its AUC comes to what the true odds allow, and one curve on any number of ranks.

    PYTHONPATH=. python benchmarks/dlrmv4_quality.py [--ranks 1 2 4] [--steps 1500] [KEY=VALUE ...]

The log knows how likely each track was to be listened to. Who knew these odds would have an AUC below 1, since labels
are drawn from them: that is the ceiling. It is taken on the same anchors that the model is judged on. With several
numbers of ranks, each trains the first steps again in float64, and losses must agree to 1e-9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from freescale.recipe import build_source, load_config
from freescale.recipe.data import build_examples
from freescale.trace import read_metrics

RECIPE = Path(__file__).parent.parent / "recipes" / "mlperf_dlrmv4_small.yaml"
KEYS = (
    *("data.scale=0.0002", "data.length_scale=0.3", "data.max_length=40", "data.global_batch=128"),
    *(
        "head.pool_events=13",
        "head.pool_window=200",
        "head.anchor_history=39",
        "head.anchor_days=5",
        "head.hidden=32",
    ),
    *("model.dim=32", "model.dropout=0", "model.input_dropout=0", "model.positions=64", "tokens.hidden=32"),
    *("optim.lr=3e-3", "embedding.lr=5e-2", "optim.warmup_steps=20", "run.device=cpu", "eval.max_users=4096"),
)
TOLERANCE = 1e-9


def ceiling(keys: list[str], split: str) -> tuple[float, int]:
    """AUC of who knows the odds, on the anchors of a split as evaluations see them."""
    config = load_config(RECIPE, keys)
    source = build_source(config)
    examples = build_examples(config, source, split, negatives=False)  # type: ignore[arg-type]
    user, start, *_ = examples.index  # type: ignore[attr-defined]
    most = len(user) if split == "test" else config.eval.max_users
    user, start = user[:most], start[:most]
    starts = np.concatenate([[0], np.cumsum(source.lengths)])
    odds = source.true_odds(np.arange(len(source.lengths)))  # type: ignore[attr-defined]
    labels = source.read(np.arange(len(source.lengths))).columns["listened"][starts[user] + start]
    return auc(odds[starts[user] + start], labels > 0), len(user)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of pairs in order; ties do not occur among odds."""
    rank = np.empty(len(scores))
    rank[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    ones = int(labels.sum())
    return float((rank[labels].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


def train(keys: list[str], *, ranks: int, out: Path) -> Path:
    """One run of the command line; its metrics."""
    many = ["--nproc", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-m", "freescale", "train", str(RECIPE), *many, f"run.out={out}", *keys]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return out / "metrics.jsonl"


def main() -> None:
    """Curves, then quality."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--evals", type=int, default=6)
    parser.add_argument("--curve-steps", type=int, default=8)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    keys, answer = [*KEYS, *options.keys], {}
    with tempfile.TemporaryDirectory() as folder:
        curves = {}
        for ranks in options.ranks:
            steps = [
                f"run.steps={options.curve_steps}",
                "run.eval_every=0",
                "model.dtype=float64",
                "run.log_every=1",
            ]
            path = train([*keys, *steps], ranks=ranks, out=Path(folder) / f"ranks-{ranks}")
            curves[ranks] = [event["loss"] for event in read_metrics(path).steps]
            off = np.max(np.abs(np.array(curves[ranks]) / np.array(curves[options.ranks[0]]) - 1))
            print(f"{ranks} ranks, {len(curves[ranks])} steps in float64: losses {off:.1e} off", flush=True)
            answer[f"ranks {ranks}"] = float(off)
        if any(value > TOLERANCE for value in answer.values()):
            sys.exit("the curves part")
        if options.steps:
            every = max(1, options.steps // options.evals)
            began = time.perf_counter()
            more = [f"run.steps={options.steps}", f"run.eval_every={every}", "run.log_every=100"]
            path = train([*keys, *more], ranks=1, out=Path(folder) / "quality")
            took = time.perf_counter() - began
            for split in ("valid", "test"):
                best, count = ceiling(keys, split)
                events = [json.loads(line) for line in path.read_text().splitlines()]
                found = [
                    (event["step"], event["auc/listened"])
                    for event in events
                    if event["event"] == "eval" and event.get("split") == split
                ]
                line = ", ".join(f"{value:.4f} ({step})" for step, value in found)
                print(
                    f"{split}: AUC of the true odds {best:.4f} on {count:,} anchors; after steps: {line}",
                    flush=True,
                )
                answer[split] = {"ceiling": best, "anchors": count, "auc": found}
            print(f"{options.steps} steps in {took:.0f} s")
    print(json.dumps({"claim": "dlrmv4_quality", **answer}))


if __name__ == "__main__":
    main()
