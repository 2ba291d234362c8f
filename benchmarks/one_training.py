"""What benchmarks of whole training runs share: many runs by one start of the ranks, one curve, only warm steps."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from freescale.comm.world.launcher import launch
from freescale.comm.world.shared_gpu.shares import virtual_gpus
from freescale.errors import FreeScaleError
from freescale.trace.metrics_log import Event, step_of
from freescale.trace.time_account import Account, account_of

RANK_FILE = str(Path(__file__).with_name("training_rank.py"))

LONG_TAILED = (
    "synthetic.mean_length=100",
    "synthetic.sigma=1.2",
    "synthetic.max_length=1000",
    "data.max_length=1000",
    "data.global_batch=24",
    "model.dim=64",
    "head.num_negatives=32",
)
"""A small model and long-tailed lengths: without balance, one rank's step can be several times another's."""


@dataclass(frozen=True)
class Recipe:
    """One run: its keys, and what of the library is another for it.

    Args:
        keys: of the recipe.
        copy_kernel: blocks of a copy kernel that takes the place of `collective`, if any.
        rows: "unique": count what owners serve; "every": the same, and every occurrence of a row travels.
    """

    keys: tuple[str, ...]
    copy_kernel: int | None = None
    rows: str | None = None


@contextmanager
def ranks_on(device: str, num_ranks: int, *, time_sliced: bool = False) -> Iterator[Mapping[str, str]]:
    """What ranks on CPU cores, or on shares of one GPU, need in their environment.

    Args:
        device: "cpu" or "cuda".
        num_ranks: of a run.
        time_sliced: go on where MPS is missing.
    """
    if device == "cpu":
        yield {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return
    with virtual_gpus(num_ranks) as shared:
        print(shared.message, file=sys.stderr)
        if not shared.partitioned and not time_sliced:
            raise SystemExit("FAILED: without MPS timings say nothing; --time-sliced runs all the same")
        yield shared.environment


def train_in_turn(
    recipes: Sequence[Recipe],
    *,
    num_ranks: int,
    environment: Mapping[str, str],
    folder: Path,
    seconds: float = 1e9,
) -> dict[int, Path | str]:
    """Train recipes one after the other; by number, the folder of each run or all that is known of what went wrong.

    Ranks are started once, and again after a failure, for what comes after it. No run begins when the time is over, and
    none after Ctrl-C.
    """
    results: dict[int, Path | str] = {}
    deadline = time.time() + seconds
    while time.time() < deadline:
        left = [number for number in range(len(recipes)) if number not in results]
        tasks = [_task(recipes[number], folder / str(number)) for number in left]
        for note in folder.glob("*.begins"):
            note.unlink()
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"deadline": deadline, "tasks": tasks, "start": time.time_ns()}))
        problem, stopped = "", False
        try:
            launch([str(plan)], num_ranks=num_ranks, environment=environment, program=(RANK_FILE,))
        except FreeScaleError as error:
            problem = str(error)
        except KeyboardInterrupt:
            stopped = True
        results |= {n: folder / str(n) for n in left if (folder / str(n) / "trained").exists()}
        if stopped or not problem:
            break
        broken = [n for n in left if n not in results and began(folder / str(n))]
        if not broken:
            raise SystemExit(f"FAILED: ranks ended before their first run: {problem}")
        failed = {n: "\n".join([problem, *last_words(folder / str(n))]) for n in broken}
        results |= failed
        for story in failed.values():  # at once: whoever ends the benchmark should still know
            print(f"failed: {story}", flush=True)
        if len(results) == len(recipes):
            break
    return results


def last_words(out: Path) -> list[str]:
    """What each rank of a run wrote down of its failure, with its traceback: the first message may not be the cause."""
    try:
        lines = (out / "failures.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    notes = [json.loads(line) for line in lines]
    return [
        f"rank {note['rank']} in stage {note['stage']!r} at step {note['step']}: "
        + (note.get("traceback") or note["message"]).rstrip()
        for note in notes
    ]


def _task(recipe: Recipe, out: Path) -> dict[str, object]:
    return {
        "out": str(out),
        "keys": [*recipe.keys, f"run.out={out}"],
        "copy_kernel": recipe.copy_kernel,
        "rows": recipe.rows,
    }


def began(out: Path) -> bool:
    """Whether the run with this folder has been started."""
    note = out.with_suffix(".begins")
    return note.exists() and note.read_text() == "yes"


def losses_of(steps: Iterable[Event]) -> list[float]:
    """The curve of a run."""
    return [float(str(event["loss"])) for event in steps]


def check_one_curve(curves: Sequence[Sequence[float]], *, tolerance: float) -> float:
    """The largest relative difference of any loss from that of the first run; refuses curves that are not one."""
    differences = (
        abs(loss / wanted - 1) for curve in curves for loss, wanted in zip(curve, curves[0], strict=True)
    )
    worst = max(differences)
    if worst > tolerance:
        raise SystemExit(f"FAILED: losses differ by {worst:.2e}; these are not the same training")
    return worst


def warm_account(steps: Iterable[Event], *, warmup: int) -> Account:
    """Where the time of a run went after its first steps."""
    account = account_of([event for event in steps if (step_of(event) or 0) >= warmup])
    assert account is not None
    return account
