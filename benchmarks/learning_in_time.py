"""A log that grows: each window is asked for before it is learnt, of models that are fresh, a day old, or older.

    python benchmarks/learning_in_time.py [--ratings ml-1m-ratings.dat] [--windows 40] [--targets 400] [--seeds 1]

Windows of six hours, from two streams:

    synthetic   600 sessions of 12 events a window, in one of 40 genres each, half of the steps along planted
                successors; 1,200 items alive, 60 of them replaced by new ones in every window. Tables of 2,048 rows,
                which do not hold all items there ever were; ids expire a day after they were last seen
    movielens   ratings in windows from --start on; what came before is the first window. 4,096 rows, LRU

Sides, all with the same windows, batches, negatives and first weights:

    zero collision, every window   the version published after the window before
    zero collision, once a day     the version published after the last whole day (every fourth window)
    zero collision, trained once   the version after the first third of the windows
    hash, every window             as many rows, one 64-bit hash

Of each window --targets are asked, ranked among the items of the last eight windows (synthetic) or of all so far, by a
plain loop that shares no code with the evaluation and is compared with it first. HR@10 and AUC (the share of candidates
that a target stands before) of all targets, and of those whose item came in the last four windows. Targets of items
nobody had met are counted and left out. The checkpoints of zero collision are published, and the chain compared with
the full export of the last one. The models are small and not tuned.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.app.run.opened_run import open_run, write_run_export
from freescale.app.serving.publishing import Published, publish_run
from freescale.comm.world import one_rank
from freescale.data import append_log
from freescale.exports import load_version, read_version
from freescale.recipe import build_run, build_source, load_config
from freescale.train import Progress, load_run, read_meta, saved_in, train

HOUR = 3_600
EVERY, A_DAY, NEW = 6 * HOUR, 4, 4
SIDES = ("zero collision, every window", "zero collision, once a day", "zero collision, trained once", "hash")


class Events:
    """Keeps the events of a run."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        """One more."""
        self.events.append(event)

    def close(self) -> None:
        """Nothing to close."""


def synthetic(folder: Path, *, windows: int, seed: int, alive: int = 1200, sessions: int = 600) -> Path:
    """Sessions stay in a genre and follow planted successors; a twentieth of the items is replaced every window."""
    rng = np.random.default_rng([seed, 11])
    ids = rng.integers(0, 1 << 62, alive)
    genre = rng.permutation(np.arange(alive) % 40)
    members = [np.flatnonzero(genre == g) for g in range(40)]
    after = np.empty(alive, np.int64)
    for one in members:
        after[one] = np.roll(one, 1)
    for window in range(windows):
        if window:
            new = rng.choice(alive, alive // 20, replace=False)
            ids[new] = rng.integers(0, 1 << 62, len(new))
        lines = ["user,item,time"]
        for n in range(sessions):
            mine = members[rng.integers(40)]
            current, begin = rng.choice(mine), window * EVERY + int(rng.integers(0, EVERY - 20))
            for step in range(12):
                lines.append(f"{window * sessions + n},{ids[current]},{begin + step}")
                current = after[current] if rng.random() < 0.5 else rng.choice(mine)
        (folder / f"{window}.csv").write_text("\n".join(lines) + "\n")
        append_log(folder / "log", folder / f"{window}.csv", max_length=50)
    return folder / "log"


def movielens(ratings: Path, folder: Path, *, windows: int, start: int) -> Path:
    """Ratings in windows of six hours from a moment on, all before it in the first."""
    table = np.loadtxt(ratings, delimiter=":", usecols=(0, 2, 6), dtype=np.int64)
    end = start + EVERY * (windows - 1)
    for name, low, high, every in (("first", 0, start, None), ("rest", start, end, EVERY)):
        rows = table[(table[:, 2] >= low) & (table[:, 2] < high)]
        lines = "".join(f"{user},{item},{moment}\n" for user, item, moment in rows.tolist())
        (folder / f"{name}.csv").write_text("user,item,time\n" + lines)
        append_log(folder / "log", folder / f"{name}.csv", every=every, max_length=50)
    return folder / "log"


def keys(log: Path, out: Path, side: str, *, stream: str, targets: int, seed: int) -> list[str]:
    """The recipe of a side."""
    id_map = "hash" if side == "hash" else "zero_collision"
    own = {
        ("synthetic", "hash"): ["embedding.rows=2048"],
        ("synthetic", "zero_collision"): [
            "embedding.rows=2048",
            "embedding.eviction=ttl",
            f"embedding.ttl={A_DAY * EVERY}",
        ],
        ("movielens", "hash"): ["embedding.rows=4096"],
        ("movielens", "zero_collision"): ["embedding.rows=4096", "embedding.eviction=lru"],
    }[stream, id_map]
    return [
        f"data.path={log}",
        f"run.out={out}",
        f"run.seed={seed}",
        f"embedding.id_map={id_map}",
        *own,
        *(["data.recent_windows=8"] if stream == "synthetic" else []),
        "data.max_length=50",
        "data.global_batch=32",
        f"data.passes={4 if stream == 'synthetic' else 2}",
        "optim.lr=0.003",
        "embedding.lr=0.01",
        "model.dim=32",
        "model.layers=1",
        "model.dropout=0",
        "head.num_negatives=64",
        "run.device=cpu",
        "run.keep=1000",
        f"eval.max_users={targets}",
    ]


def learn(words: list[str]) -> tuple[Any, list[dict[str, Any]]]:
    """Train over the windows; the run, and what it measured of each before it was learnt."""
    config = load_config(None, words)
    sink = Events()
    run = build_run(config, build_source(config), one_rank(device="cpu"), Progress([sink]))
    Path(config.run.out).mkdir(parents=True, exist_ok=True)
    (Path(config.run.out) / "config.yaml").write_text(config.to_yaml())
    train(run)
    return run, [event for event in sink.events if event["event"] == "eval"]


@torch.no_grad()
def measure(run: Any, window: int) -> dict[str, Any]:
    """HR@10 and AUC of a window by the model as it is, all targets and those of new items."""
    examples, evaluator = run.evaluation.examples_of(window), run.evaluation.evaluator
    head, items = run.state.model.head, examples.source.items.ids
    run.state.model.eval()
    catalogue = evaluator.items.catalogue(items, chunk=65_536)
    parts = list(catalogue.parts())
    numbers = torch.cat([each for each, _ in parts]).numpy()
    candidates = head.candidates(torch.cat([vectors for _, vectors in parts]))
    column = np.full(len(items), -1)
    column[numbers] = np.arange(len(numbers))
    rows = np.flatnonzero(examples.lengths() > 0)
    ranks, targets = [], []
    for start in range(0, len(rows), 256):
        some = rows[start : start + 256]
        batch = examples.batch(some)
        states = evaluator._last_states(catalogue.look_up(batch))
        scores = (head.queries(states) @ candidates.T).numpy()
        offsets, seen = examples.seen(some)
        wanted = batch.tokens["target"][batch.offsets[1:] - 1].numpy()
        for n, (score, target) in enumerate(zip(scores, wanted)):
            place = column[np.searchsorted(items, target)]
            hidden = column[np.searchsorted(items, seen[offsets[n] : offsets[n + 1]])]
            hidden = hidden[hidden >= 0] if evaluator.rule.filter_seen else hidden[:0]
            if place < 0 or place in hidden:
                ranks.append(len(items))
                continue
            ahead = (score > score[place]) | ((score == score[place]) & (numbers < numbers[place]))
            ahead[hidden] = False
            ranks.append(int(ahead.sum()))
        targets += wanted.tolist()
    run.state.model.train()
    source = run.log.source
    old = source.all_items_of(max(0, window - 1 - NEW)).ids
    fresh = np.isin(targets, np.setdiff1d(source.all_items_of(window - 1).ids, old))
    order = np.array(ranks)
    hits, auc = order < 10, 1 - np.minimum(order, len(items) - 1) / (len(items) - 1)
    found = {"window": window, "asked": len(order), "num_new": int(fresh.sum())}
    found |= {"hr": float(hits.mean()), "auc": float(auc.mean())}
    if fresh.any():
        found |= {"hr_new": float(hits[fresh].mean()), "auc_new": float(auc[fresh].mean())}
    return found


def by_window(run: Any, folder: Path, windows: int, version_of: Any, first: int) -> list[dict[str, Any]]:
    """Every window from the first on, asked of the version that serves then."""
    paths, found, loaded = saved_in(folder / "checkpoints"), [], None
    ends = {int(read_meta(path)["log"]["windows"]): path for path in paths}
    for window in range(first, windows):
        if loaded != version_of(window):
            loaded = version_of(window)
            load_run(run, ends[loaded])
        found.append(measure(run, window))
    return found


def compare(log: Path, folder: Path, *, stream: str, targets: int, seed: int) -> dict[str, Any]:
    """All sides of one stream."""
    results: dict[str, Any] = {}
    for side in ("zero collision", "hash"):
        out = folder / side.replace(" ", "_")
        begun = time.perf_counter()
        run, evals = learn(keys(log, out, side, stream=stream, targets=targets, seed=seed))
        windows = run.log.source.num_windows
        first = max(windows // 3, NEW + 2)
        print(f"{stream} {side}: {windows} windows in {time.perf_counter() - begun:.0f} s", flush=True)
        fresh = by_window(run, out, windows, lambda window: window, first)
        for mine, theirs in zip(fresh, evals[first - 1 :]):
            assert mine["window"] == theirs["window"]
            assert abs(mine["hr"] - theirs["hr@10"]) < 1e-9, (mine, theirs)
        if side == "hash":
            results["hash"] = fresh
            continue
        results["unknown"] = [event["unknown"] / event["targets"] for event in evals[first - 1 :]]
        results[SIDES[0]] = fresh
        results[SIDES[1]] = by_window(
            run, out, windows, lambda window: max(1, window // A_DAY * A_DAY), first
        )
        results[SIDES[2]] = by_window(run, out, windows, lambda window, first=first: first, first)
    return results


def table(stream: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Print means over windows and seeds, and the first side window by window."""
    means: dict[str, Any] = {}
    print(f"{stream:32} {'HR@10':>8} {'AUC':>8} {'HR new':>8} {'AUC new':>8} {'asked':>7} {'new':>6}")
    for side in SIDES:
        each = [found for run in runs for found in run[side]]
        new = [found for found in each if found["num_new"]]
        asked, count = sum(f["asked"] for f in each), sum(f["num_new"] for f in new)
        means[side] = {
            name: float(np.average([f[name] for f in each], weights=[f["asked"] for f in each]))
            for name in ("hr", "auc")
        } | {
            name: float(np.average([f[name] for f in new], weights=[f["num_new"] for f in new]))
            for name in ("hr_new", "auc_new")
            if new
        }
        of_seeds = [float(np.mean([f["hr"] for f in run[side]])) for run in runs]
        means[side] |= {"asked": asked, "num_new": count, "seeds": of_seeds}
        row = means[side]
        print(
            f"{side:32} {row['hr']:8.4f} {row['auc']:8.4f} {row.get('hr_new', float('nan')):8.4f} "
            f"{row.get('auc_new', float('nan')):8.4f} {asked:7} {count:6}   "
            + " ".join(f"{x:.4f}" for x in of_seeds),
            flush=True,
        )
    unknown = float(np.mean([x for run in runs for x in run["unknown"]]))
    print(f"targets of items nobody had met: {unknown:.1%}")
    for side in SIDES:
        print(f"  by window, {side:30}", " ".join(f"{f['hr']:.3f}" for f in runs[0][side]), flush=True)
    print("  asked, by window", " ".join(str(f["asked"]) for f in runs[0][SIDES[0]]))
    return {"means": means, "unknown": unknown}


def publish(folder: Path) -> dict[str, Any]:
    """Publish every checkpoint of zero collision; the chain must be the full export of the last one, bit for bit."""
    told: list[Published] = []
    publish_run(folder / "zero_collision", folder / "chain", tell=told.append)
    publish_run(folder / "zero_collision", folder / "int8", int8=True)
    config, run, _ = open_run(folder / "zero_collision", device="cpu")
    path = saved_in(folder / "zero_collision" / "checkpoints")[-1]
    load_run(run, path)
    out = write_run_export(folder / "full", config, run, read_meta(path), folder / "zero_collision")
    assert load_version(folder / "chain")[1].fingerprint == read_version(out).fingerprint
    ages = [age / HOUR for each in told for age in each.ages]
    found = {
        "versions": len(told),
        "full_bytes": sum(path.stat().st_size for path in out.iterdir()),
        "delta_bytes": int(np.median([each.num_bytes for each in told[1:]])),
        "int8_bytes": int(
            np.median(
                [
                    sum(file.stat().st_size for file in delta.iterdir())
                    for delta in (folder / "int8").glob("delta-*")
                ]
            )
        ),
        "changed": float(np.median([each.changed / each.num_items for each in told[1:]])),
        "deleted": int(sum(each.deleted for each in told)),
        "seconds": float(np.median([each.seconds for each in told[1:]])),
        "first_recommended": len(ages),
        "age_hours_median": float(np.median(ages)) if ages else None,
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Print tables, and a JSON object as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--targets", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--start", type=int, default=972_100_000)
    parser.add_argument("--only-ratings", action="store_true", help="leave the synthetic stream out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    published: dict[str, Any] = {}
    streams = ["movielens"] if args.only_ratings else ["synthetic", *(["movielens"] if args.ratings else [])]
    for stream in streams:
        runs = []
        for seed in range(args.seeds):
            folder = Path(tempfile.mkdtemp())
            begun = time.perf_counter()
            if stream == "synthetic":
                log = synthetic(folder, windows=args.windows, seed=seed)
            else:
                log = movielens(args.ratings, folder, windows=args.windows, start=args.start)
            print(f"{stream}: sealed in {time.perf_counter() - begun:.0f} s", flush=True)
            runs.append(compare(log, folder, stream=stream, targets=args.targets, seed=seed))
            if seed == 0:
                published = publish(folder)
            shutil.rmtree(folder)
        results[stream] = {**table(stream, runs), "published": published}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
