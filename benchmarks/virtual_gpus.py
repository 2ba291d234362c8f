r"""The same HSTU training on virtual GPUs with every transport, plain and prioritized, balanced or not.

Ranks are started with the code of `freescale train --virtual-gpus`. Checked first: the losses of all runs are one
curve. Then, side by side: step time, exposed communication, and where the time went. "Before" is the first row: rows
moved by a copy kernel on SMs (the stand-in for NCCL before 2.30, which refuses to work here), plain schedule, no
balance. With a later NCCL by LD_PRELOAD, `collective` is NCCL itself.

    python benchmarks/virtual_gpus.py --ranks 4 --budget-s 540 --save virtual_gpus.jsonl     # one H200: 10 minutes
    python benchmarks/virtual_gpus.py --ranks 8 --budget-s 540 --save virtual_gpus.jsonl
    python benchmarks/virtual_gpus.py --device cpu --ranks 2 --steps 30 --warmup 10 --rounds 1
    python benchmarks/virtual_gpus.py --ranks 4 --named --rounds 3     # before, balance alone, everything, postponed

--named runs only the rows that tell the whole story, --brief of these only the ones with nothing, with balance alone
and with everything. Every run is named when it begins, and printed and saved when it
is through: who ends the benchmark keeps what was measured, and sees where it was. A run that stands still fails after
comm.timeout_s, and those after it are run. Runs that do not fit into the time are named; with --save, the next call
goes on where this one stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from one_training import LONG_TAILED, Recipe, began, check_one_curve, losses_of, ranks_on, train_in_turn

from freescale.trace.bubbles import CAUSES
from freescale.trace.metrics_log import read_metrics, step_of
from freescale.trace.time_account import account_of

COMMON = (
    "model.dropout=0",
    "eval.max_users=64",
    "run.log_every=10",
    "run.eval_every=1000000",
    "run.keep=1",
    "balance.refit_every=20",
    "pipeline.decide_every=null",
    "comm.timeout_s=90",
)
SMALL = (
    *LONG_TAILED,
    "synthetic.users=600",
    "synthetic.items=5000",
    "run.device=cpu",
)
LARGE = (
    "synthetic.users=2304",
    "synthetic.items=10000000",
    "synthetic.mean_length=1000",
    "synthetic.sigma=1.2",
    "synthetic.max_length=8192",
    "data.max_length=8192",
    "data.workers=1",
    "model.dim=512",
    "model.layers=4",
    "model.heads=4",
    "model.dtype=bfloat16",
    "head.num_negatives=128",
    "embedding.id_map=hash",
    "embedding.rows=10000000",
    "embedding.optimizer=rowwise_adagrad",
    "run.device=cuda",
)
"""A table of 20 GB spread over the ranks, of which a step of 4 ranks reads and updates about 130,000 rows, a tenth of
them those of the step before; long-tailed lengths, so that ranks differ, and enough work that the host keeps ahead of
the GPU. The batch grows with the ranks."""
SAMPLES_A_RANK = 48

LOOK_S = 1.0
LOSS_TOLERANCE = {"cpu": 2e-3, "cuda": 1e-2}
"""Relative: sums in another order drift apart, in bfloat16 sooner than in float32."""
COMPARED = 60
"""Steps whose losses must agree. With 8 ranks a single one of 90 was 1.2e-2 off, all before the 61st at most 8e-4."""


@dataclass(frozen=True)
class Setting:
    """One run: how rows travel, when, and who computes what."""

    transport: str
    prioritized: bool
    balanced: bool
    postponed: bool = False
    sums: str = "auto"

    @property
    def name(self) -> str:
        """For a table."""
        words = ["prioritized" if self.prioritized else "plain", "balanced" if self.balanced else "in turn"]
        words[1] += ", postponed" if self.postponed else ""
        words[1] += "" if self.sums == "auto" else f", sums by {self.sums}"
        return f"{self.transport:<15} {words[0]:<11} {words[1]}"

    def keys(self) -> list[str]:
        """As recipe keys; the copy kernel takes the place of `collective`."""
        kind = "collective" if self.transport.startswith("copy_kernel") else self.transport
        return [
            f"comm.transport={kind}",
            f"pipeline.prioritized={str(self.prioritized).lower()}",
            f"balance.enabled={str(self.balanced).lower()}",
            f"pipeline.postpone={'on' if self.postponed else 'off'}",
            f"comm.sums={self.sums}",
        ]


def settings_of(transports: Sequence[str]) -> list[Setting]:
    """In the order of their worth, should the time run out: before, after, then one switch at a time."""
    wanted = [(True, True), (False, True), (False, False), (True, False)]
    order = [Setting(transports[0], False, False)]
    order += [Setting(transport, *switches) for switches in wanted for transport in reversed(transports)]
    return list(dict.fromkeys(order))


def named_settings(transports: Sequence[str]) -> list[Setting]:
    """Before, balance alone, everything with each other transport, that with the split backward, and sums elsewhere.

    On a GPU with a link of its own NCCL adds dense gradients up, whatever carries rows. Here ranks share the link to
    the host, so with rows on it the copies inside the GPU stand for NCCL.
    """
    before, *others = transports
    everything = [Setting(transport, True, True) for transport in others]
    postponed = [Setting(transport, True, True, postponed=True) for transport in others]
    if {"host_staged", "copy_engine"} <= set(others):
        postponed.append(Setting("host_staged", True, True, postponed=True, sums="copy_engine"))
    return [Setting(before, False, False), *everything, *postponed, Setting(before, False, True)]


def wanted_settings(options: argparse.Namespace) -> list[Setting]:
    """The runs of a round."""
    if not options.named and not options.brief:
        return settings_of(options.transports)
    named = named_settings(options.transports)
    wanted = [one for one in named if one.postponed or not one.prioritized] if options.brief else named
    words = options.only.split(",")
    return [one for one in wanted if one is named[0] or any(each in one.name for each in words)]


def recipe_of(setting: Setting, num_ranks: int, options: argparse.Namespace) -> Recipe:
    """The workload with one setting."""
    large = (*LARGE, f"data.global_batch={SAMPLES_A_RANK * num_ranks}")
    workload = (*COMMON, *(SMALL if options.device == "cpu" else large), *options.keys)
    blocks = setting.transport.partition(":")[2]
    keys = (*workload, *setting.keys(), f"run.steps={options.steps}")
    return Recipe(keys, int(blocks) if blocks else None)


def read_run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The losses of a run and where the time went after the warm-up."""
    steps = read_metrics(folder / "metrics.jsonl").steps
    if len(steps) != options.steps:
        raise SystemExit(f"FAILED: {folder.name}: {len(steps)} steps")
    warm = [event for event in steps if (step_of(event) or 0) >= options.warmup]
    account = account_of(warm)
    if account is None:
        raise SystemExit(f"FAILED: {folder.name}: steps without a breakdown")
    tokens = [float(str(event["tokens_per_s"])) for event in warm if event.get("tokens_per_s")]
    return {
        "step_ms": account.step_ms,
        **{cause: account.shares[cause] for cause in CAUSES},
        "bubble": account.bubble,
        "exposed_ms": account.shares["comm"] * account.step_ms,
        "tokens_per_s": statistics.fmean(tokens) if tokens else 0.0,
        "losses": losses_of(steps),
        "seconds": float((folder / "trained").read_text()),
    }


def measure(num_ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All settings round by round, as far as the time goes; what a file already holds is not run again."""
    known = load(options.save, num_ranks)
    settings = wanted_settings(options)
    wanted = [
        (one, turn) for turn in range(options.rounds) for one in settings if (one.name, turn) not in known
    ]
    recipes = [recipe_of(setting, num_ranks, options) for setting, _ in wanted]
    ranks = ranks_on(options.device, num_ranks, time_sliced=options.time_sliced)

    def keep(number: int, found: Path | str) -> dict[str, Any]:
        setting, turn = wanted[number]
        row = {"problem": found} if isinstance(found, str) else read_run(found, options)
        row = {"ranks": num_ranks, "setting": setting.name, "round": turn, **row}
        known[setting.name, turn] = row
        if options.save:
            with open(options.save, "a") as file:
                file.write(json.dumps(row) + "\n")
        if options.keep and not isinstance(found, str) and turn == 0:
            place = Path(options.keep) / f"{num_ranks}-{setting.name}".replace(" ", "-").replace(":", "")
            shutil.copytree(found, place, dirs_exist_ok=True)
        return row

    with ranks as environment, tempfile.TemporaryDirectory() as folder, told(Path(folder), wanted, keep):
        results = train_in_turn(
            recipes,
            num_ranks=num_ranks,
            environment=environment,
            folder=Path(folder),
            seconds=options.budget_s,
        )
        for number, problem in sorted(results.items()):
            if isinstance(problem, str):
                keep(number, problem)
    return list(known.values())


@contextmanager
def told(
    folder: Path, wanted: Sequence[tuple[Setting, int]], keep: Callable[[int, Path], dict[str, Any]]
) -> Iterator[None]:
    """Name every run when it begins, print and keep it when it is through: a machine may be taken away meanwhile."""
    over, errors = threading.Event(), []

    def look(left: set[int], named: set[int]) -> None:
        for number in sorted(left):
            setting, turn = wanted[number]
            if number not in named and began(folder / str(number)):
                named.add(number)
                print(f"round {turn + 1}  {setting.name:<67} begins", flush=True)
            if (folder / str(number) / "trained").exists():
                left.remove(number)
                row = keep(number, folder / str(number))
                shares = "  ".join(f"{name} {row[name]:.1%}" for name in ("bubble", *CAUSES))
                print(
                    f"round {turn + 1}  {setting.name:<67} {row['step_ms']:7.1f} ms  {shares}  "
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )

    def watch() -> None:
        left: set[int] = set(range(len(wanted)))
        named: set[int] = set()
        try:
            while not over.wait(LOOK_S):
                look(left, named)
            look(left, named)
        except BaseException as error:
            errors.append(error)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    if errors:
        raise errors[0]


def load(path: str | None, num_ranks: int) -> dict[tuple[str, int], dict[str, Any]]:
    """What an earlier call has measured."""
    if not path or not Path(path).exists():
        return {}
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {(row["setting"], row["round"]): row for row in rows if row["ranks"] == num_ranks}


def summarise(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the rounds, and the reduction against the first setting."""
    table = []
    for setting in wanted_settings(options):
        mine = [row for row in rows if row["setting"] == setting.name and "losses" in row]
        if mine:
            names = ("step_ms", "bubble", *CAUSES, "exposed_ms", "tokens_per_s")
            medians = {name: statistics.median(row[name] for row in mine) for name in names}
            steps = [row["step_ms"] for row in mine]
            spread = {"least_ms": min(steps), "most_ms": max(steps)}
            table.append({"setting": setting.name, "rounds": len(mine), **medians, **spread})
    for row in table:
        # As a share of the step, and in milliseconds: a shorter step makes the same wait a larger share.
        row["reduction"] = 1 - row["bubble"] / table[0]["bubble"]
        row["reduction_ms"] = 1 - row["bubble"] * row["step_ms"] / (table[0]["bubble"] * table[0]["step_ms"])
    return table


def print_table(table: Sequence[dict[str, Any]], num_ranks: int, worst: float) -> None:
    agree = f"the losses of all runs agree to {worst:.1e} in the first {COMPARED} steps"
    print(f"\n{num_ranks} ranks; {agree}; medians of the rounds.\n")
    names = (
        "step ms",
        "bubble",
        *CAUSES,
        "exposed ms",
        "reduction",
        "in ms",
        "tokens/s",
        "rounds",
    )
    width = 2 + max(len(row["setting"]) for row in table)
    print(" " * width + "".join(f"{name:>11}" for name in names) + "   step, from to")
    for row in table:
        cells = [f"{row['step_ms']:11.1f}", *(f"{row[name]:11.1%}" for name in ("bubble", *CAUSES))]
        cells += [f"{row['exposed_ms']:11.2f}", f"{row['reduction']:11.1%}", f"{row['reduction_ms']:11.1%}"]
        spread = f"{row['rounds']:11}   {row['least_ms']:.1f} to {row['most_ms']:.1f}"
        print(f"{row['setting']:<{width}}" + "".join(cells) + f"{row['tokens_per_s']:11,.0f}" + spread)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transports", help="comma-separated; the first is 'before'")
    parser.add_argument("--named", action="store_true", help="only the rows that tell the whole story")
    parser.add_argument("--brief", action="store_true", help="of these only nothing, balance and everything")
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="of these rows, beside the first, only those named so: a,b",
    )
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--warmup", type=int, default=57, help="steps left out at the start of every run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no run that would end later")
    parser.add_argument("--save", help="file that keeps every run, and from which the next call goes on")
    parser.add_argument(
        "--keep", help="folder for the run folders of the first round: metrics, spans, report"
    )
    parser.add_argument("--time-sliced", action="store_true", help="run even where MPS is missing")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the workload")
    options = parser.parse_args()
    default = (
        "copy_kernel:16,collective,copy_engine,host_staged"
        if options.device == "cuda"
        else "collective,host_staged,auto"
    )
    if options.named or options.brief:
        default = (
            "copy_kernel:16,copy_engine,host_staged" if options.device == "cuda" else "collective,host_staged"
        )
    options.transports = (options.transports or default).split(",")
    names = [one.name for one in named_settings(options.transports)]
    if options.only and not (options.named or options.brief):
        parser.error("--only picks rows of --named or --brief")
    if unknown := [each for each in options.only.split(",") if not any(each in name for name in names)]:
        parser.error(f"--only: no row is named {unknown[0]!r}, they are: {'; '.join(names)}")
    rows = measure(options.ranks, options)
    problems = {row["setting"]: row["problem"] for row in rows if "problem" in row}
    if all("problem" in row for row in rows):
        raise SystemExit(f"FAILED: {problems}")
    curves = [row["losses"][:COMPARED] for row in rows if "losses" in row]
    worst = check_one_curve(curves, tolerance=LOSS_TOLERANCE[options.device])
    table = summarise(rows, options)
    print_table(table, options.ranks, worst)
    done = {row["setting"] for row in rows}
    missing = [setting.name for setting in wanted_settings(options) if setting.name not in done]
    for name, problem in problems.items():
        print(f"failed: {name}: {problem}")
    for name in missing:
        print(f"no time for: {name}")
    facts = {
        "ranks": options.ranks,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
        "loss_difference": worst,
    }
    print(
        json.dumps({"claim": "virtual_gpus", "rows": table, "failed": problems, "missing": missing, **facts})
    )


if __name__ == "__main__":
    main()
