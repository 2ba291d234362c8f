"""How long a simulation takes, in CPU time of one core: 256 and 4,096 ranks, 1,000 steps, all features on.

`run` is measuring stages out, the critical path and the accounts of every rank and step: the simulation. `plan` is
making the plans it runs on, by the balancer of the project: 1,000 different global batches with `--plan-all`, else as
many as `freescale simulate` makes, which come again in turn with other jitter. Checked first: the result equals that
of an event-by-event simulation on small cases.

    python benchmarks/simulate_speed.py [--plan-all --ranks 256]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

from freescale.sim.answers.whatif import plan, plan_steps_for, simulate_features
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import load_profile
from freescale.sim.inputs.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[1]))

TARGET_S = {256: 2.0, 4096: 30.0}


def check(setting: Setting) -> int:
    """Small cases against the oracle of the tests."""
    from tests.sim.oracle import Oracle

    for ranks in (1, 3, 8):
        for hides in (False, True):
            features = Features(prioritized=hides)
            made = simulate_features(setting, features, num_ranks=ranks, num_steps=12, plan_steps=4)
            slow = Oracle(made.program, num_ranks=ranks, num_steps=12).run()
            np.testing.assert_allclose(made.outcome.ends, slow, rtol=1e-12)
    return 6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan-all", action="store_true", help="plan every one of the steps; minutes at 4,096 ranks"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=list(TARGET_S), choices=list(TARGET_S))
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    setting = Setting(workload=Workload(), profile=load_profile("h200"), cluster=load_cluster("h100"))
    print(f"checks passed: {check(setting)} cases equal the event-by-event simulation")
    rows = []
    print(
        f"\n{'ranks':>6}{'steps':>7}{'features':>14}{'plans':>7}{'plan s':>9}{'run s':>8}{'together':>10}{'target':>8}"
    )
    for ranks in options.ranks:
        target = TARGET_S[ranks]
        for features in (
            Features(balancer="random", prioritized=False, dedup=False, sm_free=False),
            Features(),
        ):
            plans = options.steps if options.plan_all else plan_steps_for(ranks)
            plan(setting, features, num_ranks=8, plan_steps=1)  # compiles the balancer's loops
            began = time.process_time()
            loads = plan(setting, features, num_ranks=ranks, plan_steps=plans)
            planned = time.process_time()
            simulate_features(setting, features, num_ranks=ranks, num_steps=options.steps, loads=loads)
            done = time.process_time()
            row = {
                "ranks": ranks,
                "steps": options.steps,
                "features": "all on" if features == Features() else "all off",
                "plans": plans,
                "plan_s": planned - began,
                "run_s": done - planned,
                "target_s": target,
            }
            rows.append(row)
            print(
                f"{ranks:>6}{options.steps:>7}{row['features']!s:>14}{plans:>7}{planned - began:>9.2f}"
                f"{done - planned:>8.2f}{done - began:>10.2f}{target:>8.0f}"
            )
    met = all(
        float(str(row["plan_s"])) + float(str(row["run_s"])) < float(str(row["target_s"])) for row in rows
    )
    print("all within the target" if met else "NOT all within the target")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"claim": "simulate_speed", "met": met, "rows": rows, "machine": machine}))


if __name__ == "__main__":
    main()
