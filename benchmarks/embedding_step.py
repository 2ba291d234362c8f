"""Events a second of a training step on a row-wise sharded table: FreeScale next to TorchRec, on gloo.

    python benchmarks/embedding_step.py [--torchrec PYTHON] [--repeats 7] [--patience 600] [--quick]

One table of 100,000 x 64 rows with row-wise Adagrad, 64 sequences a rank with lognormal lengths (about 6,500 events),
an MLP 64-64-1 on every event, Adam on the MLP; one thread a rank. Both sides must end with the same table after three
steps from the same weights, or no speed is printed. Then rounds of all sides alternate. A round in which other
programs took more than a tenth of a core is run again, as long as there is patience. The last line is JSON.

FreeScale's CPU ranks of one machine exchange rows over sockets of their own; "on gloo" is what ranks on several
machines do, and what TorchRec does. The ratio is that of FreeScale to the better of the two TorchRec loops.

TorchRec has other requirements than FreeScale, so it lives in an environment of its own:

    python3.11 -m venv /tmp/torchrec && /tmp/torchrec/bin/pip install torch==2.13.0
    /tmp/torchrec/bin/pip install --no-deps -r benchmarks/requirements-torchrec.txt
    python benchmarks/embedding_step.py --torchrec /tmp/torchrec/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from embedding_step_rank import DIM, NUM_ROWS, POOL, SEED

from freescale.comm.world import free_port
from freescale.embedding.hashing import keyed_normal

RANK_FILE = Path(__file__).with_name("embedding_step_rank.py")
KINDS = ("zipf", "uniform")
NAMES = {
    "freescale": "FreeScale",
    "freescale-gloo": "FreeScale on gloo",
    "torchrec": "TorchRec",
    "torchrec-pipelined": "TorchRec pipelined",
}
# Largest difference of a weight after three steps. Rows move by up to 0.06 and Adam's parameters by 0.003.
ALLOWED = {"float64": 1e-12, "float32": 2e-5}
OTHERS_ALLOWED = 0.1


# Ranks


@dataclass
class Side:
    """The processes of one library, one a rank; they wait idle between commands."""

    kind: str
    num_ranks: int
    processes: list[subprocess.Popen[str]]
    logs: list[Path]
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, kind: str, python: str, num_ranks: int, folder: Path) -> Side:
        """Start the ranks and wait until they stand."""
        port = free_port()
        logs = [folder / f"{kind}-{num_ranks}-{rank}.log" for rank in range(num_ranks)]
        common = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            # FreeScale leaves gloo where it is told that all ranks share a machine.
            "LOCAL_WORLD_SIZE": "0" if kind == "freescale-gloo" else str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(
                [python, str(RANK_FILE), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, log in enumerate(logs)
        ]
        side = cls(kind, num_ranks, processes, logs)
        side.versions = side._answers()[0]
        return side

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Send a command to every rank and wait for all answers."""
        for process in self.processes:
            assert process.stdin is not None
            print(json.dumps(command), file=process.stdin, flush=True)
        return self._answers()

    def end(self) -> None:
        """No more commands: the ranks leave."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process, log in zip(self.processes, self.logs):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                last = "\n".join(log.read_text().splitlines()[-12:])
                raise SystemExit(f"a rank of {NAMES[self.kind]} on {self.num_ranks} ranks failed:\n{last}")
            answers.append(json.loads(line))
        return answers


def why_no_torchrec(python: str | None) -> str | None:
    """None where TorchRec can be used, else the reason."""
    if python is None:
        return "no --torchrec PYTHON given; the head of this file says how to make one"
    try:
        found = subprocess.run(
            [python, "-c", "import torchrec.distributed"], capture_output=True, text=True, timeout=300
        )
    except OSError as error:
        return f"{python}: {error.strerror}"
    return None if found.returncode == 0 else f"{platform.machine()}: {found.stderr.strip().splitlines()[-1]}"


# Correctness


def check(sides: dict[tuple[str, int], Side], folder: Path) -> dict[str, float]:
    """Every library, on one and on two ranks, learns the same from the same; largest differences."""
    init = folder / "init"
    torch.save(keyed_normal(SEED, torch.arange(NUM_ROWS), DIM) * 0.02, init)
    found: dict[str, float] = {}
    for ids in KINDS:
        for dtype in ("float64", "float32"):
            results = {}
            for (kind, num_ranks), side in sides.items():
                if num_ranks > 2 or (dtype == "float64" and not kind.startswith("freescale")):
                    continue
                shares = [[0, 1]] if num_ranks == 1 else [[0], [1]]
                out = folder / f"{kind}-{num_ranks}"
                side.ask(do="check", ids=ids, dtype=dtype, shares=shares, init=str(init), out=str(out))
                parts = [torch.load(f"{out}-{rank}") for rank in range(num_ranks)]
                results[kind, num_ranks] = [torch.cat([part["rows"] for part in parts]), *parts[0]["dense"]]
            found.update(_compare(results, start=torch.load(init), what=f"{dtype} {ids}", dtype=dtype))
    return found


def _compare(
    results: dict[tuple[str, int], list[torch.Tensor]], *, start: torch.Tensor, what: str, dtype: str
) -> dict[str, float]:
    """Everything against FreeScale alone."""
    truth = results["freescale", 1]
    moved = float((truth[0] - start).abs().max())
    assert moved > 0.01, f"{what}: the table hardly moved ({moved}), so the check shows nothing"
    found = {}
    for (kind, num_ranks), tensors in results.items():
        difference = max(float((a - b).abs().max()) for a, b in zip(truth, tensors, strict=True))
        if difference > ALLOWED[dtype]:
            raise SystemExit(
                f"CHECK FAILED: {NAMES[kind]} on {num_ranks} ranks differs from FreeScale alone by {difference:.2e} "
                f"after three steps ({what}, allowed {ALLOWED[dtype]:.0e}). No speed is printed."
            )
        if (kind, num_ranks) != ("freescale", 1):
            found[f"{kind} x{num_ranks} {what}"] = difference
            print(f"  same as FreeScale alone, {what:16}: {NAMES[kind]:19}on {num_ranks}: {difference:.1e}")
    return found


# Speed


@dataclass
class Rounds:
    """What was measured for one side and one kind of ids."""

    events_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    table_mib: list[float] = field(default_factory=list)
    again: int = 0

    @property
    def median(self) -> float:
        """Events a second."""
        return statistics.median(self.events_per_s)

    def text(self) -> str:
        """Median and range for a table."""
        low, high = min(self.events_per_s), max(self.events_per_s)
        return f"{self.median / 1e3:.0f} [{low / 1e3:.0f}..{high / 1e3:.0f}]"

    def numbers(self) -> dict[str, Any]:
        """Everything, for the last line."""
        return {
            "events_per_s": [round(value) for value in self.events_per_s],
            "median_events_per_s": round(self.median),
            "cpu_ms_per_step_and_rank": round(statistics.median(self.cpu_ms), 2),
            "others_cores": [round(value, 3) for value in self.others],
            "rounds_run_again": self.again,
            "table_mib_per_rank": [round(value, 3) for value in self.table_mib],
        }


def busy_seconds() -> float:
    """CPU seconds all programs of the machine have used; 0 where the system does not tell."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(deadline: float) -> None:
    """Until other programs leave the machine alone."""
    while time.monotonic() < deadline:
        start = busy_seconds()
        time.sleep(0.3)
        if (busy_seconds() - start) / 0.3 < OTHERS_ALLOWED:
            return


def measure(
    sides: list[Side], *, kinds: tuple[str, ...], repeats: int, steps: int, patience_s: float
) -> dict[tuple[str, int, str], Rounds]:
    """Alternate over the sides, so that all of them see the same machine."""
    results = {(side.kind, side.num_ranks, ids): Rounds() for ids in kinds for side in sides}
    deadline = time.monotonic() + patience_s
    for _ in range(repeats):
        for (kind, num_ranks, ids), rounds in results.items():
            (side,) = (s for s in sides if (s.kind, s.num_ranks) == (kind, num_ranks))
            while True:
                wait_for_quiet(deadline)
                start, before = time.monotonic(), busy_seconds()
                answers = side.ask(do="round", ids=ids, steps=steps)
                elapsed, busy = time.monotonic() - start, busy_seconds() - before
                others = max(0.0, busy - sum(a["cpu_seconds_all"] for a in answers)) / elapsed
                if others < OTHERS_ALLOWED or time.monotonic() > deadline:
                    break
                rounds.again += 1
            rounds.events_per_s.append(answers[0]["events"] / max(a["seconds"] for a in answers))
            rounds.cpu_ms.append(1e3 * statistics.mean(a["cpu_seconds"] for a in answers) / steps)
            rounds.others.append(others)
            rounds.table_mib = [a["table_mib"] for a in answers]
    return results


# Tables


def speed_table(results: dict[tuple[str, int, str], Rounds]) -> dict[str, Any]:
    kinds = [k for k in NAMES if any(key[0] == k for key in results)]
    print(
        f"\n{'thousand events/s, median [range]':36}"
        + "".join(f"{NAMES[k]:>24}" for k in kinds)
        + f"{'ratio':>8}"
    )
    ratios: dict[str, Any] = {}
    for ids in KINDS:
        for num_ranks in (1, 2):
            row = {k: results[k, num_ranks, ids] for k in kinds if (k, num_ranks, ids) in results}
            cells = "".join(f"{row[k].text() if k in row else 'not run':>24}" for k in kinds)
            best = max((r.median for k, r in row.items() if k.startswith("torchrec")), default=None)
            if best:
                ratios |= {f"{k} {ids} x{num_ranks}": round(r.median / best, 3) for k, r in row.items()}
            ratio = f"{row['freescale'].median / best:.2f}" if best else "n/a"
            print(f"{ids + ' ids, ranks: ' + str(num_ranks):36}{cells}{ratio:>8}")
    print(f"\n{'CPU ms a step and rank, median':36}" + "".join(f"{NAMES[k]:>24}" for k in kinds))
    for ids in KINDS:
        for num_ranks in (1, 2):
            cells = "".join(
                f"{statistics.median(results[k, num_ranks, ids].cpu_ms):24.2f}"
                if (k, num_ranks, ids) in results
                else f"{'not run':>24}"
                for k in kinds
            )
            print(f"{ids + ' ids, ranks: ' + str(num_ranks):36}{cells}")
    gains = {
        f"{k} {ids}": round(results[k, 2, ids].median / results[k, 1, ids].median, 3)
        for ids in KINDS
        for k in kinds
        if (k, 1, ids) in results
    }
    print(
        "\nevents/s of 2 ranks over 1 rank: "
        + ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    )
    return {"ratio_to_best_torchrec": ratios, "two_ranks_over_one": gains}


def scaling_table(results: dict[tuple[str, int, str], Rounds], *, steps: int) -> None:
    cores = os.cpu_count() or 1
    print(f"\nWeak scaling, FreeScale, Zipf ids, 64 sequences a rank, one thread a rank, {cores} cores")
    print(f"{'ranks':>6}{'thousand events/s':>24}{'x 1 rank':>10}{'CPU ms/step':>13}  table MiB a rank")
    one = results["freescale", 1, "zipf"].median
    for (_, num_ranks, _), rounds in results.items():
        mib = " ".join(f"{value:.2f}" for value in rounds.table_mib)
        crowd = f"  ({num_ranks} ranks share {cores} cores)" if num_ranks > cores else ""
        print(
            f"{num_ranks:6}{rounds.text():>24}{rounds.median / one:10.2f}"
            f"{statistics.median(rounds.cpu_ms):13.2f}  {mib}{crowd}"
        )


def targets(summary: dict[str, Any]) -> dict[str, bool]:
    """What this benchmark is to show, and whether it did."""
    ratios, gains = summary["ratio_to_best_torchrec"], summary["two_ranks_over_one"]
    wanted = [
        ("Zipf, 2 ranks: at least 1.5x TorchRec", ratios.get("freescale zipf x2"), 1.5),
        ("uniform, 2 ranks: at least 1.0x TorchRec", ratios.get("freescale uniform x2"), 1.0),
        ("Zipf, 2 ranks, on gloo: at least 1.5x TorchRec", ratios.get("freescale-gloo zipf x2"), 1.5),
        ("uniform, 2 ranks, on gloo: at least 1.0x TorchRec", ratios.get("freescale-gloo uniform x2"), 1.0),
        ("2 ranks move at least 1.4x the events of 1, Zipf", gains["freescale zipf"], 1.4),
        ("2 ranks move at least 1.4x the events of 1, uniform", gains["freescale uniform"], 1.4),
    ]
    print()
    met = {}
    for text, value, least in wanted:
        if value is None:
            print(f"  not measured  {text}")
            continue
        met[text] = value >= least
        print(f"  {'met' if met[text] else 'NOT MET':12}  {text}: {value:.2f}")
    return met


def processor() -> str:
    """Name of the processor, where the system tells."""
    try:
        found = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in found.splitlines() if line.startswith("Model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchrec", metavar="PYTHON", help="python of an environment with TorchRec")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each side")
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds to wait for a quiet machine, in all"
    )
    parser.add_argument("--quick", action="store_true", help="2 short rounds: shows that it works")
    arguments = parser.parse_args()
    steps, repeats = (POOL, 2) if arguments.quick else (2 * POOL, arguments.repeats)
    reason = why_no_torchrec(arguments.torchrec)
    pythons = {"freescale": sys.executable, "freescale-gloo": sys.executable}
    if reason is None:
        pythons |= {"torchrec": arguments.torchrec, "torchrec-pipelined": arguments.torchrec}
    else:
        print(f"TorchRec is unavailable: {reason}")
    started, load = datetime.datetime.now(datetime.UTC), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="embedding-step-") as name:
        folder = Path(name)
        sides = {
            (kind, num_ranks): Side.start(kind, python, num_ranks, folder)
            for kind, python in pythons.items()
            for num_ranks in (1, 2)
            if (kind, num_ranks) != ("freescale-gloo", 1)
        }
        try:
            differences = check(sides, folder)
            patience = 0 if arguments.quick else arguments.patience
            speed = measure(
                list(sides.values()), kinds=KINDS, repeats=repeats, steps=steps, patience_s=patience
            )
            sides["freescale", 4] = Side.start("freescale", sys.executable, 4, folder)
            ours = [side for (kind, _), side in sides.items() if kind == "freescale"]
            weak = measure(ours, kinds=("zipf",), repeats=repeats, steps=steps, patience_s=patience / 3)
        finally:
            for side in sides.values():
                side.end()
    summary = speed_table(speed)
    scaling_table(weak, steps=steps)
    met = targets(summary)
    again = sum(rounds.again for rounds in (*speed.values(), *weak.values()))
    loads = f"{load[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    worst = max(max(rounds.others) for rounds in speed.values())
    print(f"\nload average {loads}; other programs took up to {worst:.2f} cores; rounds run again: {again}")
    result = {
        "benchmark": "embedding_step",
        "date": started.isoformat(timespec="seconds"),
        "hardware": {"machine": platform.machine(), "processor": processor(), "cores": os.cpu_count()},
        "versions": {kind: sides[kind, 2].versions for kind in pythons if kind in ("freescale", "torchrec")},
        "torchrec": "measured" if reason is None else f"unavailable: {reason}",
        "largest_difference": differences,
        "steps_per_round": steps,
        "load_average": {"before": load, "after": os.getloadavg()},
        "speed": {f"{kind} x{n} {ids}": r.numbers() for (kind, n, ids), r in speed.items()},
        "weak_scaling": {f"x{n}": r.numbers() for (_, n, _), r in weak.items()},
        **summary,
        "targets_met": met,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
