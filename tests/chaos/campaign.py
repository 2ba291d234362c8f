"""Run many trials, several at a time, and count how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.chaos import sandbox
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.trial import Missed, Problem, Trial, Verdict
from tests.chaos.workload import Reference, make_data

TRIAL_LIMIT_S = 150.0
AGAIN = 1000
"""A fault that came too late is tried again, twice, under a number that is this much higher."""


@dataclass(frozen=True)
class Ground:
    """What all trials stand on.

    Args:
        folder: of everything.
        data: the data set.
        references: undisturbed runs by their number of ranks.
        isolated: whether trials get namespaces of their own.
        settings: keys every run is given besides the recipe.
    """

    folder: Path
    data: Path
    references: dict[int, Reference]
    isolated: bool
    settings: tuple[str, ...] = ()


@contextlib.contextmanager
def ground(*, most_ranks: int = 4, settings: Sequence[str] = ()) -> Iterator[Ground]:
    """The data set and the runs nobody disturbs, in a folder that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        data = folder / "data"
        make_data(data)
        made = Ground(folder, data, {}, sandbox.permitted(), tuple(settings))
        for num_ranks in range(1, most_ranks + 1):
            made.references[num_ranks] = _undisturbed(made, num_ranks)
        yield made


def _undisturbed(made: Ground, num_ranks: int) -> Reference:
    folder = made.folder / f"undisturbed-{num_ranks}"

    def story(trial: Trial) -> None:
        trial.num_ranks = num_ranks
        run = trial.train()
        code = run.wait(120.0)
        trial.verdict.to_end_s = run.ended
        if code != 0:
            trial.problem("undisturbed", f"{code}: {run.said[-1500:]}")
        trial.check_leftovers()

    started = time.monotonic()
    verdict = _wait_for(_fork(made, Fault("undisturbed", story), 0, seed=0, folder=folder))
    if verdict.problems:
        raise RuntimeError(f"the undisturbed run on {num_ranks} ranks failed: {verdict.problems}")
    return Reference.of(folder / "run", seconds=verdict.to_end_s - started)


@dataclass
class _Running:
    """A trial on its way."""

    pid: int
    pipe: int
    name: str
    folder: Path
    started: float


def run_trials(
    made: Ground,
    trials: Sequence[tuple[Fault, int]],
    *,
    seed: int,
    jobs: int = 1,
    keep: Path | None = None,
    until: float = float("inf"),
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """All of them, or as many as begin before a time; folders of bad ones are kept where asked."""
    verdicts: list[Verdict] = []
    waiting = list(reversed(trials))
    running: dict[int, tuple[_Running, Fault, int]] = {}
    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < jobs and time.monotonic() < until:
            fault, number = waiting.pop()
            folder = made.folder / f"{fault.name}-{number}"
            begun = _fork(made, fault, number, seed=seed, folder=folder)
            running[begun.pid] = (begun, fault, number)
        for pid in list(running):
            begun, fault, number = running[pid]
            verdict = _look(begun)
            if verdict is None:
                continue
            del running[pid]
            if any(p.kind == "missed" for p in verdict.problems) and number < 2 * AGAIN:
                waiting.append((fault, number + AGAIN))
            else:
                verdicts.append(verdict)
                tell(verdict)
            _put_away(begun.folder, verdict, keep)
        time.sleep(0.01)
    return verdicts


def draw(kinds: Sequence[Fault], count: int, *, seed: int) -> list[tuple[Fault, int]]:
    """This many trials, each kind as often as the others, in a seeded order."""
    trials = [(kinds[index % len(kinds)], index // len(kinds)) for index in range(count)]
    random.Random(seed).shuffle(trials)
    return trials


def usable(made: Ground, *, names: Sequence[str] = ()) -> list[Fault]:
    """The faults of these names, or all; those that need namespaces only where there are some."""
    unknown = set(names) - set(FAULTS)
    if unknown:
        raise SystemExit(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    chosen = [FAULTS[name] for name in names or FAULTS]
    return [fault for fault in chosen if made.isolated or not fault.isolated]


def _fork(made: Ground, fault: Fault, number: int, *, seed: int, folder: Path) -> _Running:
    """Start a trial in a process of its own."""
    name = f"{fault.name}/{number}"
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _trial_main(made, fault, name, seed=seed, folder=folder, send=send)
    os.close(send)
    return _Running(pid, receive, name, folder, time.monotonic())


def _trial_main(made: Ground, fault: Fault, name: str, *, seed: int, folder: Path, send: int) -> NoReturn:
    verdict = Verdict(name)
    try:
        sandbox.die_with_parent()
        sandbox.adopt_orphans()
        if made.isolated:
            sandbox.enter()
        folder.mkdir()
        started = time.monotonic()
        trial = Trial(
            name,
            seed=seed,
            folder=folder,
            data=made.data,
            references=made.references,
            isolated=made.isolated,
            settings=made.settings,
        )
        verdict = trial.verdict
        try:
            fault.story(trial)
            trial.check_leftovers()
        except Missed as missed:
            trial.problem("missed", str(missed))
        verdict.seconds = time.monotonic() - started
    except BaseException:
        verdict.problems.append(Problem("harness", traceback.format_exc()[-2000:]))
    finally:
        _end_all_below()
        os.write(send, json.dumps(verdict.as_dict()).encode())
        os._exit(0)


def _look(begun: _Running) -> Verdict | None:
    """The verdict of a trial that has ended, or that had to be ended."""
    if os.waitpid(begun.pid, os.WNOHANG)[0] == 0:
        if time.monotonic() - begun.started < TRIAL_LIMIT_S:
            return None
        for pid in [*sandbox.descendants(begun.pid), begun.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(begun.pid, 0)
        os.close(begun.pipe)
        return Verdict(begun.name, [Problem("hang", f"the trial took more than {TRIAL_LIMIT_S:.0f} s")])
    with os.fdopen(begun.pipe, "rb") as pipe:
        text = pipe.read()
    if not text:
        return Verdict(begun.name, [Problem("harness", "the trial died")])
    told = json.loads(text)
    return Verdict(**{**told, "problems": [Problem(**each) for each in told["problems"]]})


def _wait_for(begun: _Running) -> Verdict:
    while (verdict := _look(begun)) is None:
        time.sleep(0.01)
    return verdict


def _end_all_below() -> None:
    """Whatever still runs has been counted."""
    for _ in range(100):
        below = sandbox.descendants(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _put_away(folder: Path, verdict: Verdict, keep: Path | None) -> None:
    if verdict.problems and keep is not None and folder.exists():
        with contextlib.suppress(shutil.Error):  # sockets cannot be copied
            shutil.copytree(folder, keep / folder.name, dirs_exist_ok=True, symlinks=True)
        (keep / folder.name / "verdict.json").write_text(json.dumps(verdict.as_dict(), indent=1))
    shutil.rmtree(folder, ignore_errors=True)
