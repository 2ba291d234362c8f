"""What many tables cost: a step with the tables of MLPerf's DLRMv4 against one table with as many bytes of rows a step.

    python benchmarks/feature_tables.py [--device cpu --ranks 2] [--rounds 3] [--steps 60] [--dim 64] [--tokens 4000]
        [--scale 100] [--more KEY=VALUE ...]

Tables: item, artist, album, user, hour, organic and the seven crosses of user, artist, album, hour, item and organic,
with the rows of the benchmark divided by --scale; ids follow Zipf 1.0. The other side looks up items alone, in rows so
wide that a step reads as many bytes of unique rows. Both train in turns; their median steps are compared, and their
fast ones. First it is checked that the bytes of unique rows agree to 10 %. On a GPU steps are replayed as
CUDA graphs (not with `--more run.capture=off`), and the share of those that were is told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from one_training import Recipe, ranks_on, train_in_turn

from freescale.data import prepare
from freescale.recipe import build_examples, build_features, build_source, load_config
from freescale.recipe.features import id_columns
from freescale.trace.metrics_log import read_metrics

CROSSES = {
    "user_x_artist": (["user", "artist"], 100_000_000),
    "user_x_album": (["user", "album"], 40_000_000),
    "user_x_hour": (["user", "hour"], 24_000_000),
    "item_x_hour": (["item", "hour"], 40_000_000),
    "artist_x_hour": (["artist", "hour"], 32_000_000),
    "user_x_organic": (["user", "organic"], 2_000_000),
    "user_x_artist_x_hour": (["user", "artist", "hour"], 40_000_000),
}
ROWS = {"item": 9_390_624, "artist": 1_293_395, "album": 3_367_692, "user": 1_000_001}


def schema(scale: int) -> dict[str, Any]:
    """All features."""
    rows = {name: max(64, count // scale) for name, count in ROWS.items()}
    closed = {"hour": [str(hour) for hour in range(24)], "organic": ["no", "yes"]}
    return {
        "user": {"of": "user", "is": "id", "map": "hash", "rows": rows["user"]},
        "item": {"of": "event", "is": "id"},
        "artist": {"of": "item", "is": "id", "map": "hash", "rows": rows["artist"]},
        "album": {"of": "item", "is": "id", "map": "hash", "rows": rows["album"]},
        **{name: {"of": "event", "is": "id", "values": values} for name, values in closed.items()},
        **{name: {"cross": members, "rows": max(64, n // scale)} for name, (members, n) in CROSSES.items()},
    }


def make_data(
    folder: Path, scale: int, *, num_users: int = 2000, median: float = 55.0, longest: int = 400
) -> Path:
    """Histories with Zipf ids, prepared with the schema."""
    rng = np.random.default_rng(0)
    num_items = ROWS["item"] // scale
    lengths = np.clip(rng.lognormal(np.log(median), 1.0, num_users), 5, longest).astype(int)
    total = int(lengths.sum())
    weights = 1 / np.arange(1, num_items + 1)
    items = rng.choice(num_items, size=total, p=weights / weights.sum())
    time = 1_700_000_000 + rng.integers(0, 86_400 * 30, total)
    organic = np.array(["no", "yes"])[rng.integers(2, size=total)]
    user = np.repeat(np.arange(num_users), lengths)
    events = {
        "user": user,
        "item": items,
        "time": time,
        "hour": (time // 3600 % 24).astype(str),
        "organic": organic,
    }
    pq.write_table(pa.table(events), folder / "events.parquet")
    used = np.unique(items)
    sides = {
        "item": used,
        "artist": used % (ROWS["artist"] // scale),
        "album": used % (ROWS["album"] // scale),
    }
    pq.write_table(pa.table(sides), folder / "items.parquet")
    prepare(folder / "events.parquet", folder / "data", schema=schema(scale), items=folder / "items.parquet")
    return folder / "data"


def recipes(data: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Both sides; the width of the one table follows from a few batches."""
    common = {
        "data": {"path": str(data), "global_tokens": options.tokens, "max_length": 200},
        "model": {
            "dim": options.dim,
            "layers": options.layers,
            "heads": max(1, options.dim // 128),  # wider ones are not for the kernels of a GPU
            "dropout": 0,
        },
        "head": {"num_negatives": 64},
        "embedding": {"optimizer": "rowwise_adagrad", "lr": 0.01},
        "run": {"steps": options.steps, "eval_every": 0, "device": options.device, "log_every": 1},
        "trace": {"kernels": False},
    }
    many = {**common}
    one = {**common, "features": {"item": {"of": "event", "is": "id"}}}
    of_many, of_items = unique_rows(many)
    width = round(options.dim * of_many / of_items)
    one["tables"] = {"item": {"dim": width}}
    print(
        f"unique rows a step: {of_many:,.0f} of all tables, {of_items:,.0f} items; one table is {width} wide"
    )
    agreed = of_items * width / (of_many * options.dim)
    assert 0.9 < agreed < 1.1, agreed
    return {"one table": one, f"{len(schema(options.scale))} tables": many}


def unique_rows(recipe: dict[str, Any]) -> tuple[float, float]:
    """Mean distinct ids of a batch, over all tables and of items."""
    config = load_config(None, flat(recipe))
    source = build_source(config)
    features = build_features(config, source)
    assert features is not None
    examples = build_examples(config, source, "train", negatives=True)
    rows = np.flatnonzero(examples.lengths())
    counts = []
    rng = np.random.default_rng(0)
    for step in range(5):
        chosen = rng.permutation(rows)
        until = (
            int(np.searchsorted(np.cumsum(examples.lengths()[chosen]), config.data.global_tokens or 0)) + 1
        )
        batch = examples.batch(np.sort(chosen[:until]), step=step)
        tables: dict[str, list[Any]] = {}
        for column in id_columns(config, features.schema):
            ids = getattr(batch, column.domain)[column.name].numpy().ravel()
            tables.setdefault(column.table, []).append(ids)
        counts.append(
            [sum(len(np.unique(np.concatenate(ids))) for ids in tables.values()), len(batch.items["item"])]
        )
    many, items = np.mean(counts, axis=0)
    return float(many), float(items)


def flat(recipe: dict[str, Any]) -> tuple[str, ...]:
    """A recipe as keys of a command line."""
    return tuple(
        f"{section}.{key}={json.dumps(value)}"
        for section, keys in recipe.items()
        for key, value in keys.items()
    )


class Steps(NamedTuple):
    """Milliseconds of the steps of one run: the median, and a tenth of them took at most so long.

    Other programs and a host that lends its cores elsewhere lengthen most steps of some runs, but rarely all of them.
    """

    median: float
    tenth: float


Measured = tuple[dict[str, list[Steps]], dict[str, list[float]]]


def measure(sides: dict[str, dict[str, Any]], options: argparse.Namespace) -> Measured:
    """Steps of every run, the first quarter left out; sides in turns, by one start of the ranks.

    And of every run the share of its last steps that were replayed.
    """
    recipes = [Recipe((*flat(side), *options.more)) for _ in range(options.rounds) for side in sides.values()]
    names = list(sides) * options.rounds
    alone = options.ranks == 1
    ranks = nullcontext({}) if alone else ranks_on(options.device, options.ranks)
    found: dict[str, list[Steps]] = {name: [] for name in sides}
    replayed: dict[str, list[float]] = {name: [] for name in sides}
    with ranks as environment, tempfile.TemporaryDirectory() as folder:
        done = train_in_turn(recipes, num_ranks=options.ranks, environment=environment, folder=Path(folder))
        for number, run in sorted(done.items()):
            if isinstance(run, str):
                raise SystemExit(f"FAILED: {names[number]}: {run}")
            steps = read_metrics(run / "metrics.jsonl").steps
            for text in notices(run / "metrics.jsonl") if number < len(sides) else ():
                print(f"{names[number]}: {text}")
            times = [float(str(event["step_ms"])) for event in steps]
            settled = times[len(times) // 4 :]
            found[names[number]].append(Steps(statistics.median(settled), float(np.quantile(settled, 0.1))))
            replayed[names[number]].append(float(str(steps[-1].get("captured", 0.0))))
    return found, replayed


def notices(path: Path) -> list[str]:
    """What a run said of replayed steps."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "notice" and "replayed" in event["text"]]


def main() -> None:
    """Both sides in turns; a table, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--scale", type=int, default=100)
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for both sides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = recipes(make_data(Path(folder), options.scale), options)
        found, replayed = measure(sides, options)
    ones, manys = found.values()
    facts: dict[str, Any] = {
        "device": options.device,
        "ranks": options.ranks,
        "ms": found,
        "replayed": replayed,
    }
    for name, shares in replayed.items():
        print(f"{name}: {statistics.median(shares):.0%} of the last steps replayed")
    for what in Steps._fields:
        print(f"{what:12}{'ms a step':>12}   each round")
        for name, steps in found.items():
            times = [getattr(each, what) for each in steps]
            print(f"{name:12}{statistics.median(times):12.2f}   {', '.join(f'{ms:.2f}' for ms in times)}")
        ratios = [getattr(many, what) / getattr(one, what) for one, many in zip(ones, manys)]
        print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        facts[f"{what}_ratios"] = ratios
    print(json.dumps({"benchmark": "feature_tables", **facts}))


if __name__ == "__main__":
    main()
