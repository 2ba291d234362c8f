"""SASRec against torch's own multi-head attention, one sequence at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model.encoders.sasrec import SASRec
from tests.dropping import dropping
from tests.effort import examples

DIM, MAX_LENGTH = 6, 70


def make_model(*, heads=2, layers=2, seed=0, dropout=0.0):
    torch.manual_seed(seed)
    model = SASRec(dim=DIM, layers=layers, heads=heads, max_length=MAX_LENGTH, dropout=dropout)
    for param in model.parameters():
        param.data.normal_(std=0.5)
    return model.double()


def make_batch(lengths, seed=0):
    vectors = torch.randn(
        sum(lengths), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return vectors.requires_grad_(), SequenceBatch(offsets=torch.tensor([0, *lengths]).cumsum(0))


def run(model, vectors, batch):
    return model(vectors, batch, SequenceLayout(batch.offsets))


def attention_of_torch(layer, heads):
    """nn.MultiheadAttention with the weights of a layer."""
    attention = nn.MultiheadAttention(DIM, heads, batch_first=True, dtype=torch.float64)
    parts = (layer.query, layer.key, layer.value)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        attention.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
        attention.out_proj.weight.copy_(layer.merge.weight)
        attention.out_proj.bias.copy_(layer.merge.bias)
    return attention


def by_torch(model, x_ND, heads):
    """States of one sequence with torch's attention and a causal mask."""
    x = (x_ND * math.sqrt(DIM) + model.input.position[: len(x_ND)])[None]
    hidden = torch.ones(len(x_ND), len(x_ND), dtype=torch.bool).triu(1)
    for layer in model.layers:
        normed = layer.attention_norm(x)
        attended, _ = attention_of_torch(layer, heads)(normed, x, x, attn_mask=hidden, need_weights=False)
        y = layer.ffn_norm(normed + attended)
        first, second = layer.ffn[0], layer.ffn[3]
        x = y + nn.functional.linear((y @ first.weight.T + first.bias).relu(), second.weight, second.bias)
    return model.final_norm(x)[0]


@examples(8, thorough=200)
@given(
    lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=5),
    heads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_states_and_input_gradients_are_those_of_torch(lengths, heads, seed):
    model = make_model(heads=heads, seed=seed)
    vectors, batch = make_batch(lengths, seed)
    got = run(model, vectors, batch)
    edges = batch.offsets.tolist()
    parts = [by_torch(model, vectors[a:b], heads) for a, b in itertools.pairwise(edges) if b > a]
    wanted = torch.cat(parts) if parts else vectors * 0
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)
    (ours,), (truth,) = (torch.autograd.grad(x.square().sum(), vectors) for x in (got, wanted))
    torch.testing.assert_close(ours, truth, rtol=1e-7, atol=1e-8)


def test_a_later_event_never_changes_an_earlier_state():
    model = make_model()
    vectors, batch = make_batch([MAX_LENGTH])
    before = run(model, vectors, batch)
    moved = vectors.detach().clone()
    moved[40:] += torch.linspace(1, 3, DIM, dtype=torch.float64)
    after = run(model, moved, batch)
    assert torch.equal(before[:40], after[:40])
    assert not torch.isclose(before[40:], after[40:]).all(1).any()


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
