"""Metrics are what serving gives: every user of a test asked for by `recommend`, and the hits counted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from freescale import load_export
from freescale.app.run.opened_run import export_run
from freescale.exports import Publisher, read_version
from freescale.recipe import build_run, build_source, load_config
from freescale.train import Progress, train
from tests.small_run import SMALL, Recorder, these_ranks

USERS = 1000
RECIPE = (
    *SMALL,
    f"synthetic.users={USERS}",
    "model.dtype=float64",
    "model.dropout=0.2",  # neither side draws: a mask outside of a training step would be an error
    "embedding.lr=0.02",
    "run.steps=12",
    "run.eval_every=12",
    "eval.cutoffs=1,10,30",
)


def served(tmp_path, *overrides):
    """A trained run, what it says of itself, and its export; the table as float32 keeps it, so that both are exact."""
    config = load_config(None, [*RECIPE, *overrides, f"run.out={tmp_path / 'run'}"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    recorder = Recorder()
    run = build_run(config, build_source(config), these_ranks(), Progress([recorder]))
    weight = run.state.embedding.tables["item"].weight

    def rounded(step, *args, **options):
        weight.copy_(weight.float().double())
        return take(step, *args, **options)

    take = run.evaluation.validate
    run.evaluation.validate = rounded
    train(run)
    model = load_export(export_run(tmp_path / "run", tmp_path / "export"))
    return run, recorder, model


def asked_of(run):
    """(rows, histories, times, request times, targets) of all users of the test."""
    test = run.evaluation.test
    rows = np.flatnonzero(test.lengths() > 0)
    batch, histories = test.batch(rows), test.part(rows)
    last = batch.offsets[1:] - 1
    items, times = (
        [x[a : b - 1].tolist() for a, b in zip(histories.offsets, histories.offsets[1:])]
        for x in (histories.columns["item"], histories.columns["time"])
    )
    return (
        rows,
        items,
        times,
        batch.tokens["target_time"][last].tolist(),
        batch.tokens["target"][last].tolist(),
    )


def metrics_of(answers, targets, *, missed=0, cutoffs=(1, 10, 30)):
    places = [
        next((n for n, (item, _) in enumerate(answer) if item == target), math.inf)
        for answer, target in zip(answers, targets)
    ] + [math.inf] * missed
    found = {f"hr@{k}": np.mean([p < k for p in places]) for k in cutoffs}
    found |= {f"ndcg@{k}": np.mean([(p < k) / math.log2(p + 2) for p in places]) for k in cutoffs}
    return found | {"mrr": np.mean([1 / (p + 1) for p in places])}


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    """Of data in which people repeat items: the filter is off by itself."""
    return served(tmp_path_factory.mktemp("repeating"))


@pytest.mark.parametrize("filter_seen", [False, True])
def test_metrics_are_those_of_what_is_recommended_to_a_thousand_users(repeating, filter_seen):
    """Before: 0.81 from training and 0.028 from `recommend`, on data in which people repeat items."""
    run, recorder, model = repeating
    _, items, times, asked_at, targets = asked_of(run)
    assert len(items) == USERS
    tested = recorder.of("eval")[-1]
    assert tested["split"] == "test"
    assert tested["repeat_share"] > 0.05
    assert tested["filter_seen"] is model.filter_seen is False
    how = {}
    if filter_seen:
        rule = replace(run.evaluation.evaluator.rule, filter_seen=True)
        tested, how = (
            replace(run.evaluation.evaluator, rule=rule).run(run.evaluation.test),
            {"filter_seen": True},
        )
    answers = model.recommend(items, times=times, request_time=asked_at, k=150, **how)
    wanted = metrics_of(answers, targets)
    assert {name: tested[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    repeated = np.mean([target in own for target, own in zip(targets, items)])
    assert repeated > 0.1
    assert sum(len(answer) for answer in answers) == sum(150 - len(set(own)) * filter_seen for own in items)
    assert tested["mrr"] <= 1 - repeated * filter_seen


def test_a_batch_of_users_gets_the_answers_of_one_after_the_other(repeating):
    run, _, model = repeating
    _, items, times, asked_at, _ = asked_of(run)
    together = model.recommend(items, times=times, request_time=asked_at, k=5)
    for n in range(0, USERS, 97):
        alone = model.recommend(items[n], times=times[n], request_time=asked_at[n], k=5)
        assert [item for item, _ in together[n]] == [item for item, _ in alone]
        assert [score for _, score in together[n]] == pytest.approx([score for _, score in alone])
    assert torch.equal(model.vectors, model.vectors.float().double())


def test_events_of_items_without_a_row_count_as_in_evaluation(tmp_path):
    """Before: read from a shared row by the one, left out by the other."""
    rows = ("embedding.id_map=zero_collision", "embedding.rows=80")
    run, recorder, model = served(tmp_path, *rows, "synthetic.users=300", "run.steps=8", "run.eval_every=8")
    _, items, times, asked_at, targets = asked_of(run)
    assert sum(not model.names.find(own)[0].all() for own in items) > 100
    assert model.unknown([*items[0], 10**9]) == [10**9]
    tested = recorder.of("eval")[-1]
    answers = model.recommend(items, times=times, request_time=asked_at, k=len(model.items))
    wanted = metrics_of(answers, targets)
    assert {name: tested[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    assert all(item in set(model.items.tolist()) for answer in answers for item, _ in answer)
    Publisher(tmp_path / "chain").publish(read_version(tmp_path / "export"), {})
    again = load_export(tmp_path / "chain").recommend(
        items, times=times, request_time=asked_at, k=len(model.items)
    )
    assert again == answers


def test_after_a_temporal_split_serving_knows_what_was_known_then(tmp_path):
    moments = ("data.split=temporal", "data.valid_from=0.3", "data.test_from=0.6")
    run, recorder, model = served(tmp_path, *moments, "synthetic.users=300", "synthetic.items=1000")
    source = run.evaluation.test.source
    assert len(source.inner.items.ids) > len(source.items.ids) == len(model.items)
    rows, items, times, asked_at, targets = asked_of(run)
    missed = int(run.evaluation.test.missed().sum())
    tested = recorder.of("eval")[-1]
    assert missed > 5
    assert f"{len(rows) + missed} users, new items as targets: {missed}" in tested["protocol"]
    # Serving is given all that happened, new items among it.
    whole = source.inner.read(rows)
    for n, at in enumerate(asked_at):
        mine = slice(whole.offsets[n], whole.offsets[n + 1])
        before = whole.columns["time"][mine] < min(at, source.test_from)
        items[n], times[n] = (whole.columns[c][mine][before].tolist() for c in ("item", "time"))
    answers = model.recommend(items, times=times, request_time=asked_at, k=1000)
    wanted = metrics_of(answers, targets, missed=missed)
    assert {name: tested[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
