"""Items with few events: a model that knows ids, one that reads titles and genres, and one that does both.

    python benchmarks/text_items.py --ratings RATINGS --movies MOVIES [--quick] [--ranks 2] [--device cpu]

RATINGS is MovieLens-1M's ratings.dat or a part of it (`user::item::rating::time`), MOVIES its movies.dat
(`item::title::genres`). One user in ten is held out. Three models train on the others, end to end, each on `--ranks`
ranks; only `items.*` differs between them. Then every event of the held-out users is predicted from the events before
it, against all items, seen ones left out. Targets are counted by how many training events their item has.

Before that: ten steps of the text model on one rank and on `--ranks` ranks must have the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.app.run.opened_run import open_run
from freescale.data.batches.examples import Examples
from freescale.data.preparing.preparation import prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.kernels import SequenceLayout
from freescale.model.heads import RetrievalHead
from freescale.train.run import Run

KINDS = {
    "ids": (),
    "text": ("items.kind=text", "items.add_ids=false"),
    "text + ids": ("items.kind=text",),
}
BUCKETS = ((0, 9), (10, 19), (20, 49), (50, 99), (100, 199), (200, 10**9))
RARE = 20
HELD_OUT = 10  # one user in so many
QUICK_USERS = 3  # of the others, one in so many is trained on
QUICK = (
    "model.dim=32",
    "model.heads=2",
    "model.kv_heads=1",
    "data.max_length=50",
    "data.global_batch=64",
    "head.num_negatives=32",
    "items.dim=32",
    "items.layers=1",
    "run.epochs=20",
    "run.patience=4",
    "optim.lr=0.003",
    "embedding.lr=0.003",
)
FULL = (
    "model.dim=128",
    "model.heads=4",
    "model.kv_heads=2",
    "data.max_length=200",
    "data.global_batch=128",
    "head.num_negatives=256",
    "items.dim=128",
    "items.layers=2",
    "items.heads=4",
    "items.dropout=0.1",
    "run.epochs=80",
    "run.patience=8",
    "optim.lr=0.001",
    "embedding.lr=0.001",
)
BOTH = (
    "model.kind=llama",
    "model.layers=2",
    "model.dropout=0.2",
    "run.log_every=1000",
    "run.keep=1",
    "trace.enabled=false",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=Path, required=True)
    parser.add_argument("--movies", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="small models, few epochs, one seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, default=None)
    options = parser.parse_args()
    seeds = options.seeds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = split_users(options.ratings, options.movies, folder, quick=options.quick)
        recipe = (*BOTH, *(QUICK if options.quick else FULL), f"run.device={options.device}")
        check_one_curve(folder, recipe, options.ranks)
        results = [
            measure(folder, kind, (*recipe, f"run.seed={seed}"), options.ranks, held_out)
            for seed in range(1, seeds + 1)
            for kind in KINDS
        ]
    report(results, options, seeds)


def split_users(ratings: Path, movies: Path, folder: Path, *, quick: bool) -> ParquetSource:
    """Data to train on in folder/train; the histories of the held-out users, as far as their items were trained."""
    lines = [line for line in ratings.read_text(encoding="latin-1").splitlines() if line]
    fields = [line.split("::", 2) for line in lines]
    users = [int(user) for user, *_ in fields]
    out = [user % HELD_OUT == 0 for user in users]
    kept = [not gone and (not quick or user % QUICK_USERS == 0) for user, gone in zip(users, out)]
    write(folder / "train.dat", [line for line, keep in zip(lines, kept) if keep])
    summary = prepare(folder / "train.dat", folder / "train", texts=movies)
    known = set(ParquetSource(folder / "train").items.ids.tolist())
    rest = [line for line, gone, field in zip(lines, out, fields) if gone and int(field[1]) in known]
    write(folder / "held_out.dat", rest)
    prepare(folder / "held_out.dat", folder / "held_out")
    print(f"{summary.num_users} users to train on, {summary.num_items} items, {summary.num_events} events")
    return ParquetSource(folder / "held_out")


def write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")


def train(folder: Path, out: Path, recipe: tuple[str, ...], ranks: int) -> float:
    """`freescale train`; its seconds."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "freescale", "train", "--resume", "never", "--nproc", str(ranks)]
    overrides = [*recipe, f"data.path={folder / 'train'}", f"run.out={out}"]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL, env=os.environ)
    return time.perf_counter() - start


def check_one_curve(folder: Path, recipe: tuple[str, ...], ranks: int) -> None:
    """The same losses on one rank and on several, before anything is compared."""
    exact = ("model.dtype=float64", "model.dropout=0", "items.dropout=0", "run.steps=10", "eval.max_users=50")
    curves = []
    for count in (1, ranks):
        out = folder / f"check-{count}"
        train(folder, out, (*recipe, *KINDS["text + ids"], *exact), count)
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        curves.append([event["loss"] for event in events if event["event"] == "step"])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-9)
    print(
        f"checked: ten losses on 1 and {ranks} ranks agree to 1e-9 ({curves[0][0]:.6f} ... {curves[0][-1]:.6f})"
    )


def measure(
    folder: Path, kind: str, recipe: tuple[str, ...], ranks: int, held_out: ParquetSource
) -> dict[str, Any]:
    """Train one model and predict the events of the held-out users with its best state."""
    out = folder / kind.replace(" ", "")
    # Keys of the text encoder mean nothing to a model of ids, nor those of the table to one without it.
    unused = {"ids": "items.", "text": "embedding."}.get(kind, "?")
    recipe = tuple(key for key in recipe if not key.startswith(unused))
    seconds = train(folder, out, (*recipe, *KINDS[kind]), ranks)
    config, run, path = open_run(out, device=config_device(recipe))
    counts, places = predict(run, held_out, max_length=config.data.max_length)
    leave_one_out = run.evaluation.evaluator.run(run.evaluation.test)
    result = {
        "kind": kind,
        "seconds": round(seconds, 1),
        "steps": int(path.name.removeprefix("step-")),
        "leave-one-out hr@10": leave_one_out["hr@10"],
        "rare hr@10": float((places[counts < RARE] < 10).mean()),
        "rare hr@50": float((places[counts < RARE] < 50).mean()),
        "rare mrr": float((1 / (places[counts < RARE] + 1)).mean()),
        "all hr@10": float((places < 10).mean()),
        "buckets": {
            f"{low}-{high}": [
                int(inside.sum()),
                float((places[inside] < 10).mean()) if inside.any() else None,
            ]
            for low, high in BUCKETS
            for inside in [(counts >= low) & (counts <= high)]
        },
    }
    print(json.dumps(result), flush=True)
    return result


def config_device(recipe: tuple[str, ...]) -> str:
    return next(key.split("=")[1] for key in recipe if key.startswith("run.device="))


@torch.no_grad()
def predict(run: Run, held_out: ParquetSource, *, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """For every predicted event: training events of its item, and how many unseen items stand before it."""
    run.state.model.eval()
    head = run.state.model.head
    assert isinstance(head, RetrievalHead)
    catalog = run.evaluation.test.source.items
    items = run.evaluation.evaluator.items.catalogue(catalog.ids, chunk=65_536)
    vectors = torch.cat([head.candidates(part) for _, part in items.parts()])
    examples = Examples(source=held_out, split="test", max_length=max_length, use_time=False)
    users = np.flatnonzero(examples.lengths() > 0)
    counts, places = [], []
    for user in users.tolist():
        batch = examples.batch([user])
        found = items.look_up(batch)
        rows, placed = found.rows, found.batch
        states = run.state.model.states(rows, placed, SequenceLayout(batch.offsets, device=rows.device))
        scores = (head.queries(states) @ vectors.T).cpu()
        target = torch.from_numpy(np.searchsorted(catalog.ids, batch.tokens["target"].numpy()))
        seen = np.searchsorted(catalog.ids, examples.seen([user])[1])
        places.append(rank_unseen(scores, target, seen))
        counts.append(catalog.train_counts[target.numpy()])
    return np.concatenate(counts), np.concatenate(places)


def rank_unseen(scores: torch.Tensor, target: torch.Tensor, seen: np.ndarray) -> np.ndarray:
    """How many items stand before each target; those of the events before it are left out."""
    num_known = len(seen) - len(target) + 1  # events before the first target
    bar = scores[torch.arange(len(target)), target]
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    for n in range(len(target)):
        hidden[n, seen[: num_known + n]] = True
        hidden[n, target[n]] = False
    return ((scores >= bar[:, None]) & ~hidden).sum(1).sub(1).clamp(min=0).numpy()


def report(results: list[dict[str, Any]], options: argparse.Namespace, seeds: int) -> None:
    def mean(kind: str, name: str) -> float:
        return float(np.mean([result[name] for result in results if result["kind"] == kind]))

    def mean_in(kind: str, bucket: str) -> float:
        values = [result["buckets"][bucket][1] for result in results if result["kind"] == kind]
        return float(np.mean([value for value in values if value is not None] or [np.nan]))

    print(f"\nHR@10 of the events of held-out users, by training events of their item; mean of {seeds} seeds")
    names = list(results[0]["buckets"])
    print(f"{'':>12}" + "".join(f"{name if name[-9:] != '000000000' else '200 on':>10}" for name in names))
    print(f"{'targets':>12}" + "".join(f"{results[0]['buckets'][name][0]:>10,}" for name in names))
    for kind in KINDS:
        print(f"{kind:>12}" + "".join(f"{mean_in(kind, name):>10.4f}" for name in names))
    columns = ("rare hr@10", "rare hr@50", "rare mrr", "all hr@10", "leave-one-out hr@10", "seconds")
    print(f"\n{'':>12}" + "".join(f"{name:>21}" for name in columns))
    for kind in KINDS:
        print(f"{kind:>12}" + "".join(f"{mean(kind, name):>21.4f}" for name in columns))
    facts = {
        "claim": f"items with fewer than {RARE} training events: text beats ids",
        "means": {kind: {name: round(mean(kind, name), 5) for name in columns} for kind in KINDS},
        "text + ids beats ids in every seed": all(
            a["rare hr@10"] > b["rare hr@10"]
            for a, b in zip(
                [r for r in results if r["kind"] == "text + ids"], [r for r in results if r["kind"] == "ids"]
            )
        ),
        "runs": results,
        "ranks": options.ranks,
        "device": options.device,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
