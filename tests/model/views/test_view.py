"""Encoders under masks from outside: one step of training against attention over all pairs of the batch at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import (
    AttentionMask,
    LayerWeights,
    SequenceLayout,
    WholeBatch,
    fused_layer,
    make_mask_kind,
)
from freescale.kernels.attention import reference
from freescale.model import Recommender, RetrievalHead
from freescale.model.recommender import make_encoder
from freescale.model.views.view import BatchView, masked_view
from tests.foreign_masks import Dilated, SameCategory, matrix

LENGTHS = [5, 0, 1, 40, 17]
DIM = 8
SHAPE = {"dim": DIM, "layers": 2, "heads": 2, "max_length": 40, "dropout": 0.0, "position_bias": True}


class DenseView:
    """Attention between all tokens of a batch, of which a [T, T] matrix says what counts."""

    real_tokens = None

    def __init__(self, batch: SequenceBatch, seen: torch.Tensor) -> None:
        self.batch, self.seen = batch, seen
        self.positions = torch.cat([torch.arange(n) for n in batch.lengths.tolist()])

    def fusable_batch(self, *, time):
        return None

    def silu(self, q, k, v, *, layer, scale, position_bias=None, time_bias=None):
        scores = torch.einsum("ihd,jhd->hij", q, k)
        scores = scores + position_bias[(self.positions[:, None] - self.positions).clamp(min=0)]
        gaps = self.batch.tokens["target_time"][:, None] - self.batch.tokens["time"]
        scores = scores + time_bias[reference.time_bucket(gaps)]
        return torch.einsum("hij,jhd->ihd", F.silu(scores) * scale * self.seen, v)

    def softmax(self, q, k, v, *, layer, scale):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        weights = torch.exp(torch.einsum("ihd,jhd->hij", q, k) * scale) * self.seen
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        return torch.einsum("hij,jhd->ihd", weights, v)


def make_case(kind: str, mask: str) -> tuple[torch.nn.Module, torch.Tensor, SequenceBatch]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    time = torch.randint(0, 5000, (tokens,)).cumsum(0)
    columns = {"time": time, "target_time": time + 777, "category": torch.randint(0, 3, (tokens,))}
    batch = SequenceBatch(offsets=torch.tensor([0, *LENGTHS]).cumsum(0), tokens=columns)
    options = {"kv_heads": 1} if kind == "llama" else {}
    encoder = make_encoder(kind, **SHAPE, **options, time_bias=kind == "hstu", mask=make_mask_kind(mask))
    for param in encoder.parameters():
        param.data.normal_(std=0.5)
    return encoder.double(), torch.randn(tokens, DIM, dtype=torch.float64), batch


def step(model, states, vectors):
    """One step of gradient descent; the loss, the gradient of the vectors, and the weights after it."""
    weight = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    loss = (states * weight).sum() + states.square().mean()
    params = list(model.parameters())
    grad, *grads = torch.autograd.grad(loss, [vectors, *params])
    return [loss.detach(), grad, *(param.detach() - 0.1 * g for param, g in zip(params, grads))]


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
@pytest.mark.parametrize("name", ["test_dilated", "test_same_category"])
def test_a_step_of_training_is_that_of_the_dense_model(kind, name):
    encoder, vectors, batch = make_case(kind, name)
    mask = Dilated() if name == "test_dilated" else SameCategory(batch.tokens["category"])
    seen = matrix(mask.plainly, LENGTHS)
    results = []
    for dense in (False, True):
        model, x = copy.deepcopy(encoder), vectors.clone().requires_grad_()
        view = DenseView(batch, seen)
        states = model.encode(x, view) if dense else model(x, batch, SequenceLayout(batch.offsets))
        results.append(step(model, states, x))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    plain = make_case(kind, "causal")[0](vectors, batch, SequenceLayout(batch.offsets))
    masked = encoder(vectors, batch, SequenceLayout(batch.offsets))
    assert not torch.allclose(plain, masked)


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
def test_losses_and_states_of_a_recommender_are_under_the_mask(kind):
    """The loss of training and the states of evaluation; of HSTU that is the way from distinct item vectors."""
    encoder, vectors, batch = make_case(kind, "test_dilated")
    slots = torch.arange(sum(LENGTHS)) % 30
    tokens = {**batch.tokens, "item_index": slots, "target_index": slots.roll(1)}
    samples = {"negative_index": torch.arange(10).repeat(len(LENGTHS), 1)}
    batch = SequenceBatch(offsets=batch.offsets, tokens=tokens, samples=samples)
    model = Recommender(encoder=encoder, head=RetrievalHead())
    layout = SequenceLayout(batch.offsets)
    wanted = encoder.encode(vectors[:30][slots], DenseView(batch, matrix(Dilated().plainly, LENGTHS)))
    states = model.states(vectors[:30], batch, layout)
    torch.testing.assert_close(states, wanted, rtol=1e-10, atol=1e-10)
    loss = model.head.loss(wanted, vectors[:30], batch, layout)
    torch.testing.assert_close(model(vectors[:30], batch), loss, rtol=1e-10, atol=1e-10)


def test_a_fused_layer_gets_a_batch_only_under_masks_it_knows():
    batch = make_case("hstu", "causal")[2]
    layout = SequenceLayout(batch.offsets)
    for mask, fusable in ((None, True), (AttentionMask(window=3), True), (Dilated(), False)):
        found = BatchView(batch, layout, mask=mask).fusable_batch(time=True)
        assert (found is not None) is fusable


def test_a_fused_layer_refuses_a_mask_it_does_not_know():
    batch = make_case("hstu", "causal")[2]
    whole = WholeBatch(SequenceLayout(batch.offsets), Dilated(), None, None)
    weights = LayerWeights(torch.zeros(8, 32), torch.zeros(8, 8), torch.zeros(8), None, None)
    with pytest.raises(TypeError, match="knows no mask but AttentionMask"):
        fused_layer(torch.zeros(sum(LENGTHS), 8), weights, whole, heads=2, scale=1.0)


def test_a_model_refuses_to_look_ahead():
    class Ahead:
        def for_batch(self, columns, layout):
            return SameCategory(columns["category"], looks_ahead=True)

    batch = make_case("hstu", "causal")[2]
    with pytest.raises(ConfigError, match=r"model\.mask must not look ahead"):
        masked_view(batch, SequenceLayout(batch.offsets), Ahead())


def test_compressed_histories_refuse_another_mask():
    segments = {"recent": 6, "length": 8, "summaries": 2}
    with pytest.raises(ConfigError, match=r"model\.mask and segments\.recent do not go together"):
        make_encoder(
            "hstu", **SHAPE, time_bias=False, segments=segments, mask=make_mask_kind("window", {"window": 3})
        )
    make_encoder("hstu", **SHAPE, time_bias=False, segments=segments, mask=make_mask_kind("causal"))
