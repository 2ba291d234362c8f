"""Masks of segments on the CPU: values and gradients of the loops and tiles against the plain reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import AttentionMask, SequenceLayout, hstu_attention, softmax_attention
from freescale.kernels.attention import reference
from freescale.kernels.attention.segment_runs import can_unroll
from tests.effort import examples


def make_inputs(lengths, *, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    tokens = sum(lengths)
    gaps = torch.randint(0, 10_000, (tokens,), generator=draw)
    return {
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "inputs": [normal(tokens, 2, 3), normal(tokens, 2, 3), normal(tokens, 2, 5)],
        "tables": [normal(max(lengths) + 3), normal(129)],
        "times": {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(-1)},
    }


@st.composite
def segmented(draw):
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    tokens = sum(lengths)
    steps = torch.tensor(draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=tokens, max_size=tokens)))
    segments = torch.cat([part.cumsum(0) for part in steps.split(lengths)]) if tokens else steps
    summaries = torch.tensor(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    return lengths, AttentionMask(segments=segments.long(), summaries=summaries.bool())


@examples(20, thorough=200)
@given(segmented(), st.sampled_from(["plain", "bias", "softmax"]), st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_reference(batch, mode, seed):
    lengths, mask = batch
    case = make_inputs(lengths, seed=seed)
    options = {"scale": 0.3, "mask": mask}
    tables = case["tables"] if mode == "bias" else []
    if mode == "bias":
        options |= dict(zip(("position_bias", "time_bias"), tables)) | case["times"]
    ours, truth, backend = hstu_attention, reference.hstu_attention, "loops"
    if mode == "softmax":
        ours, truth, backend = softmax_attention, reference.softmax_attention, "tiles"
    got = ours(*case["inputs"], case["offsets"], backend=backend, **options)
    wanted = truth(*case["inputs"], case["offsets"], **options)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
    if not sum(lengths):
        return
    weight = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    inputs = [*case["inputs"], *tables]
    for own, true in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs, allow_unused=True),
    ):
        torch.testing.assert_close(own, true, rtol=1e-9, atol=1e-10)


def test_all_layers_share_what_was_prepared():
    case = make_inputs([20])
    mask = AttentionMask(segments=torch.arange(20) // 5, summaries=torch.arange(20) % 5 == 4)
    layout = SequenceLayout(case["offsets"])
    assert layout.runs(mask) is layout.runs(mask)
    # 4 segments of 5, with 0, 1, 2 and 3 summaries in front.
    assert len(layout.runs(mask).index) == 20 + 6


@pytest.mark.parametrize(
    ("mask", "possible"),
    [
        (AttentionMask(segments=torch.tensor([0, 0, 1, 0, 0])), True),
        (AttentionMask(segments=torch.tensor([0, 1, 0, 0, 0])), False),
        (AttentionMask(segments=torch.tensor([0, 0, 1, 0, 0]), window=2), False),
        (AttentionMask(segments=torch.tensor([0, 0, 1, 0, 0]), prefix=1), False),
        (AttentionMask(segments=torch.tensor([0, 0, 1, 0, 0]), targets=torch.tensor([1, 1])), False),
        (AttentionMask(window=2), False),
    ],
)
def test_only_segments_in_one_piece_are_sequences_of_their_own(mask, possible):
    offsets = torch.tensor([0, 3, 5])
    assert can_unroll(mask, offsets) is possible
    q = torch.randn(5, 1, 4, dtype=torch.float64)
    wanted = reference.hstu_attention(q, q, q, offsets, scale=1.0, mask=mask)
    torch.testing.assert_close(hstu_attention(q, q, q, offsets, scale=1.0, mask=mask), wanted)


def test_tiles_ask_the_mask_and_find_the_same():
    case = make_inputs([20])
    mask = AttentionMask(segments=torch.arange(20) // 5, summaries=torch.arange(20) % 5 == 4)
    options = {"scale": 0.3, "mask": mask, "position_bias": case["tables"][0]}
    loops, tiles = (
        hstu_attention(*case["inputs"], case["offsets"], backend=backend, **options)
        for backend in ("loops", "tiles")
    )
    torch.testing.assert_close(tiles, loops, rtol=1e-10, atol=1e-11)
