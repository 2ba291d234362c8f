"""Candidates scored from a cache of their history: the same states as in one pass, in chunks of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import SequenceBatch
from freescale.errors import ConfigError, DataError
from freescale.kernels import SequenceLayout
from freescale.model.serving.history_cache import candidate_states, extend_caches
from freescale.model.views.request_view import target_states
from tests.effort import examples
from tests.model.views.test_request_view import make, requests_of


def part_of(batch, spans, targets=None):
    """Tokens from first to last of every request."""
    starts = batch.offsets[:-1].tolist()
    index = torch.tensor([s + i for s, (a, b) in zip(starts, spans) for i in range(a, b)], dtype=torch.int64)
    return SequenceBatch(
        offsets=torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0),
        tokens={name: values[index] for name, values in batch.tokens.items()},
        targets=targets,
    )


def from_cache(encoder, batch, sizes, kept, grown, chunk):
    """The first `kept` events cached at once, more up to `grown` added, the rest asked with the candidates."""
    first = [min(kept, max(n - 1, 0)) for n, _ in sizes]
    second = [max(a, min(grown, max(n - 1, 0))) for a, (n, _) in zip(first, sizes)]
    old = part_of(batch, [(0, a) for a in first])
    caches = extend_caches(encoder, old.tokens["vector"], old, model="w")
    more = part_of(batch, list(zip(first, second)))
    caches = extend_caches(encoder, more.tokens["vector"], more, caches, model="w")
    new = part_of(batch, [(b, n + k) for b, (n, k) in zip(second, sizes)], batch.targets)
    return candidate_states(encoder, new.tokens["vector"], new, caches, chunk=chunk, model="w")


@pytest.mark.parametrize("kind", ["hstu", "hstu with a dense part", "sasrec", "llama"])
def test_scores_from_a_cache_are_those_of_one_pass(kind):
    sizes = [(11, 4), (0, 3), (1, 1), (5, 0), (7, 9)]
    encoder, batch = make(kind).eval(), requests_of(sizes)
    wanted = target_states(encoder, batch.tokens["vector"], batch, SequenceLayout(batch.offsets))
    for kept, grown, chunk in ((10, 10, None), (3, 6, 2), (0, 0, 1), (2, 9, 100)):
        got = from_cache(encoder, batch, sizes, kept, grown, chunk)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@examples(15, thorough=300)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), min_size=1, max_size=3),
    st.integers(0, 11),
    st.integers(0, 11),
    st.integers(1, 6),
)
def test_any_requests(sizes, kept, grown, chunk):
    encoder, batch = make("hstu").eval(), requests_of(sizes)
    wanted = target_states(encoder, batch.tokens["vector"], batch, SequenceLayout(batch.offsets))
    got = from_cache(encoder, batch, sizes, kept, grown, chunk)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_cache_does_not_depend_on_when_the_request_comes():
    encoder, batch = make("hstu").eval(), requests_of([(6, 2)])
    later = batch.with_tokens(
        time=torch.where(torch.arange(8) < 6, batch.tokens["time"], batch.tokens["time"] + 90_000),
        target_time=torch.where(
            torch.arange(8) < 5, batch.tokens["target_time"], batch.tokens["target_time"] + 90_000
        ),
    )
    for asked in (batch, later):
        wanted = target_states(encoder, asked.tokens["vector"], asked, SequenceLayout(asked.offsets))
        old = part_of(batch, [(0, 5)])  # made before anybody knew of the request
        caches = extend_caches(encoder, old.tokens["vector"], old)
        new = part_of(asked, [(5, 8)], asked.targets)
        got = candidate_states(encoder, new.tokens["vector"], new, caches)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_what_cannot_be_kept_is_refused():
    batch = requests_of([(3, 2)])
    with pytest.raises(ConfigError, match="cannot be kept"):
        extend_caches(make("hstu with a window"), batch.tokens["vector"], batch)
    encoder = make("hstu").eval()
    old = part_of(batch, [(0, 2)])
    caches = extend_caches(encoder, old.tokens["vector"], old, model="one")
    with pytest.raises(DataError, match="other weights"):
        candidate_states(encoder, batch.tokens["vector"], batch, caches, model="other")
    with pytest.raises(DataError, match="chunk must be"):
        candidate_states(encoder, batch.tokens["vector"], batch, chunk=0)
