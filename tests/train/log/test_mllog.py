"""Lines of MLPerf's rules: every start has its stop, in order, and the run ends with success only at its target."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from freescale.train.log import mllog
from freescale.train.log.events import Progress
from freescale.train.log.mllog import MllogSink

RECIPE = {
    "run": {"seed": 3, "eval_every": 10, "first_eval": 20, "stop_at": 0.75},
    "data": {"global_batch": 8, "max_length": 40},
    "model": {"scale_length": 4096},
    "optim": {
        **{"accumulate": 1, "lr": 1e-6, "beta1": 0.95, "beta2": 0.999},
        **{"weight_decay": 0.0, "clip_norm": 1.0, "warmup_steps": 24_000},
    },
    "embedding": {"optimizer": "rowwise_adagrad", "lr": 1e-6},
    "eval": {"metric": "auc/listened"},
}


def lines(path):
    found = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in found)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in found]


def run(path, values, *, resume_step=0):
    sink = MllogSink(path, recipe=RECIPE, resume_step=resume_step, train_samples=800, eval_samples=50)
    with Progress([sink]) as progress:
        progress.start({})
        step = resume_step
        for value in values:
            step += 10
            progress.tick(step)
            progress.step(step, loss=0.13, step_ms=1.0, tokens_per_s=1.0)
            progress.evaluation(step, {"auc/listened": value}, split="valid")
            if value is not None and value >= 0.75:
                break
        progress.evaluation(step, {"auc/listened": 0.9}, split="test")
        progress.end({})


@pytest.mark.parametrize(("values", "status"), [((0.5, 0.76), "success"), ((0.5, 0.6), "aborted")])
def test_a_run_from_its_start_to_its_end(tmp_path, values, status, monkeypatch):
    clock = itertools.count(1_700_000_000.0, 0.25)  # every look at it takes a moment
    monkeypatch.setattr(mllog, "time", SimpleNamespace(time=lambda: next(clock)))
    path = tmp_path / "mllog.txt"
    run(path, values)
    found = lines(path)
    keys = [line["key"] for line in found]
    assert keys[:2] == ["cache_clear", "init_start"]
    assert (
        keys.index("init_stop")
        < keys.index("run_start")
        < keys.index("train_samples")
        < keys.index("block_start")
    )
    for name in ("init", "run", "block", "eval"):
        assert keys.count(f"{name}_start") == keys.count(f"{name}_stop") > 0, name
    assert keys[-1] == "run_stop"
    assert found[-1]["metadata"]["status"] == status
    values_of = {line["key"]: line["value"] for line in found}
    assert values_of["global_batch_size"] == 8
    assert values_of["opt_sparse_name"] == "RowWiseAdagrad"
    assert values_of["eval_every_data_pct"] == pytest.approx(0.1)
    assert values_of["skip_eval_epoch_pct"] == pytest.approx(0.1)
    told = [line for line in found if line["key"] == "eval_accuracy"]
    assert [line["value"] for line in told] == list(values)
    assert [line["metadata"]["samples_count"] for line in told] == [80, 160]
    times = [line["time_ms"] for line in found if line["key"] != "train_loss"]
    assert times == sorted(times)


def test_a_resumed_run_goes_on_with_the_stream(tmp_path):
    path = tmp_path / "mllog.txt"
    run(path, (0.5,))
    first = lines(path)[:-2]  # killed before its end
    path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in first))
    run(path, (0.8,), resume_step=10)
    keys = [line["key"] for line in lines(path)]
    assert keys.count("run_start") == keys.count("run_stop") == keys.count("init_start") == 1
