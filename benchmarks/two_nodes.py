r"""What a run on two machines says of its time, held against what is known of the wire and of what was planted.

Two network namespaces (tests/nodes.py) under torchrun with its c10d rendezvous: on a bare wire, on one of 100 Mbit/s,
and on one whose every frame is 20 ms on its way. All runs train the same recipe in float64, plain and prioritized:

    nothing    as it is
    late       rank 1 sleeps for 60 ms in the forward of every step
    stopped    rank 1 is stopped (SIGSTOP) for 400 ms, once in every fourth step, wherever it is then

A model of a rank computes on a device of its own for --device-ms in every step, as on a GPU (it sleeps), and on the
cores that all ranks share for the rest, so that a busy host changes little of a step.

Checked first: every loss of every run equals that of one process, to 1e-9. Then `comm` and `straggler` of the log, as
shares of the step, against a truth that knows nothing of the accounts (R ranks, T the length of a step):

    comm       by the core:  what is left of T without the time in which the training thread computed, had a core or
                   stood in line for one (two_nodes_rank.py), the straggler's truth, and what else it waits for on the
                   bare wire. Its own work may differ from wire to wire: the switch between the machines takes their
                   cores, too, and a thread that has slept for long finds its caches cold.
               by the wire, plain only:  what the bare wire costs, and exchange by exchange what its bytes take between
                   two plain sockets, from asking to having them all, as gloo asks before it sends. A plain step
                   stands still for four exchanges: counts, ids, rows, row gradients. Bytes are those that the
                   ranks of one machine give the transport for the other one; from the larger direction alone to
                   one after the other. Where bytes fill the wire, two ranks send one after the other: the answer
                   that lets one send stands in line behind the bytes of the rank that came last. Dense gradients
                   travel beside row gradients and have begun before the backward is over: they add from nothing
                   to all of their larger direction, and of a second trip where they take two (over 2 ranks and 64 kB).
    straggler  what the ranks wait for each other on the bare wire + (R - 1) / R * what was planted in a step
               A plain step gets longer by all that was planted. A prioritized one, or one that is stopped anywhere, may
               not: then the ranks had something else to wait for, or to do, and which of both it was at a moment is
               a matter of order. So straggler lies between what made the step longer and all that was planted, and
               comm is less by no more than the difference.

Steps are taken by fours, and the quieter half of the fours counts; all of them where ranks are stopped. The truth
stands for the two machines, not for a cluster: both share this host's cores, and a busy host shows as straggler and
host time.

    python benchmarks/two_nodes.py [--steps 48] [--device-ms 150] [--quick]
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from two_nodes_rank import LATE_S, STOP_EVERY, STOP_S, Move

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.nodes import PORT, Node, nodes, why_no_nodes
from tests.warm_python import warm_python

WIRES: dict[str, dict[str, float]] = {"bare": {}, "100 Mbit": {"rate_mbit": 100}, "20 ms": {"delay_ms": 20}}
WAYS = {"plain": "false", "prioritized": "true"}
PLANTED_MS = {"nothing": 0.0, "late": 1e3 * LATE_S, "stopped": 1e3 * STOP_S / STOP_EVERY}
"""In a mean step."""
EXCHANGES = ("exchange counts", "exchange ids", "exchange rows", "send row gradients home")
DENSE = "train"
"""The stage in which dense gradients are sent."""
TWO_TRIPS = 64 << 10
WARM_UP = 6
POINTS = 3.0


def run_plan(
    python: str, folder: Path, tasks: Sequence[Mapping[str, Any]], *, num_local: int, wire: str | None
) -> None:
    """All tasks on both machines, or, without a wire, in one process."""
    folder.mkdir()
    plan = folder / "plan.json"
    plan.write_text(json.dumps(tasks))
    program = [str(Path(__file__).with_name("two_nodes_rank.py")), str(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    if wire is None:
        subprocess.run([python, *program], env=environment, check=True)
        return
    started = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={num_local}"]
    started += ["--rdzv-backend=c10d", f"--rdzv-endpoint=node-a:{PORT}"]
    with nodes(2, **WIRES[wire]) as machines:
        running = [_start(machine, [python, *started, *program], environment) for machine in machines]
        said = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            raise SystemExit("\n".join(said) + f"\nFAILED: a run over the wire {wire!r} ended with an error")


def _start(machine: Node, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return machine.popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


Between = tuple[float, float]
"""The truth, in milliseconds or points: from here to there."""


class Measured:
    """What a run said, in milliseconds of a step, means over its ranks and over the quieter half of its steps."""

    def __init__(self, path: Path, *, quieter: bool = True) -> None:
        heard = json.loads(path.read_text())
        self.losses = [event["loss"] for event in heard["steps"]]
        self.num_ranks = len(heard["moves"])
        self._bytes, self._wire = bytes_between_machines(heard["moves"]), heard["wire"]
        warm = heard["steps"][WARM_UP:-1]
        fours = [warm[n : n + STOP_EVERY] for n in range(0, len(warm) - STOP_EVERY + 1, STOP_EVERY)]
        fours.sort(key=lambda four: sum(event["step_ms"] for event in four))
        steps = [event for four in fours[: -(-len(fours) // 2) if quieter else None] for event in four]
        self._counted = [event["step"] for event in steps]
        self.step = statistics.mean(event["step_ms"] for event in steps)
        self.comm, self.straggler = (
            statistics.mean(event.get(cause, 0.0) * event["step_ms"] for event in steps)
            for cause in ("comm", "straggler")
        )
        self.slowest = statistics.mode(event.get("slowest") for event in steps)
        # Forward n of a rank is that of step n + 1.
        self.on_core = statistics.mean(
            rank[step] - rank[step - 1] for rank in heard["cores"] for step in self._counted
        )
        self.held = statistics.mean(rank[step - 1] for rank in heard["held"] for step in self._counted)

    def wire_ms(self, wire: Mapping[str, float]) -> Between:
        """What the exchanges of a plain step must take on a wire, by what plain sockets took."""
        trip = self._takes(0)
        one_way = sum if self.num_ranks == 2 and "rate_mbit" in wire else max
        low, high = len(EXCHANGES) * trip, len(EXCHANGES) * trip
        for step in self._counted:
            sizes = {name: self._bytes.get((name, step), (0, 0)) for name in (*EXCHANGES, DENSE)}
            dense = sizes.pop(DENSE)
            beyond = [[self._takes(each) - trip for each in both] for both in sizes.values()]
            low += sum(map(one_way, beyond)) / len(self._counted)
            high += (sum(map(sum, beyond)) + self._takes(max(dense)) - trip) / len(self._counted)
        two_trips = self.num_ranks > 2 and self.dense_bytes > TWO_TRIPS
        return low, high + (trip if two_trips else 0.0)

    def _takes(self, num_bytes: float) -> float:
        """Milliseconds between two plain sockets, from asking to having them all."""
        sizes, times = zip(*self._wire, strict=True)
        beyond = max(0.0, num_bytes - sizes[-1]) * (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return float(np.interp(num_bytes, sizes, times)) + beyond

    @property
    def dense_bytes(self) -> float:
        """Sent from machine to machine for dense gradients in a step."""
        return statistics.mean(max(self._bytes.get((DENSE, step), (0, 0))) for step in self._counted)


def bytes_between_machines(moves: Sequence[Sequence[Move]]) -> dict[tuple[str, int], tuple[int, int]]:
    """(stage, step) -> bytes that the ranks of each of the two machines send to the other one."""
    half = len(moves) // 2
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, mine in enumerate(moves):
        there = slice(half, None) if rank < half else slice(0, half)
        for name, step, sent in mine:
            before = found.get((name, step), (0, 0))
            more = sum(sent[there])
            found[name, step] = (
                (before[0] + more, before[1]) if rank < half else (before[0], before[1] + more)
            )
    return found


def rows_of(measured: Mapping[tuple[int, str, str, str], Measured]) -> list[dict[str, Any]]:
    """Every run, with the truth beside what it said, in points."""
    rows = []
    for (num_local, wire, way, planted), run in measured.items():
        bare = measured[num_local, "bare", way, "nothing"]
        undisturbed = measured[num_local, wire, way, "nothing"]
        late, hidden = planted_ms(way, planted, longer=run.step - undisturbed.step)
        others = 1 - 1 / (2 * num_local)
        own = PLANTED_MS[planted] / (2 * num_local)
        waited = run.step - run.on_core - own
        # Stopped while its device computes, a rank loses only what the stop lasts longer than that.
        spared = max(0.0, own - run.held) if planted == "stopped" else 0.0
        other = bare.step - bare.on_core - bare.comm - bare.straggler
        straggler = (bare.straggler + others * late, bare.straggler + others * (late + hidden))
        truth: dict[str, Between] = {
            "comm": (waited - other - straggler[1], waited + spared - other - straggler[0]),
            "straggler": straggler,
        }
        if way == "plain" and wire != "bare":
            low, high = run.wire_ms(WIRES[wire])
            truth["comm by wire"] = (bare.comm + low - hidden, bare.comm + high)
        rows.append(
            {
                "ranks": f"2x{num_local}",
                "wire": wire,
                "way": way,
                "planted": planted,
                "step_ms": run.step,
                "comm": 100 * run.comm / run.step,
                "straggler": 100 * run.straggler / run.step,
                "truth": {name: tuple(100 * each / run.step for each in truth[name]) for name in truth},
                "dense_kilobytes": run.dense_bytes / 1000,
                "on_core_ms": run.on_core,
                "other_waits_ms": other,
                "slowest": run.slowest,
            }
        )
    return rows


def planted_ms(way: str, planted: str, *, longer: float) -> Between:
    """What somebody surely waited for in a mean step, and what may have been hidden by other waits or work."""
    everything = PLANTED_MS[planted]
    surely = everything if way == "plain" and planted == "late" else min(max(0.0, longer), everything)
    return surely, everything - surely


def off_by(row: Mapping[str, Any]) -> dict[str, float]:
    """How far each share lies from its truth, in points. What the bare wire costs is the measure, not measured."""
    off = {}
    for name, (low, high) in row["truth"].items():
        said = row[name.split()[0]]
        if not (name == "comm" and row["wire"] == "bare"):
            off[name] = max(low - said, said - high, 0.0)
    return off


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    titles = (
        "ranks",
        "wire",
        "way",
        "planted",
        "step",
        "comm",
        "by the core",
        "by the wire",
        "straggler",
        "truth",
    )
    print("\n| " + " | ".join(titles) + " | off | slowest |")
    print("|---" * (len(titles) + 2) + "|")
    for row in rows:
        core, straggler, wire = (_between(row["truth"].get(n)) for n in ("comm", "straggler", "comm by wire"))
        cells = (row["ranks"], row["wire"], row["way"], row["planted"], f"{row['step_ms']:.1f} ms")
        cells += (f"{row['comm']:.1f}", core, wire, f"{row['straggler']:.1f}", straggler)
        print("| " + " | ".join(cells) + f" | {max(off_by(row).values()):.1f} | {row['slowest']} |")


def _between(truth: Between | None) -> str:
    if truth is None:
        return ""
    low, high = truth
    return f"{low:.1f}" if high - low < 0.1 else f"{low:.1f} to {high:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--device-ms", type=float, default=150.0, help="of compute on no core, a step")
    parser.add_argument("--quick", action="store_true", help="one rank a machine only")
    parser.add_argument(
        "--wires", nargs="*", default=list(WIRES), help="of these; the bare one is the measure"
    )
    parser.add_argument("--planted", nargs="*", default=list(PLANTED_MS), help="of these, beside nothing")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], help="a machine")
    options = parser.parse_args()
    if reason := why_no_nodes():
        raise SystemExit(reason)
    tasks = [
        {
            "name": f"{way}-{planted}",
            "planted": planted,
            "device_ms": options.device_ms,
            "keys": [f"pipeline.prioritized={WAYS[way]}", f"run.steps={options.steps}"],
        }
        for planted in PLANTED_MS
        if planted in ("nothing", *options.planted)
        for way in WAYS
    ]
    measured: dict[tuple[int, str, str, str], Measured] = {}
    with tempfile.TemporaryDirectory() as folder, warm_python() as command:
        python = str(command)
        run_plan(python, Path(folder, "one"), tasks[:1], num_local=1, wire=None)
        reference = Measured(Path(folder, "one", f"{tasks[0]['name']}.json")).losses
        for num_local in (1,) if options.quick else options.ranks:
            some = tasks if num_local == 1 else [task for task in tasks if task["planted"] == "nothing"]
            for wire in (wire for wire in WIRES if wire in ("bare", *options.wires)):
                here = Path(folder, f"{num_local}-{wire}".replace(" ", ""))
                run_plan(python, here, some, num_local=num_local, wire=wire)
                for task in some:
                    way, planted = task["name"].split("-")
                    measured[num_local, wire, way, planted] = Measured(
                        here / f"{task['name']}.json", quieter=planted != "stopped"
                    )
    worst = max(abs(a - b) for run in measured.values() for a, b in zip(run.losses, reference, strict=True))
    if worst > 1e-9:
        raise SystemExit(f"FAILED: losses are up to {worst:.1e} off those of one process")
    print(f"{len(measured)} runs on two machines: losses of one process, at most {worst:.1e} off")
    rows = rows_of(measured)
    print_table(rows)
    largest = max(max(off_by(row).values()) for row in rows)
    print(f"\nshares are at most {largest:.1f} points off; {POINTS:.0f} are allowed")
    facts = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device_ms": options.device_ms,
        "date": f"{datetime.date.today()}",
        "losses_off": worst,
        "largest_points": largest,
        "ok": largest <= POINTS,
        "rows": rows,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
