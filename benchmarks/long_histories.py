"""Quality of compressed histories on MovieLens-1M: beside the full length and the latest 50 events, by seeds.

    PYTHONPATH=. python benchmarks/long_histories.py ml-1m.txt --out runs/long [--jobs 10] [--seeds 1 2 3]
        [--only full-800 P750-k4 ...] [--quick] [--report] [key=value ...]

Every variant and seed is one training run of recipes/ml1m_hstu.yaml with a few keys changed, `--jobs` of them at a
time (on one GPU: under MPS). A run that has its result.json is not run again, so the whole can be done in pieces;
`--report` only prints what is there. HR@10 is by full ranking of the test item, seen items filtered, for all users
and for those with long histories. Compressed models are evaluated by the masked pass, and again from token caches,
which must give the same ranks; then with tokens that are 10 to 100 events old. `--quick` trains few small steps on the
CPU to show that all of it works: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.segmented import SegmentedEncoder
from freescale.train.quality.full_ranking import Asked, ItemBlock, rank_of_targets

RECENT = 50
GROUPS = {"all": 0, "200+": 200, "400+": 400, "800+": 800}
AGES = (0, 10, 20, 50, 100)
QUICK = ("run.steps=4", "run.eval_every=4", "model.dim=16", "eval.max_users=100", "head.num_negatives=32")


def variants() -> dict[str, tuple[str, ...]]:
    """Keys of each contender, beside those of the recipe."""

    def compressed(history: int, length: int, summaries: int) -> tuple[str, ...]:
        return (
            f"data.max_length={history + RECENT}",
            f"segments.recent={RECENT}",
            f"segments.length={length}",
            f"segments.summaries={summaries}",
        )

    found = {
        "recent-50": (f"data.max_length={RECENT}",),
        "full-400": ("data.max_length=400",),
        "full-800": ("data.max_length=800",),
        "P350-k4": compressed(350, 350, 4),
        "P750-k4": compressed(750, 750, 4),
    }
    found |= {f"P750-k{k}": compressed(750, 750, k) for k in (1, 2, 8)}
    return found | {f"P750-k4-{n}-segments": compressed(750, 750 // n, 4) for n in (2, 5)}


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    """One run and its result, in processes of their own."""
    folder = args.out / f"{name}-{seed}"
    if (folder / "result.json").exists():
        return
    recipe = Path(__file__).parents[1] / "recipes" / "ml1m_hstu.yaml"
    keys = [*variants()[name], *(QUICK if args.quick else ()), *args.keys]
    command = [sys.executable, "-m", "freescale", "train", str(recipe), *keys]
    command += [f"run.seed={seed}", f"data.path={args.out / 'data'}", f"run.out={folder}"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
        again = [sys.executable, __file__, str(args.data), "--out", str(args.out), "--measure", str(folder)]
        subprocess.run([*again, *(["--quick"] if args.quick else [])], stdout=log, stderr=log, check=True)
    print(f"{name}, seed {seed}: {json.loads((folder / 'result.json').read_text())['hr@10']}", flush=True)


def measure(folder: Path, *, max_users: int | None) -> dict[str, Any]:
    """HR@10 of the best checkpoint for every group of users, in every way the model can be asked."""
    from freescale.app.run.opened_run import open_run

    _, run, _ = open_run(folder, device="auto")
    model, examples = run.state.model.eval(), run.evaluation.test
    lengths = np.asarray(examples.source.lengths)
    users = np.flatnonzero(examples.lengths() > 0)
    users = users[np.argsort(-lengths[users], kind="stable")][:max_users] if max_users else users
    encoder = model.encoder

    def whole(vectors: Tensor, batch: SequenceBatch) -> Tensor:
        states = encoder(vectors, batch, SequenceLayout(batch.offsets, device=vectors.device))
        return states.index_select(0, (batch.offsets[1:] - 1).to(states.device))

    ranks = ranks_of(run, users, whole)
    groups = {name: lengths[users] >= least for name, least in GROUPS.items()}
    result: dict[str, Any] = {"hr@10": {name: hit_rate(ranks[group]) for name, group in groups.items()}}
    if not isinstance(encoder, SegmentedEncoder):
        return result
    server = Compressor(encoder, model=str(folder))
    cached = ranks_of(run, users, server.last_states)
    result["same rank from the cache"] = float((cached == ranks).mean())
    # The same users for every age: those whose tokens can be that old.
    old = users[lengths[users] > RECENT + max(AGES) + 2]
    for grows, name in (
        (False, "aged, the events between left out"),
        (True, "aged, the events between asked with"),
    ):
        result[name] = {
            age: hit_rate(ranks_of(run, old, lambda v, b, a=age, g=grows: aged(server, v, b, age=a, grows=g)))
            for age in AGES
        }
    return result


def aged(server: Compressor, vectors: Tensor, batch: SequenceBatch, *, age: int, grows: bool) -> Tensor:
    """Last states with a cache that ends `age` events too early; the events between are left out or asked with."""
    lengths = batch.lengths
    known = lengths - RECENT - age
    caches = server.compress(*_events(vectors, batch, torch.zeros_like(known), known))
    first = known if grows else lengths - RECENT
    recent_vectors, recent = _events(vectors, batch, first, lengths)
    states = server.states(recent_vectors, recent, caches)
    return states.index_select(0, (recent.offsets[1:] - 1).to(states.device))


def _events(
    vectors: Tensor, batch: SequenceBatch, first: Tensor, last: Tensor
) -> tuple[Tensor, SequenceBatch]:
    """Events first .. last - 1 of every user."""
    spans = zip((batch.offsets[:-1] + first).tolist(), (batch.offsets[:-1] + last).tolist())
    index = torch.cat([torch.arange(a, b) for a, b in spans]).to(vectors.device)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (last - first).cumsum(0)])
    tokens = {name: values.index_select(0, index) for name, values in batch.tokens.items()}
    return vectors.index_select(0, index), SequenceBatch(offsets=offsets, tokens=tokens)


@torch.no_grad()
def ranks_of(
    run: Any, users: np.ndarray[Any, Any], last_states: Callable[[Tensor, SequenceBatch], Tensor]
) -> np.ndarray[Any, Any]:
    """[users] place of the test item among all items."""
    evaluator, examples, head = run.evaluation.evaluator, run.evaluation.test, run.state.model.head
    catalog = examples.source.items.ids
    vectors = evaluator.items.catalogue(catalog, chunk=evaluator.item_chunk)
    blocks = [ItemBlock(numbers=n, vectors=head.candidates(v)) for n, v in vectors.parts()]
    places = []
    for start in range(0, len(users), evaluator.batch):
        rows = users[start : start + evaluator.batch]
        batch = examples.batch(rows)
        found = vectors.look_up(batch)
        lookup, indexed = found.rows, found.batch
        states = head.queries(last_states(F.embedding(indexed.tokens["item_index"], lookup), indexed))
        asked = Asked.of(examples, rows, batch, states, run.ranks.device, evaluator.rule)
        places.append(rank_of_targets(asked, blocks).cpu().numpy())
    return np.concatenate(places)


def hit_rate(ranks: np.ndarray[Any, Any]) -> float | None:
    """Share of users whose item is among the first ten; None without users."""
    return float((ranks < 10).mean()) if len(ranks) else None


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Table of means over the seeds that are there."""
    results: dict[str, list[dict[str, Any]]] = {}
    for name in variants():
        found = [args.out / f"{name}-{seed}" / "result.json" for seed in args.seeds]
        results[name] = [json.loads(path.read_text()) for path in found if path.exists()]
    print(f"\n{'HR@10, mean of seeds':24} {'seeds':>5} " + " ".join(f"{name:>8}" for name in GROUPS))
    table: dict[str, Any] = {}
    for name, runs in results.items():
        if runs:
            table[name] = {group: _mean([run["hr@10"][group] for run in runs]) for group in GROUPS}
            table[name]["seeds"] = [run["hr@10"]["all"] for run in runs]
            shown = " ".join(f"{_shown(table[name][group]):>8}" for group in GROUPS)
            print(f"{name:24} {len(runs):5} {shown}")
    for name, runs in results.items():
        for kind in [key for key in (runs[0] if runs else {}) if key.startswith("aged")]:
            means = {age: _mean([run[kind][str(age)] for run in runs]) for age in AGES}
            table[name][kind] = means
            print(f"{name}, {kind}: " + ", ".join(f"{age}: {_shown(value)}" for age, value in means.items()))
        if runs and "same rank from the cache" in runs[0]:
            table[name]["same rank from the cache"] = min(run["same rank from the cache"] for run in runs)
            print(
                f"{name}: same rank from the cache for {100 * table[name]['same rank from the cache']:.2f} %"
            )
    return table


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help='ml-1m.txt, "user item" lines in time order')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(variants()), default=list(variants()))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args, args.keys = parser.parse_known_args()
    if args.measure:
        result = measure(args.measure, max_users=60 if args.quick else None)
        (args.measure / "result.json").write_text(json.dumps(result))
        return
    if not args.report:
        if not (args.out / "data").exists():
            command = [sys.executable, "-m", "freescale", "prepare", str(args.data), str(args.out / "data")]
            subprocess.run(command, check=True)
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda job: train(*job, args), [(n, s) for s in args.seeds for n in args.only]))
    print(json.dumps(report(args)))


if __name__ == "__main__":
    main()
