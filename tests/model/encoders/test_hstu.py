"""HSTU against one sequence at a time, written out from the paper's formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model.encoders.hstu import HSTU
from freescale.model.recommender import make_encoder
from tests.dropping import dropping
from tests.effort import examples

DIM, MAX_LENGTH = 6, 40


def make_model(*, heads=2, layers=2, seed=0, **options):
    torch.manual_seed(seed)
    model = HSTU(dim=DIM, layers=layers, heads=heads, max_length=MAX_LENGTH, **{"time_bias": True, **options})
    # Larger weights than the initial ones, so that attention matters to the result.
    for param in model.parameters():
        param.data.normal_(std=0.5)
    return model.double()


def make_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    time = torch.randint(0, 5000, (tokens,), generator=generator).cumsum(0)
    target_time = time + torch.randint(0, 5000, (tokens,), generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = SequenceBatch(offsets=offsets, tokens={"time": time, "target_time": target_time})
    vectors = torch.randn(tokens, DIM, dtype=torch.float64, generator=generator)
    return vectors.requires_grad_(), batch


def run(model, vectors, batch):
    return model(vectors, batch, SequenceLayout(batch.offsets))


def written_out(model, x_ND, time, target_time, *, heads):
    """States of one sequence: explicit loops over layers, heads and pairs of positions."""
    n = len(x_ND)
    x = x_ND * math.sqrt(DIM) + model.input.position[:n]
    for layer in model.layers:
        projected = F.silu(F.layer_norm(x, (DIM,), eps=1e-6) @ layer.uvqk)
        u, v, q, k = projected.split(DIM, dim=1)
        outputs = []
        for h in range(heads):
            part = slice(h * DIM // heads, (h + 1) * DIM // heads)
            rows = []
            for i in range(n):
                row = torch.zeros(DIM // heads, dtype=x.dtype)
                for j in range(i + 1):
                    score = q[i, part] @ k[j, part]
                    if layer.bias.position is not None:
                        score = score + layer.bias.position[i - j]
                    if layer.bias.time is not None:
                        gap = max(1, abs(int(target_time[i]) - int(time[j])))
                        score = score + layer.bias.time[min(128, int(math.log(gap) / 0.301))]
                    row = row + F.silu(score) / MAX_LENGTH * v[j, part]
                rows.append(row)
            outputs.append(torch.stack(rows))
        attended = torch.cat(outputs, dim=1)
        gated = u * F.layer_norm(attended, (DIM,), eps=1e-6)
        x = x + F.linear(gated, layer.output.weight, layer.output.bias)
    return x


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
def test_states_and_gradients_are_those_of_the_formulas(heads, biases):
    model = make_model(heads=heads, position_bias=biases[0], time_bias=biases[1])
    vectors, batch = make_batch([5, 0, 1, 9])
    got = run(model, vectors, batch)
    edges = batch.offsets.tolist()
    wanted = torch.cat(
        [
            written_out(
                model, vectors[a:b], batch.tokens["time"][a:b], batch.tokens["target_time"][a:b], heads=heads
            )
            for a, b in itertools.pairwise(edges)
            if b > a
        ]
    )
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    inputs = [vectors, *model.parameters()]
    weight = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    for ours, truth in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-9)


@examples(8, thorough=200)
@given(lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_sequence_has_the_same_states_alone_and_in_company(lengths, seed):
    model = make_model(seed=seed)
    vectors, batch = make_batch(lengths, seed)
    together = run(model, vectors, batch)
    for n in range(len(lengths)):
        part = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        alone = run(model, vectors[part], batch.select([n]))
        torch.testing.assert_close(together[part], alone, rtol=1e-9, atol=1e-10)


def test_a_later_event_never_changes_an_earlier_state():
    model = make_model()
    vectors, batch = make_batch([MAX_LENGTH])
    before = run(model, vectors, batch)
    moved = vectors.detach().clone()
    moved[25:] += 3.0
    later = {name: values.clone() for name, values in batch.tokens.items()}
    later["time"][25:] += 10**6
    later["target_time"][25:] += 10**6
    after = run(model, moved, batch.with_tokens(**later))
    assert torch.equal(before[:25], after[:25])
    assert not torch.isclose(before[25:], after[25:]).all(1).any()


def test_a_batch_without_tokens_has_no_states_and_zero_gradients_for_every_parameter():
    model = make_model()
    vectors, batch = make_batch([0, 0])
    states = run(model, vectors, batch)
    assert states.shape == (0, DIM)
    states.sum().backward()
    assert all((param.grad == 0).all() for param in model.parameters())


def test_dropout_works_in_training_only():
    model = make_model(dropout=0.5)
    vectors, batch = make_batch([20])
    model.eval()
    assert torch.equal(run(model, vectors, batch), run(model, vectors, batch))
    model.train()
    assert not torch.equal(dropping(model, vectors, batch, 0), dropping(model, vectors, batch, 1))


def test_encoders_are_made_by_name():
    shape = {"dim": DIM, "layers": 1, "heads": 2, "max_length": 9, "dropout": 0.0}
    hstu = make_encoder("hstu", position_bias=False, time_bias=True, **shape)
    assert hstu.layers[0].bias.position is None
    assert hstu.layers[0].bias.time is not None
    assert type(make_encoder("sasrec", position_bias=True, time_bias=True, **shape)).__name__ == "SASRec"
