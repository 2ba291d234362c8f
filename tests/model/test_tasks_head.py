"""Heads of named tasks: labels, conditions, weights, sums, and what cannot be learnt from."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model import Recommender, TasksHead, make_encoder, make_head

LINES = (
    "click = action > 0",
    "like = action >= 4 where click",
    "stars = number action where click weight 0.5",
)


def make(lines=LINES, **options):
    torch.manual_seed(0)
    head = make_head("tasks", dim=4, options={"tasks": lines, **options})
    return Recommender(encoder=make_encoder("hstu", dim=4, layers=2, max_length=9), head=head).double()


def requests_of(sizes, actions, **more):
    tokens = sum(n + k for n, k in sizes)
    label = torch.zeros(tokens)
    offsets = torch.tensor([0, *(n + k for n, k in sizes)]).cumsum(0)
    at = [int(offsets[b]) + n + c for b, (n, k) in enumerate(sizes) for c in range(k)]
    label[at] = torch.tensor(actions, dtype=torch.float32)
    return SequenceBatch(
        offsets=offsets,
        tokens={"item_index": torch.arange(tokens) % 5, "label_action": label, **more},
        samples={"row": torch.arange(len(sizes)), "request_user": torch.arange(len(sizes)) // 2},
        targets=torch.tensor([k for _, k in sizes], dtype=torch.int64),
    )


ROWS = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)


def test_labels_conditions_and_what_is_missing():
    head = make().head
    labels, weights = head.labels(requests_of([(2, 2), (0, 2)], [0.0, 3.0, 5.0, math.nan]))
    assert labels.tolist() == [[0, 0, 0], [1, 0, 3], [1, 1, 5], [0, 0, 0]]
    assert weights.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert head.loss_weights(requests_of([(1, 0)], [])).tolist() == [0, 0, 0]


def test_weights_of_candidates_that_are_no_weights_count_nothing():
    weight = torch.tensor([9.0, 2.0, math.nan, -1.0])
    _, weights = make().head.labels(requests_of([(1, 3)], [5.0, 5.0, 5.0], label_weight=weight))
    assert weights[:, 0].tolist() == [2, 0, 0]


@pytest.mark.parametrize("late", [False, True])
def test_the_loss_is_the_sum_of_every_tasks_mean(late):
    model = make(late=late)
    batch = requests_of([(2, 3), (0, 1), (3, 0)], [0.0, 3.0, 5.0, 4.0])
    layout = SequenceLayout(batch.offsets)
    states, _ = model.encode(ROWS, batch, layout)
    items = ROWS[batch.tokens["item_index"][[2, 3, 4, 5]]]
    logits = model.head.logits(states, items)
    click, like = torch.tensor([0.0, 1, 1, 1]).double(), torch.tensor([0.0, 1, 1]).double()
    wanted = F.binary_cross_entropy_with_logits(logits[:, 0], click)
    wanted = wanted + F.binary_cross_entropy_with_logits(logits[1:, 1], like)
    wanted = wanted + 0.5 * F.mse_loss(logits[1:, 2], torch.tensor([3.0, 5, 4]).double())
    torch.testing.assert_close(model(ROWS, batch, layout), wanted)
    # Of a larger global batch it is a part.
    totals = torch.tensor([8.0, 6.0, 6.0]).double().expand(3, -1)
    torch.testing.assert_close(model(ROWS, batch.with_samples(loss_weights=totals), layout), wanted / 2)


def test_a_task_that_nobody_counts_for_gives_nothing():
    model, batch = make(), requests_of([(2, 2)], [0.0, 0.0])
    loss = model(ROWS, batch)
    assert torch.isfinite(loss)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    empty = make()(ROWS, requests_of([], []))
    assert empty.item() == 0.0


def test_late_candidates_share_the_state_of_their_history_and_see_nothing_of_each_other():
    model = make(late=True)
    batch = requests_of([(3, 2), (0, 2)], [0.0, 1.0, 2.0, 3.0])
    states, _ = model.encode(ROWS, batch, SequenceLayout(batch.offsets))
    assert torch.equal(states[0], states[1])
    assert not states[2:].any()


@pytest.mark.parametrize("late", [False, True])
def test_outcomes_reach_no_logit(late):
    model = make(late=late)
    one, other = (requests_of([(3, 2), (1, 2)], actions) for actions in ([0.0] * 4, [5.0, 4.0, 3.0, 2.0]))
    first, second = (model.encode(ROWS, x, SequenceLayout(x.offsets))[0] for x in (one, other))
    assert torch.equal(first, second)


def test_metrics_leave_out_what_does_not_count_and_are_called_by_task():
    model = make()
    batch = requests_of([(2, 3), (1, 2)], [0.0, 3.0, 5.0, 4.0, math.nan])
    metrics = model.head.metrics()
    states, _ = model.encode(ROWS, batch, SequenceLayout(batch.offsets))
    metrics.update_requests(states, ROWS, batch)
    got = metrics.values()
    assert {*model.head.metric_names} <= {*got}
    assert got["mse/stars"] is not None
    assert got["gauc_request_share/click"] == pytest.approx(3 / 4)


def test_towers_of_their_own_and_what_is_refused():
    assert len(make(towers="own").head.towers) == 3
    with pytest.raises(ConfigError, match=r"head\.towers"):
        make(towers="many")
    with pytest.raises(ConfigError, match="at least 1"):
        make(candidates=0)
    with pytest.raises(ConfigError, match="needs requests"):
        make().head.labels(SequenceBatch(offsets=torch.tensor([0])))
    assert isinstance(make().head, TasksHead)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"anchors": "x", "candidates": 3}, "head.candidates: with head.anchors every request has one"),
        ({"anchor_days": 2}, "head.anchor_days: only with head.anchors"),
        (
            {"pool_events": 5, "hidden": 8},
            "head.pool_events: .*head.pools; head.hidden: .*head.towers=product",
        ),
    ],
)
def test_a_key_that_nobody_reads_is_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        make(**keys)
    make(anchors="x", candidates=1, anchor_days=2)


def test_tasks_mix_the_experts_they_share():
    model = make(towers="own", experts=3)
    head, (experts,) = model.head, model.head.towers
    x = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = experts(x)
        made = F.silu(experts.experts(x)).view(4, 3, 4)
        for task in range(3):
            share = experts.gates(x)[:, 3 * task : 3 * task + 3].softmax(-1)
            mixed = sum(share[:, [n]] * made[:, n] for n in range(3))
            torch.testing.assert_close(got[:, [task]], experts.towers[task](mixed))
    assert make_head("tasks", dim=4, options=head.export_facts()["options"]).towers[0].num_experts == 3
    with pytest.raises(ConfigError, match=r"head\.experts"):
        make(experts=2)
