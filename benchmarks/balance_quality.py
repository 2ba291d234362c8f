"""Idle share of the ranks by plan: random, Karmarkar-Karp with equal counts, FreeScale, and the bound.

    python benchmarks/balance_quality.py [--quick] [--lengths FILE ...]

Checks the partition first and prints no number if a check is red. Length files are found in $FREESCALE_DATA
or ../shared/data and skipped when absent; `--lengths` adds files with one length a line. Cost of a sample is
L + L^2 / 2048, bubble is 1 - mean / latest over the steps shown. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from freescale.balance import GlobalBatches, Partition, assignment_report, partition_report
from freescale.balance.balancers.karmarkar_karp import karmarkar_karp_equal

IntArray = np.ndarray
Draw = Callable[[int, np.random.Generator], IntArray]
RANKS, SAMPLES_A_RANK = (8, 64, 256), (8, 32)


def costs_of(lengths: IntArray) -> np.ndarray:
    return lengths + np.square(lengths, dtype=np.float64) / 2048


# Where the lengths come from


def lognormal(sigma: float) -> Draw:
    def draw(count: int, rng: np.random.Generator) -> IntArray:
        return np.maximum(np.minimum(np.exp(rng.normal(np.log(512), sigma, count)), 8192), 1).astype(np.int64)

    return draw


def zipf(count: int, rng: np.random.Generator) -> IntArray:
    """Zipf 1.2 cut at 4,096: longer draws are drawn again."""
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < count:
        more = rng.zipf(1.2, count)
        drawn = np.concatenate((drawn, more[more <= 4096]))
    return drawn[:count]


def pareto(count: int, rng: np.random.Generator) -> IntArray:
    """Quantiles of uncut review histories: median 10, 90 % below 46, 99 % below 400, longest 3,107."""
    return np.minimum(5 * rng.random(count) ** (-1 / 1.05), 3107).astype(np.int64)


def from_file(lengths: IntArray) -> Draw:
    return lambda count, rng: rng.choice(lengths, count)


def column_counts(path: Path, *, separator: str | None, column: int = 0, skip: int = 0) -> IntArray:
    """How often each value of a column occurs: histories given one event a line."""
    counts: dict[str, int] = {}
    with path.open(encoding="latin-1") as lines:
        for line in itertools.islice(lines, skip, None):
            user = line.split(separator, column + 1)[column]
            counts[user] = counts.get(user, 0) + 1
    return np.array(list(counts.values()), dtype=np.int64)


def row_lengths(path: Path) -> IntArray:
    """Items of each line, without the user in front: histories given one user a line."""
    with path.open() as lines:
        return np.array([len(line.split()) - 1 for line in lines], dtype=np.int64)


def length_files(extra: Iterable[Path]) -> dict[str, Draw]:
    folder = Path(os.environ.get("FREESCALE_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))
    readers: dict[str, Callable[[Path], IntArray]] = {
        "ml-1m.txt": lambda path: column_counts(path, separator=None),
        "ml-1m-ratings-users-1-2999.dat": lambda path: column_counts(path, separator="::"),
        "ml-100k.inter": lambda path: column_counts(path, separator="\t", skip=1),
        "amazon-video-games.txt": lambda path: column_counts(path, separator=None),
        "s3rec-Beauty.txt": row_lengths,
    }
    found = {
        name: from_file(read(folder / name)) for name, read in readers.items() if (folder / name).exists()
    }
    if not found:
        given = f"synthetic lengths, and {len(extra)} files" if extra else "synthetic lengths only"
        print(f"no data sets in {folder}: {given}")
    for path in extra:
        found[path.name] = from_file(np.loadtxt(path, dtype=np.int64, ndmin=1))
    return found


# Correctness


def check() -> int:
    """Cover, caps, bound and repeatability on 300 random cases, optimum on 60 tiny ones; cases checked."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_ranks, count = int(rng.integers(1, 40)), int(rng.integers(1, 400))
        lengths = pareto(count, rng)
        max_count = math.ceil(count / num_ranks) + int(rng.integers(0, 4))
        speeds = rng.uniform(0.5, 1.5, num_ranks) if rng.random() < 0.5 else None
        arguments = {"tokens": lengths, "max_count": max_count, "speeds": speeds}
        plan = partition_report(costs_of(lengths), num_ranks, **arguments)
        assert sorted(np.concatenate(plan.ranks).tolist()) == list(range(count)), "not every sample once"
        assert plan.counts.max() <= max_count, "count cap broken"
        assert plan.max_tokens is not None, "no token cap"
        assert plan.tokens.max() <= plan.max_tokens, "token cap broken"
        assert plan.imbalance >= plan.bound * (1 - 1e-9), "better than the bound"
        again = partition_report(costs_of(lengths), num_ranks, **arguments)
        assert np.array_equal(plan.owner, again.owner), "not repeatable"
    for _ in range(60):
        costs = costs_of(pareto(7, rng))
        best = min(
            np.bincount(owner, weights=costs, minlength=3).max()
            for owner in itertools.product(range(3), repeat=7)
        )
        assert partition_report(costs, 3).times.max() <= best * 1.17, "far from the optimum"
    return 360


# Quality


def bubble_of(plans: list[Partition]) -> float:
    """Idle share over several steps: fair finishes against latest ones, in percent."""
    fair = sum(float(plan.times.mean()) for plan in plans)
    return 100 * (1 - fair / sum(float(plan.times.max()) for plan in plans))


def bound_of(steps: list[np.ndarray], num_ranks: int) -> float:
    """The same for the plain bound: a step lasts the fair share or its largest sample, in percent."""
    fair = sum(float(costs.sum()) / num_ranks for costs in steps)
    return 100 * (1 - fair / sum(max(float(costs.sum()) / num_ranks, float(costs.max())) for costs in steps))


def owner_of(parts: list[IntArray], count: int) -> IntArray:
    owner = np.empty(count, dtype=np.int64)
    for rank, part in enumerate(parts):
        owner[part] = rank
    return owner


def one_step_row(draw: Draw, *, num_ranks: int, samples: int, trials: int) -> dict[str, float]:
    rng = np.random.default_rng(num_ranks * 100 + samples)
    batches = [draw(num_ranks * samples, rng) for _ in range(trials)]
    costs = [costs_of(lengths) for lengths in batches]
    in_turn = np.arange(num_ranks * samples) % num_ranks
    equal_kk = [owner_of(karmarkar_karp_equal(cost, num_ranks), len(cost)) for cost in costs]
    return {
        "random": bubble_of([assignment_report(cost, in_turn, num_ranks) for cost in costs]),
        "kk_equal": bubble_of([assignment_report(cost, kk, num_ranks) for cost, kk in zip(costs, equal_kk)]),
        "equal": bubble_of([partition_report(cost, num_ranks, max_count=samples) for cost in costs]),
        "capped": bubble_of([partition_report(c, num_ranks, tokens=n) for c, n in zip(costs, batches)]),
        "free": bubble_of([partition_report(cost, num_ranks) for cost in costs]),
        "bound": bound_of(costs, num_ranks),
    }


def one_step_table(sources: dict[str, Draw], *, quick: bool) -> list[dict[str, object]]:
    print(
        "\nPlanned bubble of one step, % (equal: equal counts; capped: tokens <= 1.10 x mean; free: neither)"
    )
    names = ("random", "kk_equal", "equal", "capped", "free", "bound")
    print(
        f"{'lengths':32}{'W':>5}{'B':>4}" + "".join(f"{name:>10}" for name in names) + f"{'free-bound':>12}"
    )
    rows: list[dict[str, object]] = []
    for name, draw in sources.items():
        for num_ranks, samples in itertools.product(RANKS, SAMPLES_A_RANK):
            trials = max(2, (256 if quick else 2048) // num_ranks)
            row = one_step_row(draw, num_ranks=num_ranks, samples=samples, trials=trials)
            gap = row["free"] - row["bound"]
            cells = "".join(f"{row[column]:10.3f}" for column in names)
            print(f"{name:32}{num_ranks:5}{samples:4}{cells}{gap:12.4f}")
            rows.append({"lengths": name, "ranks": num_ranks, "samples": samples, **row})
    return rows


def planned(batches: GlobalBatches, *, num_ranks: int, num_steps: int, capped: bool = True) -> float:
    plans = []
    for step in range(num_steps):
        lengths = batches.lengths[batches.batch(step)]
        plans.append(partition_report(costs_of(lengths), num_ranks, tokens=lengths if capped else None))
    return bubble_of(plans)


def way_out_row(draw: Draw, *, num_ranks: int, samples: int) -> dict[str, object]:
    rng = np.random.default_rng(num_ranks * 1000 + samples)
    lengths = draw(num_ranks * samples * 32, rng)
    row: dict[str, object] = {}
    for window in (1, 4, 16):
        batches = GlobalBatches(
            lengths, global_batch=num_ranks * samples, window=window, window_ranks=num_ranks
        )
        steps = [costs_of(lengths[batches.batch(step)]) for step in range(32)]
        row[f"bound_{window}"] = bound_of(steps, num_ranks)
        row[f"window_{window}"] = planned(batches, num_ranks=num_ranks, num_steps=32)
        row[f"free_{window}"] = planned(batches, num_ranks=num_ranks, num_steps=32, capped=False)
        mixing = batches.mixing(num_steps=32)
        row[f"swing_{window}"] = [
            round(mixing.fewest, 2),
            round(mixing.most, 2),
            round(mixing.most_tokens, 2),
        ]
    mean = float(lengths.mean())
    for budget in (32, 128):
        tokens = budget * 1024 * num_ranks
        batches = GlobalBatches(draw(int(2.2 * tokens / mean) + 1, rng), global_tokens=tokens)
        row[f"tokens_{budget}k"] = planned(batches, num_ranks=num_ranks, num_steps=2)
    return row


def way_out_table(
    sources: dict[str, Draw], rows: list[dict[str, object]], *, quick: bool
) -> list[dict[str, object]]:
    print("\nWays out of the giant-sample bound where it is above 50 %: planned bubble, %")
    print("window and tokens: tokens of a rank <= 1.10 x mean of the step; free: no cap; best: of all capped")
    columns = ("window_4", "window_16", "tokens_32k", "tokens_128k")
    shown = ("bound_1", "window_4", "free_4", "window_16", "free_16", "tokens_32k", "tokens_128k")
    head = "".join(f"{name:>12}" for name in shown)
    print(f"{'lengths':32}{'W':>5}{'B':>4}{head}{'best':>9}  samples min-max, tokens max a step (window 16)")
    results: list[dict[str, object]] = []
    for row in rows:
        num_ranks, samples, name = int(str(row["ranks"])), int(str(row["samples"])), str(row["lengths"])
        if float(str(row["bound"])) <= 50 or (quick and num_ranks > 64):
            continue
        out = way_out_row(sources[name], num_ranks=num_ranks, samples=samples)
        out["best"] = min(float(str(out[column])) for column in columns)
        cells = "".join(f"{out[column]:12.3f}" for column in shown)
        fewest, most, tokens = out["swing_16"]  # type: ignore[misc]
        print(f"{name:32}{num_ranks:5}{samples:4}{cells}{out['best']:9.3f}  {fewest}-{most}, {tokens}")
        results.append({"lengths": name, "ranks": num_ranks, "samples": samples, **out})
    return results


# Speed


def median_ms(run: Callable[[], object], *, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def plan_ranks(costs: np.ndarray, num_ranks: int, **arguments: object) -> list[IntArray]:
    return partition_report(costs, num_ranks, **arguments).ranks  # type: ignore[arg-type]


def speed_table(*, quick: bool) -> dict[str, float]:
    rng = np.random.default_rng(5)
    lengths = lognormal(1.0)(8192, rng)
    costs, speeds = costs_of(lengths), rng.normal(1.0, 0.03, 256)
    cases: dict[str, dict[str, object]] = {
        "free counts": {},
        "token cap": {"tokens": lengths},
        "token and count cap": {"tokens": lengths, "max_count": 32},
        "caps and rank speeds": {"tokens": lengths, "max_count": 40, "speeds": speeds},
    }
    print("\nPlanning 8,192 samples over 256 ranks, swaps included, median ms on one core")
    result: dict[str, float] = {}
    for name, arguments in cases.items():
        result[name] = median_ms(partial(plan_ranks, costs, 256, **arguments), repeats=20 if quick else 100)
        print(f"  {name:28}{result[name]:8.2f}")
    result["Karmarkar-Karp equal (numpy)"] = median_ms(lambda: karmarkar_karp_equal(costs, 256), repeats=5)
    print(f"  {'Karmarkar-Karp equal (numpy)':28}{result['Karmarkar-Karp equal (numpy)']:8.2f}")
    return result


def growth_table(*, quick: bool) -> list[dict[str, float]]:
    print("\nGrowth, token cap and swaps included: ms, and ns for each sample and doubling (flat = n log n)")
    print(
        f"{'samples':>10}{'W=256 ms':>12}{'ns/(n log n)':>14}{'B=32 ranks':>12}{'ms':>10}{'ns/(n log n)':>14}"
    )
    rng = np.random.default_rng(6)
    rows = []
    for count in (8192, 65_536, 262_144) if quick else (8192, 65_536, 262_144, 1_000_000):
        lengths = lognormal(1.0)(count, rng)
        costs, repeats = costs_of(lengths), 3 if count > 100_000 else 9
        many = count // 32
        fixed, growing = (
            median_ms(partial(plan_ranks, costs, ranks, tokens=lengths), repeats=repeats)
            for ranks in (256, many)
        )
        unit = count * math.log2(count) / 1e6
        rows.append({"samples": count, "w256_ms": fixed, "b32_ranks": many, "b32_ms": growing})
        print(f"{count:10}{fixed:12.2f}{fixed / unit:14.2f}{many:12}{growing:10.2f}{growing / unit:14.2f}")
    return rows


def targets(
    rows: list[dict[str, object]], outs: list[dict[str, object]], speed: dict[str, float]
) -> dict[str, object]:
    """The claims, each as the worst measured value and whether it holds."""

    def worst(samples: int) -> float:
        return max(float(str(r["free"])) - float(str(r["bound"])) for r in rows if r["samples"] == samples)

    equal = max(
        float(str(row["equal"]))
        for row in rows
        if (row["lengths"], row["ranks"], row["samples"]) == ("lognormal 1.0", 256, 32)
    )
    best = max((float(str(row["best"])) for row in outs), default=0.0)
    planning = speed["token and count cap"]
    return {
        "free minus bound at B 32, points": [worst(32), worst(32) <= 0.15],
        "free minus bound at B 8, points": [worst(8), worst(8) <= 0.5],
        "equal counts, W256 B32 lognormal 1.0, %": [equal, equal <= 1.0],
        "best way out where the bound is above 50 %, %": [best, best < 2.0],
        "planning with caps and swaps, ms": [planning, planning <= 2.0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer trials, no 256 ranks in the second table")
    parser.add_argument("--lengths", type=Path, nargs="*", default=[], help="files with one length a line")
    arguments = parser.parse_args()
    print(f"checks passed: {check()} cases")
    sources: dict[str, Draw] = {
        "lognormal 1.0": lognormal(1.0),
        "lognormal 1.5": lognormal(1.5),
        "zipf 1.2 cut at 4096": zipf,
        "pareto 1.05 cut at 3107": pareto,
        **length_files(arguments.lengths),
    }
    rows = one_step_table(sources, quick=arguments.quick)
    outs = way_out_table(sources, rows, quick=arguments.quick)
    speed = speed_table(quick=arguments.quick)
    growth = growth_table(quick=arguments.quick)
    claims = targets(rows, outs, speed)
    print("\nClaims")
    for name, (value, holds) in claims.items():  # type: ignore[misc]
        print(f"  {'holds' if holds else 'FAILS'}  {name}: {value:.4f}")
    document = {
        "benchmark": "balance_quality",
        "machine": platform.processor() or platform.machine(),
        "claims": claims,
        "one_step": rows,
        "ways_out": outs,
        "planning_ms": speed,
        "growth": growth,
    }
    print(json.dumps(document))
    return 0 if all(holds for _, holds in claims.values()) else 1  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main())
