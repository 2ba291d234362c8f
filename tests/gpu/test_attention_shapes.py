"""Random shapes through the Triton attention kernels on a real GPU, every option, against the reference in float64.

1,000 shapes: `pytest tests/gpu/test_attention_shapes.py -n 8`; FREESCALE_SHAPES=3 for a sample, e.g. under
compute-sanitizer.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from freescale.kernels import AttentionMask, hstu_attention, softmax_attention
from freescale.kernels.attention import reference
from freescale.kernels.attention.triton import bias_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = int(os.environ.get("FREESCALE_SHAPES", "42"))
# Bytes for kept score gradients: the whole batch at once, in parts, and worked out again.
ROOM = [bias_gradients.SCORE_BYTES, 2**24, 0]
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 2e-5}
# (width, value width) and dtype go round in steps that meet all pairs; odd widths, and the widest of each kernel.
WIDTHS = [
    (64, 64),
    (16, 16),
    (25, 50),
    (128, 128),
    (96, 32),
    (256, 256),
    (200, 200),
    (50, 50),
    (32, 128),
    (8, 8),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
COMBINATIONS = [
    (
        *WIDTHS[n % len(WIDTHS)],
        DTYPES[(n // 10 + n) % 4],
        ("plain", "bias", "softmax", "position")[n % 4],
        n % 3,
    )
    for n in range(24)
]


def make_mask(kind: int, lengths: list[int], draw: random.Random) -> AttentionMask | None:
    """No mask; window, prefix and targets; segments with summaries and now and then everything together."""
    if kind == 0:
        return None
    segments = torch.cat([torch.arange(n) // 40 for n in lengths])
    summaries = torch.cat([torch.arange(n) % 40 >= 37 for n in lengths])
    options: dict[str, object] = {}
    if kind == 1 or draw.random() < 0.3:
        options |= {
            "window": draw.choice([None, 0, 1, 63, 200]),
            "prefix": draw.choice([0, 1, 70, 300]),
            "targets": torch.tensor([draw.randint(0, n) for n in lengths]),
        }
    if kind == 2:
        options |= {"segments": segments, "summaries": summaries}
    return AttentionMask(**options)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Error over the size of the truth; where that is zero (softmax over one token), over a tenth a number.

    There the gradient is a difference of two equal sums over the width, each of size ten and rounded on its own.
    """
    ours, truth = ours.detach().double(), truth.detach()
    numbers = max(truth.numel(), 1) ** 0.5
    size = float(truth.norm())
    return float((ours - truth).norm()) / (size if size > 1e-9 * numbers else 0.1 * numbers)


@pytest.mark.parametrize(
    "combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c)).replace("torch.", "")
)
@pytest.mark.timeout(600)
def test_random_shapes_equal_the_reference(combination, monkeypatch):
    width, v_width, dtype, mode, mask_kind = combination
    draw = random.Random(str(combination))
    for n in range(SHAPES):
        monkeypatch.setattr(bias_gradients, "SCORE_BYTES", ROOM[n % 3])
        lengths = [
            draw.choice([0, 1, 17, 64, draw.randint(0, 300), draw.randint(0, 900)])
            for _ in range(draw.randint(1, 6))
        ]
        heads = draw.choice([1, 2, 4])
        if draw.random() < 0.04:
            lengths.append(draw.choice([2048, 4097, 8191]))
            heads = 1
        if sum(lengths) == 0:
            lengths.append(5)
        mask = make_mask(mask_kind, lengths, draw)
        seed = draw.randint(0, 2**31)
        check(lengths, heads, width, v_width, dtype, mode, mask, seed)


def test_the_widest_heads_in_tf32_with_a_bias_fit_into_shared_memory(monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setitem(LIMITS, torch.float32, 2e-3)
    try:
        torch.set_float32_matmul_precision("high")
        for room in (ROOM[0], 0):
            monkeypatch.setattr(bias_gradients, "SCORE_BYTES", room)
            check([300, 17], 2, 256, 256, torch.float32, "bias", None, 0)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("room", ROOM)
def test_gradients_are_the_same_in_every_run(room, monkeypatch):
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", room)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([700, 3, 511, 900, 64])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    inputs = [
        torch.randn(tokens, 4, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3)
    ]
    tables = [torch.randn(n, generator=generator).cuda().requires_grad_() for n in (900, 129)]
    gaps = (torch.rand(tokens, generator=generator) ** 8 * 1e6).long().cuda()
    times = {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(-1)}

    def gradients():
        options = {
            "scale": 1 / 64,
            "alpha": 0.125,
            "position_bias": tables[0],
            "time_bias": tables[1],
            **times,
        }
        out = hstu_attention(*inputs, offsets, **options)
        return torch.autograd.grad(out.float().square().sum(), [*inputs, *tables])

    first = gradients()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, gradients()))


def check(lengths, heads, width, v_width, dtype, mode, mask, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    # As a layer has them: parts of one projection, so rows are longer than what is read of them.
    flat = torch.randn(tokens, heads * (2 * width + v_width), generator=generator).cuda().to(dtype)
    q, k, v = flat.split([heads * width, heads * width, heads * v_width], dim=1)
    inputs = [x.unflatten(1, (heads, -1)).detach().requires_grad_() for x in (q, k, v)]
    tables = []
    options: dict[str, object] = {"mask": mask}
    if mode in ("bias", "position"):
        tables.append(torch.randn(max(lengths) + 2, generator=generator).cuda().requires_grad_())
    if mode == "bias":
        tables.append(torch.randn(129, generator=generator).cuda().requires_grad_())
        gaps = (torch.rand(tokens, generator=generator) ** 8 * 1e6).long().cuda()
        options |= {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(-1)}
    names = ("position_bias", "time_bias")
    if mode == "softmax":
        ours, truth, options = (
            softmax_attention,
            reference.softmax_attention,
            {**options, "scale": width**-0.5},
        )
    else:
        ours, truth = hstu_attention, reference.hstu_attention
        options |= {"scale": 1 / 64, "alpha": width**-0.5}
    wide = [x.detach().double().requires_grad_() for x in (*inputs, *tables)]
    out = ours(*inputs, offsets, **options, **dict(zip(names, tables)))
    wanted = truth(*wide[:3], offsets, **options, **dict(zip(names, wide[3:])))
    weight = torch.randn(out.shape, generator=generator).cuda().to(dtype)
    got = torch.autograd.grad(out, [*inputs, *tables], weight)
    expected = torch.autograd.grad(wanted, wide, weight.double())
    errors = [relative_error(a, b) for a, b in zip((out, *got), (wanted, *expected))]
    # Gradients of the tables are summed from score gradients kept in half precision, of a bias rounded to it.
    limits = [LIMITS[dtype]] * 4 + [8e-3 if dtype.itemsize == 2 else LIMITS[dtype]] * 2
    assert all(e < limit for e, limit in zip(errors, limits)), (lengths, heads, mask, seed, errors)
