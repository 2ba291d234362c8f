"""Trackers: the numbers of metrics.jsonl under the same names, in a run or sent afterwards; never on by themselves."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from freescale.app.run.opened_run import replay_run
from freescale.errors import CheckpointError, ConfigError, FreeScaleError
from freescale.train import MlflowSink, WandbSink, open_tracker, replay

EVENTS = [
    {"event": "start", "facts": {}},
    {"event": "step", "step": 1, "loss": 2.0, "bubble": None},
    {"event": "step", "step": 2, "loss": 1.5, "bubble": 0.25},
    {"event": "eval", "step": 2, "split": "valid", "hr@10": 0.1},
    {"event": "eval", "step": 1, "split": "test", "trained_steps": 2, "hr@10": 0.2},
    {"event": "end"},
]


class FakeWandb(ModuleType):
    """What `WandbSink` uses of the package, as its documentation has it."""

    def __init__(self):
        super().__init__("wandb")
        self.logged, self.axes, self.finished = [], {}, 0

    def init(self, **options):
        self.options = options
        return SimpleNamespace(
            log=self.logged.append,
            define_metric=lambda name, step_metric: self.axes.update({name: step_metric}),
            finish=lambda: setattr(self, "finished", self.finished + 1),
        )


class FakeMlflow(ModuleType):
    def __init__(self):
        super().__init__("mlflow")
        self.logged, self.params, self.ended = [], {}, []

    def MlflowClient(self, uri):  # noqa: N802
        return SimpleNamespace(
            get_experiment_by_name=lambda name: None,
            create_experiment=lambda name: "7",
            create_run=lambda number, run_name: SimpleNamespace(
                info=SimpleNamespace(run_id=f"{number}/{run_name}")
            ),
            log_param=lambda run, key, value: self.params.update({key: value}),
            log_metric=lambda run, key, value, step: self.logged.append((run, key, value, step)),
            set_terminated=self.ended.append,
        )


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def test_wandb_gets_every_number_on_an_axis_of_its_own(wandb):
    sink = WandbSink("books", name="one", config={"run": {"steps": 2}}, mode="offline")
    assert replay(EVENTS, sink) == 4
    assert wandb.options == {
        "project": "books",
        "name": "one",
        "config": {"run": {"steps": 2}},
        "mode": "offline",
    }
    assert wandb.axes == {f"{group}/*": f"{group}/step" for group in ("train", "eval", "test")}
    assert wandb.logged == [
        {"train/step": 1, "train/loss": 2.0},
        {"train/step": 2, "train/loss": 1.5, "train/bubble": 0.25},
        {"eval/step": 2, "eval/hr@10": 0.1},
        {"test/step": 1, "test/hr@10": 0.2},
    ]
    assert wandb.finished == 1


def test_mlflow_gets_the_same_under_names_it_allows(mlflow):
    sink = MlflowSink("books", name="one", config={"run": {"steps": 2}})
    replay(EVENTS, sink)
    assert mlflow.params == {"run.steps": "2"}
    assert mlflow.logged[0] == ("7/one", "train/loss", 2.0, 1)
    assert mlflow.logged[-1] == ("7/one", "test/hr_at_10", 0.2, 1)
    assert mlflow.ended == ["7/one"]


def test_a_resumed_run_sends_no_step_twice(wandb, mlflow):
    replay(EVENTS, WandbSink("books", resume_step=1))
    assert wandb.logged[0]["train/step"] == 2
    replay(EVENTS, MlflowSink("books", resume_step=1))
    assert mlflow.logged[0][-1] == 2


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_missing_package_names_the_extra(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(FreeScaleError) as caught:
        open_tracker(kind, "books")
    assert caught.value.next_step == f"pip install '.[{kind}]' in the clone, or pip install {kind}"
    with pytest.raises(ConfigError, match="tensorboard, wandb, mlflow"):
        open_tracker("weights", "books")


def test_a_run_is_replayed_from_its_folder(tmp_path, wandb):
    run = tmp_path / "films" / "first"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in EVENTS) + '{"event": "st'
    )
    (run / "config.yaml").write_text("run: {steps: 2}\n")
    assert replay_run(run, to="wandb") == (4, "films")
    assert wandb.options["name"] == "first"
    assert wandb.options["config"] == {"run": {"steps": 2}}
    with pytest.raises(CheckpointError, match="not a run folder"):
        replay_run(tmp_path, to="wandb")


def test_installed_is_not_switched_on(tmp_path, wandb, mlflow):
    from freescale import Trainer

    recipe = {
        "run.steps": 2,
        "run.eval_every": 0,
        "run.device": "cpu",
        "synthetic.users": 60,
        "synthetic.items": 20,
    }
    recipe |= {
        "model.dim": 4,
        "model.layers": 1,
        "data.max_length": 8,
        "data.global_batch": 8,
        "run.log_every": 1,
    }
    Trainer(recipe={**recipe, "run.out": str(tmp_path / "off")}).fit(quiet=True)
    assert not wandb.logged
    assert not mlflow.logged
    on = {"run.wandb": "books", "run.mlflow": "books"}
    Trainer(recipe={**recipe, **on, "run.out": str(tmp_path / "on")}).fit(quiet=True)
    assert [line["train/step"] for line in wandb.logged] == [1, 2]
    assert wandb.options["name"] == "on"
    assert mlflow.ended == ["7/on"]
