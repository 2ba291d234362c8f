r"""Break short runs on purpose, hundreds of times, and judge how each of them ended.

    python benchmarks/chaos.py --faults 500 --seed 1 --jobs 3
    python benchmarks/chaos.py --kinds kill-rank,shard-flipped --faults 20 --keep /tmp/bad
    python benchmarks/chaos.py --seed 1 --repeat kill-rank/3
    python benchmarks/chaos.py --kills 100          # 2 ranks, killed anywhere, resumed: bit by bit the same run
    python benchmarks/chaos.py --reshape 30         # resumed with another number of ranks: on the curve
    python benchmarks/chaos.py --list

A trial is the real command (`freescale train`, with its launcher, or ranks started by hand) on a small data set in
float64, one fault (`tests/chaos/faults`), and, where the run had to end, the same command again. Right is: on the curve
of the run nobody disturbed (bit by bit on as many ranks, 1e-9 on others), or one clear message, an exit code that is
documented, within 30 s of the fault, nothing left behind, and everything saved before still there. Processes are
forked from this one, which has torch imported, except in kinds that say "from cold".
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chaos.campaign import Ground, draw, ground, run_trials, usable
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.programs import preload
from tests.chaos.proofs import killed_and_reshaped, killed_and_resumed
from tests.chaos.trial import Verdict

COLUMNS = {
    "hang": "hang",
    "curve": "wrong curve",
    "lost": "lost checkpoint",
    "left": "leftover",
    "trace": "traceback",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.list:
        for fault in FAULTS.values():
            print(f"{fault.name:28} {fault.about}")
        return 0
    preload()
    started = time.monotonic()
    until = started + 60 * options.minutes if options.minutes else float("inf")
    with ground(most_ranks=options.ranks, settings=options.set or ()) as made:
        if not made.isolated:
            print(
                "no namespaces here: kinds that need them are left out, shared memory and sockets not looked at"
            )
        trials = _chosen(made, options)
        verdicts = run_trials(
            made,
            trials,
            seed=options.seed,
            jobs=options.jobs,
            keep=options.keep,
            until=until,
            tell=_tell(options),
        )
    print(table(verdicts))
    summary = summarise(verdicts, asked=len(trials), seed=options.seed, seconds=time.monotonic() - started)
    print(json.dumps(summary))
    return 0 if summary["right"] == len(trials) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="how many trials, over all kinds alike")
    parser.add_argument("--kinds", default="", help="names, with commas; all unless given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="most ranks of a run; the proofs need 4")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no trial after this long")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for what bad trials wrote")
    parser.add_argument("--repeat", metavar="KIND/NUMBER", help="one trial alone")
    parser.add_argument("--kills", type=int, default=0, help="the proof of kills on two ranks")
    parser.add_argument("--reshape", type=int, default=0, help="the proof of other numbers of ranks")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="a key for every run")
    parser.add_argument("--list", action="store_true", help="say which kinds there are")
    options = parser.parse_args(arguments)
    if options.keep is None:
        options.keep = Path(tempfile.mkdtemp(prefix="chaos-bad-"))
    return options


def _chosen(made: Ground, options: argparse.Namespace) -> list[tuple[Fault, int]]:
    if options.repeat:
        kind, _, number = options.repeat.partition("/")
        proofs = {"killed-and-resumed": killed_and_resumed, "killed-and-reshaped": killed_and_reshaped}
        return [(proofs[kind] if kind in proofs else usable(made, names=[kind])[0], int(number))]
    if options.kills or options.reshape:
        kills = [(killed_and_resumed, number) for number in range(options.kills)]
        return kills + [(killed_and_reshaped, number) for number in range(options.reshape)]
    names = [name for name in options.kinds.split(",") if name]
    return draw(usable(made, names=names), options.faults, seed=options.seed)


def _tell(options: argparse.Namespace) -> Callable[[Verdict], None]:
    def tell(verdict: Verdict) -> None:
        mark = "BAD " if verdict.problems else "ok  "
        print(f"{mark} {verdict.trial:32} {verdict.seconds:5.1f} s  {verdict.outcome}", flush=True)
        for problem in verdict.problems:
            print(f"     {problem.kind}: {' '.join(problem.seen.split())[-300:]}")
        if verdict.problems:
            keys = "".join(f" --set {each}" for each in options.set or ())
            print(
                f"     repeat: python benchmarks/chaos.py --seed {options.seed} --repeat {verdict.trial}{keys}"
            )
            print(f"     files:  {options.keep / verdict.trial.replace('/', '-')}", flush=True)

    return tell


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each kind."""
    head = f"{'kind':28} {'count':>5} {'right':>5} " + " ".join(f"{name:>5}" for name in COLUMNS)
    lines = [f"{head} {'other':>5} {'longest to end':>14}"]
    for kind in sorted({verdict.trial.partition("/")[0] for verdict in verdicts}):
        these = [verdict for verdict in verdicts if verdict.trial.partition("/")[0] == kind]
        counts = _count(these)
        cells = " ".join(f"{counts[name]:5}" for name in (*COLUMNS, "other"))
        right = sum(not verdict.problems for verdict in these)
        longest = max(verdict.to_end_s for verdict in these)
        lines.append(f"{kind:28} {len(these):5} {right:5} {cells} {longest:12.1f} s")
    return "\n".join(lines)


def _count(verdicts: Sequence[Verdict]) -> Counter[str]:
    """Trials with a problem of each column."""
    columns = {kind: name for name, kind in COLUMNS.items()}
    return Counter(
        name
        for verdict in verdicts
        for name in {columns.get(problem.kind, "other") for problem in verdict.problems}
    )


def summarise(verdicts: Sequence[Verdict], *, asked: int, seed: int, seconds: float) -> dict[str, object]:
    """The last line."""
    counts = _count(verdicts)
    return {
        "benchmark": "chaos",
        "seed": seed,
        "asked": asked,
        "trials": len(verdicts),
        "kinds": len({verdict.trial.partition("/")[0] for verdict in verdicts}),
        "right": sum(not verdict.problems for verdict in verdicts),
        **{name: counts[name] for name in (*COLUMNS, "other")},
        "longest_to_end_s": round(max((v.to_end_s for v in verdicts), default=0.0), 1),
        "bad": [verdict.trial for verdict in verdicts if verdict.problems],
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        gc.unfreeze()  # extension modules count what nobody has collected when the process ends
