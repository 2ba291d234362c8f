"""The promise over a log that grows: the same rows and losses a step, however much of it is there by then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.app.run.opened_run import evaluate_run, export_run
from freescale.app.serving.publishing import publish_run
from freescale.errors import ConfigError, DataError, Preempted
from freescale.exports import load_version
from freescale.exports.opened_export import load_export
from freescale.recipe import load_config
from freescale.train import saved_in
from freescale.train.loop import train
from tests.effort import slow
from tests.grown_log import DAY, ON_A_LOG, grow
from tests.killed import dies
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, full_tensors, make_run

DAYS = 4


class Grower:
    """A sink that appends a day whenever the run waits for one, and tells it to stop when there are no more."""

    def __init__(self, folder: Path, run: Any, first: int, last: int) -> None:
        self._folder, self._run, self._days = folder, run, list(range(first, last))

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] != "notice" or "waiting for the next one" not in event["text"]:
            return
        if self._days:
            day = self._days.pop(0)
            grow(self._folder, day, day + 1)
        else:
            self._run.stop.requested = True

    def close(self) -> None:
        pass


def learn(
    rank: int, overrides: tuple[str, ...], folder: str, out: str, resume_from: Path | None, grown: int
) -> dict[str, Any]:
    """Losses by step, rows by step, evaluations and tensors of a run over the log in a folder."""
    run, recorder = make_run((*ON_A_LOG, f"data.path={folder}/log", *overrides), out)
    assert run.log is not None
    if grown and rank == 0:
        run.progress.add(Grower(Path(folder), run, grown, DAYS))
    if "run.follow=true" in overrides:
        with pytest.raises(Preempted):
            train(run, resume_from=resume_from)
    else:
        train(run, resume_from=resume_from)
    losses = {event["step"]: event["loss"] for event in recorder.of("step")}
    return {
        "losses": losses,
        "evals": {event["window"]: event for event in recorder.of("eval")},
        "windows": recorder.of("window"),
        "total": [event["total_steps"] for event in recorder.of("grown")][-1:],
        "tensors": full_tensors(run),
        "rows": {step: run.log.batches.batch(step - 1).tolist() for step in losses},
    }


def on_ranks(
    num_ranks: int,
    overrides: tuple[str, ...],
    folder: Path,
    out: Path,
    resume_from: Path | None = None,
    grown: int = 0,
) -> dict[str, Any]:
    if num_ranks == 1:
        return learn(0, overrides, str(folder), str(out), resume_from, grown)
    result: dict[str, Any] = run_on_ranks(
        learn, num_ranks, overrides, str(folder), str(out), resume_from, grown, timeout=110
    )[0]
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the whole log, and what one rank learns from it."""
    folder = tmp_path_factory.mktemp("whole")
    grow(folder, 0, DAYS)
    return folder, on_ranks(1, (), folder, folder / "run")


def _check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for step, loss in found["losses"].items():
        assert found["rows"][step] == wanted["rows"][step]
        assert loss == pytest.approx(wanted["losses"][step], rel=1e-9)
    for window, event in found["evals"].items():
        for name in ("hr@5", "ndcg@10", "mrr"):
            assert event[name] == pytest.approx(wanted["evals"][window][name], rel=1e-9)
    for name, value in wanted["tensors"].items():
        np.testing.assert_allclose(found["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)


def test_one_rank_learns_every_window_and_is_tested_on_it_before(
    whole: tuple[Path, dict[str, Any]],
) -> None:
    _, alone = whole
    assert sorted(alone["losses"]) == list(range(1, len(alone["losses"]) + 1))
    assert sorted(alone["evals"]) == [1, 2, 3]
    assert [event["window"] for event in alone["windows"]] == [0, 1, 2, 3]
    for event in alone["evals"].values():
        assert event["split"] == "next"
        assert 0 < event["unknown"] < event["targets"]


@pytest.mark.parametrize("num_ranks", [2, slow(3), slow(4)])
def test_ranks_do_not_change_the_curve(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, num_ranks: int
) -> None:
    folder, alone = whole
    found = on_ranks(num_ranks, (), folder, tmp_path / "run")
    _check(found, alone)
    assert sorted(found["losses"]) == sorted(alone["losses"])


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_a_log_that_grows_during_the_run_gives_the_same_curve(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, num_ranks: int
) -> None:
    _, alone = whole
    grow(tmp_path, 0, 2)
    found = on_ranks(num_ranks, ("run.follow=true",), tmp_path, tmp_path / "run", grown=2)
    _check(found, alone)
    assert sorted(found["losses"]) == sorted(alone["losses"])
    assert sorted(found["evals"]) == [1, 2, 3]
    assert found["total"] == [len(alone["losses"])]


@pytest.mark.parametrize(("first", "then"), [(2, 1), slow(1, 3), slow(4, 2)])
def test_killed_inside_a_window_it_goes_on_with_more_data_and_other_ranks(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, first: int, then: int
) -> None:
    _, alone = whole
    grow(tmp_path, 0, 2)
    half = 5  # inside of the second window
    begun = on_ranks(first, (f"run.steps={half}",), tmp_path, tmp_path / "run")
    grow(tmp_path, 2, DAYS)
    path = tmp_path / "run" / "checkpoints" / f"step-{half:08d}"
    found = on_ranks(then, (), tmp_path, tmp_path / "run", resume_from=path)
    found["losses"] |= begun["losses"]
    found["rows"] |= begun["rows"]
    _check(found, alone)
    assert sorted(found["losses"]) == sorted(alone["losses"])


@pytest.mark.slow
def test_killed_before_any_write_of_a_checkpoint_it_goes_on_to_the_same_version(tmp_path: Path) -> None:
    grow(tmp_path, 0, 2)
    keys = (f"data.path={tmp_path}/log", "run.eval_every=0")

    def version(out: Path) -> str:
        config = load_config(None, [*SMALL, *ON_A_LOG, *keys, f"run.out={out}"])
        (out / "config.yaml").write_text(config.to_yaml())
        publish_run(out, out / "chain", every_checkpoint=False)
        return load_version(out / "chain")[1].fingerprint

    def go(out: Path) -> None:
        paths = saved_in(out / "checkpoints")
        learn(0, keys[1:], str(tmp_path), str(out), paths[-1] if paths else None, 0)

    go(tmp_path / "wanted")
    wanted = version(tmp_path / "wanted")
    number, died = 0, True
    while died:
        out = tmp_path / f"run-{number}"
        died = dies(lambda out=out: go(out), out / "checkpoints", at=number)  # type: ignore[misc]
        go(out)
        assert version(out) == wanted
        shutil.rmtree(out)
        number += 1
    assert number > 8  # so often it was killed


def test_old_windows_may_be_deleted_under_a_run(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from freescale.data import drop_windows

    _, alone = whole
    grow(tmp_path, 0, DAYS)
    begun = on_ranks(1, ("run.steps=5",), tmp_path, tmp_path / "run")
    drop_windows(tmp_path / "log", before=1)
    path = tmp_path / "run" / "checkpoints" / "step-00000005"
    filtered = "true" if alone["evals"][1]["filter_seen"] else "false"
    found = on_ranks(1, (f"eval.filter_seen={filtered}",), tmp_path, tmp_path / "run", resume_from=path)
    found["losses"] |= begun["losses"]
    found["rows"] |= begun["rows"]
    _check(found, alone)


def test_ids_age_by_the_clock_of_the_data(tmp_path: Path) -> None:
    grow(tmp_path, 0, 3)
    ttl = ("embedding.eviction=ttl", f"embedding.ttl={DAY}", f"data.path={tmp_path}/log")
    run, _ = make_run((*ON_A_LOG, *ttl), tmp_path / "run")
    train(run)
    log = run.log
    assert log is not None
    ends = [log.source.entry(window).last for window in range(3)]
    assert [log.clock(log.batches.first_step(window)) for window in range(3)] == ends
    assert int(run.state.id_maps["item"].map._clock[0]) == ends[-1]  # type: ignore[attr-defined]


def test_a_checkpoint_of_another_log_is_refused(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = whole
    path = folder / "run" / "checkpoints"
    last = sorted(path.glob("step-*"))[-1]
    grow(tmp_path, 0, 2)
    with pytest.raises(DataError, match="has learnt 4 windows, and the log has 2"):
        on_ranks(1, (), tmp_path, tmp_path / "run", resume_from=last)
    shutil.rmtree(tmp_path / "log")
    grow(tmp_path, 1, DAYS)
    with pytest.raises(DataError, match="has learnt from other data"):
        on_ranks(1, (), tmp_path, tmp_path / "run", resume_from=last)


def test_a_window_that_is_not_as_it_was_is_refused_by_name(tmp_path: Path) -> None:
    log = grow(tmp_path, 0, 3)
    np.save(log / "window-000001" / "targets.npy", np.ones(3, np.int64))
    with pytest.raises(DataError, match="window-000001"):
        on_ranks(1, (), tmp_path, tmp_path / "run")
    shutil.rmtree(log / "window-000001")
    with pytest.raises(DataError, match="window-000001"):
        on_ranks(1, (), tmp_path, tmp_path / "other")


def test_what_would_make_old_steps_depend_on_new_windows_is_refused(tmp_path: Path) -> None:
    grow(tmp_path, 0, 1)
    wrong = ("embedding.id_map=direct", "embedding.rows=null", "optim.schedule=cosine", "data.max_length=7")
    wrong += ("embedding.eviction=none", "embedding.max_probe=128", "embedding.buckets=null")
    with pytest.raises(ConfigError) as caught:
        make_run((*ON_A_LOG, f"data.path={tmp_path}/log", *wrong))
    for key in ("embedding.id_map", "embedding.rows", "optim.schedule", "data.max_length"):
        assert f"- {key}: " in str(caught.value)
    with pytest.raises(ConfigError, match="are for logs"):
        make_run(("run.follow=true",))


def test_a_run_over_a_log_is_exported_and_not_evaluated_again(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, alone = whole
    shutil.copytree(folder / "run", tmp_path / "run")
    config = load_config(None, [*SMALL, *ON_A_LOG, f"data.path={folder}/log", f"run.out={tmp_path}/run"])
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    model = load_export(export_run(tmp_path / "run", tmp_path / "out"))
    identity = alone["tensors"]["ids.identity"].ravel()
    assert set(model.items.tolist()) <= set(identity.tolist())
    assert len(model.recommend(model.items[:3].tolist(), times=[1, 2, 3], k=3)) == 3
    with pytest.raises(ConfigError, match="has no test targets"):
        evaluate_run(tmp_path / "run", device="cpu")
