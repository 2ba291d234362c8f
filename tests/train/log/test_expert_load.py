"""The load of experts: counted, told in a fixed number of fields, handed back to the routers, refused when broken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from freescale.errors import TrainingError
from freescale.model.parts.moe import MoE, moe_layers
from freescale.train.log.expert_load import LATE, ExpertLoad, load_fields


def make_model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(MoE(dim=4, hidden=3, num_experts=5, top_k=2) for _ in range(layers)))


def plan_of(global_tokens: int, step: int = 0) -> Any:
    return SimpleNamespace(global_tokens=global_tokens, step=step)


def ready_of(global_tokens: int, step: int = 0) -> Any:
    return SimpleNamespace(plan=plan_of(global_tokens, step))


def test_fields_tell_the_worst_layer() -> None:
    even, skewed = torch.full((4,), 6.0), torch.tensor([20.0, 4.0, 0.0, 0.0])
    fields = load_fields([even, skewed])
    shares = torch.tensor([20 / 24, 4 / 24])
    assert fields["expert_max"] == pytest.approx(20 / 6)
    assert fields["expert_entropy"] == pytest.approx(
        float(-(shares * shares.log()).sum() / torch.tensor(4.0).log())
    )
    assert fields["expert_dead"] == 2
    assert load_fields([even]) == {"expert_max": 1.0, "expert_entropy": pytest.approx(1.0), "expert_dead": 0}
    assert load_fields([torch.zeros(4)])["expert_max"] == 1.0


def test_counts_of_a_step_go_to_the_routers_and_to_the_log() -> None:
    model = make_model()
    load = ExpertLoad(model)
    load.begin(ready_of(100))
    model(torch.randn(30, 4))
    taken = load.counts(0)
    assert load.counts(0).sum() == 0
    fields = load.fields(2 * taken, plan_of(100))  # as if another rank had seen the same
    assert set(fields) == {"expert_max", "expert_entropy", "expert_dead", "expert_aux", "expert_z"}
    picture = load.picture()
    assert picture is not None
    for step in range(1, LATE):
        load.begin(ready_of(100, step))
        assert not any(layer.router.bias.any() for _, layer in moe_layers(model))
    load.begin(ready_of(100, LATE))
    for name, layer in moe_layers(model):
        assert layer.global_tokens == 100
        counts = picture["tokens_per_expert"][name]
        assert sum(counts) == 2 * 30 * 2
        assert layer.router.share.tolist() == pytest.approx([count / 120 for count in counts])
        assert layer.router.bias.abs().max() > 0
    assert sum(map(sum, load.picture()["tokens_per_expert"].values())) == 0


def biases_after(steps: int, *, told_after: int, resumed_at: int | None = None) -> list[list[float]]:
    """Biases of every step; its counts are told so many steps later, all of them before a checkpoint."""
    model = make_model(1)
    load, (router,) = ExpertLoad(model), [layer.router for _, layer in moe_layers(model)]
    waiting: list[tuple[int, Any]] = []
    seen = []
    for step in range(steps):
        if step == resumed_at:
            while waiting:
                number, counts = waiting.pop(0)
                load.fields(counts, plan_of(9, number))
            kept = {name: value.clone() for name, value in load.state_dict().items()}
            load = ExpertLoad(model)
            for name, value in load.state_dict().items():
                value.copy_(kept[name])
        load.begin(ready_of(9, step))
        model(torch.randn(9, 4, generator=torch.Generator().manual_seed(step)))
        seen.append(router.bias.tolist())
        waiting.append((step, load.counts(step)))
        while len(waiting) > told_after:
            number, counts = waiting.pop(0)
            load.fields(counts, plan_of(9, number))
    return seen


def test_biases_do_not_depend_on_when_counts_come() -> None:
    """At once on a CPU, a step later on a GPU or between machines."""
    at_once = biases_after(12, told_after=0)
    assert [any(step) for step in at_once[: LATE + 1]] == [False] * LATE + [True]
    assert biases_after(12, told_after=1) == at_once
    for resumed_at in range(1, 8):
        assert biases_after(12, told_after=1, resumed_at=resumed_at) == at_once


def test_a_model_without_experts_says_nothing() -> None:
    load = ExpertLoad(nn.Linear(2, 2))
    load.begin(ready_of(3))
    assert load.state_dict() == {}
    assert len(load.counts(0)) == 0
    assert load.fields(load.counts(0), plan_of(3)) == {}
    assert load.picture() is None
    load.check(load.counts(0))


def test_tokens_that_cannot_be_routed_are_named_with_their_layer() -> None:
    """As on a GPU, where a router does not look at its logits but counts."""
    load = ExpertLoad(make_model())
    taken = load.counts(0)
    load.check(taken)
    taken[-1] = 3
    with pytest.raises(TrainingError, match=r"router logits of 1 are NaN or infinite[\s\S]*3 tokens"):
        load.check(taken)
