"""Where a run goes on: all ranks at the same checkpoint, the newest that is whole, undamaged and finite."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freescale.comm.world import Ranks, fail_together, from_first, here
from freescale.data import sync_folder
from freescale.errors import CheckpointError, DamagedCheckpointError
from freescale.train.run import Run
from freescale.train.state.resume_story import ResumeStory, resume_story
from freescale.train.state.run_state import load_facts, load_run
from freescale.train.state.same_data import check_same_data
from freescale.train.state.saved import damaged, put_aside, read_meta
from freescale.train.state.shared_folder import appears
from freescale.train.state.weight_check import describe_blown_up, first_blown_up

Accept = Callable[[Path, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Args:
        path: the checkpoint; None: from the beginning.
        step: steps it has behind it.
        notices: what whoever started the run should know of it.
        story: how old it is, and what has changed since.
    """

    path: Path | None = None
    step: int = 0
    notices: list[str] = field(default_factory=list)
    story: ResumeStory | None = None


def resume(
    run: Run, candidates: Sequence[Path], *, accept: Accept | None = None, new_data: bool = False
) -> Resumed:
    """Bring back the first of these checkpoints that is good, on all ranks the same; none if there are none.

    Args:
        run: what it is brought back into.
        candidates: checkpoints, the one to prefer first; those of rank 0 count.
        accept: raises where a checkpoint, by its facts, is one of another run.
        new_data: whether it may have learnt from other data.

    Raises:
        CheckpointError: on every rank; no checkpoint is good, or a rank does not see what the others see.
    """
    run.checkpoints.open()
    paths = from_first(lambda: [str(path) for path in candidates], ranks=run.ranks, what="find a checkpoint")
    skipped: list[tuple[Path, DamagedCheckpointError]] = []
    for path in map(Path, paths):
        try:
            meta = _agreed_meta(path, ranks=run.ranks)
            if accept is not None:
                accept(path, meta)
            if not new_data:
                check_same_data(meta, run.state.data, path=path)
                if run.log is not None:
                    run.log.check(meta, path=path)
            _load_finite(run, path)
        except DamagedCheckpointError as error:
            skipped.append((path, error))
            continue
        step = load_facts(run, meta)
        run.checkpoints.begun_from = meta.get("begun_from") if _is_own(run, path) else str(path.resolve())
        notices = _put_aside(run, skipped, step) + _keep_best(run, path)
        return Resumed(path, step, notices, resume_story(run, path, meta))
    if len(skipped) == 1:
        raise skipped[0][1]
    if skipped:
        raise CheckpointError(
            "no checkpoint can be resumed from:\n  - " + "\n  - ".join(error.what for _, error in skipped),
            next_step="start again with --resume never, or put a copy of a checkpoint back",
        )
    return Resumed()


def _agreed_meta(path: Path, *, ranks: Ranks) -> dict[str, Any]:
    """The facts of a checkpoint as rank 0 sees them; refuses, on every rank, where another one sees others."""
    wanted = from_first(lambda: _whole_digest(path), ranks=ranks, what="agree on a checkpoint")
    failure: Exception | None = None
    meta: dict[str, Any] = {}
    try:
        if not appears(lambda: _digest(path) == wanted, folder=path.parent):
            raise CheckpointError("another one there" if _digest(path) else "none there")
        meta = read_meta(path)
    except CheckpointError as error:
        failure = CheckpointError(
            f"ranks do not see the same checkpoint: {here(ranks)} sees {error.what}",
            got=path,
            next_step="choose a run.out (or --resume folder) on a file system that all machines share",
        )
    fail_together(failure, ranks=ranks, what="agree on a checkpoint")
    return meta


def _load_finite(run: Run, path: Path) -> None:
    """Load a checkpoint; one with weights that have blown up is as good as damaged."""
    load_run(run, path)
    bad = first_blown_up(run)
    if bad is not None:
        rank, found = bad
        raise damaged(path, f"{next(iter(found))} has blown up: {describe_blown_up(rank, found)}")


def _put_aside(run: Run, skipped: Sequence[tuple[Path, DamagedCheckpointError]], step: int) -> list[str]:
    """Checkpoints of this run that were passed over get another name: their steps will be written again."""
    notices = []
    for path, error in skipped:
        kept = "left as it is"
        if _is_own(run, path):
            kept = f"kept as {path.name}.bad"
            if run.ranks.is_first:
                put_aside(path)
        notices.append(f"{error.what}; {kept}, going on from step {step}")
    run.ranks.barrier()
    return notices


def _keep_best(run: Run, path: Path) -> list[str]:
    """See that the best state so far is in this run's folder; bring it over from where it was, or forget it."""
    best = run.evaluation.best
    if not best:
        from_first(run.checkpoints.unmark_best, ranks=run.ranks, what="note the best checkpoint")
        return []
    is_here = from_first(lambda: _bring_best(run, path), ranks=run.ranks, what="note the best checkpoint")
    if is_here:
        return []
    run.evaluation.forget_best()
    return [
        f"the checkpoint of the best state so far (step {best['step']}, {best['metric']} {best['value']:.4f}) is gone: "
        "the best is the best from here on"
    ]


def _bring_best(run: Run, path: Path) -> bool:
    """Whether the best checkpoint of the run is, or now is, in its folder; rank 0 alone."""
    best, folder = run.evaluation.best, run.checkpoints.folder
    name = f"step-{int(best['step']):08d}"
    try:
        read_meta(folder / name)
    except DamagedCheckpointError:
        source = path.parent / name
        try:
            if _is_own(run, path):
                raise
            read_meta(source)
        except DamagedCheckpointError:
            run.checkpoints.unmark_best()
            return False
        _copy(source, folder / name)
    run.checkpoints.mark_best(int(best["step"]), best)
    return True


def _copy(source: Path, target: Path) -> None:
    """A checkpoint in another folder: links where the file system has them, for its files never change."""
    staged = target.with_suffix(".tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, staged / file.name)
        except OSError:
            shutil.copyfile(file, staged / file.name)
            with open(staged / file.name, "rb+") as copy:
                os.fsync(copy.fileno())
    sync_folder(staged)
    os.replace(staged, target)
    sync_folder(target.parent)


def _is_own(run: Run, path: Path) -> bool:
    return path.parent.resolve() == run.checkpoints.folder.resolve()


def _whole_digest(path: Path) -> str | None:
    read_meta(path)
    return _digest(path)


def _digest(path: Path) -> str | None:
    try:
        return hashlib.blake2b((path / "meta.json").read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None
