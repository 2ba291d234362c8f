"""What 8, 64 and 256 GPUs would give for DLRMv4: a prediction, from its measured compute on one H200.

    PYTHONPATH=. python benchmarks/dlrmv4_simulate.py [--profile FILE]

No GPU is needed. How compute grows with lengths follows from the profile that ships (8 HSTU layers of width 512,
measured on an H200), scaled to three layers of DLRMv4: attention by its pairs, the rest by the FLOPs of its products (7
D^2 a token and layer, not 5). How long it takes is what `dlrmv4_speed.py` measured: forward and backward of all lengths
are scaled by one number, so that a sample of the mean takes that. The host is that of a run of the twin. With
--profile, one that was measured with recipes/mlperf_twin.yaml is taken as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from dlrmv4_parts.inputs import real_lengths

import freescale.sim as sim

DENSE = 15_243_057
TABLES = {"item": 9_390_624, "artist": 1_293_395, "album": 3_367_692}
SINGLE = {"user": 1_000_001, "ua": 100_000_000, "ub": 40_000_000, "uh": 24_000_000, "ih": 40_000_000}
SINGLE |= {"ah": 32_000_000, "uo": 2_000_000, "uah": 40_000_000}
SAMPLES = {8192: 69.3e6, 16_384: 87.7e6, 32_768: 113.0e6}
"""To an AUC of 0.75, means of the reference's 20 logs each."""
PUBLISHED = {8192: (8, 160), 16_384: (16, 112), 32_768: (32, 83)}
"""MI350s and minutes, evaluations included."""
EVAL_SHARE = 2_058_204 / 3 / 2_293_760
"""An evaluation costs a third of a training pass over its samples; one a block, from the first that counts on."""
MEASURED_MS = {False: 106.3 / 256, True: 84.7 / 256}
"""Forward and backward of a sample of real length on an H200, last layer whole and short: docs/mlperf.md, Speed."""
HOST_MS = 57.7 - 43.3
"""What a step of recipes/mlperf_twin.yaml took beside its kernels on an H200, with three loader processes. Its Python
is the same for any size of a batch."""
CASES = ((8, 8192), (16, 16_384), (64, 32_768), (256, 32_768))


def derived(short: bool, lengths: np.ndarray) -> dict[str, Any]:
    """The profile that ships, for three layers of DLRMv4 that take as long as they were measured to."""
    profile: dict[str, Any] = json.loads((Path(sim.__file__).parent / "profiles" / "h200.json").read_text())
    layers = 3 / profile["model"]["layers"]
    token, square = layers * 7 / 5, layers
    if short:
        # Keys and values of all tokens are 2 of 7 parts of a layer's products, and nearly no pair is left.
        token, square = token * (2 + 2 / 7) / 3, square * 2 / 3
    parts = [profile["times"][name] for name in ("forward", "backward")]
    for part in parts:
        part["per_token_ms"] *= token
        part["per_square_ms"] *= square
    tokens, squares = float(lengths.mean()), float(np.mean(lengths.astype(float) ** 2))
    before = sum(part["per_token_ms"] * tokens + part["per_square_ms"] * squares for part in parts)
    for part in parts:
        part["per_token_ms"] *= MEASURED_MS[short] / before
        part["per_square_ms"] *= MEASURED_MS[short] / before
    for name in ("host", "host_hiding"):
        profile["times"][name] |= {"fixed_ms": HOST_MS, "per_token_ms": 0.0}
    del profile["times"]["weights"]  # those of tasks and towers are not postponed
    profile["measured"].remove("times.weights")
    profile["model"] |= {"kind": "stu", "layers": 3, "dense_parameters": DENSE}
    return profile


def simulate(profile: Path, lengths: Path, cluster: str, gpus: int, batch: int) -> dict[str, Any]:
    """One prediction, everything on."""
    tables = [f"{name}:{rows},2048,1,1" for name, rows in TABLES.items()]
    tables += [f"{name}:{rows},2048,0,1" for name, rows in SINGLE.items()]
    command = [
        *(sys.executable, "-m", "freescale", "simulate", "--gpus", str(gpus), "--profile", str(profile)),
        *("--cluster", cluster, "--lengths", str(lengths), "--quick", "--steps", "40", "--json"),
        *(f"workload.samples_per_gpu={batch // gpus}", f"workload.tables={';'.join(tables)}"),
        f"workload.dense_bytes={4 * DENSE}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:] + done.stdout[-500:])
    return json.loads(done.stdout)


def main() -> None:
    """A table of predictions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="measured with recipes/mlperf_twin.yaml")
    parser.add_argument("--clusters", nargs="+", default=["h200", "h100"])
    parser.add_argument("--raw", action="store_true", help="print what the simulator says")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        lengths = Path(folder) / "lengths.npy"
        real = np.array(real_lengths(4000, seed=1, users=200)) + 9
        np.save(lengths, real)
        print(
            "prediction; minutes to AUC 0.75 by the reference's mean number of samples, evaluations from its grid"
        )
        print(
            f"{'GPUs':>5} {'':6} {'batch':>7} {'last':>6} {'ms a step':>10} {'samples/s a GPU':>16} {'bubble':>8} "
            f"{'minutes':>8} {'published':>22}"
        )
        for short in (False, True):
            profile = options.profile or Path(folder) / f"profile-{short}.json"
            if options.profile is None:
                profile.write_text(json.dumps(derived(short, real)))
            for cluster in options.clusters:
                for gpus, batch in CASES:
                    found = simulate(profile, lengths, cluster, gpus, batch)
                    if options.raw:
                        print(json.dumps(found)[:3000])
                    best = min(found["rows"], key=lambda row: row["step_ms"])
                    rate = batch / best["step_ms"] * 1000
                    training = SAMPLES[batch] / rate
                    skipped = {8192: 24, 16_384: 30, 32_768: 40}[batch]
                    evals = max(1, round(SAMPLES[batch] / 2_293_760) - skipped)
                    minutes = (training + evals * EVAL_SHARE * 2_293_760 / rate) / 60
                    there, took = PUBLISHED[batch]
                    row = {
                        "gpus": gpus,
                        "cluster": cluster,
                        "batch": batch,
                        "short": short,
                        "minutes": minutes,
                    }
                    row |= {"ms": best["step_ms"], "per_gpu": rate / gpus, "bubble": best["bubble"]}
                    rows.append(row)
                    print(
                        f"{gpus:>5} {cluster:6} {batch:>7} {'short' if short else 'whole':>6} {best['step_ms']:>10.1f} "
                        f"{rate / gpus:>16.0f} {best['bubble']:>8.1%} {minutes:>8.1f} {took:>8} on {there} MI350",
                        flush=True,
                    )
            if options.profile is not None:
                break
    print(json.dumps({"claim": "dlrmv4_simulate", "rows": rows}))


if __name__ == "__main__":
    main()
