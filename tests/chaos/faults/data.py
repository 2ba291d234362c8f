"""Data that is damaged, missing, or other data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.chaos.fault import fault
from tests.chaos.faults.checkpoints import flip, killed_run, truncate
from tests.chaos.trial import Trial
from tests.chaos.workload import make_data


def must_notice(trial: Trial, saved: Path, *, says: str = "damaged|missing|not a FreeScale data set") -> None:
    """The run says which file, or was not touched by it; with the data mended it reaches the curve."""
    run = trial.train()
    trial.strike()
    if not trial.must_end_or_survive(run, says=says):
        mended(trial, saved)


def mended(trial: Trial, saved: Path) -> None:
    """Put the data back and train."""
    shutil.rmtree(trial.data, ignore_errors=True)
    saved.rename(trial.data)
    trial.must_resume()


def copied(trial: Trial) -> Path:
    """A copy of the data, for later."""
    return Path(shutil.copytree(trial.data, trial.folder / "data.saved"))


def a_file(trial: Trial) -> Path:
    """A file of the data set."""
    return trial.rng.choice(sorted(trial.data.iterdir()))


@fault()
def data_truncated(trial: Trial) -> None:
    """A file of the data set is cut off."""
    saved = copied(trial)
    truncate(trial, a_file(trial))
    must_notice(trial, saved)


@fault()
def data_flipped(trial: Trial) -> None:
    """A bit of the data set is flipped."""
    saved = copied(trial)
    flip(trial, a_file(trial))
    must_notice(trial, saved)


@fault()
def data_removed(trial: Trial) -> None:
    """A file of the data set is gone."""
    saved = copied(trial)
    a_file(trial).unlink()
    must_notice(trial, saved)


@fault()
def data_removed_in_a_step(trial: Trial) -> None:
    """The data set is removed while it is read: what was read already is enough, or the run says what is missing."""
    saved = copied(trial)
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    shutil.rmtree(trial.data)
    if not trial.must_end_or_survive(run, says="damaged|missing|no such file"):
        mended(trial, saved)


@fault()
def manifest_changed(trial: Trial) -> None:
    """The manifest says something else than the files."""
    saved = copied(trial)
    path = trial.data / "dataset.json"
    manifest = json.loads(path.read_text())
    shard = trial.rng.choice(manifest["shards"])
    change = trial.rng.choice(("users", "groups", "bytes", "version", "features"))
    if change == "users":
        manifest["num_users"] += 1
    elif change == "groups":
        shard["row_groups"][0] += 1
    elif change == "bytes":
        shard["bytes"] -= 1
    elif change == "version":
        manifest["version"] += 1
    else:
        manifest["features"] = ["item", "price"]
    path.write_text(json.dumps(manifest))
    must_notice(trial, saved, says="dataset.json|data set|damaged")


@fault(quick=True)
def data_replaced(trial: Trial) -> None:
    """Other data of the same size, or users in another order, lie there when a run is resumed: refused by name."""
    saved = copied(trial)
    killed_run(trial)
    if trial.rng.random() < 0.5:
        path = trial.data / "dataset.json"
        manifest = json.loads(path.read_text())
        manifest["shards"].reverse()
        path.write_text(json.dumps(manifest))
    else:
        shutil.rmtree(trial.data)
        make_data(trial.data, seed=trial.rng.randint(1, 1000))
    trial.strike()
    run = trial.train()
    trial.must_end(run, says="data")
    mended(trial, saved)


@fault(isolated=True)
def other_data_on_one_rank(trial: Trial) -> None:
    """One rank reads other data of the same size from its own folder."""
    other = trial.folder / "other"
    other.mkdir()
    make_data(other / "data", seed=trial.rng.randint(1, 1000))
    os.symlink(trial.run, other / "run")
    trial.run.mkdir()
    ranks = [
        trial.train_by_hand(rank, folder=other if rank == trial.victim else None)
        for rank in range(trial.num_ranks)
    ]
    trial.strike()
    for rank in ranks:
        trial.must_end(rank, says="data")
    trial.must_resume()
