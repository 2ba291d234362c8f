"""Disks that are full, that nobody may write to, that are gone."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from pathlib import Path

from tests.chaos import sandbox
from tests.chaos.fault import fault
from tests.chaos.trial import Trial
from tests.chaos.workload import SAVED_EVERY, STEPS

FULL = "no space|disk space"


@fault(isolated=True)
def disk_full_in_checkpoint(trial: Trial) -> None:
    """The disk of the checkpoints is full before the run is over."""
    folder = trial.run / "checkpoints"
    folder.mkdir(parents=True)
    sandbox.small_disk(folder, kibibytes=trial.rng.randint(40, 250))
    run = trial.train()
    trial.until_ranks_start(run)
    trial.must_end(run, says=FULL, limit=60)
    sandbox.resize_disk(folder, mebibytes=64)
    trial.must_resume()


@fault(isolated=True)
def disk_full_in_run(trial: Trial) -> None:
    """The disk of the whole run folder fills up in a step: metrics, spans and checkpoints have no room."""
    trial.run.mkdir()
    sandbox.small_disk(trial.run, kibibytes=4096)
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    fill(trial.run)
    trial.must_end(run, says=FULL)
    (trial.run / "ballast").unlink()
    sandbox.resize_disk(trial.run, mebibytes=64)
    trial.must_resume()


@fault(isolated=True)
def only_disk_full(trial: Trial) -> None:
    """The run folder and TMPDIR are on one disk, and it fills up in a step: what failed must be said all the same."""
    disk = trial.folder / "disk"
    disk.mkdir()
    sandbox.small_disk(disk, kibibytes=4096)
    for folder in (trial.run, trial.temporary):
        (disk / folder.name).mkdir()
        folder.mkdir(exist_ok=True)
        sandbox.bind(disk / folder.name, folder)
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    fill(disk)
    trial.must_end(run, says=FULL)
    (disk / "ballast").unlink()
    sandbox.resize_disk(disk, mebibytes=64)
    trial.must_resume()


def fill(folder: Path, *, block: int = 4096) -> None:
    """Somebody else's file takes what is left."""
    with open(folder / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(block))


@fault(isolated=True)
def temporary_folder_full(trial: Trial) -> None:
    """TMPDIR has no room at all."""
    sandbox.small_disk(trial.temporary, kibibytes=4)
    fill(trial.temporary, block=512)
    run = trial.train()
    trial.strike()
    survived = trial.must_end_or_survive(run, says=FULL)
    (trial.temporary / "ballast").unlink()
    if not survived:
        trial.must_resume()


@fault(isolated=True)
def shared_memory_full(trial: Trial) -> None:
    """/dev/shm has no room, as in a container with its default of 64 MB."""
    sandbox.mount("tmpfs", "/dev/shm", kind="tmpfs", options="size=4k")
    run = trial.train()
    trial.strike()
    if not trial.must_end_or_survive(run, says=f"{FULL}|shared memory|/dev/shm"):
        trial.must_resume()


@fault(isolated=True)
def run_folder_read_only(trial: Trial) -> None:
    """The run folder cannot be written to from the start."""
    trial.run.mkdir()
    sandbox.make_read_only(trial.run)
    run = trial.train()
    trial.strike()
    trial.must_end(run, says="read-only")
    sandbox.make_read_only(trial.run, read_only=False)
    trial.must_resume()


@fault()
def files_may_not_grow(trial: Trial) -> None:
    """A limit on the size of files is reached in a step, as a quota would be: one rank can write nothing any more."""
    run = trial.train()
    pid = trial.until_step(run, trial.rng.randint(2, STEPS - SAVED_EVERY - 1))
    trial.strike()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    trial.must_end(run, says="file too large")
    trial.must_resume()


@fault()
def run_folder_removed(trial: Trial) -> None:
    """Somebody removes the run folder in a step: the run ends and says so; the next one starts afresh."""
    run = trial.train()
    trial.until_step(run)
    trial.strike(spoils="")
    shutil.rmtree(trial.run, ignore_errors=True)
    if run.wait(30.0) == 0:
        trial.problem("wrong curve", "the run ended 0 and its folder is gone")
    else:
        trial.must_end(run, says="gone|removed|no such file")
    shutil.rmtree(trial.run, ignore_errors=True)
    trial.must_resume()


@fault()
def few_descriptors(trial: Trial) -> None:
    """A process may open few files only."""
    most = trial.rng.randint(12, 40)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    run = trial.train(hook=lambda: limit() if "RANK" in os.environ else None)
    trial.strike()
    if not trial.must_end_or_survive(run, says="too many open files|file descriptor"):
        trial.must_resume()
