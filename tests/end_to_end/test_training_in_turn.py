"""Ranks of benchmarks train recipes by one start: every row sent, or a transport in the place of another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.small_run import SMALL

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipes_by_one_start_have_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from one_training import Recipe, check_one_curve, losses_of, ranks_on, train_in_turn

    from freescale.trace.metrics_log import read_metrics

    # Of many items few negatives are their own targets, which only unique rows tell apart.
    keys = (
        *SMALL,
        "synthetic.items=4000",
        "synthetic.features=true",
        "run.steps=3",
        "run.eval_every=0",
        "data.workers=0",
    )
    plain = (*keys, "pipeline.prioritized=false")
    recipes = [Recipe(plain, rows="unique"), Recipe(plain, rows="every"), Recipe(plain, copy_kernel=16)]
    with ranks_on("cpu", 2) as environment:
        done = train_in_turn(recipes, num_ranks=2, environment=environment, folder=tmp_path)
    assert all(isinstance(run, Path) for run in done.values()), done
    steps: list[Any] = [read_metrics(run / "metrics.jsonl").steps for run in done.values()]
    assert check_one_curve([losses_of(each) for each in steps], tolerance=1e-3) < 1e-3
    for once, always in zip(*steps[:2], strict=True):
        assert always["exposed_bytes"] > once["exposed_bytes"]
        assert always["tables"]["item"]["rows"] > once["tables"]["item"]["rows"]
    served = [json.loads((tmp_path / f"0.rank-{rank}").read_text()) for rank in range(2)]
    for step in range(3):
        # What owners serve is what ranks have asked for.
        asked = steps[0][step]["tables"]["item"]["rows"]
        assert sum(rank["item"][step] for rank in served) == asked
    sys.modules.pop("one_training", None)


def test_all_that_ranks_said_of_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a driver's error stands in the second line of a message, a rank's traceback in the run's folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import one_training

    from freescale.errors import TrainingError

    def launch(*_: Any, **__: Any) -> None:
        (tmp_path / "0.begins").write_text("yes")
        out = tmp_path / "0"
        out.mkdir()
        note = {"rank": 2, "stage": "fetch OL rows", "step": 41, "message": "IndexError: 7"}
        traced = {**note, "traceback": "Traceback ...\n  in begin\nIndexError: 7\n"}
        (out / "failures.jsonl").write_text(f"{json.dumps(traced)}\n{json.dumps({**note, 'rank': 3})}\n")
        raise TrainingError("rank 1 failed: the CUDA driver refused a call", got="CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(one_training, "launch", launch)
    done = one_training.train_in_turn([one_training.Recipe(())], num_ranks=4, environment={}, folder=tmp_path)
    sys.modules.pop("one_training", None)
    story = done[0]
    for told in (
        "CUDA_ERROR_UNKNOWN",
        "rank 2 in stage 'fetch OL rows' at step 41: Traceback",
        "in begin",
        "rank 3",
    ):
        assert told in story
    assert f"failed: {story}" in capsys.readouterr().out
