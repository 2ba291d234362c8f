"""Candidates behind a history: k of them in one pass are k passes with one, in every backend and under every mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import AttentionMask, hstu_attention, softmax_attention
from freescale.kernels.attention.plan import visibility
from freescale.kernels.attention.triton import bias_gradients
from tests.effort import along_edges, examples

BACKENDS = ["reference", "tiles"]
if not torch.cuda.is_available():
    BACKENDS.append("triton")  # by Triton's interpreter
MASKS = {
    "plain": {},
    "window": {"window": 9},
    "prefix": {"prefix": 3},
    "segments": {"segments": 12},
    "all": {"window": 30, "prefix": 2, "segments": 12},
    "prefix beyond the history": {"window": 2, "prefix": 40, "segments": 5},
}
# Lengths of histories with their numbers of candidates: none of either, one, and around the edges of tiles.
REQUESTS = [[(66, 5), (0, 3), (1, 1), (17, 0)], [(63, 2), (64, 2), (65, 9)], [(130, 35), (0, 0), (3, 2)]]


def make_mask(requests, *, window=None, prefix=0, segments=None, only_targets=False):
    """A mask of whole requests; candidates belong to the segment that the history ends in."""
    targets = torch.tensor([k for _, k in requests])
    if segments is None:
        return AttentionMask(window=window, prefix=prefix, targets=targets, only_targets=only_targets)
    places = torch.cat([torch.arange(n + k).clamp(max=max(n - 1, 0)) for n, k in requests])
    real = torch.cat([torch.arange(n + k) < n for n, k in requests])
    return AttentionMask(
        window=window,
        prefix=prefix,
        targets=targets,
        only_targets=only_targets,
        segments=places // segments,
        summaries=(places % segments >= segments - 2) & real,
    )


def make_leaves(tokens, *, seed, heads=2, width=4, longest=200):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    gaps = torch.randint(0, 10_000, (tokens,), generator=draw)
    return [normal(tokens, heads, width) for _ in range(3)] + [normal(longest), normal(129)], gaps.cumsum(0)


def attend(leaves, times, index, requests, *, softmax, backend, **mask):
    """Attention over the tokens at `index`, which are these requests one after the other."""
    q, k, v = (x[index] for x in leaves[:3])
    offsets = torch.tensor([0, *(n + k for n, k in requests)]).cumsum(0)
    seen = make_mask(requests, **mask)
    if softmax:
        return softmax_attention(q, k, v, offsets, scale=0.3, mask=seen, backend=backend)
    return hstu_attention(
        q,
        k,
        v,
        offsets,
        scale=0.1,
        alpha=0.5,
        position_bias=leaves[3],
        time_bias=leaves[4],
        key_time=times[index],
        query_time=times[index] + 1000,
        mask=seen,
        backend=backend,
    )


def in_one_pass_and_alone(requests, *, seed=0, softmax=False, backend="tiles", **mask):
    """Outputs of all tokens and gradients of everything: in one pass, and candidate by candidate."""
    tokens = sum(n + k for n, k in requests)
    # A table as long as the longest history needs, not as its candidates would.
    leaves, times = make_leaves(tokens, seed=seed, longest=max(n for n, _ in requests) + 1)
    edges = torch.tensor([0, *(n + k for n, k in requests)]).cumsum(0)
    spans = [torch.arange(int(edges[b]), int(edges[b + 1])) for b in range(len(requests))]
    together = attend(leaves, times, torch.arange(tokens), requests, softmax=softmax, backend=backend, **mask)
    singles, rows = [], []
    for (n, k), span in zip(requests, spans):
        singles += [((n, 0), span[:n])]
        rows += [(span[:n], torch.arange(n))]
        singles += [((n, 1), torch.cat([span[:n], span[n + c, None]])) for c in range(k)]
        rows += [(span[n + c, None], torch.tensor([n])) for c in range(k)]
    outs = attend(
        leaves,
        times,
        torch.cat([index for _, index in singles]),
        [request for request, _ in singles],
        softmax=softmax,
        backend="reference",
        **mask,
    )
    starts = torch.tensor([0, *(len(index) for _, index in singles)]).cumsum(0)
    alone = torch.zeros_like(together)
    for start, (token, row) in zip(starts.tolist(), rows):
        alone = alone.index_copy(0, token, outs[start + row])
    weight = torch.linspace(-1, 1, together.numel(), dtype=torch.float64).view_as(together)
    own = leaves[:3] if softmax else leaves
    return [
        (out.detach(), torch.autograd.grad(out, own, weight, allow_unused=True)) for out in (together, alone)
    ]


def assert_same(found):
    (out, grads), (wanted, wanted_grads) = found
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    for grad, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize(
    ("requests", "mask", "backend", "softmax"),
    along_edges(
        REQUESTS,
        MASKS,
        BACKENDS,
        [False, True],
        also=lambda r, m, b, s: m == "all" and (b == "tiles" or (r is REQUESTS[0] and not s)),
    ),
)
def test_candidates_in_one_pass_are_passes_with_one(requests, mask, backend, softmax):
    assert_same(in_one_pass_and_alone(requests, backend=backend, softmax=softmax, **MASKS[mask]))


@pytest.mark.skipif("triton" not in BACKENDS, reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("way", "mask"),
    along_edges([{"SCORE_BYTES": 2**19, "_KEPT_PROGRAMS": 3}, {"SCORE_BYTES": 0}], ["all", "plain"]),
)
def test_gradients_of_tables_that_come_about_in_other_ways(way, mask, monkeypatch):
    for name, value in way.items():
        monkeypatch.setattr(bias_gradients, name, value)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert_same(in_one_pass_and_alone([(33, 20), (3, 2)], backend="triton", **MASKS[mask]))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif("triton" not in BACKENDS, reason="the interpreter is for machines without a GPU")
def test_sequences_too_long_to_be_counted(monkeypatch):
    monkeypatch.setattr(visibility, "MOST_COUNTED", 10)
    assert_same(in_one_pass_and_alone([(40, 3), (0, 2)], backend="triton", **MASKS["all"]))


@examples(5, thorough=200)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 8)), min_size=1, max_size=3).filter(any),
    window=st.none() | st.integers(0, 80),
    prefix=st.integers(0, 80),
    segments=st.none() | st.integers(2, 30),
    backend=st.sampled_from(BACKENDS[1:]),
    softmax=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_requests_under_any_mask(requests, window, prefix, segments, backend, softmax, seed):
    if sum(n + k for n, k in requests):
        mask = {"window": window, "prefix": prefix, "segments": segments}
        assert_same(in_one_pass_and_alone(requests, seed=seed, backend=backend, softmax=softmax, **mask))


@pytest.mark.parametrize("backend", BACKENDS)
def test_candidates_may_change_places_be_repeated_and_have_other_neighbours(backend):
    leaves, times = make_leaves(40, seed=1)
    times[30:] = times[30]  # the request's
    history = torch.arange(30)

    def scores(candidates, *, before=()):
        index = torch.cat([*before, history, torch.tensor(candidates)])
        requests = [(len(x), 0) for x in before] + [(30, len(candidates))]
        out = attend(leaves, times, index, requests, softmax=False, backend=backend, window=25)
        return out[-len(candidates) :]

    straight = scores([30, 31, 32, 33])
    for other in (
        scores([33, 30, 32, 31])[[1, 3, 2, 0]],
        scores([30, 30, 31, 32, 32, 33])[[0, 2, 3, 5]],
        scores([30, 31, 32, 33, *range(34, 40)])[:4],
        scores([30, 31, 32, 33], before=(torch.arange(20),)),
    ):
        torch.testing.assert_close(other, straight, rtol=0, atol=1e-13)


def test_a_table_must_reach_over_histories_not_over_candidates():
    leaves, times = make_leaves(9, seed=0, longest=4)
    attend(leaves, times, torch.arange(9), [(3, 6)], softmax=False, backend="auto")
    with pytest.raises(ValueError, match="4 weights for sequences of up to 5"):
        attend(leaves, times, torch.arange(9), [(4, 5)], softmax=False, backend="auto")


@pytest.mark.parametrize(
    ("mask", "backend", "softmax"), along_edges(["window", "all", "prefix"], BACKENDS, [False, True], flip=1)
)
def test_targets_alone_are_what_they_are_beside_all_others(mask, backend, softmax):
    requests = [(40, 30), (0, 2), (5, 0), (17, 1)]
    tokens = sum(n + k for n, k in requests)
    leaves, times = make_leaves(tokens, seed=3)
    own = leaves[:3] if softmax else leaves
    is_target = torch.cat([torch.arange(n + k) >= n for n, k in requests])
    weight = (
        torch.linspace(-1, 1, tokens * 8, dtype=torch.float64).view(tokens, 2, 4) * is_target[:, None, None]
    )
    found = []
    for only in (False, True):
        options = {**MASKS[mask], "only_targets": only}
        every = torch.arange(tokens)
        out = attend(leaves, times, every, requests, softmax=softmax, backend=backend, **options)
        found.append([out[is_target].detach(), *torch.autograd.grad(out, own, weight)])
    assert not out[~is_target].any()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_only_targets_needs_targets():
    with pytest.raises(ValueError, match="only_targets needs targets"):
        AttentionMask(only_targets=True)
