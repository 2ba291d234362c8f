"""Masks on a GPU: those from outside as on the CPU, AttentionMask by Triton as its predicate says; about a minute."""

from __future__ import annotations

import pytest
import torch

from freescale.data import SequenceBatch
from freescale.kernels import (
    AttentionMask,
    SequenceLayout,
    hstu_attention,
    make_mask_kind,
    softmax_attention,
)
from freescale.model.recommender import make_encoder
from tests.foreign_masks import Dilated, FromTheEnd, SameCategory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [300, 0, 1, 17, 64, 700, 65]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
TARGETS = torch.tensor([5, 0, 1, 17, 0, 30, 2])
FOREIGN = {
    "dilated": Dilated(every=7, near=5),
    "category": SameCategory(torch.arange(sum(LENGTHS)) * 7 % 5),
    "ahead": SameCategory(torch.arange(sum(LENGTHS)) * 7 % 5, looks_ahead=True),
    "from the end": FromTheEnd(torch.tensor([3, 0, 1, 17, 0, 300, 9])),
}
KNOWN = {
    "window": AttentionMask(window=40),
    "prefix": AttentionMask(prefix=70),
    "segments": AttentionMask(segments=POSITIONS // 40, summaries=POSITIONS % 40 >= 37),
    "again": AttentionMask(segments=POSITIONS // 40 % 3, window=100, targets=TARGETS),
    "all": AttentionMask(
        window=200, prefix=3, targets=TARGETS, segments=POSITIONS // 40, summaries=POSITIONS % 40 >= 37
    ),
}


def results(
    mask: object, *, device: str, dtype: torch.dtype, softmax: bool, backend: str
) -> list[torch.Tensor]:
    """Output and all gradients."""
    draw = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=draw, dtype=torch.float64)
        return made.to(device, dtype).requires_grad_()

    leaves = [normal(tokens, 2, 32), normal(tokens, 2, 32), normal(tokens, 2, 16), normal(700), normal(129)]
    weight = normal(tokens, 2, 16)
    gaps = torch.randint(0, 10_000, (tokens,), generator=draw)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    if softmax:
        leaves = leaves[:3]
        out = softmax_attention(*leaves, offsets, scale=0.2, mask=mask, backend=backend)  # type: ignore[arg-type]
    else:
        out = hstu_attention(
            *leaves[:3],
            offsets,
            scale=1 / 64,
            alpha=0.2,
            position_bias=leaves[3],
            time_bias=leaves[4],
            key_time=gaps.cumsum(0).to(device),
            query_time=(gaps.cumsum(0) + gaps.roll(1)).to(device),
            mask=mask,  # type: ignore[arg-type]
            backend=backend,  # type: ignore[arg-type]
        )
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.detach())]


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor], limit: float) -> None:
    for ours, truth in zip(got, wanted, strict=True):
        error = (ours.cpu().double() - truth.cpu().double()).norm() / truth.double().norm().cpu()
        assert error < limit, error


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_mask_from_outside_gives_what_it_gives_on_the_cpu(
    name: str, softmax: bool, dtype: torch.dtype, limit: float
) -> None:
    torch.set_float32_matmul_precision("highest")
    mask = FOREIGN[name]
    got = results(mask, device="cuda", dtype=dtype, softmax=softmax, backend="auto")
    wanted = results(mask, device="cpu", dtype=torch.float64, softmax=softmax, backend="reference")
    assert_close(got, wanted, limit)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_the_triton_kernels_see_what_the_predicate_says(name: str, softmax: bool) -> None:
    torch.set_float32_matmul_precision("highest")
    mask = KNOWN[name]
    got = results(mask, device="cuda", dtype=torch.float32, softmax=softmax, backend="triton")
    wanted = results(mask, device="cuda", dtype=torch.float64, softmax=softmax, backend="tiles")
    assert_close(got, wanted, 5e-5)


def test_gradients_under_a_mask_from_outside_are_the_same_in_every_run() -> None:
    case = {"device": "cuda", "dtype": torch.float32, "softmax": False, "backend": "auto"}
    first = results(FOREIGN["dilated"], **case)  # type: ignore[arg-type]
    for _ in range(3):
        again = results(FOREIGN["dilated"], **case)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
@pytest.mark.parametrize("name", ["test_dilated", "test_same_category"])
def test_states_of_a_model_are_those_of_the_cpu(kind: str, name: str) -> None:
    """HSTU would fuse its layers here, and must not under a mask that they do not know."""
    torch.set_float32_matmul_precision("highest")
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        torch.manual_seed(0)
        shape = {"dim": 64, "layers": 2, "heads": 2, "max_length": 700, "dropout": 0.0}
        options = {"position_bias": True, "time_bias": kind == "hstu", "mask": make_mask_kind(name)}
        encoder = make_encoder(kind, **shape, **options).to(device, dtype)
        vectors = torch.randn(sum(LENGTHS), 64, dtype=torch.float64).to(device, dtype)
        time = torch.randint(0, 50_000, (sum(LENGTHS),)).cumsum(0)
        tokens = {"time": time, "target_time": time + 77, "category": time % 4}
        batch = SequenceBatch(offsets=torch.tensor([0, *LENGTHS]).cumsum(0), tokens=tokens).to(device)
        states = encoder(vectors, batch, SequenceLayout(batch.offsets, device=device))
        # Not a sum of squares: behind a norm that is a constant, and its gradients are nothing but rounding.
        weight = torch.randn(
            sum(LENGTHS), 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        (states * weight.to(device, dtype)).sum().backward()
        found.append([states.detach(), *(p.grad for p in encoder.parameters() if p.grad is not None)])
    usual = float(torch.stack([wanted.abs().max() for wanted in found[0]]).median())
    for wanted, got in zip(*found, strict=True):
        error = (got.cpu().double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3 * usual)
        assert error < 2e-3, error
