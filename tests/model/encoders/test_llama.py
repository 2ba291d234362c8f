"""The decoder against a plain padded one that shares no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model.encoders.llama import Decoder, Rotation
from freescale.model.parts.moe import moe_layers
from tests.dropping import dropping
from tests.effort import examples

DIM, MAX_LENGTH, BASE = 24, 50, 100.0


def make_model(*, heads=4, kv_heads=2, layers=2, seed=0, dropout=0.0, **options):
    torch.manual_seed(seed)
    model = Decoder(
        dim=DIM,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=20,
        rope_base=BASE,
        max_length=MAX_LENGTH,
        dropout=dropout,
        **options,
    )
    for param in model.parameters():
        param.data.normal_(std=0.4)
    return model.double()


def make_batch(lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(sum(lengths), DIM, dtype=torch.float64, generator=draw)
    return vectors.requires_grad_(), SequenceBatch(offsets=torch.tensor([0, *lengths]).cumsum(0))


def run(model, vectors, batch):
    return model(vectors, batch, SequenceLayout(batch.offsets))


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x_BNHW):
    """Rotary positions as complex numbers: first half + i second half, times e^(i angle)."""
    half = x_BNHW.shape[-1] // 2
    places = torch.arange(x_BNHW.shape[1], dtype=torch.float64)
    speeds = torch.tensor([BASE ** (-2 * p / x_BNHW.shape[-1]) for p in range(half)], dtype=torch.float64)
    turns = torch.polar(torch.ones(len(places), half, dtype=torch.float64), torch.outer(places, speeds))
    z = torch.complex(x_BNHW[..., :half], x_BNHW[..., half:]) * turns[None, :, None, :]
    return torch.cat([z.real, z.imag], dim=-1)


def padded(model, vectors, lengths, heads, kv_heads):
    """States of all sequences, from one padded tensor."""
    width, longest = DIM // heads, max(lengths)
    x = torch.zeros(len(lengths), longest, DIM, dtype=torch.float64)
    parts = vectors.split(lengths)
    x = torch.stack([nn.functional.pad(p, (0, 0, 0, longest - len(p))) for p in parts]) * math.sqrt(DIM)
    hidden = torch.ones(longest, longest, dtype=torch.bool).triu(1)
    for layer in model.layers:
        n = rms(x, layer.attention_norm.weight)
        w_q, w_k, w_v = layer.qkv.weight.split([heads * width, kv_heads * width, kv_heads * width])
        q, k, v = (
            (n @ w.T).view(*n.shape[:2], count, width)
            for w, count in ((w_q, heads), (w_k, kv_heads), (w_v, kv_heads))
        )
        q, k = turned(q), turned(k)
        outputs = []
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = torch.einsum("bnw,bmw->bnm", q[:, :, head], k[:, :, shared]) / math.sqrt(width)
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            outputs.append(torch.einsum("bnm,bmw->bnw", weights, v[:, :, shared]))
        x = x + torch.cat(outputs, -1) @ layer.merge.weight.T
        n = rms(x, layer.ffn_norm.weight)
        gate, up = (n @ w.T for w in layer.ffn.w_in.split(20))
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.ffn.w_out.T
    x = rms(x, model.final_norm.weight)
    return torch.cat([x[b, :length] for b, length in enumerate(lengths)])


@examples(8, thorough=200)
@given(
    lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=5).filter(any),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 2)]),
    seed=st.integers(0, 99),
)
def test_states_and_all_gradients_are_those_of_the_padded_decoder(lengths, heads, seed):
    model = make_model(heads=heads[0], kv_heads=heads[1], seed=seed)
    vectors, batch = make_batch(lengths, seed)
    got, wanted = run(model, vectors, batch), padded(model, vectors, lengths, *heads)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)
    weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    leaves = [vectors, *model.parameters()]
    ours, truth = (torch.autograd.grad((x * weight).sum(), leaves) for x in (got, wanted))
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_a_later_event_never_changes_an_earlier_state():
    model = make_model()
    vectors, batch = make_batch([MAX_LENGTH])
    before = run(model, vectors, batch)
    moved = vectors.detach().clone()
    moved[40:] += torch.linspace(1, 3, DIM, dtype=torch.float64)
    after = run(model, moved, batch)
    assert torch.equal(before[:40], after[:40])
    assert not torch.isclose(before[40:], after[40:]).all(1).any()


def test_the_order_of_events_matters_although_there_is_no_position_table():
    model = make_model()
    vectors, batch = make_batch([9])
    swapped = vectors.detach()[[1, 0, *range(2, 9)]]
    assert not torch.allclose(run(model, vectors, batch)[-1], run(model, swapped, batch)[-1])


def test_products_of_turned_heads_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)

    def product(i, j):
        at = {"width": 8, "base": BASE, "dtype": torch.float64}
        return (Rotation(torch.tensor([i]), **at)(q[None]) * Rotation(torch.tensor([j]), **at)(k[None])).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100))
    assert not torch.isclose(product(9, 4), product(9, 5))


def test_places_far_away_are_turned_exactly_in_single_precision():
    x = torch.randn(1, 1, 64)
    at = {"width": 64, "base": 10_000.0}
    exact = Rotation(torch.tensor([100_000]), **at, dtype=torch.float64)(x.double())
    narrow = Rotation(torch.tensor([100_000]), **at, dtype=torch.float32)(x)
    torch.testing.assert_close(narrow.double(), exact, rtol=0, atol=1e-6)


def test_a_batch_without_tokens_has_no_states_and_zero_gradients_for_every_parameter():
    model = make_model()
    vectors, batch = make_batch([0])
    states = run(model, vectors, batch)
    assert states.shape == (0, DIM)
    states.sum().backward()
    assert all((param.grad == 0).all() for param in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_dropout_works_in_training_only(training):
    model = make_model(dropout=0.5).train(training)
    vectors, batch = make_batch([20])
    first, second = (dropping(model, vectors, batch, step) for step in range(2))
    assert torch.equal(first, second) is not training


def test_initial_layers_add_little_and_deep_ones_less():
    torch.manual_seed(0)
    model = Decoder(dim=64, layers=8, heads=4)
    assert model.layers[0].qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (model.layers[3].merge.weight, model.layers[3].ffn.w_out):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert (model.layers[0].ffn_norm.weight == 1).all()


def test_experts_take_the_place_of_the_feed_forward_part_with_weights_of_their_own():
    ffn = {"kind": "moe", "hidden": 8, "num_experts": 4, "top_k": 2}
    model = Decoder(dim=DIM, layers=2, heads=4, ffn=ffn)
    assert [name for name, _ in moe_layers(model)] == ["layers.0.ffn", "layers.1.ffn"]
    # Drawn expert by expert, not over again with the other weights (whose last ones are scaled down with depth).
    assert model.layers[1].ffn.w_out.std().item() == pytest.approx(0.02, rel=0.2)
    vectors, batch = make_batch([3, 4])
    assert run(model.double(), vectors, batch).shape == (7, DIM)


def test_autocast_keeps_states_between_layers_in_half_precision():
    model = make_model().float()
    vectors, batch = make_batch([20, 5])
    vectors = vectors.detach().float()
    seen = []
    model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    exact = run(model, vectors, batch)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = run(model, vectors, batch)
    assert seen == [torch.float32, torch.bfloat16]
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, exact, rtol=0.2, atol=0.2)
