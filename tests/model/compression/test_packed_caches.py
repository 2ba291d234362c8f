"""Caches of many users in one store: read in place, by the padded products and by the kernel, they are the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.errors import DataError
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.packed_caches import PackedCaches
from freescale.model.compression.token_cache import CacheStamp, TokenCache
from freescale.model.views.cached_view import CachedView
from tests.effort import examples
from tests.model.compression.test_compressor import KINDS, make_events, make_model, part

STAMP = CacheStamp(model="m1", length=9, summaries=2, dtype="float64")


def make_cache(sizes, *, heads=1, layers=2, times=True, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shape = (layers, 2 * len(sizes), heads, 16)
    keys, values = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    stamps = tuple(range(100, 100 + 7 * len(sizes), 7)) if times else ()
    return TokenCache(keys=keys, values=values, sizes=tuple(sizes), times=stamps, stamp=STAMP)


SIZES = st.lists(st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5)


@examples(20, thorough=200)
@given(SIZES, st.data())
def test_a_store_gives_back_what_was_put_in(sizes, data):
    caches = [None if own is None else make_cache(own, seed=n) for n, own in enumerate(sizes)]
    store = PackedCaches.pack(caches, device="cpu", stamp=STAMP)
    users = data.draw(st.lists(st.integers(0, len(caches) - 1), max_size=6))
    for found, wanted in (
        (store, caches),
        (store.select(users), [caches[user] for user in users]),
        (store.select(users)[1:], [caches[user] for user in users[1:]]),
    ):
        assert len(found) == len(wanted)
        assert found.ends.tolist() == [0 if cache is None else cache.end for cache in wanted]
        for n, (got, cache) in enumerate(zip(found, wanted)):
            assert (got is None) == (cache is None)
            if cache is not None:
                assert (got.sizes, got.times, got.stamp) == (cache.sizes, cache.times, cache.stamp)
                assert torch.equal(got.keys, cache.keys)
                assert torch.equal(got.values, cache.values)
                own = slice(found.starts[n], found.starts[n] + found.counts[n])
                assert tuple(found.positions[own].tolist()) == cache.positions()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_read_a_store_by_user(kind):
    """Users in another order and twice, from the store and from their own caches."""
    model = make_model(kind)
    lengths = [40, 6, 23, 31]
    vectors, batch = make_events(lengths)
    server = Compressor(model, model="m1")
    history = [34, 0, 17, 25]
    store = server.compress(*part(vectors, batch, [0] * 4, history))
    assert isinstance(store, PackedCaches)
    recent, asked = part(vectors, batch, history, lengths)
    wanted = server.states(recent, asked, list(store))
    assert torch.equal(server.states(recent, asked, store), wanted)
    users = [2, 0, 2, 1]
    rows = torch.cat([torch.arange(6) + 6 * user for user in users])
    again = server.states(recent[rows], asked.select(users), store.select(users))
    torch.testing.assert_close(again, wanted[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["silu", "position", "time", "both", "softmax"])
@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([[3, 9], None, [1], [9, 9, 9, 2]], [5, 3, 0, 17]),
        ([None, None], [4, 1]),
        ([[2] * 20, [9]], [70, 2]),
    ],
)
def test_the_kernel_gives_what_padded_products_give(mode, sizes, lengths):
    """Users without a cache and without a request, more than a tile of both, shared heads."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    caches = [None if own is None else make_cache(own, seed=n) for n, own in enumerate(sizes)]
    users = list(reversed(range(len(caches))))
    store = PackedCaches.pack(caches, device="cpu", stamp=STAMP).select(users)
    draw = torch.Generator().manual_seed(1)
    total = sum(lengths)
    time = torch.randint(0, 5000, (total,), generator=draw).cumsum(0)
    batch = SequenceBatch(
        offsets=torch.tensor([0, *lengths]).cumsum(0), tokens={"time": time, "target_time": time + 77}
    )
    q, k, v = (torch.randn(total, heads, 16, generator=draw, dtype=torch.float64) for heads in (2, 1, 1))
    tables = {
        "position_bias": torch.randn(300, generator=draw, dtype=torch.float64),
        "time_bias": torch.randn(129, generator=draw, dtype=torch.float64),
    }
    wanted = {"position": ["position_bias"], "time": ["time_bias"], "both": list(tables)}.get(mode, [])
    options = {name: tables[name] for name in wanted}

    def attend(fused):
        view = CachedView(batch, store, device=torch.device("cpu"), fused=fused)
        attention = view.softmax if mode == "softmax" else view.silu
        return [attention(q, k, v, layer=layer, scale=0.3, **options) for layer in (0, 1)]

    for got, truth in zip(attend(True), attend(False)):
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-11)


def test_a_store_of_another_model_is_refused():
    vectors, batch = make_events([22])
    store = Compressor(make_model(), model="m2").compress(vectors, batch)
    with pytest.raises(DataError, match="made by another model"):
        Compressor(make_model(), model="m1").states(vectors, batch, store)


def test_new_tokens_stand_behind_all_summaries():
    store = PackedCaches.pack([make_cache([9, 9])], device="cpu", stamp=STAMP)
    view = CachedView(SequenceBatch(offsets=torch.tensor([0, 3])), store, device=torch.device("cpu"))
    assert view.positions.tolist() == [22, 23, 24]
