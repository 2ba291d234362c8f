"""Encoders over requests: k candidates in one pass are k passes with one, and a short last layer is the whole one."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.parts.dropout import dropout_keys, number_sites
from freescale.model.recommender import make_encoder
from freescale.model.views.request_view import request_view, target_states
from tests.effort import examples
from tests.foreign_masks import Dilated

DIM = 8
KINDS = {
    "hstu": {"time_bias": True},
    "hstu with a dense part": {"ffn": {"kind": "dense", "hidden": 12}},
    "hstu with a window": {"time_bias": True, "mask": {"name": "window", "options": {"window": 3}}},
    "sasrec": {},
    "llama": {"kv_heads": 1},
}


def make(kind, **options):
    torch.manual_seed(0)
    found = {**KINDS[kind], **options}
    encoder = make_encoder(kind.split()[0], dim=DIM, layers=2, heads=2, max_length=12, **found).double()
    number_sites(encoder)
    return encoder


def requests_of(sizes, seed=0):
    """Requests with so many events and candidates; times rise, and candidates have that of the request."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(n + k for n, k in sizes)
    vectors = torch.randn(tokens, DIM, generator=draw, dtype=torch.float64)
    times = []
    for n, k in sizes:
        own = torch.randint(1, 5000, (n + 1,), generator=draw).cumsum(0)
        times.append(torch.cat([own[:n], own[n:].expand(k)]))
    time = torch.cat(times) if times else torch.zeros(0, dtype=torch.int64)
    asked = torch.cat([torch.cat([own[1:], own[-1:]]) if len(own) else own for own in times] or [time])
    batch = SequenceBatch(
        offsets=torch.tensor([0, *(n + k for n, k in sizes)]).cumsum(0),
        tokens={"vector": vectors, "time": time, "target_time": asked},
        samples={"row": torch.arange(len(sizes)) + 100},
        targets=torch.tensor([k for _, k in sizes], dtype=torch.int64),
    )
    return batch


def one_by_one(batch):
    """The same requests with one candidate each, and the tokens they are made of."""
    index, sizes = [], []
    for start, stop, k in zip(
        batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), batch.targets.tolist()
    ):
        for c in range(stop - k, stop):
            index += [*range(start, stop - k), c]
            sizes.append((stop - k - start, 1))
    index = torch.tensor(index, dtype=torch.int64)
    return SequenceBatch(
        offsets=torch.tensor([0, *(n + k for n, k in sizes)]).cumsum(0),
        tokens={name: values[index] for name, values in batch.tokens.items()},
        samples={"row": torch.arange(len(sizes))},
        targets=torch.ones(len(sizes), dtype=torch.int64),
    ), index


def results(encoder, batch, vectors, states):
    weight = torch.linspace(-1, 1, states.numel(), dtype=torch.float64).view_as(states)
    own = [vectors, *encoder.parameters()]
    return [states, *torch.autograd.grad(states, own, weight, allow_unused=True)]


def assert_same(some, others, atol):
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_in_one_pass_are_passes_with_one(kind):
    encoder, batch = make(kind), requests_of([(11, 4), (0, 3), (1, 1), (5, 0), (7, 17)])
    vectors = batch.tokens["vector"].requires_grad_()
    together = target_states(encoder, vectors, batch, SequenceLayout(batch.offsets))
    single, index = one_by_one(batch)
    alone = target_states(encoder, vectors[index], single, SequenceLayout(single.offsets))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    assert_same(results(encoder, batch, vectors, together), results(encoder, batch, vectors, alone), 1e-10)


@examples(10, thorough=200)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), min_size=1, max_size=4),
    st.sampled_from([*KINDS]),
)
def test_any_requests(sizes, kind):
    encoder, batch = make(kind), requests_of(sizes)
    vectors = batch.tokens["vector"]
    together = target_states(encoder, vectors, batch, SequenceLayout(batch.offsets))
    single, index = one_by_one(batch)
    alone = target_states(encoder, vectors[index], single, SequenceLayout(single.offsets))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("hstu")])
def test_a_short_last_layer_is_the_whole_one(kind, dropout):
    encoder, batch = make(kind, dropout=dropout), requests_of([(11, 4), (0, 3), (5, 0)])
    vectors, layout = batch.tokens["vector"].requires_grad_(), SequenceLayout(batch.offsets)
    view = request_view(batch, layout, encoder.mask)
    with dropout_keys(seed=1, step=2, batch=batch):
        short = encoder.encode_targets(vectors, view)
        whole = encoder.encode(vectors, view).index_select(0, view.target_index)
    torch.testing.assert_close(short, whole, rtol=0, atol=1e-13)
    assert_same(results(encoder, batch, vectors, short), results(encoder, batch, vectors, whole), 1e-12)


def test_experts_of_the_last_layer_see_all_tokens():
    ffn = {"kind": "moe", "num_experts": 2, "hidden": 4, "top_k": 1}
    encoder, batch = make("hstu", ffn=ffn), requests_of([(6, 3), (2, 1)])
    layout = SequenceLayout(batch.offsets)
    view = request_view(batch, layout, None)
    short = encoder.encode_targets(batch.tokens["vector"], view)
    assert torch.equal(short, encoder.encode(batch.tokens["vector"], view).index_select(0, view.target_index))


def test_nothing_that_comes_later_or_belongs_to_others_reaches_a_candidate():
    encoder, batch = make("hstu"), requests_of([(6, 3), (4, 2)])
    layout = SequenceLayout(batch.offsets)
    vectors = batch.tokens["vector"].requires_grad_()
    states = target_states(encoder, vectors, batch, layout)
    for candidate, (own, start, stop) in enumerate(
        [(6, 0, 6), (7, 0, 6), (8, 0, 6), (13, 9, 13), (14, 9, 13)]
    ):
        (grad,) = torch.autograd.grad(states[candidate].sum(), vectors, retain_graph=True)
        seen = grad.abs().sum(1) > 0
        wanted = torch.zeros(15, dtype=torch.bool)
        wanted[start:stop] = wanted[own] = True
        assert torch.equal(seen, wanted)


def test_what_cannot_see_candidates_is_refused():
    batch = requests_of([(3, 2)])
    layout = SequenceLayout(batch.offsets)
    with pytest.raises(ConfigError, match="cannot see candidates"):
        target_states(lambda vectors, batch, layout: vectors, batch.tokens["vector"], batch, layout)

    class Foreign:
        def for_batch(self, columns, layout):
            return Dilated(every=2, near=1)

    with pytest.raises(ConfigError, match="does not know them"):
        request_view(batch, layout, Foreign())
    without = SequenceBatch(offsets=batch.offsets, tokens=batch.tokens)
    with pytest.raises(ConfigError, match="how many candidates"):
        request_view(without, layout, None)


def test_batches_keep_their_candidates_apart():
    batch = requests_of([(3, 2), (0, 1), (4, 0)])
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.targets, batch.targets)
    assert torch.equal(again.tokens["time"], batch.tokens["time"])
    assert batch.select([2, 0]).targets.tolist() == [0, 2]
    assert [x for part in batch.split(2) for x in part.targets.tolist()] == [2, 1, 0]
    assert batch.with_samples(x=torch.zeros(3)).to("cpu").targets.tolist() == [2, 1, 0]
    for wrong in ([9, 0, 0], [-1, 0, 0], [1, 1]):
        with pytest.raises(ValueError, match="targets must be"):
            SequenceBatch(offsets=batch.offsets, targets=torch.tensor(wrong))
