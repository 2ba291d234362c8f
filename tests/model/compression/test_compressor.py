"""Serving from token caches gives the states of the masked pass that was trained."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.batches.segment_rule import SegmentRule, Segments
from freescale.data.batches.segments import insert_summaries
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.errors import DataError
from freescale.kernels import SequenceLayout
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.segmented import SegmentedEncoder
from freescale.model.compression.token_cache import TokenCache
from freescale.model.recommender import make_encoder
from tests.effort import examples

DIM, MAX_PLACES = 8, 120
RULE = SegmentRule(recent=6, length=9, summaries=3)
KINDS = ["hstu", "sasrec", "llama"]


def make_model(kind="hstu", rule=RULE, *, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    inner = make_encoder(
        kind,
        position_bias=True,
        time_bias=True,
        dim=DIM,
        layers=3,
        heads=2,
        kv_heads=1,
        max_length=MAX_PLACES,
        dropout=0.0,
    )
    model = SegmentedEncoder(inner, rule=rule, dim=DIM, max_positions=MAX_PLACES)
    # Larger weights than the initial ones, so that attention and bias matter to the result.
    for name, param in model.named_parameters():
        if "norm" not in name:
            param.data.normal_(std=0.4)
    return model.to(dtype).eval()


def make_events(lengths, *, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    time = torch.randint(0, 50_000, (tokens,), generator=draw).cumsum(0)
    target_time = torch.cat([time[1:], time[-1:] + 99]) if tokens else time
    batch = SequenceBatch(
        offsets=torch.tensor([0, *lengths]).cumsum(0), tokens={"time": time, "target_time": target_time}
    )
    return torch.randn(tokens, DIM, generator=draw).to(dtype), batch


def part(vectors, batch, first, last):
    """Events first[u] .. last[u] - 1 of each user u."""
    index = torch.cat(
        [torch.arange(start + a, start + b) for start, a, b in zip(batch.offsets[:-1].tolist(), first, last)]
    )
    lengths = torch.tensor([b - a for a, b in zip(first, last)])
    tokens = {name: values[index] for name, values in batch.tokens.items()}
    return vectors[index], SequenceBatch(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), tokens=tokens
    )


def masked_states(model, vectors, batch, segments=None):
    """States of all events by the masked pass, with the segments of the rule or others."""
    with torch.no_grad():
        if segments is None:
            return model(vectors, batch, SequenceLayout(batch.offsets))
        cut = insert_summaries(batch, segments, summaries=model.rule.summaries, device="cpu")
        return model.masked_pass(vectors, cut)[cut.events]


@examples(13, thorough=200)
@given(
    kind=st.sampled_from(KINDS),
    rule=st.builds(
        SegmentRule, recent=st.integers(1, 9), length=st.integers(1, 13), summaries=st.integers(1, 4)
    ),
    segments=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    odd=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_cached_requests_equal_the_masked_pass(kind, rule, segments, odd, seed):
    """One to five segments a user, lengths that fit nothing, users without a history among them."""
    lengths = [
        max(0, rule.recent + (n - 1) * rule.length + min(extra, rule.length) - 1)
        for n, extra in zip(segments, odd)
    ]
    lengths.append(max(1, rule.recent - 1))
    model = make_model(kind, rule, seed=seed)
    if max(rule.tokens(np.array(lengths))) > MAX_PLACES:
        return
    vectors, batch = make_events(lengths, seed=seed)
    wanted = masked_states(model, vectors, batch)
    server = Compressor(model, model="m1")
    history = rule.history(np.array(lengths)).tolist()
    caches = server.compress(*part(vectors, batch, [0] * len(lengths), history))
    got = server.states(*part(vectors, batch, history, lengths), caches)
    recent = torch.cat([torch.arange(a + h, b) for (a, b), h in zip(spans(batch), history)])
    torch.testing.assert_close(got, wanted[recent], rtol=0, atol=1e-5)
    if all(lengths):
        last = wanted[batch.offsets[1:] - 1]
        torch.testing.assert_close(server.last_states(vectors, batch), last, rtol=0, atol=1e-5)


def spans(batch):
    return itertools.pairwise(batch.offsets.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_grows_by_segments_to_what_it_is_when_made_at_once(kind):
    """Fed in pieces, also several segments at a time and a short one at the end; old tensors are not made again."""
    model = make_model(kind)
    lengths = [45, 27, 20]
    vectors, batch = make_events(lengths)
    server = Compressor(model, model="m1")
    at_once = server.compress(vectors, batch)
    fed, caches = [0, 0, 0], [None, None, None]
    for step in ([9, 9, 0], [18, 9, 9], [0, 9, 9], [18, 0, 2]):
        upto = [a + b for a, b in zip(fed, step)]
        before = caches
        caches = server.compress(*part(vectors, batch, fed, upto), caches)
        for old, new in zip(before, caches):
            if old is not None:
                assert torch.equal(new.keys[:, : old.keys.shape[1]], old.keys)
                assert torch.equal(new.values[:, : old.values.shape[1]], old.values)
        fed = upto
    for grown, whole in zip(caches, at_once):
        assert grown.sizes == whole.sizes
        assert grown.times == whole.times
        assert grown.positions() == whole.positions()
        torch.testing.assert_close(grown.keys, whole.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(grown.values, whole.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_added_at_odd_places_equal_the_masked_pass_over_the_same_segments(kind):
    model = make_model(kind)
    vectors, batch = make_events([31])
    server = Compressor(model, model="m1")
    caches = [None]
    for first, last in ((0, 4), (4, 13), (13, 20)):
        caches = server.compress(*part(vectors, batch, [first], [last]), caches)
    assert caches[0].sizes == (4, 9, 7)
    got = server.states(*part(vectors, batch, [20], [31]), caches)
    segments = Segments(np.zeros(3, np.int64), np.array([4, 9, 7]))
    torch.testing.assert_close(got, masked_states(model, vectors, batch, segments)[20:], rtol=0, atol=1e-5)


def test_a_short_last_segment_is_compressed_again_with_what_came_after():
    model = make_model()
    vectors, batch = make_events([30])
    server = Compressor(model, model="m1")
    first = server.compress(*part(vectors, batch, [0], [13]))[0]
    assert first.sizes == (9, 4)
    kept = first.whole_segments()
    assert kept.num_events == 9
    assert kept.whole_segments() is kept
    grown = server.compress(*part(vectors, batch, [9], [24]), [kept])[0]
    assert grown.sizes == (9, 9, 6)
    assert (grown.num_events, grown.end) == (24, 33)
    got = server.states(*part(vectors, batch, [24], [30]), [grown])
    torch.testing.assert_close(got, masked_states(model, vectors, batch)[24:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_the_two_passes_differ_by_rounding_only(kind):
    model = make_model(kind, dtype=torch.float64)
    vectors, batch = make_events([33, 4, 50], dtype=torch.float64)
    server = Compressor(model, model="m1", dtype=torch.float64)
    wanted = masked_states(model, vectors, batch)[batch.offsets[1:] - 1]
    torch.testing.assert_close(server.last_states(vectors, batch), wanted, rtol=0, atol=1e-12)


def test_the_cache_matters_and_is_all_that_is_kept():
    model = make_model()
    vectors, batch = make_events([40])
    server = Compressor(model, model="m1")
    recent = part(vectors, batch, [34], [40])
    caches = server.compress(*part(vectors, batch, [0], [34]))
    with_history = server.states(*recent, caches)
    assert (with_history - server.states(*recent, [None])).abs().max() > 1e-2
    # 3 layers, 4 segments of 3 summaries, keys and values of 8 numbers.
    assert caches[0].nbytes == 3 * 12 * 2 * 8 * 4
    half = Compressor(model, model="m1", dtype=torch.bfloat16)
    small = half.compress(*part(vectors, batch, [0], [34]))
    assert small[0].nbytes == caches[0].nbytes // 2
    torch.testing.assert_close(half.states(*recent, small), with_history, rtol=0.1, atol=0.1)


def test_a_cache_comes_back_from_bytes_as_it_was():
    model = make_model()
    vectors, batch = make_events([22])
    for dtype in (torch.float32, torch.bfloat16):
        cache = Compressor(model, model="m1", dtype=dtype).compress(vectors, batch)[0]
        back = TokenCache.from_bytes(cache.to_bytes())
        assert (back.sizes, back.times, back.stamp) == (cache.sizes, cache.times, cache.stamp)
        assert torch.equal(back.keys, cache.keys)
        assert torch.equal(back.values, cache.values)


@pytest.mark.parametrize("bad", [b"", b"nonsense" * 9, (2).to_bytes(8, "little") + b"{}"])
def test_other_bytes_are_refused(bad):
    with pytest.raises(DataError, match="no token cache"):
        TokenCache.from_bytes(bad)


def test_a_truncated_cache_is_refused():
    model = make_model()
    cache = Compressor(model, model="m1").compress(*make_events([22]))[0]
    with pytest.raises(DataError, match="no token cache"):
        TokenCache.from_bytes(cache.to_bytes()[:-5])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "m2"}, "model m2"),
        ({"dtype": torch.bfloat16}, "dtype bfloat16"),
        ({"rule": SegmentRule(recent=6, length=8, summaries=3)}, "length 8"),
        ({"rule": SegmentRule(recent=6, length=9, summaries=2)}, "summaries 2"),
    ],
)
def test_a_cache_of_another_model_is_refused(other, message):
    vectors, batch = make_events([22])
    rule = other.pop("rule", RULE)
    cache = Compressor(make_model(rule=rule), **{"model": "m1", **other}).compress(vectors, batch)
    server = Compressor(make_model(), model="m1")
    for call in (server.compress, server.states):
        with pytest.raises(DataError, match="made by another model") as caught:
            call(vectors, batch, cache)
        assert message in str(caught.value)
        assert "compress the user's history again" in str(caught.value)


def test_histories_beyond_what_was_learnt_are_refused():
    server = Compressor(make_model(), model="m1")
    vectors, batch = make_events([85])
    cache = server.compress(vectors, batch)  # 85 + 10 * 3 places
    with pytest.raises(DataError, match="longer than the model has learnt"):
        server.states(*make_events([6]), cache)
    server.states(*make_events([5]), cache)
    with pytest.raises(DataError, match="without a cache"):
        server.compress(*make_events([3]), cache)
    with pytest.raises(DataError, match="2 caches"):
        server.states(vectors, batch, [None, None])


def test_gradients_reach_the_summaries_and_are_zero_without_histories():
    model = make_model(dtype=torch.float64).train()
    vectors, batch = make_events([30, 3], dtype=torch.float64)
    model(vectors, batch, SequenceLayout(batch.offsets)).square().sum().backward()
    assert (model.summaries.grad.abs() > 0).all()
    model.zero_grad()
    vectors, batch = make_events([6, 3], dtype=torch.float64)
    model(vectors, batch, SequenceLayout(batch.offsets)).square().sum().backward()
    assert (model.summaries.grad == 0).all()


def test_every_vector_has_the_gradient_of_its_place():
    model = make_model(dtype=torch.float64)
    vectors, batch = make_events([20, 3, 30], dtype=torch.float64)
    cut = insert_summaries(batch, RULE.cut(batch.lengths.numpy()), summaries=RULE.summaries, device="cpu")
    vectors.requires_grad_()
    laid = model.with_summaries(vectors, cut)
    weight = torch.randn(laid.shape, dtype=torch.float64)
    grads = torch.autograd.grad((laid * weight).sum(), [vectors, model.summaries])
    assert torch.equal(grads[0], weight[cut.events])
    wanted = weight[cut.summaries].view(-1, RULE.summaries, DIM).sum(0)
    torch.testing.assert_close(grads[1], wanted, rtol=0, atol=1e-12)
