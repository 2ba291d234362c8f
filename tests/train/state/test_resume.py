"""Where a run goes on: the newest good checkpoint, the same one on all ranks, and the best state with it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from freescale.errors import CheckpointError
from freescale.train.loop import train
from freescale.train.state import shared_folder, weight_check
from freescale.train.state.resume import Resumed, resume
from freescale.train.state.run_state import save
from freescale.train.state.saved import read_meta, saved_in
from tests.ranks import run_on_ranks
from tests.small_run import full_tensors, make_run
from tests.train.state.test_checkpoint import damage, names, shard_of

pytestmark = pytest.mark.timed

RECIPE = ("run.steps=6", "run.eval_every=2", "run.keep=5", "model.dtype=float64")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of six steps, with checkpoints after two, four and six."""
    run, _ = make_run(RECIPE, tmp_path / "run")
    train(run)
    assert names(tmp_path / "run" / "checkpoints") == ["best.json", *(f"step-0000000{n}" for n in (2, 4, 6))]
    return tmp_path / "run"


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def go_on(folder: Path, *overrides: str) -> Resumed:
    run, _ = make_run((*RECIPE, *overrides), folder)
    return resume(run, saved_in(folder / "checkpoints")[::-1])


def test_the_newest_is_taken(finished):
    resumed = go_on(finished)
    assert (resumed.path, resumed.step, resumed.notices) == (step(finished, 6), 6, [])


def test_without_any_a_run_starts_from_the_beginning(tmp_path):
    assert go_on(tmp_path) == Resumed(None, 0, [])


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing", "facts"])
def test_a_damaged_one_is_passed_over_said_and_kept(finished, kind):
    shard = shard_of(step(finished, 6))
    if kind == "flipped":
        damage(shard)
    elif kind == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "missing":
        shard.unlink()
    else:
        (step(finished, 6) / "meta.json").write_text("{")
    resumed = go_on(finished)
    assert (resumed.path, resumed.step) == (step(finished, 4), 4)
    (said,) = resumed.notices
    assert f"{step(finished, 6)} is damaged" in said
    assert "kept as step-00000006.bad, going on from step 4" in said
    assert not step(finished, 6).exists()
    assert (finished / "checkpoints" / "step-00000006.bad").exists()


def test_a_run_that_went_back_ends_as_if_nothing_had_happened(finished):
    whole, _ = make_run(RECIPE, finished)
    resume(whole, [step(finished, 6)])
    damage(shard_of(step(finished, 6)))
    run, _ = make_run(RECIPE, finished)
    resumed = resume(run, saved_in(finished / "checkpoints")[::-1])
    train(run, first_step=resumed.step)
    again, wanted = full_tensors(run), full_tensors(whole)
    assert all((again[name] == wanted[name]).all() for name in wanted)
    read_meta(step(finished, 6))


def test_several_may_be_passed_over_and_none_may_be_left(finished):
    for number in (6, 4):
        damage(shard_of(step(finished, number)))
    resumed = go_on(finished)
    assert resumed.step == 2
    assert len(resumed.notices) == 2
    damage(shard_of(step(finished, 2)))
    shutil.copytree(finished / "checkpoints" / "step-00000004.bad", step(finished, 4))
    with pytest.raises(CheckpointError, match="no checkpoint can be resumed from") as caught:
        go_on(finished)
    assert str(caught.value).count("is damaged") == 2
    assert "--resume never" in str(caught.value)
    assert step(finished, 2).exists()


def test_one_that_was_asked_for_by_name_is_refused(finished):
    damage(shard_of(step(finished, 6)))
    run, _ = make_run(RECIPE, finished)
    with pytest.raises(
        CheckpointError, match=f"goes on from the one before it: --resume {step(finished, 4)}"
    ):
        resume(run, [step(finished, 6)])
    assert step(finished, 6).exists()


@pytest.mark.parametrize("where", ["model", "optimizer", "table", "moment"])
def test_one_with_numbers_that_are_none_is_passed_over(finished, where):
    """As versions wrote them that did not look at the last update."""
    run, _ = make_run((*RECIPE, "run.steps=8"), finished)
    resume(run, [step(finished, 6)])
    weight = next(run.state.model.parameters())
    table = run.state.embedding.tables["item"]
    planted = {
        "model": weight.data,
        "optimizer": run.state.optimizer.state[weight]["exp_avg_sq"],
        "table": table.weight,
        "moment": next(iter(table.state.values())),
    }
    planted[where].view(-1)[-1:].fill_(float("nan"))
    save(run, 8, best=False)
    run.checkpoints.wait()
    resumed = go_on(finished, "run.steps=8")
    assert resumed.step == 6
    assert "has blown up" in resumed.notices[0]
    assert "nan on rank 0" in resumed.notices[0]
    assert (finished / "checkpoints" / "step-00000008.bad").exists()


def test_the_state_after_the_last_step_is_looked_at_before_it_is_saved(tmp_path, monkeypatch):
    looked, first_blown_up = [], weight_check.first_blown_up
    monkeypatch.setattr(weight_check, "first_blown_up", lambda run: looked.append(1) or first_blown_up(run))
    run, _ = make_run(("run.steps=3", "run.eval_every=100", "run.checkpoint_every=2"), tmp_path)
    train(run)
    assert names(tmp_path / "checkpoints") == ["best.json", "step-00000002", "step-00000003"]
    assert len(looked) == 2


# A run that starts from another one's checkpoint, in a folder of its own.


def test_a_fork_has_the_best_state_in_its_own_folder(finished, tmp_path):
    best = read_meta(step(finished, 6))["best"]
    run, _ = make_run((*RECIPE, "run.steps=7", "run.eval_every=100"), tmp_path / "fork")
    run.evaluation.best = {}
    resumed = resume(run, [step(finished, 6)])
    assert resumed.notices == []
    assert run.evaluation.best == best
    assert run.checkpoints.best() == step(tmp_path / "fork", best["step"])
    shutil.rmtree(finished)
    run.evaluation.best["value"] = 2.0  # nothing that comes is better
    summary = train(run, first_step=resumed.step)
    assert summary["best_step"] == best["step"]
    assert summary["checkpoint"] == str(step(tmp_path / "fork", best["step"])) == str(run.checkpoints.best())


def test_a_fork_whose_best_state_is_gone_says_so_and_begins_anew(finished, tmp_path):
    run, _ = make_run((*RECIPE, "run.steps=7"), finished)
    resume(run, [step(finished, 6)])
    run.evaluation.best = {"metric": "ndcg@10", "value": 0.5, "step": 2}
    save(run, 7, best=False)
    run.checkpoints.wait()
    shutil.rmtree(step(finished, 2))
    fork, _ = make_run((*RECIPE, "run.steps=7"), tmp_path / "fork")
    resumed = resume(fork, [step(finished, 7)])
    assert "best state so far (step 2, ndcg@10 0.5000) is gone" in resumed.notices[0]
    assert fork.evaluation.best == {}
    assert names(tmp_path / "fork" / "checkpoints") == []


def test_going_back_takes_the_note_of_the_best_along(finished):
    """The best of a later step is none of the run that goes on from an earlier one."""
    run, _ = make_run(RECIPE, finished)
    run.checkpoints.mark_best(6, {})
    resume(run, [step(finished, 4)])
    run.checkpoints.forget_after(4)
    assert run.checkpoints.best() == step(finished, read_meta(step(finished, 4))["best"]["step"])


# Many ranks.


def go_on_apart(rank: int, folder: str, kind: str) -> tuple[str, float]:
    """Rank 1 sees a folder of its own, as over a file system that is not shared, or one that remembers."""
    shared_folder.PATIENCE_S = 0.3
    run, _ = make_run(RECIPE, folder)
    if rank == 1:
        other = Path(folder + "-other")
        if kind != "nothing":
            shutil.copytree(Path(folder) / "checkpoints", other)
        if kind == "another":
            (other / "step-00000006" / "meta.json").write_text("{}")
        elif kind == "half":
            shard_of(other / "step-00000006").unlink()
        redirect(Path(folder) / "checkpoints", other)
    start = time.monotonic()
    try:
        path = Path(folder, "checkpoints", "step-00000006")
        resume(run, [path] if rank == 0 else [])
    except CheckpointError as error:
        return str(error), time.monotonic() - start
    return f"went on: {torch.stack([p.sum() for p in run.state.model.parameters()]).sum():.6f}", 0.0


def redirect(here: Path, there: Path) -> None:
    """What this process reads of the checkpoints in one folder, it reads in another."""

    def moved(path: Path) -> Path:
        return there / path.relative_to(here) if path.parent.parent == here else path

    read_bytes, read_text, exists = Path.read_bytes, Path.read_text, Path.exists
    Path.read_bytes = lambda self: read_bytes(moved(self))  # type: ignore[method-assign]
    Path.read_text = lambda self, *args: read_text(moved(self), *args)  # type: ignore[method-assign, misc]
    Path.exists = lambda self: exists(moved(self))  # type: ignore[method-assign, misc, assignment]


@pytest.mark.parametrize(
    ("kind", "told"),
    [("nothing", "sees none there"), ("another", "sees another one there"), ("half", "is missing")],
)
def test_a_rank_that_sees_another_checkpoint_is_named_at_once_on_all(finished, kind, told):
    said = run_on_ranks(go_on_apart, 2, str(finished), kind)
    assert "ranks do not see the same checkpoint: rank 1 on " in said[0][0]
    assert told in said[0][0]
    assert said[0][0] == said[1][0]
    assert max(seconds for _, seconds in said) < 10
    assert step(finished, 6).exists()


def go_back_together(rank: int, folder: str) -> tuple[int, list[str]]:
    run, _ = make_run((*RECIPE, "embedding.replicate_below_mb=0"), folder)
    # Only rank 0 looks for checkpoints; what the others would find does not count.
    resumed = resume(run, saved_in(Path(folder) / "checkpoints")[::-1] if rank == 0 else [])
    return resumed.step, resumed.notices


def save_together(rank: int, folder: str) -> None:
    run, _ = make_run((*RECIPE, "embedding.replicate_below_mb=0"), folder)
    train(run)


def test_damage_that_one_rank_reads_sends_all_of_them_back(tmp_path):
    run_on_ranks(save_together, 2, str(tmp_path), timeout=110)
    damage(step(tmp_path, 6) / "shard-00001.safetensors")
    told = run_on_ranks(go_back_together, 2, str(tmp_path))
    assert told[0] == told[1]
    assert told[0][0] == 4
    assert "shard-00001.safetensors has changed" in told[0][1][0]


def test_a_damaged_best_one_ends_no_finished_run(finished):
    """The run has its last state, which is tested instead; it was to start again from nothing."""
    run, recorder = make_run(RECIPE, finished)
    resumed = resume(run, [step(finished, 6)])
    run.evaluation.best = {"metric": "ndcg@10", "value": 1.0, "step": 2}
    run.checkpoints.mark_best(2, run.evaluation.best)
    damage(shard_of(step(finished, 2)))
    summary = train(run, first_step=resumed.step)
    assert summary["best_step"] == 6
    assert summary["checkpoint"] == str(step(finished, 6))
    (note,) = [event["text"] for event in recorder.of("notice") if "is damaged" in event["text"]]
    assert note.endswith("the state of the end is tested instead")
    again, _ = make_run(RECIPE, finished)
    resume(again, [step(finished, 6)])
    wanted, found = full_tensors(again), full_tensors(run)
    assert all((found[name] == wanted[name]).all() for name in wanted)


def test_where_none_came_before_a_later_one_is_named(finished):
    damage(shard_of(step(finished, 2)))
    run, _ = make_run(RECIPE, finished)
    with pytest.raises(CheckpointError, match=f"from a later one: --resume {step(finished, 6)}"):
        resume(run, [step(finished, 2)])
