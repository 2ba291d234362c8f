"""One trial: what a fault can do to a run, and what must hold of the end.

A fault is a short story told with these verbs: start a run, wait for a moment, strike, say how the run must end. Every
expectation that does not hold becomes a problem; the story goes on, so that one trial shows all that is wrong.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from freescale.errors import EXIT_ERROR, EXIT_PEER
from tests.chaos import sandbox, workload
from tests.chaos.programs import REPOSITORY, Hook, Program
from tests.chaos.workload import RECIPE, STEPS, Reference

LIMIT_S = 30.0
"""A run that has not ended this long after the fault hangs."""
FAILED = frozenset({EXIT_ERROR, EXIT_PEER})
MOST_RANKS = 4
MOST_TEXT = 1500
_UNFORESEEN = ("Traceback (most recent call last)", "terminate called", "Fatal Python error")


class Missed(Exception):  # noqa: N818 (nothing is wrong)
    """The run was over before the fault struck: the trial shows nothing."""


@dataclass(frozen=True)
class Problem:
    """What did not hold: a kind of problem, and what was seen."""

    kind: str
    seen: str


@dataclass
class Verdict:
    """How a trial went.

    Args:
        trial: which one.
        problems: none if everything ended right.
        to_end_s: longest time from the fault to the end of a run that had to end.
        seconds: how long the trial took.
        outcome: how the disturbed run ended, in words.
    """

    trial: str
    problems: list[Problem] = field(default_factory=list)
    to_end_s: float = 0.0
    seconds: float = 0.0
    outcome: str = ""

    def as_dict(self) -> dict[str, object]:
        """For a pipe."""
        return asdict(self)


class Trial:
    """What a fault is given.

    Args:
        name: KIND/NUMBER; with the seed it says everything that is drawn.
        seed: of the campaign.
        folder: an empty folder.
        data: the data set, of which the trial gets its own copy.
        references: undisturbed runs by their number of ranks.
        isolated: whether this process has namespaces of its own.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        folder: Path,
        data: Path,
        references: Mapping[int, Reference],
        isolated: bool,
        settings: Sequence[str] = (),
    ) -> None:
        self.verdict = Verdict(name)
        self.rng = random.Random(f"{seed}/{name}")
        self.num_ranks = min(self.rng.choice((2, 2, 2, 3)), max(references, default=MOST_RANKS))
        self.victim = self.rng.randrange(self.num_ranks)
        self.folder, self.run = folder, folder / "run"
        self.data, self.temporary, self.logs = folder / "data", folder / "tmp", folder / "logs"
        self.references, self.isolated, self.settings = references, isolated, settings
        for made in (self.temporary, self.logs):
            made.mkdir()
        for source in data.iterdir():
            self.data.mkdir(exist_ok=True)
            (self.data / source.name).write_bytes(source.read_bytes())
        self.programs: list[Program] = []
        self._steps = mmap.mmap(-1, 16 * (MOST_RANKS + 1))  # the last pair: where ranks wait, if anywhere
        self._struck = 0.0
        self._before: dict[str, str] = {}
        self._not_of_trial: set[int] = set()

    # Start.

    def train(
        self, *options: str, nproc: int | None = None, hook: Hook | None = None, cold: bool = False
    ) -> Program:
        """`freescale train` with this many ranks, started by its own launcher."""
        ranks = ["--nproc", str(nproc or self.num_ranks)]
        return self.start("train", *RECIPE, *self.settings, *options, *ranks, hook=hook, cold=cold)

    def train_by_hand(
        self, rank: int, *options: str, hook: Hook | None = None, folder: Path | None = None, **variables: str
    ) -> Program:
        """One rank of a job that something else starts, as torchrun's variables describe it."""
        told = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            **variables,
        }
        command = ["train", *RECIPE, *self.settings, *options]
        return self.start(*command, variables=told, hook=hook, folder=folder)

    def start(
        self,
        *command: str,
        variables: Mapping[str, str] | None = None,
        hook: Hook | None = None,
        cold: bool = False,
        folder: Path | None = None,
    ) -> Program:
        """Any command of freescale."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            **(variables or {}),
        }
        program = Program(
            f"{len(self.programs)}-{command[0]}",
            ["-m", "freescale", *command],
            folder=folder or self.folder,
            logs=self.logs,
            environment=environment,
            hook=self._hook(hook),
            cold=cold,
        )
        self.programs.append(program)
        return program

    def _hook(self, hook: Hook | None) -> Hook:
        def before_main() -> None:
            rank = int(os.environ.get("RANK", -1))
            if rank >= 0:
                self._count_steps(rank)
            if hook is not None:
                hook()

        return before_main

    def _count_steps(self, rank: int) -> None:
        """In a rank: tell the trial its process, and every step it begins."""
        from freescale.train.compute import step as module

        run = module.TrainStep.run
        self._put(rank, os.getpid(), -1)

        def counted(this: object, ready: object, *rest: object) -> object:
            step = ready.plan.step + 1  # type: ignore[attr-defined]
            self._put(rank, os.getpid(), step)
            while self.rank_at(MOST_RANKS)[1] == step:
                time.sleep(0.005)
            return run(this, ready, *rest)  # type: ignore[arg-type]

        module.TrainStep.run = counted  # type: ignore[method-assign,assignment]

    def _put(self, rank: int, pid: int, step: int) -> None:
        struct.pack_into("qq", self._steps, 16 * rank, pid, step)

    # Wait for a moment.

    def rank_at(self, rank: int) -> tuple[int, int]:
        """Process of a rank, 0 before it is there, and the step it is at, -1 before the first."""
        pid, step = struct.unpack_from("qq", self._steps, 16 * rank)
        return pid, step

    def until(self, condition: Callable[[], bool], *, of: Program, seconds: float = 60.0) -> None:
        """Until something holds; the run must not end before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if of.poll() is not None:
                raise Missed(f"{of.name} ended with {of.code} first: {of.said[-300:]}")
            if time.monotonic() > deadline:
                raise Missed(f"did not come to it within {seconds:.0f} s: {of.said[-300:]}")
            time.sleep(0.0005)

    def until_step(self, run: Program, step: int | None = None, *, rank: int | None = None) -> int:
        """Until a rank is somewhere inside a step, drawn where it is not given; its process."""
        step = self.rng.randint(2, STEPS - 3) if step is None else step
        rank = self.victim if rank is None else rank
        self.until(lambda: self.rank_at(rank)[1] >= step, of=run)
        time.sleep(self.rng.random() * 0.03)
        return self.rank_at(rank)[0]

    def hold_at(self, step: int) -> None:
        """Ranks wait in this step, as on a slow machine; 0: nowhere any more."""
        self._put(MOST_RANKS, 0, step)

    def until_ranks_start(self, run: Program) -> None:
        """Until every rank's process is there."""
        self.until(lambda: all(self.rank_at(rank)[0] for rank in range(self.num_ranks)), of=run)

    def forget_ranks(self) -> None:
        """Before another run starts: its ranks are not there yet."""
        for rank in range(MOST_RANKS):
            self._put(rank, 0, -1)

    def strike(self, *, spoils: str | None = None) -> None:
        """Call it right before the fault: what is saved now must be there at the end, but for what it spoils itself."""
        held = workload.contents(self.run)
        self._before = {name: held[name] for name in held if spoils is None or spoils not in name}
        self._struck = time.monotonic()

    # Judge.

    def problem(self, kind: str, seen: str) -> None:
        """Something did not hold; ten of them say enough."""
        found = Problem(kind, seen[-MOST_TEXT:])
        if found not in self.verdict.problems and len(self.verdict.problems) < 10:
            self.verdict.problems.append(found)

    def must_end(
        self,
        program: Program,
        *,
        says: str,
        codes: Collection[int] = FAILED,
        limit: float = LIMIT_S,
        errors: int = 1,
    ) -> None:
        """It ends in time, with one of these codes and one message that says this; nothing saved is lost."""
        code = self._end_of(program, limit=limit)
        if code is None:
            return
        self.verdict.outcome = self.verdict.outcome or f"{code}: {_first_error(program.said)}"
        if code not in codes:
            self.problem(
                "exit code", f"{program.name}: {code}, not one of {sorted(codes)}: {program.said[-500:]}"
            )
        if not re.search(says, program.said, re.IGNORECASE | re.DOTALL):
            self.problem("message", f"{program.name}: no {says!r} in {program.said[-500:]!r}")
        if program.said.count("error:") != errors:
            self.problem(
                "message", f"{program.name}: {program.said.count('error:')} errors: {program.said[-800:]!r}"
            )
        self._check_nothing_unforeseen(program)
        self.check_saved()

    def must_end_with_traceback(self, program: Program, *, says: str, codes: Collection[int]) -> None:
        """The same where nobody foresaw the error: its traceback is printed, once."""
        code = self._end_of(program, limit=60.0)
        if code is None:
            return
        self.verdict.outcome = f"{code}: {_first_error(program.said)}"
        if code not in codes:
            self.problem(
                "exit code", f"{program.name}: {code}, not one of {sorted(codes)}: {program.said[-500:]}"
            )
        if not re.search(says, program.said, re.IGNORECASE | re.DOTALL):
            self.problem("message", f"{program.name}: no {says!r} in {program.said[-500:]!r}")
        if program.said.count("error:") != 1 or program.said.count(_UNFORESEEN[0]) > 1:
            self.problem("message", f"{program.name}: more than one story: {program.said!r}")
        self.check_saved()

    def must_survive(self, program: Program, *, limit: float = 60.0, bits: bool = True) -> None:
        """It goes on to the end, on the curve."""
        code = self._end_of(program, limit=limit)
        if code is None:
            return
        if code != 0:
            self.problem("did not survive", f"{program.name}: {code}: {program.said[-800:]}")
        self._check_nothing_unforeseen(program)
        self.check_saved()
        if code == 0:
            self.verdict.outcome = self.verdict.outcome or "survived"
            self.check_curve(self.num_ranks if bits else None, whole=True)

    def must_end_or_survive(self, program: Program, *, says: str) -> bool:
        """Either is right, silence or another curve is not; True if it survived."""
        code = program.wait(LIMIT_S)
        # On a busy machine, one that goes on from what is whole may still be at work then.
        if code == 0 or (code is None and "going on from" in program.out.read_text(errors="replace")):
            self.must_survive(program)
            return True
        self.must_end(program, says=says)
        return False

    def must_resume(self, *options: str, nproc: int | None = None) -> None:
        """Nothing is left behind, and the same command, once what was wrong is mended, reaches the end of the curve."""
        self.check_leftovers()
        if not self.verdict.problems:
            self.check_curve(self.num_ranks, whole=False)
        same = nproc in (None, self.num_ranks)
        again = self.train(*options, nproc=nproc)
        code = again.wait(60.0)
        if code != 0:
            self.problem("resume", f"{code}: {again.said[-800:]}")
            return
        self.check_curve(self.num_ranks if same else None, whole=True)
        self.check_folder()

    def check_saved(self) -> None:
        """Checkpoints that were there when the fault struck are there, byte for byte."""
        now = workload.contents(self.run)
        for name, digest in self._before.items():
            if now.get(name) != digest:
                self.problem("lost checkpoint", f"{name} {'has changed' if name in now else 'is gone'}")

    def check_curve(self, equal_to: int | None, *, whole: bool) -> None:
        """Losses are those of the undisturbed run; bit by bit and with its tensors where it has as many ranks."""
        reference = self.references[equal_to or 1]
        try:
            seen = workload.losses(self.run)
        except (ValueError, KeyError) as error:
            self.problem("wrong curve", f"metrics.jsonl: {error}")
            return
        wanted = reference.losses if whole else reference.losses[: len(seen)]
        if len(seen) != len(wanted):
            self.problem("wrong curve", f"{len(seen)} of {len(wanted)} steps are logged")
            return
        off = max((abs(a - b) for a, b in zip(seen, wanted)), default=0.0)
        if off > (0.0 if equal_to else 1e-9):
            self.problem("wrong curve", f"losses differ by {off:.3g}")
        elif whole and equal_to:
            last = workload.saved_tensors(self.run / "checkpoints" / workload.step_name(STEPS))
            if not same_tensors(last, reference.tensors):
                self.problem("wrong curve", "the last checkpoint holds other tensors")
            elif workload.evaluations(self.run) != reference.evaluations:
                self.problem("wrong curve", "evaluations differ")

    def ignore_present_processes(self) -> None:
        """What runs now belongs to the scenery."""
        self._not_of_trial |= set(sandbox.descendants(os.getpid()))

    def check_leftovers(self) -> None:
        """No program of this trial has left anything."""
        for found in sandbox.leftovers(self.temporary, isolated=self.isolated, but=self._not_of_trial):
            self.problem("leftover", found)

    def check_folder(self) -> None:
        """The run folder holds what an undisturbed one holds, and nothing else."""
        more = workload.file_names(self.run) - self.references[self.num_ranks].names
        # Spans are the ranks' own, costs are kept where enough steps were measured, failures were told, and a run that
        # was told to stop has saved where it stood.
        allowed = re.compile(r"spans/|cost_model\.json|failures\.jsonl|checkpoints/step-\d{8}(/|$)")
        for name in sorted(name for name in more if not allowed.match(name)):
            self.problem("leftover", f"run folder: {name}")

    def _end_of(self, program: Program, *, limit: float) -> int | None:
        since = max(self._struck, 0.0) or time.monotonic()
        code = program.wait(max(0.1, since + limit - time.monotonic()))
        if code is None:
            self.problem(
                "hang", f"{program.name} still runs {limit:.0f} s after the fault: {program.said[-500:]!r}"
            )
            self.verdict.outcome = "hang"
            _kill_all(program.pid)
        elif self._struck:
            self.verdict.to_end_s = max(self.verdict.to_end_s, program.ended - self._struck)
        return code

    def _check_nothing_unforeseen(self, program: Program) -> None:
        for text in _UNFORESEEN:
            if text in program.said:
                self.problem("traceback", f"{program.name}: {program.said[-1500:]}")
                return


def same_tensors(these: workload.Tensors, those: workload.Tensors) -> bool:
    """Same names, same bits."""
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in those)


def _first_error(said: str) -> str:
    lines = [line for line in said.splitlines() if "error:" in line]
    return (lines or said.splitlines()[-1:] or ["nothing said"])[0][:160]


def _kill_all(pid: int) -> None:
    for each in [*sandbox.descendants(pid), pid]:
        try:
            os.kill(each, 9)
        except ProcessLookupError:
            continue
    sys.stdout.flush()
