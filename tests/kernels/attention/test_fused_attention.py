"""The Triton kernels, run by Triton's interpreter on the CPU, against the reference; on a GPU see tests/gpu."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import AttentionMask, SequenceLayout, hstu_attention, softmax_attention
from freescale.kernels.attention import reference
from freescale.kernels.attention.plan import visibility
from freescale.kernels.attention.plan.room import BIAS_ROWS
from freescale.kernels.attention.triton import bias_gradients
from tests.effort import along_edges, examples, quick_first, slow

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)

LENGTHS = [70, 0, 1, 17]
SEGMENTS = torch.cat([torch.arange(n) // 12 for n in LENGTHS])
SUMMARIES = torch.cat([torch.arange(n) % 12 >= 10 for n in LENGTHS])
TARGETS = torch.tensor([5, 0, 1, 17])
MASKS = {
    "none": None,
    "window": AttentionMask(window=9),
    "prefix": AttentionMask(prefix=3),
    "targets": AttentionMask(targets=TARGETS),
    "segments": AttentionMask(segments=SEGMENTS, summaries=SUMMARIES),
    "all": AttentionMask(window=30, prefix=66, targets=TARGETS, segments=SEGMENTS, summaries=SUMMARIES),
    "again": AttentionMask(window=30, prefix=2, targets=TARGETS, segments=SEGMENTS % 3, summaries=SUMMARIES),
}


def make_inputs(lengths, *, heads=2, key_heads=None, width=16, v_width=16, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    tokens = sum(lengths)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    gaps = torch.randint(0, 10_000, (tokens,), generator=draw)
    return {
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "inputs": [
            normal(tokens, heads, width),
            normal(tokens, key_heads or heads, width),
            normal(tokens, key_heads or heads, v_width),
        ],
        "tables": [
            normal(max(lengths) + 3).to(table).detach().requires_grad_(),
            normal(129).to(table).detach().requires_grad_(),
        ],
        "times": {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(-1)},
    }


def compare(case, *, mode="plain", mask=None, atol=1e-11):
    """Values and all gradients of the kernels and of the reference."""
    offsets, inputs = case["offsets"], case["inputs"]
    tables = {"bias": case["tables"], "position": case["tables"][:1]}.get(mode, [])
    options = dict(zip(("position_bias", "time_bias"), tables), mask=mask)
    if mode == "bias":
        options |= case["times"]
    if mode == "softmax":
        ours, truth, options = softmax_attention, reference.softmax_attention, {**options, "scale": 0.25}
    else:
        ours, truth = hstu_attention, reference.hstu_attention
        options |= {"scale": 0.125, "alpha": 0.5}
    got = ours(*inputs, offsets, backend="triton", **options)
    wide = [x.detach().double().requires_grad_() for x in (*inputs, *tables)]
    options |= dict(zip(("position_bias", "time_bias"), wide[3:]))
    wanted = truth(*wide[:3], offsets, **options)
    weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got).to(got.dtype)
    pairs = [(got, wanted)]
    pairs += zip(
        torch.autograd.grad(got, [*inputs, *tables], weight),
        torch.autograd.grad(wanted, wide, weight.double()),
    )
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=1e-3 if atol > 1e-6 else 1e-9, atol=atol)


def test_bias_that_no_tile_reads_is_not_made():
    """Rows 256 on see nothing of columns 0 to 127: that piece stays poisoned, and nothing may be read from it."""
    segments = torch.arange(300) // 140
    mask = AttentionMask(segments=segments, summaries=torch.arange(300) % 140 >= 138)
    work = SequenceLayout(torch.tensor([0, 300])).work
    assert work.seen_pieces(mask).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        compare(make_inputs([300], heads=1), mode="bias", mask=mask)
    finally:
        torch.use_deterministic_algorithms(False)


# How gradients of the tables come about: score gradients kept for the whole batch, kept for one or two sequences at a
# time with several tiles a program, or worked out again.
WAYS = {"kept": {}, "parts": {"SCORE_BYTES": 2**19, "_KEPT_PROGRAMS": 3}, "again": {"SCORE_BYTES": 0}}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """One of the ways, in memory that is full of NaN before: nothing may be read that nobody wrote."""
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(bias_gradients, name, value)
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mask", quick_first(["window", "targets", "segments", "all"], "all"))
def test_sequences_too_long_to_be_counted(monkeypatch, mask):
    monkeypatch.setattr(visibility, "MOST_COUNTED", 10)
    compare(make_inputs(LENGTHS), mode="bias", mask=MASKS[mask])


@pytest.mark.parametrize(("mask", "way"), along_edges(MASKS, WAYS), indirect=["way"])
def test_silu_with_both_biases_under_every_mask(mask, way):
    compare(make_inputs(LENGTHS), mode="bias", mask=MASKS[mask])


@pytest.mark.parametrize(("lengths", "way"), along_edges([[20], [64, 3]], WAYS), indirect=["way"])
def test_keys_that_a_prefix_sees_ahead_count_as_distance_0_inside_one_tile(lengths, way):
    compare(make_inputs(lengths), mode="bias", mask=MASKS["prefix"])


@pytest.mark.parametrize("mask", quick_first(MASKS, "none", "prefix", "all"))
def test_softmax_under_every_mask(mask):
    compare(make_inputs(LENGTHS), mode="softmax", mask=MASKS[mask])


@pytest.mark.parametrize(("shared", "mask"), along_edges([(4, 2), (3, 1)], ["none", "segments"]))
def test_heads_that_share_keys_and_values(shared, mask):
    heads, key_heads = shared
    compare(make_inputs(LENGTHS, heads=heads, key_heads=key_heads), mode="softmax", mask=MASKS[mask])


def test_shared_heads_add_their_gradients_up_in_single_precision():
    compare(make_inputs([70], heads=4, key_heads=1, dtype=torch.float16), mode="softmax", atol=5e-2)
    compare(make_inputs([40], heads=2, key_heads=1, width=200, v_width=200), mode="softmax")


def test_shared_heads_of_a_batch_without_tokens():
    case = make_inputs([0, 0], heads=4, key_heads=2)
    out = softmax_attention(*case["inputs"], case["offsets"], scale=1.0, backend="triton")
    assert out.shape == (0, 4, 16)
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), case["inputs"]))


@pytest.mark.parametrize(("width", "v_width"), [(25, 50), (96, 40), slow(3, 5)])
def test_widths_that_are_no_powers_of_two(width, v_width):
    compare(make_inputs([33, 5], width=width, v_width=v_width), mode="position")


def test_the_widest_heads_take_a_kernel_for_keys_and_one_for_values():
    compare(make_inputs([33, 5], heads=1, width=200, v_width=200))


@pytest.mark.parametrize("way", quick_first(WAYS, "kept"), indirect=True)
def test_half_precision_adds_the_bias_by_a_product(way):
    compare(make_inputs([70, 17], dtype=torch.float16), mode="bias", atol=5e-2)


@pytest.mark.parametrize(
    ("kind", "way"),
    along_edges(
        [("plain", 2), ("softmax", 2), ("softmax", 1)],
        WAYS,
        also=lambda kind, way: kind[1] == 1 and way == "kept",
    ),
    indirect=["way"],
)
def test_queries_may_read_score_gradients_without_a_table(kind, way, monkeypatch):
    mode, key_heads = kind
    monkeypatch.setattr(bias_gradients, "KEPT_WIDTHS", (0, 64))
    case = make_inputs([140, 17], heads=2, key_heads=key_heads, dtype=torch.float16)
    compare(case, mode=mode, atol=5e-2)


@pytest.mark.parametrize("way", quick_first(WAYS, "parts"), indirect=True)
def test_single_precision(way):
    compare(make_inputs([70, 17], dtype=torch.float32), mode="bias", atol=1e-3)


@pytest.mark.parametrize("way", quick_first(WAYS, "again"), indirect=True)
def test_the_widest_heads_with_a_bias(way):
    compare(make_inputs([33, 5], heads=1, width=200, v_width=200), mode="position")


@pytest.mark.parametrize(
    ("mask", "way"), along_edges([None, AttentionMask(window=20, prefix=2)], WAYS), indirect=["way"]
)
def test_query_tiles_that_reach_over_pairs_nobody_wrote(mask, way):
    """Heads over 64 wide have query tiles twice as high as those of the keys."""
    case = make_inputs([150], heads=1, width=72, v_width=72, dtype=torch.float16)
    compare(case, mode="position", mask=mask, atol=5e-2)


@pytest.mark.slow
def test_sums_of_many_programs_go_through_two_steps(monkeypatch):
    monkeypatch.setattr("freescale.kernels.attention.plan.bias.CHUNK", 2)
    # Room for the first sequence, so that the second is a part of its own behind three blocks.
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", 3 * BIAS_ROWS**2 * 8)
    compare(make_inputs([140, 33], heads=1), mode="bias")


@examples(3, thorough=60)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_jagged_batch(lengths, heads, seed):
    if sum(lengths):
        compare(make_inputs(lengths, heads=heads, seed=seed))


@pytest.mark.parametrize("way", quick_first(WAYS, "kept"), indirect=True)
def test_numerical_gradients_agree(way):
    case = make_inputs([3, 9], heads=1, width=2, v_width=2)
    layout = SequenceLayout(case["offsets"])

    def attend(q, k, v, position_bias, time_bias):
        tables = {"position_bias": position_bias, "time_bias": time_bias, **case["times"]}
        return hstu_attention(q, k, v, case["offsets"], scale=0.25, layout=layout, backend="triton", **tables)

    assert torch.autograd.gradcheck(attend, (*case["inputs"], *case["tables"]), fast_mode=True)


@pytest.mark.parametrize("way", quick_first(WAYS, "parts"), indirect=True)
def test_gradients_are_the_same_in_every_run(way):
    case = make_inputs([70, 17], dtype=torch.float32)
    options = {"position_bias": case["tables"][0], "time_bias": case["tables"][1], **case["times"]}
    runs = []
    for _ in range(2):
        out = hstu_attention(*case["inputs"], case["offsets"], scale=0.1, backend="triton", **options)
        runs.append(torch.autograd.grad(out.sum(), [*case["inputs"], *case["tables"]]))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_a_batch_without_tokens_has_zero_gradients():
    case = make_inputs([0, 0])
    out = hstu_attention(
        *case["inputs"], case["offsets"], scale=1.0, position_bias=case["tables"][0], backend="triton"
    )
    grads = torch.autograd.grad(out.sum(), [*case["inputs"], case["tables"][0]])
    assert out.shape == (0, 2, 16)
    assert all((grad == 0).all() for grad in grads)


def test_rows_with_gaps_between_them_are_read_in_place():
    flat = torch.randn(87, 3 * 32, dtype=torch.float64)
    case = make_inputs([70, 17])
    case["inputs"] = [x.unflatten(1, (2, 16)).requires_grad_() for x in flat.split(32, dim=1)]
    assert not case["inputs"][0].is_contiguous()
    compare(case)


@examples(8, thorough=200)
@given(st.lists(st.integers(0, 2**62) | st.integers(0, 100), min_size=2, max_size=20))
def test_time_buckets_are_those_of_the_reference(stamps):
    times = torch.tensor(stamps)
    layout = SequenceLayout(torch.tensor([0, len(stamps)]))
    found = layout.buckets(times, times, backend="triton").view(128, 128)[: len(stamps), : len(stamps)]
    wanted = reference.time_bucket(times[:, None] - times[None, :])
    assert torch.equal(found.long(), wanted)
