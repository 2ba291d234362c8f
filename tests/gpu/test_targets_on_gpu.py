"""Candidates on a GPU: one pass of the Triton kernels against single passes in float64, and scores from a cache."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels import SequenceLayout
from freescale.model.serving.history_cache import candidate_states
from freescale.model.serving.request_view import target_states
from tests.kernels.attention.test_targets import MASKS, make_leaves, make_mask
from tests.kernels.attention.test_targets import attend as attend_cpu
from tests.model.serving.test_request_view import make, requests_of

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
