"""Kernels of candidates over cached histories against padded products, and requests through one recorded pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import SequenceBatch
from freescale.errors import DataError
from freescale.kernels import SequenceLayout
from freescale.model.serving.candidate_graph import CandidateGraph
from freescale.model.serving.history_cache import HistoryCache, HistoryCaches, extend_caches
from freescale.model.serving.history_store import HistoryStore
from freescale.model.views.cached_view import CachedView
from freescale.model.views.request_view import target_states
from tests.effort import examples, slow
from tests.model.serving.test_history_cache import part_of
from tests.model.views.test_request_view import DIM, make, requests_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU; see tests/gpu"
)
CPU = torch.device("cpu")


def both_ways(sizes, cached, *, softmax, timed=True, heads=2, kv_heads=2, width=16):
    """Attention of new events and candidates over caches of so many tokens: by padded products, by the kernels."""
    draw = torch.Generator().manual_seed(0)
    batch = requests_of(sizes)
    if not timed:
        batch = SequenceBatch(offsets=batch.offsets, targets=batch.targets)
    tokens = sum(n + k for n, k in sizes)
    queries = torch.randn(tokens, heads, width, generator=draw)
    rest = [torch.randn(tokens, kv_heads, width, generator=draw) for _ in range(2)]
    caches = []
    for count in cached:
        keys = torch.randn(2, 1, count, kv_heads, width, generator=draw)
        times = torch.arange(count) * 50 if timed else None
        caches.append(HistoryCache(keys=keys[0], values=keys[1], times=times) if count else None)
    store = HistoryCaches(caches, device=CPU)
    tables = {"position_bias": torch.randn(1100, generator=draw)}
    tables |= {"time_bias": torch.randn(129, generator=draw)} if timed else {}
    for fused in (False, True):
        view = CachedView(batch, store, device=CPU, fused=fused)
        if softmax:
            yield view.softmax(queries, *rest, layer=0, scale=0.3)
        else:
            yield view.silu(queries, *rest, layer=0, scale=0.1, **tables)


@pytest.mark.parametrize("softmax", [False, True])
def test_the_kernels_of_cached_requests_know_candidates(softmax):
    padded, fused = both_ways([(5, 40), (0, 3), (2, 0)], [7, 0, 3], softmax=softmax)
    torch.testing.assert_close(fused, padded, rtol=1e-4, atol=1e-5)


def test_long_histories_are_cut_into_parts():
    """1,030 keys are enough for two parts of a few candidates; the second ends with the events and themselves."""
    padded, fused = both_ways([(2, 20), (1, 3)], [1030, 17], softmax=False)
    torch.testing.assert_close(fused, padded, rtol=1e-4, atol=1e-5)


def test_many_new_events_have_kernels_of_their_own():
    padded, fused = both_ways([(19, 3), (1, 2)], [9, 4], softmax=False)
    torch.testing.assert_close(fused, padded, rtol=1e-4, atol=1e-5)


@examples(6, thorough=200)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_any_requests(users, softmax, timed, kv_heads):
    sizes, cached = [(n, k) for n, k, _ in users], [c for *_, c in users]
    padded, fused = both_ways(sizes, cached, softmax=softmax, timed=timed, kv_heads=kv_heads)
    torch.testing.assert_close(fused, padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["hstu", slow("sasrec")])
def test_a_recorded_pass_answers_as_one_pass_over_everything(kind):
    """Replayed for fewer users, others, one of them twice, with fewer candidates; nothing of before is left."""
    encoder, sizes = make(kind).eval().float(), [(9, 4), (1, 3), (6, 5), (3, 1)]
    batch = requests_of(sizes)
    vectors = batch.tokens["vector"].float()
    wanted = target_states(encoder, vectors, batch, SequenceLayout(batch.offsets)).split([4, 3, 5, 1])
    kept = [max(n - 2, 0) for n, _ in sizes]
    old = part_of(batch, [(0, n) for n in kept])
    caches = extend_caches(encoder, old.tokens["vector"].float(), old, model="w")
    store = HistoryStore(caches[0], users=5, events=9, device=CPU)
    places = [4, 0, 2, 1]
    for place, cache in zip(places, caches):
        store.put(place, cache)
    passes = []

    def record(run):
        passes.append(run())  # as a warm-up does
        return run

    graph = CandidateGraph(encoder, store, users=4, candidates=6, events=2, dim=DIM, record=record)
    for users in ([0, 1, 2, 3], [3, 3, 1], [2]):
        asked = [(kept[n], sum(sizes[n])) for n in users]
        whole = batch.select(users)
        part = part_of(whole, asked, whole.targets)
        got = graph.states(part.tokens["vector"].float(), part, [places[n] for n in users])
        torch.testing.assert_close(got, torch.cat([wanted[n] for n in users]), rtol=0, atol=1e-5)
    assert len(passes) == 1


def test_what_does_not_fit_is_refused():
    encoder, batch = make("hstu").eval().float(), requests_of([(3, 2)])
    old = part_of(batch, [(0, 2)])
    (cache,) = extend_caches(encoder, old.tokens["vector"].float(), old, model="w")
    store = HistoryStore(cache, users=1, events=2, device=CPU)
    with pytest.raises(DataError, match="no room for that cache"):
        store.put(1, cache)
    with pytest.raises(DataError, match="other weights"):
        store.put(0, HistoryCache(keys=cache.keys, values=cache.values, times=cache.times, model="x"))
    graph = CandidateGraph(encoder, store, users=1, candidates=1, dim=DIM, record=lambda run: run)
    with pytest.raises(DataError, match="does not fit into the recorded graph"):
        graph.states(batch.tokens["vector"].float(), batch, [0])
    with pytest.raises(DataError, match="1 to 16"):
        CandidateGraph(encoder, store, users=1, candidates=1, dim=DIM, events=17)
