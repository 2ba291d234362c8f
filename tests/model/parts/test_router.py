"""The router against its formulas; its losses against losses that are simply added; its balance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freescale.errors import ConfigError, TrainingError
from freescale.model.parts.router import Router

DIM, EXPERTS = 6, 5


def make_router(*, seed: int = 0, top_k: int = 2, **options) -> Router:
    torch.manual_seed(seed)
    router = Router(dim=DIM, num_experts=EXPERTS, top_k=top_k, **options).double()
    router.weight.data.normal_()
    return router


def tokens(count: int = 40, seed: int = 1) -> Tensor:
    return torch.randn(count, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_are_the_scores_of_the_best_experts(score: str, renormalize: bool) -> None:
    router, x = make_router(score=score, renormalize=renormalize, scale=1.5), tokens()
    routing = router(x)
    for token, row in enumerate(x):
        logits = [float(row @ weight) for weight in router.weight.detach()]
        odds = torch.tensor(logits).double()
        scores = (odds.softmax(0) if score == "softmax" else odds.sigmoid()).tolist()
        best = sorted(range(EXPERTS), key=lambda e: -scores[e])[:2]
        total = sum(scores[e] for e in best) if renormalize else 1.0
        assert routing.experts[token].tolist() == best
        assert routing.weights[token].tolist() == pytest.approx([1.5 * scores[e] / total for e in best])


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    router, x = make_router(renormalize=False), tokens()
    router.bias[3] = 10
    routing = router(x)
    assert (routing.experts == 3).any(1).all()
    scores = (x @ router.weight.T).softmax(-1)
    torch.testing.assert_close(routing.weights, scores.gather(1, routing.experts))


def test_half_precision_tokens_are_routed_in_float32() -> None:
    router = Router(dim=DIM, num_experts=EXPERTS, top_k=2)
    x = tokens().to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights, router(x.float()).weights)


def test_a_model_in_half_precision_still_counts_and_moves_in_full() -> None:
    router = Router(dim=DIM, num_experts=EXPERTS, top_k=2).to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.bias.dtype == router.share.dtype == torch.float32
    for _ in range(3):
        router(tokens(333).to(torch.bfloat16))
    assert router.take_tally()[:EXPERTS].sum() == 3 * 333 * 2


def test_losses_are_sums_over_tokens_of_what_is_written_down() -> None:
    router, x = make_router(aux_loss=0.3, z_loss=0.2), tokens()
    router.share.copy_(torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]))
    logits = x @ router.weight.T
    balance = EXPERTS * (logits.softmax(-1) * router.share).sum()
    expected = 0.3 * balance + 0.2 * logits.exp().sum(-1).log().square().sum()
    torch.testing.assert_close(router(x).loss, expected)
    parts = router(x[:7]).loss + router(x[7:]).loss
    torch.testing.assert_close(parts, expected)


def test_an_even_load_has_a_balance_loss_of_one_a_token() -> None:
    router, x = make_router(aux_loss=1.0), tokens()
    assert router(x).loss.item() == pytest.approx(len(x))


def test_without_coefficients_there_is_no_loss() -> None:
    assert make_router()(tokens()).loss is None


def test_counts_are_those_of_training() -> None:
    router, x = make_router(), tokens()
    counts = torch.bincount(router(x[:9]).experts.flatten(), minlength=EXPERTS)
    counts += torch.bincount(router(x[9:]).experts.flatten(), minlength=EXPERTS)
    router.eval()(x)
    taken = router.take_tally()
    assert taken[:EXPERTS].tolist() == counts.tolist()
    assert taken[-1] == 0
    assert router.take_tally().sum() == 0


def tally_of(*counts: float, spread: float = 0.0) -> Tensor:
    return torch.tensor([*counts, 0.0, 0.0, spread, 0.0], dtype=torch.float64)


def test_rebalancing_moves_biases_towards_even_load_and_keeps_the_share() -> None:
    router = make_router(bias_rate=0.25)
    # 10 tokens with two experts each, and logits that differ by 0.4 within a token: a full move is 0.25 * 0.4.
    router.rebalance(tally_of(12, 0, 4, 2, 2, spread=10 * 0.4))
    moves = [-1, 1, 0, 0.5, 0.5]  # by the error over the mean of 4, at most 1; less their mean 0.2
    assert router.bias.tolist() == pytest.approx([0.1 * (move - 0.2) for move in moves])
    assert router.share.tolist() == pytest.approx([0.6, 0.0, 0.2, 0.1, 0.1])


def test_a_step_without_tokens_moves_nothing() -> None:
    router = make_router(bias_rate=0.25)
    router.rebalance(tally_of(0, 0, 0, 0, 0))
    assert router.bias.tolist() == [0.0] * EXPERTS
    assert router.share.tolist() == pytest.approx([0.2] * EXPERTS)


def test_the_tally_holds_losses_spread_and_bad_tokens() -> None:
    router, x = make_router(aux_loss=0.5, z_loss=0.1), tokens()
    router(x)
    aux, z, spread, bad = router.take_tally()[EXPERTS:].tolist()
    logits = x @ router.weight.detach().T
    assert aux == pytest.approx(len(x))
    assert z == pytest.approx(logits.logsumexp(-1).square().sum().item())
    assert spread == pytest.approx(sum(row.std(correction=0).item() for row in logits))
    assert bad == 0


@pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
def test_a_router_that_loves_one_expert_is_balanced_whatever_the_size_of_its_logits(size: float) -> None:
    router, x = make_router(bias_rate=0.1), tokens(2000)
    x += 0.5 * x.abs()
    router.weight.data[2] += 1.5
    router.weight.data *= size
    loads = []
    for _ in range(120):
        router(x)
        tally = router.take_tally()
        router.rebalance(tally)
        loads.append((tally[:EXPERTS].max() / tally[:EXPERTS].mean()).item())
    assert loads[0] > 1.6
    assert max(loads[-10:]) < 1.1


def test_forced_routing_is_even_and_distinct() -> None:
    router = make_router(forced=True, top_k=3)
    experts = router(tokens(37)).experts
    assert all(len(set(row)) == 3 for row in experts.tolist())
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("top_k", [0, 6])
def test_more_choices_than_experts_are_refused(top_k: int) -> None:
    with pytest.raises(ConfigError, match=f"top_k={top_k} of 5 experts"):
        make_router(top_k=top_k)


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(ConfigError, match="softmax, sigmoid"):
        make_router(score="softplus")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    x = tokens()
    x[[3, 8], 1] = value
    with pytest.raises(TrainingError, match=r"router logits are NaN or infinite[\s\S]*2 of 40 tokens"):
        make_router()(x)
