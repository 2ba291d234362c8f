"""How a run is judged: the protocol it names, the baselines beside it, the state the test line speaks of."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from freescale.data import RepeatShare
from freescale.errors import ConfigError
from freescale.recipe import build_run, load_config
from freescale.train import Progress
from freescale.train.log.sinks import JsonlSink
from freescale.train.loop import train
from freescale.train.quality.full_ranking import Rule
from freescale.train.quality.protocol import EvalProtocol
from freescale.train.state.saved import read_meta
from tests.list_source import ListSource
from tests.small_run import SMALL, make_run, these_ranks


def build(source, *overrides, folder):
    config = load_config(None, [*SMALL, *overrides, f"run.out={folder}"])
    return build_run(config, source, these_ranks(), Progress())


def repeating(share):
    """Histories of 22 events: of 19 training targets each, about this share repeats."""
    rng = np.random.default_rng(1)
    histories = []
    for _ in range(50):
        fresh = iter(rng.permutation(400) + 1)
        history = [int(next(fresh)) for _ in range(2)]
        while len(history) < 22:
            again = rng.random() < share
            history.append(history[-2] if again else int(next(fresh)))
        histories.append(history)
    return ListSource(histories)


@pytest.mark.parametrize(
    ("share", "asked", "filters"),
    [
        (0.0, "auto", True),
        (0.02, "auto", True),
        (0.2, "auto", False),
        (0.2, "true", True),
        (0.0, "false", False),
    ],
)
def test_seen_items_are_filtered_unless_people_repeat_them(tmp_path, share, asked, filters):
    run = build(repeating(share), f"eval.filter_seen={asked}", folder=tmp_path)
    protocol = run.evaluation.protocol
    assert protocol.rule.filter_seen is filters
    assert protocol.repeats.share == pytest.approx(share, abs=0.02)
    assert protocol.facts()["repeat_share"] == protocol.repeats.share
    assert ("seen filtered" if filters else "seen kept") in protocol.words("test")
    assert f"eval.filter_seen={asked}; " in protocol.seen_words(asked)
    assert bool(run.evaluation.repeat) is not filters
    assert any("counts such targets as misses" in text for text in run.evaluation.notices) is (
        share > 0.1 and filters
    )


def test_events_checkpoints_and_summary_say_how_it_was_judged(tmp_path):
    run, recorder = make_run(("run.steps=4", "run.eval_every=2", "eval.cutoffs=5,20"), tmp_path)
    summary = train(run)
    valid, _, test = recorder.of("eval")
    share = run.evaluation.protocol.repeats.share
    assert 0.05 < share < 1
    for event in (valid, test):
        assert (event["filter_seen"], event["repeat_share"]) == (False, share)
        assert event["protocol"] == "full ranking, seen kept, 150 items, leave-one-out, 300 users"
        for name in ("hr@5", "hr@20", "ndcg@5", "mrr"):
            assert 0 < event[f"repeat_last_{name}"] < 1
            assert 0 < event[f"popularity_{name}"] < 1
    assert run.evaluation.best["metric"] == "ndcg@5"
    assert summary["best_metric"] == "test hr@5"
    assert summary["repeat_last"] == test["repeat_last_hr@5"]
    meta = read_meta(run.checkpoints.latest())
    assert meta["protocol"] == run.evaluation.protocol.facts()
    assert meta["protocol"]["filter_seen"] is False


def plan_validation(run, monkeypatch, values):
    """Validation gives these values of the metric that decides, whatever was learnt."""
    real, left = run.evaluation.evaluator.run, list(values)

    def planned(examples, **options):
        found = real(examples, **options)
        return {**found, run.evaluation.metric: left.pop(0)} if examples.split == "valid" else found

    run.evaluation.evaluator = replace(run.evaluation.evaluator)
    object.__setattr__(run.evaluation.evaluator, "run", planned)


def test_the_test_line_names_the_step_of_the_state_that_was_tested(tmp_path, monkeypatch):
    """Before: the last step, whichever state was looked at."""
    run, recorder = make_run(("run.steps=6", "run.eval_every=2"), tmp_path)
    plan_validation(run, monkeypatch, [0.5, 0.9, 0.1])
    summary = train(run)
    test = recorder.of("eval")[-1]
    assert (test["split"], test["step"], test["trained_steps"]) == ("test", 4, 6)
    assert summary["best_step"] == 4
    assert summary["checkpoint"].endswith("step-00000004")


def test_a_test_is_forgotten_where_the_run_goes_on(tmp_path):
    """It speaks of an early state, but it came after the last step, and comes again after the last step."""
    path = tmp_path / "metrics.jsonl"
    events = [
        {"event": "eval", "step": 4, "split": "valid"},
        {"event": "eval", "step": 4, "split": "test", "trained_steps": 10},
    ]
    for step in (6, 10):
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        JsonlSink(path, resume_step=step).close()
        assert [json.loads(line)["split"] for line in path.read_text().splitlines()] == ["valid"]


def protocol(**changes):
    values = {
        "rule": Rule(filter_seen=True),
        "num_items": 3416,
        "users": {"valid": 6040, "test": 6040},
        "repeats": RepeatShare(repeated=0, targets=10, whole=True),
        **changes,
    }
    return EvalProtocol(**values)


def test_a_protocol_names_all_that_makes_numbers_incomparable():
    assert protocol().words("valid") == "full ranking, seen filtered, 3,416 items, leave-one-out, 6,040 users"
    few = protocol(max_users=1000)
    assert few.words("valid").endswith("first 1,000 of 6,040 users")
    assert few.words("test").endswith("leave-one-out, 6,040 users")
    asked = protocol(max_users=1000, judged="requests")
    assert asked.words("valid").endswith("first 1,000 of 6,040 requests")
    assert "6,040 requests" in asked.warnings(limit=0.05)[0]
    assert "eval.max_users" in few.warnings(limit=0.05)[0]
    sampled = protocol(rule=Rule(sampled=100))
    assert sampled.words("test").startswith("sampled ranking among 100 of 3,416 items, seen filtered")
    assert "eval.protocol=full" in sampled.warnings(limit=0.05)[0]
    assert protocol().warnings(limit=0.05) == []
    assert protocol(rule=None, repeats=None).words("test") == "next event's label, leave-one-out, 6,040 users"


def test_a_best_state_that_was_judged_otherwise_is_not_held_against_later_ones(tmp_path):
    run, _ = make_run(("run.steps=2",), tmp_path)
    evaluation = run.evaluation
    state = {"best": {"metric": "ndcg@10", "value": 0.9, "step": 1}, "evaluations_since_best": 1}
    evaluation.load_state({**state, "protocol": evaluation.protocol.facts()})
    assert evaluation.best["value"] == 0.9
    assert evaluation.notices == []
    evaluation.load_state({**state, "protocol": {**evaluation.protocol.facts(), "max_users": 7}})
    assert evaluation.best == {}
    assert "max_users: 7 there, None now" in evaluation.notices[0]
    evaluation.load_state(state)
    assert "spared by the filter there" in evaluation.notices[1]
    by_another = {**state["best"], "metric": "ndcg@1", "value": 0.1}
    evaluation.load_state({**state, "best": by_another, "protocol": evaluation.protocol.facts()})
    assert evaluation.best == {}
    assert "by ndcg@1 there, ndcg@10 now" in evaluation.notices[2]


def test_what_the_first_edition_has_judged_stands_where_nobody_repeats():
    assert protocol().differences(None) == []
    assert protocol(rule=Rule(filter_seen=False)).differences(None) != []
    assert protocol(repeats=RepeatShare(repeated=1, targets=10, whole=True)).differences(None) != []


CLICKS = ListSource([[2 * (n % 2) for n in range(user, user + 9)] for user in range(20)])
"""Actions are 0 and 1."""


def test_a_threshold_that_gives_one_label_is_refused_by_its_key(tmp_path):
    """Before: all labels 0 on clicks with the threshold of ratings, and no word."""
    ranking = ("head.kind=ranking", "eval.metric=auc")
    with pytest.raises(ConfigError) as caught:
        build(CLICKS, *ranking, folder=tmp_path)
    for words in (
        "head.label_thresholds: 3.5",
        "same label, 0",
        "actions that occur: 0, 1",
        "thresholds=0.5",
    ):
        assert words in str(caught.value), words
    with pytest.raises(
        ConfigError, match=r"label_thresholds: -1 gives every training target the same label, 1"
    ):
        build(CLICKS, *ranking, "head.label_thresholds=0.5,-1", folder=tmp_path)
    run = build(CLICKS, *ranking, "head.label_thresholds=0.5", folder=tmp_path)
    assert run.evaluation.protocol.words("test").startswith("next event's label: action > 0.5 (5")
    with pytest.raises(ConfigError, match=r"head\.kind=retrieval: with one action"):
        build(ListSource([[4, 4, 4, 4, 4]]), *ranking, folder=tmp_path)


def test_too_many_random_items_are_refused(tmp_path):
    sampled = ("eval.protocol=sampled", "eval.sampled=300")
    with pytest.raises(ConfigError, match=r"eval\.sampled: too many for this catalogue"):
        make_run(sampled, tmp_path)
    run, _ = make_run(("eval.protocol=sampled", "eval.sampled=50"), tmp_path)
    assert run.evaluation.evaluator.rule == Rule(filter_seen=False, sampled=50, seed=1)
    assert "rank the target among 50 random items" in run.evaluation.notices[0]
