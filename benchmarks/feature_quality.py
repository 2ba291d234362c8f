"""What features bring on MovieLens: HR@10 and NDCG@10 with ids alone and with genres, year, hour and past ratings.

    python benchmarks/feature_quality.py --ratings ratings.dat --movies movies.dat [--ml100k ml-100k.inter] [--seeds 3]
        [--device cuda] [--at-once 6] [--epochs 60] [--steps 1400]

    ids        items alone
    sides      genres (mean of their rows) and year of items, in their vectors
    events     hour and rating of past events, joined to them
    all        both

Every side has the same data, split, batches, negatives and epochs; the best checkpoint by validation NDCG@10 is tested,
all items ranked, seen items left out. "new" are test targets with fewer than 20 events in training. A rating is an
outcome: the model sees those of past events, never that of the event to predict.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data import IntArray, prepare
from freescale.data.batches.examples import Examples

RATINGS = ["1", "2", "3", "4", "5"]
YEARS = [1940, 1960, 1970, 1980, 1985, 1990, 1993, 1995, 1997, 1999]
OF_ITEMS = {"genres": {"of": "item", "is": "ids"}, "year": {"of": "item", "is": "number", "edges": YEARS}}
OF_EVENTS = {
    "hour": {"of": "event", "is": "id", "values": [str(hour) for hour in range(24)]},
    "rating": {"of": "event", "is": "id", "values": RATINGS, "outcome": True},
}
ITEM = {"item": {"of": "event", "is": "id"}}
SIDES: dict[str, dict[str, Any]] = {
    "ids": ITEM,
    "sides": ITEM | OF_ITEMS,
    "events": ITEM | OF_EVENTS,
    "all": ITEM | OF_ITEMS | OF_EVENTS,
}
FEW_EVENTS = 20


@dataclass(frozen=True)
class SomeTargets(Examples):
    """The examples of some users.

    Args:
        kept: whether a row is one of them.
    """

    kept: Any = None

    def lengths(self) -> IntArray:
        """0 for the others."""
        return np.where(self.kept, super().lengths(), 0)


def write_files(ratings: Path, movies: Path | None, folder: Path) -> tuple[Path, Path | None]:
    """Events and items as CSV, from the files as they are published."""
    events, items = folder / "events.csv", None
    with events.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["user", "item", "rating", "time", "hour"])
        for line in ratings.read_text().splitlines():
            parts = line.split("::") if "::" in line else line.split("\t")
            if not parts[0].isdigit():
                continue
            user, item, rating, time = parts[0], parts[1], str(int(float(parts[2]))), int(float(parts[3]))
            out.writerow([user, item, rating, time, time // 3600 % 24])
    if movies is not None:
        items = folder / "items.csv"
        with items.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["item", "year", "genres"])
            for line in movies.read_text(encoding="latin-1").splitlines():
                number, title, genres = line.split("::")
                year = re.search(r"\((\d{4})\)\s*$", title)
                out.writerow([number, year[1] if year else "", genres])
    return events, items


def recipe_of(side: str, data: Path, out: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run."""
    return {
        "run": {
            "out": str(out),
            "epochs": options.epochs,
            "patience": 15,
            "seed": seed,
            "device": options.device,
        }
        | ({"steps": options.steps} if options.steps else {}),
        "data": {"path": str(data), "global_batch": 128, "max_length": 200},
        "model": {"dim": 64, "layers": 2, "dropout": 0.2},
        "head": {"num_negatives": 256},
        "features": SIDES[side],
        "eval": {"filter_seen": True},
    }


def train(side: str, data: Path, out: Path, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train, then test in a process of its own, so that several can go on at once."""
    import yaml

    out.mkdir(parents=True)
    recipe = out.parent / f"{out.name}.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(side, data, out, options, seed)))
    command = [sys.executable, __file__, "--one", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def one(recipe: str) -> None:
    """In a process of its own."""
    import yaml

    from freescale.app.run.opened_run import open_run

    subprocess.run(
        [sys.executable, "-m", "freescale", "train", recipe], check=True, stdout=subprocess.DEVNULL
    )

    words = yaml.safe_load(Path(recipe).read_text())["run"]
    _, run, _ = open_run(Path(words["out"]), device=words["device"])
    test = run.evaluation.test
    source = test.source
    users = np.flatnonzero(test.lengths())
    batch = test.batch(users)
    targets = batch.tokens["target"][batch.offsets[1:] - 1].numpy()
    counts = np.full(len(test.lengths()), FEW_EVENTS)
    counts[users] = source.items.train_counts[np.searchsorted(source.items.ids, targets)]
    fields = {name: getattr(test, name) for name in test.__dataclass_fields__}
    new = SomeTargets(**fields, kept=counts < FEW_EVENTS)
    found = run.evaluation.evaluator.run(test), run.evaluation.evaluator.run(new)
    print(
        json.dumps(
            {
                "hr@10": found[0]["hr@10"],
                "ndcg@10": found[0]["ndcg@10"],
                "new hr@10": found[1]["hr@10"],
                "new hr@50": found[1]["hr@50"],
                "new users": int((new.lengths() > 0).sum()),
                "steps": run.evaluation.best.get("step", 0),
            }
        )
    )


def table(name: str, results: dict[str, list[dict[str, float]]]) -> None:
    """Means and spread over seeds."""
    print(f"\n{name}: mean over seeds (lowest to highest)")
    names = ["hr@10", "ndcg@10", "new hr@10", "new hr@50"]
    print(f"{'':8}" + "".join(f"{each:>26}" for each in names))
    for side, runs in results.items():
        cells = []
        for metric in names:
            values = [run[metric] for run in runs if run.get(metric) is not None]
            cells.append(
                f"{statistics.mean(values):.4f} ({min(values):.4f}-{max(values):.4f})" if values else "-"
            )
        print(f"{side:8}" + "".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    """Prepare, train every side with every seed, print the tables and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=Path)
    parser.add_argument("--movies", type=Path)
    parser.add_argument("--ml100k", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=0, help="end earlier")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    wanted = []
    with tempfile.TemporaryDirectory() as folder:
        for name, ratings, movies in (
            ("ml-1m half", options.ratings, options.movies),
            ("ml-100k", options.ml100k, None),
        ):
            if ratings is None:
                continue
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            events, items = write_files(ratings, movies, place)
            schema = ITEM | OF_EVENTS | (OF_ITEMS if items else {})
            prepare(events, place / "data", schema=schema, items=items)
            sides = SIDES if items else {side: SIDES[side] for side in ("ids", "events")}
            wanted += [(name, side, place, seed) for side in sides for seed in range(options.seeds)]
        with ThreadPoolExecutor(options.at_once) as pool:
            jobs = {
                (name, side, seed): pool.submit(
                    train, side, place / "data", place / f"{side}-{seed}", options, seed
                )
                for name, side, place, seed in wanted
            }
            done = {key: job.result() for key, job in jobs.items()}
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for (name, side, _), numbers in done.items():
        results.setdefault(name, {}).setdefault(side, []).append(numbers)
    for name, found in results.items():
        table(name, found)
    print(json.dumps({"benchmark": "feature_quality", "seeds": options.seeds, "results": results}))


if __name__ == "__main__":
    main()
