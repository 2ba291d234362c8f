"""Candidates on a GPU: one pass of the Triton kernels against single passes in float64, and scores from a cache."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels import SequenceLayout
from freescale.model.serving.candidate_graph import CandidateGraph
from freescale.model.serving.history_cache import HistoryCache, HistoryCaches, candidate_states, extend_caches
from freescale.model.serving.history_store import HistoryStore
from freescale.model.views.cached_view import CachedView
from freescale.model.views.request_view import target_states
from tests.exports.test_scores import HISTORY, SHOWN, TIMES, export, numbers
from tests.kernels.attention.test_targets import MASKS, make_leaves, make_mask
from tests.kernels.attention.test_targets import attend as attend_cpu
from tests.model.serving.test_history_cache import part_of
from tests.model.views.test_request_view import make, requests_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = [(150, 70), (0, 3), (64, 1), (30, 17), (5, 0)]


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("mask", ["plain", "all"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-3), (torch.bfloat16, 2e-2)])
def test_candidates_in_one_pass_against_float64(mask, softmax, dtype, limit):
    from freescale.kernels import hstu_attention, softmax_attention

    tokens = sum(n + k for n, k in REQUESTS)
    leaves, times = make_leaves(tokens, seed=0, width=32, longest=151)
    every = torch.arange(tokens)
    options = {**MASKS[mask], "softmax": softmax, "backend": "reference"}
    wanted = attend_cpu(leaves, times, every, REQUESTS, **options)
    own = leaves[:3] if softmax else leaves
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    truth = [wanted, *torch.autograd.grad(wanted, own, weight)]
    mine = [x.detach().to("cuda", dtype).requires_grad_() for x in leaves[:3]]
    mine += [] if softmax else [x.detach().to("cuda", torch.float32).requires_grad_() for x in leaves[3:]]
    offsets = torch.tensor([0, *(n + k for n, k in REQUESTS)]).cumsum(0)
    shared = {"mask": make_mask(REQUESTS, **MASKS[mask]), "backend": "triton"}
    if softmax:
        out = softmax_attention(*mine, offsets, scale=0.3, **shared)
    else:
        bias = {"position_bias": mine[3], "time_bias": mine[4], "key_time": times.cuda()}
        bias |= {"query_time": times.cuda() + 1000}
        out = hstu_attention(*mine[:3], offsets, scale=0.1, alpha=0.5, **bias, **shared)
    for got, want in zip([out, *torch.autograd.grad(out, mine, weight.to(out))], truth, strict=True):
        assert (got.detach().double().cpu() - want.detach()).norm() / want.detach().norm() < limit


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
def test_states_of_candidates_are_those_of_the_cpu_with_a_cache_and_without(kind):
    encoder, batch = make(kind).eval(), requests_of([(11, 40), (0, 3), (1, 1)])
    wanted = target_states(encoder, batch.tokens["vector"], batch, SequenceLayout(batch.offsets)).detach()
    encoder, moved = encoder.float().cuda(), batch.to("cuda")
    vectors = moved.tokens["vector"].float()
    with torch.no_grad():
        once = target_states(encoder, vectors, moved, SequenceLayout(batch.offsets, device="cuda"))
        chunked = candidate_states(encoder, vectors, moved, chunk=7)
    for got in (once, chunked):
        assert (got.double().cpu() - wanted).norm() / wanted.norm() < 5e-3


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("new", "cached"), [(1, 2100), (3, 130), (20, 60)])
def test_cached_candidates_against_float64(new, cached, softmax, dtype, limit):
    """One user alone, whose keys are cut into parts; and three, one of them without a cache."""
    for sizes, counts in (([(new, 70)], [cached]), ([(new, 70), (1, 3), (0, 5)], [cached, 0, 7])):
        draw, batch = torch.Generator().manual_seed(0), requests_of(sizes)
        heads = torch.randn(3, sum(n + k for n, k in sizes), 2, 64, generator=draw, dtype=torch.float64)
        kept = [torch.randn(2, 1, n, 2, 64, generator=draw, dtype=torch.float64) for n in counts]
        tables = torch.randn(2, 2200, generator=draw, dtype=torch.float64)
        found = []
        for device, own in (("cpu", torch.float64), ("cuda", dtype)):
            caches = [
                HistoryCache(keys=x[0].to(device, own), values=x[1].to(device, own), times=stamps.to(device))
                for x, stamps in zip(kept, (torch.arange(n) * 50 for n in counts))
            ]
            store = HistoryCaches(caches, device=torch.device(device))
            view = CachedView(batch.to(device), store, device=torch.device(device))
            inputs = [x.to(device, own) for x in heads]
            if softmax:
                found.append(view.softmax(*inputs, layer=0, scale=0.3))
            else:
                position, time = (
                    x.to(device, torch.float64 if device == "cpu" else torch.float32) for x in tables
                )
                bias = {"position_bias": position, "time_bias": time[:129]}
                found.append(view.silu(*inputs, layer=0, scale=0.1, **bias))
        assert (found[1].double().cpu() - found[0]).norm() / found[0].norm() < limit


def test_a_recorded_request_answers_as_one_pass():
    """Any users of the store, fewer candidates, a history that has grown: by one graph."""
    encoder, sizes = make("hstu").eval(), [(11, 40), (6, 3), (1, 1)]
    batch = requests_of(sizes)
    wanted = target_states(encoder, batch.tokens["vector"], batch, SequenceLayout(batch.offsets)).detach()
    wanted = wanted.split([k for _, k in sizes])
    encoder, moved = encoder.float().cuda(), batch.to("cuda")
    device = torch.device("cuda")
    old = part_of(moved, [(0, max(n - 2, 0)) for n, _ in sizes])
    caches = extend_caches(encoder, old.tokens["vector"].float(), old)
    store = HistoryStore(caches[0], users=3, events=12, device=device)
    for place, cache in enumerate(caches):
        store.put(place, cache)
    graph = CandidateGraph(encoder, store, users=2, candidates=50, events=2, dim=8)
    for users in ([0, 1], [2], [1, 0]):
        whole = moved.select(users)
        part = part_of(whole, [(max(sizes[n][0] - 2, 0), sum(sizes[n])) for n in users], whole.targets)
        got = graph.states(part.tokens["vector"].float(), part, users)
        want = torch.cat([wanted[n] for n in users])
        assert (got.double().cpu() - want).norm() / want.norm() < 5e-3


def test_an_exported_model_scores_on_a_gpu_as_on_a_cpu(tmp_path):
    model = export(tmp_path / "export")
    moved = model.to("cuda")
    asked = {"times": TIMES, "request_time": 9500}
    wanted = torch.tensor(numbers(model.score(HISTORY, SHOWN, **asked)))
    cache = moved.remember(HISTORY, times=TIMES)
    latest = {"times": TIMES[-1:], "request_time": 9500, "cache": cache}
    found = [moved.score(HISTORY, SHOWN, **asked), moved.score(HISTORY, SHOWN, **asked, chunk=2)]
    found += [moved.score(HISTORY[-1:], SHOWN, **latest), moved.score(HISTORY[-1:], SHOWN, **latest, chunk=3)]
    for got in found:
        torch.testing.assert_close(torch.tensor(numbers(got)), wanted, rtol=0, atol=1e-9)
