"""Four models from outside (examples/own_*.py): one curve on any ranks, killed and resumed, exported and asked."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from freescale import load_export
from freescale.recipe import build_run, build_source
from freescale.train import Progress, train
from tests.effort import quick_first, slow
from tests.ranks import run_on_ranks
from tests.small_run import Recorder, full_tensors, these_ranks
from tests.test_one_curve import assert_same_curve

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ["own_gru4rec", "own_two_tower", "own_transformer", "own_loss"]
SHORT = {
    "run.steps": 10,
    "run.eval_every": 5,
    "run.checkpoint_every": 5,
    "run.log_every": 1,
    "run.keep": 10,
    "run.device": "cpu",
    "synthetic.users": 200,
    "synthetic.items": 60,
    "synthetic.mean_length": 8,
    "data.max_length": 20,
    "data.global_batch": 20,
    "head.num_negatives": 8,
    "model.dtype": "float64",
}


@pytest.fixture(autouse=True)
def examples(monkeypatch, own_kinds):
    """As a folder on PYTHONPATH; what a test registers is gone after it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in NAMES:
        sys.modules.pop(name, None)


def make(name, folder, **recipe):
    """The example's own trainer, for a short run; keys of one section replace those of the example."""
    return importlib.import_module(name).trainer(folder, **{**SHORT, **recipe})


def fit_on(rank, name, folder, recipe, resume_from):
    """What `fit` builds and trains, on ranks that are there already."""
    trainer = make(name, folder, **recipe)
    recorder = Recorder()
    with trainer._objects.offered():
        source = build_source(trainer.config)
        run = build_run(trainer.config, source, these_ranks(), Progress([recorder]))
        train(run, resume_from=resume_from)
    return {
        "losses": [event["loss"] for event in recorder.of("step")],
        "evals": recorder.of("eval"),
        "tensors": full_tensors(run),
    }


def curve(name, num_ranks, *, folder=None, **recipe):
    folder = folder or tempfile.mkdtemp()
    if num_ranks == 1:
        return fit_on(0, name, folder, recipe, None)
    return run_on_ranks(fit_on, num_ranks, name, folder, recipe, None, timeout=110)[0]


def whole_and_resumed(rank, name, folder, saved):
    """With prioritized traffic from the first step, and with plain traffic from a checkpoint of one rank alone."""
    whole = fit_on(rank, name, f"{folder}/whole", {}, None)
    return whole, fit_on(rank, name, f"{folder}/resumed", {"pipeline.prioritized": False}, saved)


@pytest.mark.parametrize("name", NAMES)
def test_one_curve_on_ranks_with_and_without_prioritized_traffic_and_resumed(name, tmp_path):
    alone = curve(name, 1, folder=str(tmp_path))
    assert len(alone["losses"]) == 10
    saved = tmp_path / "run" / "checkpoints" / "step-00000005"
    whole, resumed = run_on_ranks(whole_and_resumed, 2, name, str(tmp_path), saved, timeout=110)[0]
    assert_same_curve(whole, alone)
    assert_same_curve(resumed, alone, first_step=5)


@pytest.mark.parametrize("name", [slow(name) for name in NAMES])
def test_one_curve_on_four_ranks_and_with_plain_traffic(name):
    alone = curve(name, 1)
    assert_same_curve(curve(name, 4), alone)
    assert_same_curve(curve(name, 2, **{"pipeline.prioritized": False}), alone)


@pytest.mark.parametrize(
    "name", ["own_transformer", *(slow(name) for name in NAMES if name != "own_transformer")]
)
def test_more_ranks_than_samples(name):
    # A rank without samples asks no code of the user's, and its gradients are zero.
    tiny = {"data.global_batch": 1, "run.steps": 3, "run.eval_every": 0}
    assert_same_curve(curve(name, 2, **tiny), curve(name, 1, **tiny))


class KillAt:
    """Ends the process as a machine does that is switched off."""

    def __init__(self, step):
        self.step = step

    def write(self, event):
        if event["event"] == "step" and event["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        pass


def losses_of(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def killed(name, folder, step):
    trainer = make(name, folder)
    trainer._sinks = (KillAt(step),)
    trainer.fit(quiet=True)


@pytest.mark.parametrize("name", quick_first(NAMES, "own_gru4rec", "own_two_tower", "own_loss"))
def test_checked_killed_resumed_evaluated_exported_and_asked(name, tmp_path):
    whole = make(name, tmp_path / "whole")
    assert whole.check().ok, whole.check()
    summary = whole.fit(quiet=True)
    process = multiprocessing.get_context("fork").Process(target=killed, args=(name, tmp_path / "cut", 8))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    again = make(name, tmp_path / "cut")
    again.fit(quiet=True)
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    assert again.evaluate()["metrics"] == pytest.approx(summary["test"])
    folder = again.export(tmp_path / "export")
    asked_at_once = ask(name, folder)
    assert len(asked_at_once) == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["own_code"]["on_the_one_curve"]
    code = manifest["own_code"].get("encoder") or manifest["own_code"]["head"]
    assert code["class"].startswith(name)


def ask(name, folder):
    module = importlib.import_module(name)
    given = {
        "own_gru4rec": lambda: {"encoder": module.GRU4Rec(module.DIM)},
        "own_two_tower": lambda: {"plugins": [name]},
        "own_transformer": lambda: {"encoder": module.Transformer()},
        "own_loss": lambda: {"head": module.BprMax()},
    }[name]()
    served = load_export(folder, **given)
    history = [int(item) for item in served.items[:4]]
    times = {"times": [10, 20, 30, 40]} if name == "own_loss" else {}
    return served.recommend(history, k=3, **times)


def test_every_example_is_short():
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60, name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_script_runs_alone_and_under_torchrun(name, tmp_path, python):
    import subprocess

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ways = {"alone": [], "together": torchrun if name == "own_gru4rec" else []}
    answers = {}
    for way, words in ways.items():
        ran = subprocess.run(
            [python, *words, str(EXAMPLES / f"{name}.py"), str(tmp_path / way)],
            capture_output=True,
            text=True,
            timeout=110,
            env=environment,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        answers[way] = losses_of(tmp_path / way)
        assert len(re.findall(r"\(\d+, -?\d\.\d+", ran.stdout)) == 5
    np.testing.assert_allclose(list(answers["together"].values()), list(answers["alone"].values()), rtol=1e-4)
