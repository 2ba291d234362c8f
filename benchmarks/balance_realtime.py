"""Straggler time of real training steps on 2 CPU ranks: random assignment against balanced, and with a slow rank.

Each rank computes forward and backward of a small HSTU on its share of the same global batch, then waits for the other
at a barrier; that wait is the straggler time. Modes alternate step by step in one run, on the same global batches:

    random         equal counts, random assignment
    balanced       cost model fitted in this run
    slow, blind    rank 1 computes at 70 % speed, the plan does not know
    slow, known    the same, with speeds measured in this run

    python benchmarks/balance_realtime.py [--steps 60]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist

from freescale.balance.costs.cost_fit import MeasuredStep, fit_cost_model
from freescale.balance.costs.rank_speed import at_equal_speed, measured_speeds
from freescale.balance.sampler import BalancedSampler
from freescale.data.batches.examples import Examples
from freescale.data.sources.synthetic import SyntheticSource
from freescale.model.encoders.hstu import HSTU
from freescale.model.heads import RetrievalHead
from freescale.model.recommender import Recommender
from freescale.train.accounts.timer import StepTimer

RANKS, GLOBAL_BATCH, MAX_LENGTH, DIM, SLOW_SPEED = 2, 48, 800, 64, 0.7


class Bench:
    """The model and the data of one rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        source = SyntheticSource(num_users=2000, mean_length=120, sigma=1.2, max_length=MAX_LENGTH + 3)
        self.examples = Examples(source=source, max_length=MAX_LENGTH, num_negatives=64)
        encoder = HSTU(dim=DIM, layers=2, max_length=MAX_LENGTH, time_bias=True)
        self.model = Recommender(encoder=encoder, head=RetrievalHead())
        self.table = torch.randn(1501, DIM) * 0.02
        self.timer = StepTimer(torch.device("cpu"))
        self.rank = rank

    def sampler(self, **options: object) -> BalancedSampler:
        """A sampler over the same global batches."""
        return BalancedSampler(
            self.examples.lengths(),
            global_batch=GLOBAL_BATCH,
            num_ranks=RANKS,
            rank=self.rank,
            seed=3,
            **options,
        )

    def compute(self, sampler: BalancedSampler, step: int, *, slow: bool) -> MeasuredStep:
        """Forward and backward of this rank's share; a slow rank goes on computing for its speed's sake."""
        batch = self.examples.batch(sampler.plan(step).rows, step=step)
        batch = batch.with_tokens(item_index=batch.tokens["item"], target_index=batch.tokens["target"])
        batch = batch.with_samples(negative_index=batch.samples["negatives"])
        rows = self.table.clone().requires_grad_()
        dist.barrier()
        start = time.perf_counter()
        self.timer.start(rows)
        (self.model(rows, batch) / max(1, batch.num_tokens)).backward()
        if slow and self.rank == 1:
            until = start + (time.perf_counter() - start) / SLOW_SPEED
            while time.perf_counter() < until:
                pass
        done = MeasuredStep.of(batch.lengths.numpy(), ms=1000 * (time.perf_counter() - start))
        self.model.zero_grad()
        return done


def pooled(steps: list[MeasuredStep]) -> list[list[MeasuredStep]]:
    """The steps of every rank, on every rank."""
    everybody: list[list[MeasuredStep]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(everybody, steps)
    return everybody


def run_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), int(os.environ["BENCH_STEPS"])
    bench = Bench(rank)
    free = bench.sampler(balanced=False)
    warm = [bench.compute(free, 1000 + step, slow=False) for step in range(40)][5:]
    everybody = pooled(warm)
    fit = fit_cost_model([step for one in everybody for step in one])
    fair = bench.sampler(cost_model=fit.model, max_tokens_ratio=1.5)
    slow_steps = pooled([bench.compute(fair, 2000 + step, slow=True) for step in range(20)])
    speeds = measured_speeds(slow_steps, fit.model)
    known = bench.sampler(cost_model=fit.model, max_tokens_ratio=1.5, speeds=speeds)
    modes = {
        "random": (free, False),
        "balanced": (fair, False),
        "slow, blind": (fair, True),
        "slow, known": (known, True),
    }
    records = defaultdict(list)
    for step in range(steps):
        for name, (sampler, slow) in modes.items():
            mine = bench.compute(sampler, step, slow=slow)
            arrived = time.perf_counter()
            dist.barrier()
            records[name].append((mine.ms, 1000 * (time.perf_counter() - arrived)))
    floor = barrier_floor()
    times = [None] * RANKS
    dist.all_gather_object(times, dict(records))
    if rank == 0:
        report(
            times,
            fit_error=fit.error,
            speeds=speeds.tolist(),
            floor=floor,
            check=equal_at_equal_speed(everybody),
        )
    dist.destroy_process_group()


def barrier_floor() -> float:
    """Milliseconds of a barrier nobody is late for."""
    waits = []
    for _ in range(50):
        start = time.perf_counter()
        dist.barrier()
        waits.append(1000 * (time.perf_counter() - start))
    return float(np.median(waits))


def equal_at_equal_speed(everybody: list[list[MeasuredStep]]) -> bool:
    """Sanity: scaling to speed 1 changes nothing."""
    return at_equal_speed(everybody[0], 1.0) == everybody[0]


def report(times: list, *, fit_error: float, speeds: list[float], floor: float, check: bool) -> None:
    assert check
    rows = {}
    for name in times[0]:
        both = np.array([one[name] for one in times])  # [ranks, steps, (compute, wait)]
        compute, wait = both[..., 0], np.maximum(both[..., 1] - floor, 0)
        step_ms = compute.max(0)
        full_speed = compute.copy()
        if name.startswith("slow"):
            full_speed[1] *= SLOW_SPEED
        total_speed = 1 + (SLOW_SPEED if name.startswith("slow") else 1)
        ideal = full_speed.sum(0) / total_speed
        rows[name] = {
            "step_ms": round(float(np.median(step_ms)), 2),
            "straggler_ms": round(float(wait.mean()), 2),
            "straggler_share": round(float(wait.mean() / step_ms.mean()), 4),
            "over_ideal": round(float(step_ms.sum() / ideal.sum() - 1), 4),
        }
    falls = 1 - rows["balanced"]["straggler_ms"] / rows["random"]["straggler_ms"]
    print(f"2 ranks x 1 thread, HSTU dim {DIM}, {GLOBAL_BATCH} histories a step, up to {MAX_LENGTH} events")
    print(
        f"cost model error {fit_error:.1%}; measured speeds {speeds}; a barrier alone {floor:.2f} ms (taken off)"
    )
    print(f"{'mode':<14}{'step ms':>10}{'straggler ms':>15}{'share':>9}{'over ideal':>13}")
    for name, row in rows.items():
        print(
            f"{name:<14}{row['step_ms']:>10.1f}{row['straggler_ms']:>15.2f}"
            f"{row['straggler_share']:>9.1%}{row['over_ideal']:>13.1%}"
        )
    print(f"straggler time falls by {falls:.1%}")
    facts = {"hardware": f"{platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0]}
    facts |= {"torch": torch.__version__, "date": str(datetime.date.today())}
    print(
        json.dumps(
            {"claim": "balance_realtime", "straggler_falls_by": round(falls, 4), "rows": rows, **facts}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank()
        return
    with tempfile.TemporaryDirectory():
        common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
        common |= {"OMP_NUM_THREADS": "1", "BENCH_STEPS": str(options.steps)}
        ranks = [
            subprocess.Popen([sys.executable, __file__], env={**common, "RANK": str(rank)})
            for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank failed")


if __name__ == "__main__":
    main()
