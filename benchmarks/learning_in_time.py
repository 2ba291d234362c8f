"""A log that grows, end to end: test every window, then train on it; publish deltas; serve them under load.

    python benchmarks/learning_in_time.py --ratings ml-1m-ratings.dat [--users 8] [--targets 500] [--refreshes 100]

Ratings of every 8th user are sealed in windows of so many days from --start to --end; what came before is the first
window. --targets of each window are asked for. Three models see
the same windows, batches and negatives:

    zero collision   a row of its own for every item, given when it comes; LRU where the table is full
    hash             one 64-bit hash into as many rows: 4,096, for up to 3,700 movies
    trained once     zero collision again, but after the first third of the windows it learns no more

Each is asked for every target of a window before that is learnt (HR@10 by full ranking among the items known so far;
targets of unknown items left out and counted), apart for targets that one of the last four windows brought. Then the
checkpoints of the first are published one by one, each compared with its full export bit by bit, and a server that
follows the chain is asked by several threads through so many refreshes.

This shows no quality of a tuned model: it is small and sees each window once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from freescale.app.opened_run import open_run, write_run_export
from freescale.app.publishing import Published, publish_run
from freescale.app.server import ChainServer
from freescale.comm.world import one_rank
from freescale.data import append_log
from freescale.recipe import build_run, build_source, load_config
from freescale.train import (
    ChainModel,
    Progress,
    load_run,
    load_version,
    read_meta,
    read_version,
    saved_in,
    train,
)

DAY = 86_400


class Events:
    """Keeps the events of a run."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        """One more."""
        self.events.append(event)

    def close(self) -> None:
        """Nothing to close."""


def seal(
    ratings: Path, folder: Path, *, users: int, days: int, start: int, end: int
) -> tuple[Path, int, float]:
    """Write the ratings of some users as a log; where it is, its windows, and the seconds a window took."""
    lines = [line.split("::") for line in ratings.read_text().split()]
    chosen = [line for line in lines if int(line[0]) % users == 0 and int(line[3]) < end]
    late = [line for line in chosen if int(line[3]) >= start]
    begun = time.perf_counter()
    for name, part, every in (
        ("first", [x for x in chosen if int(x[3]) < start], None),
        ("rest", late, days * DAY),
    ):
        file = folder / f"{name}.csv"
        rows = "".join(f"{user},{item},{moment}\n" for user, item, _, moment in part)
        file.write_text("user,item,time\n" + rows)
        log = append_log(folder / "log", file, every=every, max_length=50).log
    return folder / "log", len(log.windows), (time.perf_counter() - begun) / len(log.windows)


def keys(log: Path, out: Path, id_map: str, rows: int, targets: int) -> list[str]:
    """The recipe of a side."""
    own = ["embedding.eviction=lru"] if id_map == "zero_collision" else []
    return [
        f"data.path={log}",
        f"run.out={out}",
        f"embedding.id_map={id_map}",
        f"embedding.rows={rows}",
        "data.max_length=50",
        "data.global_batch=32",
        "data.passes=4",
        "optim.lr=0.003",
        "embedding.lr=0.01",
        "model.dim=32",
        "model.layers=2",
        "model.dropout=0",
        "head.num_negatives=64",
        "run.device=cpu",
        "run.keep=1000",
        f"eval.max_users={targets}",
        *own,
    ]


def learn(words: list[str], *, until: int | None) -> tuple[Any, list[dict[str, Any]]]:
    """Train over the windows, or the first so many; what was measured of each."""
    config = load_config(None, words)
    sink = Events()
    source = build_source(config)
    run = build_run(config, source, one_rank(device="cpu"), Progress([sink]))
    if until is not None:
        config = load_config(None, [*words, f"run.steps={run.log.batches.first_step(until)}"])
        run = build_run(config, build_source(config), one_rank(device="cpu"), Progress([sink]))
    Path(config.run.out).mkdir(parents=True, exist_ok=True)
    (Path(config.run.out) / "config.yaml").write_text(config.to_yaml())
    train(run)
    return run, [event for event in sink.events if event["event"] == "eval"]


def measure(run: Any, window: int) -> dict[str, float]:
    """HR@10 of a window by the model as it is, and apart for targets that one of the last four windows brought."""
    examples = run.evaluation.examples_of(window)
    source = examples.source
    ids, before = (
        source.items.ids,
        run.log.source.items_of(max(0, window - 5)).ids,
    )
    fresh = np.setdiff1d(ids, before)
    whole = run.evaluation.evaluator.run(examples)["hr@10"]
    read = source.read(np.arange(len(source.unknown)))
    targets = read.columns["item"][read.offsets[:-1] + np.maximum(source._ends, 1) - 1]
    is_new = np.isin(targets, fresh) & ~source.unknown
    source.unknown = source.unknown | ~is_new
    new = run.evaluation.evaluator.run(examples)["hr@10"] if is_new.any() else None
    return {"hr@10": whole, "new": new, "num_new": int(is_new.sum())}


def ask(address: str, history: list[int], found: list[tuple[int, str]], done: threading.Event) -> None:
    """Ask until told to stop; every answer with its version."""
    body = json.dumps({"history": history, "times": list(range(len(history))), "k": 10}).encode()
    while not done.is_set():
        answer = json.loads(urllib.request.urlopen(f"{address}/recommend", body, timeout=60).read())
        found.append((answer["seq"], json.dumps(answer["items"])))


def serve(chain: Path, folder: Path, *, refreshes: int) -> dict[str, Any]:
    """A server through many refreshes, asked by three threads: failures, mixed answers, p50, p99."""
    current, version = load_version(chain)
    said = {"format": "freescale-chain", "version": 1}
    prints = [json.loads((chain / "base-00000000" / "manifest.json").read_text())["fingerprint"]]
    prints += [
        json.loads((chain / f"delta-{seq:08d}" / "delta.json").read_text())["fingerprint"]
        for seq in range(1, current.seq + 1)
    ]
    place, history = folder / "served", version.ids[:5].tolist()

    def point(seq: int) -> None:
        words = {**said, "base": 0, "seq": seq, "fingerprint": prints[seq], "facts": {"step": seq}}
        (folder / "point").write_text(json.dumps(words))
        (folder / "point").replace(place / "current.json")

    shutil.copytree(chain, place)
    done_refreshes, found, wanted, times = 0, [], {}, []
    while done_refreshes < refreshes:
        point(0)
        model = ChainModel(place)
        server = ChainServer(model, refresh_s=3600)
        threading.Thread(target=server.serve, daemon=True).start()
        done = threading.Event()
        known = [item for item in history if not model.unknown([item])] or model.items[:3].tolist()
        askers = [threading.Thread(target=ask, args=(server.address, known, found, done)) for _ in range(3)]
        for asker in askers:
            asker.start()
        for seq in range(1, min(current.seq, refreshes - done_refreshes) + 1):
            point(seq)
            begun = time.perf_counter()
            model.refresh()
            times.append(time.perf_counter() - begun)
            done_refreshes += 1
            done.wait(0.05)
        done.set()
        for asker in askers:
            asker.join()
        health = server.health()
        server.close()
        for seq, answer in found:
            wanted.setdefault((tuple(known), seq), set()).add(answer)
        found.clear()
    mixed = sum(len(answers) > 1 for answers in wanted.values())
    return {
        "refreshes": done_refreshes,
        "refresh_ms": 1000 * float(np.median(times)),
        "failures": health["failures"],
        "answers_of_one_version_that_differ": mixed,
        "p50_ms": health["p50_ms"],
        "p99_ms": health["p99_ms"],
    }


def main() -> None:
    """Print tables, and a JSON object as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=Path, required=True)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--targets", type=int, default=500)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--start", type=int, default=974_000_000)
    parser.add_argument("--end", type=int, default=984_000_000)
    parser.add_argument("--refreshes", type=int, default=100)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    log, windows, seconds = seal(
        args.ratings, folder, users=args.users, days=args.every, start=args.start, end=args.end
    )
    print(f"{windows} windows, {seconds:.2f} s to seal one", flush=True)
    rows = 4096
    sides: dict[str, list[dict[str, float]]] = {}
    half = windows // 3
    for name, id_map in (("zero collision", "zero_collision"), ("hash", "hash")):
        words = keys(log, folder / name.replace(" ", "_"), id_map, rows, args.targets)
        run, evals = learn(words, until=None)
        assert [event["window"] for event in evals] == list(range(1, windows))
        sides[name] = []
        for path in saved_in(folder / name.replace(" ", "_") / "checkpoints")[: windows - 1]:
            load_run(run, path)
            window = int(read_meta(path)["log"]["windows"])
            found = measure(run, window)
            assert abs(found["hr@10"] - evals[window - 1]["hr@10"]) < 1e-9
            sides[name].append({"window": window, "unknown": evals[window - 1]["unknown"], **found})
    words = keys(log, folder / "once", "zero_collision", rows, args.targets)
    run, _ = learn(words, until=half)
    sides["trained once"] = [{"window": n, **measure(run, n)} for n in range(half, windows)]
    print(f"{'HR@10 from window ' + str(half) + ' on':28} {'all':>8} {'new items':>10}")
    means = {}
    for name, found in sides.items():
        later = [each for each in found if each["window"] >= half]
        new = [each for each in later if each["new"] is not None]
        weights = [each["num_new"] for each in new]
        means[name] = [
            float(np.mean([each["hr@10"] for each in later])),
            float(np.average([each["new"] for each in new], weights=weights)) if new else None,
        ]
        print(
            f"{name:28} {means[name][0]:8.4f} {float('nan') if means[name][1] is None else means[name][1]:10.4f}"
        )

    told: list[Published] = []
    publish_run(folder / "zero_collision", folder / "chain", tell=told.append)
    config, run, _ = open_run(folder / "zero_collision", device="cpu")
    paths = saved_in(folder / "zero_collision" / "checkpoints")
    load_run(run, paths[-1])
    full = read_version(
        write_run_export(folder / "full", config, run, read_meta(paths[-1]), folder / "zero_collision")
    )
    assert load_version(folder / "chain")[1].fingerprint == full.fingerprint
    size = sum(path.stat().st_size for path in (folder / "full").iterdir())
    deltas = [each.num_bytes for each in told[1:]]
    print(f"full export {size:,} bytes; deltas {int(np.median(deltas)):,} (median of {len(deltas)})")
    print(f"a publication takes {np.median([each.seconds for each in told[1:]]):.2f} s")
    served = serve(folder / "chain", folder, refreshes=args.refreshes)
    print(served)
    shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "windows": windows,
                "hr@10": means,
                "full_bytes": size,
                "delta_bytes": int(np.median(deltas)),
                "serve": served,
            }
        )
    )


if __name__ == "__main__":
    main()
