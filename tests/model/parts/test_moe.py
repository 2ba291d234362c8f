"""MoE against one token at a time, its injected losses, its initial weights, and HSTU with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.errors import ConfigError, FreeScaleError
from freescale.kernels import SequenceLayout
from freescale.model.encoders.hstu import HSTU
from freescale.model.parts.ffn import DenseFFN
from freescale.model.parts.moe import AllHere, MoE, make_ffn, moe_layers
from freescale.model.views.view import BatchView
from tests.effort import examples

DIM, HIDDEN, EXPERTS = 6, 10, 5


def make_moe(*, seed: int = 0, **options) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(**{"dim": DIM, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": 2, **options}).double()
    for param in moe.parameters():
        param.data.normal_(std=0.5)
    return moe


def tokens(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, dtype=torch.float64, generator=generator).requires_grad_()


def one_expert(x: Tensor, w_in: Tensor, w_out: Tensor, activation: str) -> Tensor:
    before = w_in @ x
    if activation == "swiglu":
        return w_out @ (F.silu(before[:HIDDEN]) * before[HIDDEN:])
    return w_out @ (F.silu(before) if activation == "silu" else F.relu(before) ** 2)


def written_out(moe: MoE, x: Tensor) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for row in x:
        scores = (moe.router.weight @ row).softmax(0)
        values, best = scores.topk(moe.router.top_k)
        parts = [
            w / values.sum() * one_expert(row, moe.w_in[e], moe.w_out[e], moe.activation)
            for w, e in zip(values, best)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows) if rows else x * 0


@examples(8, thorough=200)
@given(
    count=st.integers(0, 30),
    top_k=st.integers(1, EXPERTS),
    activation=st.sampled_from(["swiglu", "silu", "relu2"]),
    save=st.sampled_from(["preact", "input", "all"]),
)
def test_it_is_the_weighted_sum_of_a_tokens_experts(
    count: int, top_k: int, activation: str, save: str
) -> None:
    moe, x = make_moe(top_k=top_k, activation=activation, save=save), tokens(count)
    probe = tokens(count, seed=2).detach()
    got = moe(x)
    expected = written_out(moe, x)
    torch.testing.assert_close(got, expected)
    inputs = [x, moe.w_in, moe.w_out, moe.router.weight] if count else []
    if inputs:
        ours = torch.autograd.grad((got * probe).sum(), inputs)
        for mine, truth in zip(ours, torch.autograd.grad((expected * probe).sum(), inputs)):
            torch.testing.assert_close(mine, truth)


def test_a_shared_expert_is_added_for_every_token() -> None:
    moe, x = make_moe(shared=2), tokens(12)
    assert isinstance(moe.shared, DenseFFN)
    assert moe.shared.w_out.shape == (DIM, 2 * HIDDEN)
    torch.testing.assert_close(moe(x), written_out(moe, x) + moe.shared(x))


@pytest.mark.parametrize("global_tokens", [None, 100, torch.tensor(100.0)])
def test_injected_losses_have_the_gradients_of_added_ones_and_do_not_show(
    global_tokens: Tensor | int | None,
) -> None:
    moe, x = make_moe(aux_loss=0.3, z_loss=0.1), tokens(20)
    plain = make_moe()
    moe.router.share.copy_(torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]))
    moe.global_tokens = global_tokens
    probe = tokens(20, seed=2).detach()
    count = 20 if global_tokens is None else global_tokens
    y = moe(x)
    assert torch.equal(y, plain(x))
    got = torch.autograd.grad((y * probe).sum() / count, [x, moe.router.weight, moe.w_in])
    added = moe.router(x).loss
    expected = torch.autograd.grad(
        ((plain(x) * probe).sum()) / count, [x, plain.router.weight, plain.w_in], retain_graph=False
    )
    extra = torch.autograd.grad(added / count, [x, moe.router.weight])
    torch.testing.assert_close(got[0], expected[0] + extra[0])
    torch.testing.assert_close(got[1], expected[1] + extra[1])
    torch.testing.assert_close(got[2], expected[2])
    assert extra[1].abs().max() > 1e-6


@pytest.mark.parametrize("num_pads", [0, 1, 7])
def test_pads_behind_the_tokens_are_computed_and_change_nothing(num_pads: int) -> None:
    options = {"aux_loss": 0.3, "z_loss": 0.1, "shared": 1}
    plain, padded = make_moe(**options), make_moe(**options)
    x = tokens(20).detach()
    longer = torch.cat([x, tokens(num_pads, seed=3).detach()])
    probe = tokens(20, seed=2).detach()
    found = []
    for moe, own, real in ((plain, x, None), (padded, longer, torch.tensor([20]))):
        moe.global_tokens = torch.tensor(20.0, dtype=torch.float64)
        own = own.clone().requires_grad_()
        y = moe(own, real)
        assert len(y) == len(own)
        (y[:20] * probe).sum().backward()
        found.append((y[:20].detach(), own.grad, moe.router.take_tally()))
    assert padded.takes_pads
    (y, grad, tally), (padded_y, padded_grad, padded_tally) = found
    torch.testing.assert_close(padded_y, y)
    torch.testing.assert_close(padded_grad[:20], grad)
    assert not padded_grad[20:].any()
    torch.testing.assert_close(padded_tally, tally)
    assert padded_tally[: moe.num_experts].sum() == 20 * moe.router.top_k
    for (name, one), other in zip(plain.named_parameters(), padded.parameters(), strict=True):
        assert one.grad is not None, name
        assert one.grad.abs().max() > 0, name
        torch.testing.assert_close(other.grad, one.grad)


def test_an_evaluation_counts_nothing_and_learns_nothing() -> None:
    moe = make_moe(aux_loss=0.3).eval()
    assert moe(tokens(5)).grad_fn.name() != "_AlsoLearnBackward"
    assert moe.router.take_tally().sum() == 0


class _Part(AllHere):
    def __init__(self, first: int, count: int) -> None:
        self._block = (first, count)

    def block(self, num_experts: int) -> tuple[int, int]:
        return self._block


def test_an_expert_starts_alike_whoever_holds_it() -> None:
    def fresh(dispatch: AllHere) -> MoE:
        torch.manual_seed(3)
        return MoE(dim=DIM, hidden=HIDDEN, num_experts=EXPERTS, top_k=2, dispatch=dispatch)

    whole, part = fresh(AllHere()), fresh(_Part(2, 2))
    assert torch.equal(part.w_in, whole.w_in[2:4])
    assert torch.equal(part.w_out, whole.w_out[2:4])
    assert torch.equal(part.router.weight, whole.router.weight)
    assert torch.rand(1) == (fresh(AllHere()), torch.rand(1))[1], "drawing must not depend on what is held"
    assert len(torch.unique(whole.w_in)) == whole.w_in.numel()


@pytest.mark.parametrize("shape", [(4, DIM + 1), (2, 3, DIM), (DIM,)])
def test_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FreeScaleError, match=rf"\(tokens, {DIM}\)"):
        make_moe()(torch.zeros(shape, dtype=torch.float64))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="swiglu, silu, relu2"):
        MoE(dim=DIM, hidden=HIDDEN, num_experts=EXPERTS, top_k=2, activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="none, dense, moe"):
        make_ffn({"kind": "sparse"}, dim=DIM)


def test_autocast_gives_half_precision_and_float32_gradients() -> None:
    moe = MoE(dim=DIM, hidden=HIDDEN, num_experts=EXPERTS, top_k=2)
    x = torch.randn(9, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert moe.w_in.grad is not None
    assert moe.w_in.grad.dtype == moe.router.weight.grad.dtype == torch.float32


def kept_bytes(moe: MoE, x: Tensor) -> int:
    """Bytes of distinct storages kept for the backward, parameters left out."""
    own = {param.untyped_storage().data_ptr() for param in moe.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = moe(x)
    assert y.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


@pytest.mark.parametrize("save", ["preact", "input"])
def test_the_layer_keeps_no_more_than_the_experts_and_a_few_numbers_a_token(save: str) -> None:
    count, dim, hidden = 400, 128, 96
    moe = MoE(dim=dim, hidden=hidden, num_experts=4, top_k=2, save=save).to(torch.bfloat16)  # type: ignore[arg-type]
    x = torch.randn(count, dim, dtype=torch.bfloat16, requires_grad=True)
    floor = 2 * count * dim + (2 * count * 2 * 2 * hidden if save == "preact" else 0)
    router = count * (3 * 4 + 4 * 2) * 4  # scores of 4 experts, weights and places of 2 choices
    assert kept_bytes(moe, x) <= 1.02 * floor + router


def test_one_expert_that_every_token_uses_is_the_dense_twin() -> None:
    moe = make_moe(num_experts=1, top_k=1)
    dense = DenseFFN(dim=DIM, hidden=HIDDEN).double()
    dense.w_in.data.copy_(moe.w_in[0])
    dense.w_out.data.copy_(moe.w_out[0])
    x = tokens(7)
    torch.testing.assert_close(moe(x), dense(x))


def test_an_hstu_layer_adds_the_feed_forward_part_of_its_normed_states() -> None:
    def model(**options) -> HSTU:
        torch.manual_seed(0)
        return HSTU(dim=DIM, layers=2, max_length=10, **options).double()

    ffn = {"kind": "moe", "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": 2}
    with_experts, without = model(ffn=ffn), model()
    assert [name for name, _ in moe_layers(with_experts)] == [
        "layers.0.feed_forward.ffn",
        "layers.1.feed_forward.ffn",
    ]
    batch = SequenceBatch(offsets=torch.tensor([0, 3, 9]), tokens={})
    view, x = BatchView(batch, SequenceLayout(batch.offsets)), tokens(9)
    layer, plain = with_experts.layers[0], without.layers[0]
    layer.load_state_dict(plain.state_dict(), strict=False)
    attended = plain(x, view, 0)
    moe = layer.feed_forward.ffn
    expected = attended + moe(F.layer_norm(attended, (DIM,), eps=1e-6))
    torch.testing.assert_close(layer(x, view, 0), expected)
