"""check(): what people do wrong is found and named in one sentence, and what is right passes."""

from __future__ import annotations

import re
import threading

import pytest

from freescale import Trainer
from freescale.check import check_listeners
from freescale.errors import ConfigError
from tests.check import planted

RECIPE = {
    "data.max_length": 8,
    "data.global_batch": 8,
    "model.dim": planted.DIM,
    "head.num_negatives": 3,
    "run.device": "cpu",
    "run.steps": 2,
    "run.eval_every": 0,
}


def make(tmp_path, *, encoder=None, head=None, source=None, **recipe):
    return Trainer(
        encoder=encoder or planted.Gru(),
        head=head or planted.OwnSoftmax(),
        source=source or planted.Lists(),
        recipe={**RECIPE, "run.out": str(tmp_path / "run"), **recipe},
    )


def sentences(report):
    return [str(violation) for violation in report.violations]


def test_what_is_right_passes_every_rule(tmp_path):
    report = make(tmp_path).check()
    assert report.ok, sentences(report)
    assert len(report.rules) == 14
    assert not report.skipped
    assert str(report).count("yes  ") == 14


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
def test_our_own_models_pass(tmp_path, kind):
    more = {"model.dropout": 0.3, "model.heads": 1, "model.layers": 1}
    recipe = {**RECIPE, "run.out": str(tmp_path / "run"), "model.kind": kind, **more}
    trainer = Trainer(source=planted.Lists(), recipe=recipe)
    report = trainer.check()
    assert report.ok, sentences(report)


ENCODERS = [
    (planted.BatchNormed, r"running_mean changes in a forward.*BatchNorm.*use LayerNorm"),
    (planted.StatelessBatchNorm, r"encoder\.norm mixes the samples of a batch \(BatchNorm\): use LayerNorm"),
    (planted.DividedByPadding, "change when a longer one is in its batch: padding leaks in"),
    (planted.LessTheMean, "change with the other histories of its batch"),
    (planted.NumpyNoise, r"draws from numpy\.random"),
    (planted.PythonNoise, "draws from Python's random"),
    (planted.OwnGenerator, "draws numbers that torch's seed does not reach"),
    (planted.FunctionalDropout, "follow the rank and not the sample: use freescale.Dropout"),
    (planted.TorchDropout, r"torch's dropout in encoder\.drop draws masks by rank"),
    (planted.CountsItsCalls, "keeps state outside of parameters and buffers"),
    (planted.RunningMean, r"encoder\.mean changes in a forward"),
    (planted.WritesIntoTheBatch, "changes 'item' of the batch it was given"),
    (planted.Bidirectional, "a state changes with an event that comes after it"),
    (planted.ReadsTheTarget, "reads the target it is to predict"),
    (planted.UnusedWeights, r"encoder\.later\.weight, encoder\.later\.bias gets no gradient"),
    (planted.OnlyForLongHistories, r"encoder\.long\.weight.* gets no gradient in a batch of one history"),
    (planted.NoEmptyHistories, "fails on a batch with a history without events: AssertionError: packed"),
    (planted.WrongShape, r"returned \[8, 7, 6\]: return one state a token, \[29, 6\]"),
    (planted.WrongWidth, r"item vectors of width 6 \(model\.dim\): RuntimeError"),
]
HEADS = [
    (planted.MeanLoss, "your loss is a mean over targets: return the sum"),
    (planted.MeanOverSamples, "your loss is a mean over samples: return the sum"),
    (planted.InBatchNegatives, "other samples' items serve as negatives"),
    (planted.OneLossATarget, r"your loss is a tensor \[29\]: return one number, the sum"),
    (planted.AConstantASample, "a history without events changes the loss"),
    (planted.Detached, "your loss has no gradient"),
]
SOURCES = [
    (planted.ReadsOtherwiseTwice, "reading the same rows of your source twice gives other histories"),
    (planted.DependsOnNeighbours, "depend on the order in which rows are read, or on those read with them"),
    (planted.WrongLengths, r"lengths promise \d+ events for row 0, and read\(\) gives"),
    (planted.UnknownItems, "gives items that are not among items.ids"),
    (planted.CannotTravel, "cannot be pickled"),
]


@pytest.mark.parametrize(("part", "words"), ENCODERS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_encoder_is_named(tmp_path, part, words):
    report = make(tmp_path, encoder=part()).check()
    assert len(report.violations) <= 3, sentences(report)
    assert any(re.search(words, sentence) for sentence in sentences(report)), sentences(report)


@pytest.mark.parametrize(("part", "words"), HEADS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_head_is_named(tmp_path, part, words):
    report = make(tmp_path, head=part()).check()
    assert any(re.search(words, sentence) for sentence in sentences(report)), sentences(report)


@pytest.mark.parametrize(("part", "words"), SOURCES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_source_is_named(tmp_path, part, words):
    report = make(tmp_path, source=part()).check()
    assert any(re.search(words, sentence) for sentence in sentences(report)), sentences(report)


def test_fit_stops_before_the_first_step_and_says_why(tmp_path):
    trainer = make(tmp_path, head=planted.MeanLoss())
    with pytest.raises(ConfigError, match=r"your loss is a mean over targets(.|\n)*run\.check=warn"):
        trainer.fit(quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class Yes:
    def decide(self, event):
        return True


class Changes:
    def decide(self, event):
        event["mrr"] = 1


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (Yes(), "decide returned True"),
        (Changes(), "changes the event"),
        (object(), r"a judge needs decide\(event\)"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_named(tmp_path, judge, words):
    trainer = Trainer(
        encoder=planted.Gru(),
        source=planted.Lists(),
        recipe={**RECIPE, "run.out": str(tmp_path / "run")},
        judge=judge,
        sinks=[object()],
    )
    found = sentences(trainer.check())
    assert any(re.search(words, sentence) for sentence in found), found
    assert any("a sink needs the methods write(event)" in sentence for sentence in found), found


class Holds:
    """Cannot be copied: it holds a lock."""

    def __init__(self):
        self.lock = threading.Lock()

    def decide(self, event):
        return None


@pytest.mark.parametrize("sinks", [[], [object()]])
def test_a_judge_that_cannot_be_copied_was_not_tried_and_the_report_says_so(sinks):
    report = check_listeners(Holds(), sinks)
    ((rule, reason),) = report.skipped
    assert rule == "judges decide alike and change nothing"
    assert re.fullmatch(r"Holds cannot be copied \(TypeError: .*lock.*\)", reason)
    assert len(report.rules) == len(sinks)
    assert "not tried, Holds cannot be copied" in str(report)
