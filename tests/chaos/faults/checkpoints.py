"""Checkpoints that were damaged after they had been written."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.chaos.fault import fault
from tests.chaos.trial import Trial
from tests.chaos.workload import SAVED_EVERY, STEPS, checkpoints, cut_at


def killed_run(trial: Trial) -> Path:
    """The folder of a run that was killed behind its second checkpoint or later; its latest checkpoint."""
    trial.run.parent.mkdir(exist_ok=True)
    cut_at(
        trial.references[trial.num_ranks],
        trial.run,
        SAVED_EVERY * trial.rng.randint(2, STEPS // SAVED_EVERY - 1),
    )
    return checkpoints(trial.run)[-1]


def must_notice(trial: Trial, damaged: Path) -> None:
    """Either the run goes on from what is whole, or it says what is damaged, and following its advice works."""
    trial.strike(spoils=damaged.name)
    run = trial.train()
    if trial.must_end_or_survive(run, says=f"{damaged.name}.*(damaged|cannot be read)"):
        return
    advice = re.search(r"--resume ([^\s,;]+)", run.said)
    if advice is None:
        trial.problem("message", f"no way out is named: {run.said[-500:]}")
        return
    trial.must_resume("--resume", advice[1])


def a_shard(trial: Trial, folder: Path) -> Path:
    """One of its files."""
    return trial.rng.choice(sorted(folder.glob("*.safetensors")))


def flip(trial: Trial, path: Path) -> None:
    """One bit of a file is another one."""
    content = bytearray(path.read_bytes())
    content[trial.rng.randrange(len(content))] ^= 1 << trial.rng.randrange(8)
    path.write_bytes(content)


def truncate(trial: Trial, path: Path) -> None:
    """The end of a file is missing."""
    os.truncate(path, trial.rng.randrange(path.stat().st_size))


@fault(quick=True)
def shard_truncated(trial: Trial) -> None:
    """A shard of the latest checkpoint is cut off."""
    latest = killed_run(trial)
    truncate(trial, a_shard(trial, latest))
    must_notice(trial, latest)


@fault()
def shard_flipped(trial: Trial) -> None:
    """A bit of a shard is flipped."""
    latest = killed_run(trial)
    flip(trial, a_shard(trial, latest))
    must_notice(trial, latest)


@fault()
def shard_removed(trial: Trial) -> None:
    """A shard is gone."""
    latest = killed_run(trial)
    a_shard(trial, latest).unlink()
    must_notice(trial, latest)


@fault()
def meta_truncated(trial: Trial) -> None:
    """meta.json is cut off."""
    latest = killed_run(trial)
    truncate(trial, latest / "meta.json")
    must_notice(trial, latest)


@fault()
def meta_flipped(trial: Trial) -> None:
    """A bit of meta.json is flipped; where it changes nothing that is read, the run goes on."""
    latest = killed_run(trial)
    flip(trial, latest / "meta.json")
    must_notice(trial, latest)


@fault()
def checkpoint_empty(trial: Trial) -> None:
    """The folder of the latest checkpoint is empty."""
    latest = killed_run(trial)
    shutil.rmtree(latest)
    latest.mkdir()
    must_notice(trial, latest)


@fault()
def all_checkpoints_damaged(trial: Trial) -> None:
    """Every checkpoint is damaged: the advice leads back to the start."""
    latest = killed_run(trial)
    for folder in checkpoints(trial.run):
        truncate(trial, a_shard(trial, folder))
    trial.strike(spoils="")
    run = trial.train()
    trial.must_end(run, says=f"{latest.name}.*damaged")
    for _ in range(STEPS):
        advice = re.search(r"--resume ([^\s,;]+)", run.said)
        if advice is None:
            trial.problem("message", f"no way out is named: {run.said[-500:]}")
            return
        if advice[1] == "never":
            trial.must_resume("--resume", "never")
            return
        run = trial.train("--resume", advice[1])
        trial.must_end(run, says="damaged")
    trial.problem("message", "the advice never ends")


@fault()
def best_garbage(trial: Trial) -> None:
    """best.json holds something else: what it said is known from the checkpoints, too."""
    killed_run(trial)
    garbage = trial.rng.choice(
        ("", "{", "[]", '{"step": "x"}', '{"step": 999}', "\x00\x01", '{"step": null}')
    )
    (trial.run / "checkpoints" / "best.json").write_text(garbage)
    trial.strike()
    trial.must_end_or_survive(trial.train(), says="best.json")
    trial.check_folder()


@fault()
def leftover_folders(trial: Trial) -> None:
    """Half a checkpoint and half a file of a killed run lie about: the next run clears them away."""
    killed_run(trial)
    folder = trial.run / "checkpoints"
    half = folder / f"step-{STEPS:08d}.tmp"
    half.mkdir()
    (half / "shard-00001-model-00001-of-00001.safetensors").write_bytes(bytes(100))
    (folder / "best.json.new").write_text('{"st')
    trial.strike()
    trial.must_survive(trial.train())
    trial.check_folder()


@fault()
def metrics_cut(trial: Trial) -> None:
    """The last line of metrics.jsonl is half there, as after a power cut."""
    killed_run(trial)
    path = trial.run / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - trial.rng.randint(1, 100))
    lines = path.read_bytes()
    trial.strike()
    run = trial.train()
    if run.wait(60.0) != 0 or b"\n" not in lines:
        trial.problem("did not survive", run.said[-800:])
        return
    trial.must_survive(run)


@fault()
def recipe_of_run_garbage(trial: Trial) -> None:
    """RUN_DIR/config.yaml holds something else: training writes it anew."""
    killed_run(trial)
    (trial.run / "config.yaml").write_bytes(b"run: [\x00")
    trial.strike()
    trial.must_end_or_survive(trial.train(), says="config.yaml")
