"""Masks from outside: values and gradients against pairs written out in Python, on every way that takes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.errors import FreeScaleError
from freescale.kernels import AttentionMask, SequenceLayout, hstu_attention, softmax_attention
from freescale.kernels.attention import reference
from freescale.kernels.attention.cpu.tile_layout import TileLayout
from freescale.kernels.attention.cpu.tile_masks import RuleTiles
from freescale.kernels.attention.mask_rule import visible_in_sequence
from tests.effort import examples
from tests.foreign_masks import Dilated, FromTheEnd, SameCategory, matrix

ODD_LENGTHS = [0, 1, 17, 33, 0, 40, 2]
EXACT = {"rtol": 1e-10, "atol": 1e-10}
MASKS = ["dilated", "category", "ahead", "from the end"]


def make_mask(name, lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    if name == "dilated":
        return Dilated(every=1 + seed % 5, near=seed % 3)
    if name == "from the end":
        return FromTheEnd(torch.randint(0, 20, (len(lengths),), generator=draw))
    category = torch.randint(0, 3, (sum(lengths),), generator=draw)
    return SameCategory(category, looks_ahead=name == "ahead")


def make_inputs(lengths, *, heads=2, kv_heads=2, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    tokens = sum(lengths)
    gaps = torch.randint(0, 10_000, (tokens,), generator=draw)
    inputs = [normal(tokens, heads, 3), normal(tokens, kv_heads, 3), normal(tokens, kv_heads, 5)]
    tables = [normal(max(lengths, default=0) + 1), normal(reference.NUM_TIME_BUCKETS)]
    times = {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(1)}
    return inputs, tables, times


def dense(inputs, tables, times, seen, *, lengths, softmax):
    """Attention over all pairs of the batch at once, only those seen counting."""
    q, k, v = (x.transpose(0, 1) for x in inputs)
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * 0.7
    if softmax:
        weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * seen
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    else:
        position = torch.cat([torch.arange(n) for n in lengths])
        scores = scores + tables[0][(position[:, None] - position).clamp(min=0, max=len(tables[0]) - 1)]
        scores = scores + tables[1][reference.time_bucket(times["query_time"][:, None] - times["key_time"])]
        weights = torch.nn.functional.silu(scores) * 0.1 * seen
    return (weights @ v).transpose(0, 1)


def attend(inputs, tables, times, lengths, *, softmax, **options):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    if softmax:
        return softmax_attention(*inputs, offsets, scale=0.7, **options)
    bias = {"position_bias": tables[0], "time_bias": tables[1], **times}
    return hstu_attention(*inputs, offsets, scale=0.1, alpha=0.7, **bias, **options)


def assert_same(got, wanted, leaves):
    torch.testing.assert_close(got, wanted, **EXACT)
    weight = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    pairs = zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (got, wanted)), strict=True)
    for own, true in pairs:
        torch.testing.assert_close(own, true, **EXACT)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_values_and_gradients_are_those_of_pairs_written_out(name, softmax, backend):
    inputs, tables, times = make_inputs(ODD_LENGTHS, heads=4, kv_heads=2 if softmax else 4)
    mask = make_mask(name, ODD_LENGTHS)
    seen = matrix(mask.plainly, ODD_LENGTHS)
    layout = SequenceLayout(torch.tensor([0, *ODD_LENGTHS]).cumsum(0), block=16)
    got = attend(
        inputs, tables, times, ODD_LENGTHS, softmax=softmax, mask=mask, layout=layout, backend=backend
    )
    wanted = dense(inputs, tables, times, seen, lengths=ODD_LENGTHS, softmax=softmax)
    assert_same(got, wanted, [*inputs, *([] if softmax else tables)])


@examples(8, thorough=200)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    name=st.sampled_from(MASKS),
    softmax=st.booleans(),
    block=st.sampled_from([8, 16, None]),
    seed=st.integers(0, 99),
)
def test_any_jagged_batch_equals_the_reference(lengths, name, softmax, block, seed):
    inputs, tables, times = make_inputs(lengths, seed=seed)
    mask, offsets = make_mask(name, lengths, seed), torch.tensor([0, *lengths]).cumsum(0)
    layout = SequenceLayout(offsets, block=block)
    case = {"softmax": softmax, "mask": mask, "layout": layout}
    got = attend(inputs, tables, times, lengths, **case)
    wanted = attend(inputs, tables, times, lengths, **case, backend="reference")
    assert_same(got, wanted, [*inputs, *([] if softmax else tables)])


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("lengths", [[0], [0, 0]])
def test_a_batch_without_tokens_has_an_empty_output_and_zero_gradients(softmax, lengths):
    inputs, tables, times = make_inputs(lengths)
    got = attend(inputs, tables, times, lengths, softmax=softmax, mask=Dilated())
    assert got.shape == (0, 2, 5)
    grads = torch.autograd.grad(got.sum(), [*inputs, *([] if softmax else tables)])
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("softmax", [False, True])
def test_a_token_that_sees_nothing_gets_zeros(softmax):
    inputs, tables, times = make_inputs([5])
    mask = SameCategory(torch.tensor([0, 1, 0, 1, 2]))
    out = attend(inputs, tables, times, [5], softmax=softmax, mask=mask)
    assert (out[[0, 1, 4]] == 0).all()
    assert (out[[2, 3]] != 0).all()


def test_what_is_hidden_may_be_far_above_what_is_seen():
    q = torch.full((3, 1, 1), 40.0, requires_grad=True)
    k = torch.tensor([[[1.0]], [[40.0]], [[1.0]]], requires_grad=True)
    mask = SameCategory(torch.tensor([0, 1, 0]))
    out = softmax_attention(q, k, k, torch.tensor([0, 3]), scale=1.0, mask=mask)
    out.sum().backward()
    assert torch.isfinite(q.grad).all()
    assert torch.isfinite(k.grad).all()


def test_gradients_are_the_same_in_every_run():
    inputs, tables, times = make_inputs(ODD_LENGTHS)
    mask = make_mask("category", ODD_LENGTHS)

    def gradients():
        out = attend(inputs, tables, times, ODD_LENGTHS, softmax=False, mask=mask)
        return torch.autograd.grad(out.square().sum(), [*inputs, *tables])

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients()))


def test_tiles_of_which_nothing_is_seen_are_left_out_and_the_rest_is_asked_tile_by_tile():
    asked = []

    class Near(Dilated):
        def sees(self, i, j, **others):
            asked.append((i.numel(), j.numel()))
            return i - j <= 3

    layout = TileLayout(torch.tensor([0, 64, 96]), block=16)
    tiles = RuleTiles(Near(), layout)
    assert [(pair.query_level, pair.key_level) for pair in tiles.pairs] == [
        (i, j) for i in range(4) for j in (i - 1, i) if j >= 0
    ]
    assert set(asked) == {(16, 16)}


@st.composite
def kernel_masks(draw):
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    tokens = sum(lengths)
    segments = draw(
        st.none() | st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens).map(torch.tensor)
    )
    return lengths, AttentionMask(
        window=draw(st.none() | st.integers(0, 20)),
        prefix=draw(st.sampled_from([0, 0, 5])),
        targets=draw(st.none() | st.tuples(*(st.integers(0, n) for n in lengths)).map(torch.tensor)),
        segments=segments,
        summaries=None if segments is None else torch.arange(tokens) % 4 == 3,
    )


@examples(8, thorough=200)
@given(kernel_masks(), st.booleans(), st.integers(0, 99))
def test_tiles_that_ask_an_attention_mask_equal_the_reference(batch, softmax, seed):
    lengths, mask = batch
    inputs, tables, times = make_inputs(lengths, seed=seed)
    case = {"softmax": softmax, "mask": mask}
    got = attend(inputs, tables, times, lengths, **case, backend="tiles")
    wanted = attend(inputs, tables, times, lengths, **case, backend="reference")
    assert_same(got, wanted, [*inputs, *([] if softmax else tables)])


@examples(4, thorough=60)
@given(kernel_masks(), st.booleans(), st.integers(0, 99))
def test_the_triton_kernels_see_what_the_predicate_says(batch, softmax, seed):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    lengths, mask = batch
    inputs, tables, times = make_inputs(lengths, seed=seed)
    case = {"softmax": softmax, "mask": mask}
    got = attend(inputs, tables, times, lengths, **case, backend="triton")
    wanted = attend(inputs, tables, times, lengths, **case, backend="tiles")
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@examples(20, thorough=200)
@given(kernel_masks())
def test_what_a_mask_allows_is_its_predicate(batch):
    lengths, mask = batch
    starts, counts = torch.tensor([0, *lengths]).cumsum(0).tolist(), mask.target_counts(len(lengths))
    for n in range(len(lengths)):
        seen = visible_in_sequence(mask, n, starts[n], starts[n + 1], torch.device("cpu"))
        assert torch.equal(mask.allowed(starts[n], starts[n + 1], int(counts[n])), seen)
        assert seen.diagonal().all()


@pytest.mark.parametrize("backend", ["triton", "loops"])
def test_kernels_refuse_masks_they_do_not_know(backend):
    q = torch.randn(4, 1, 4)
    with pytest.raises(ValueError, match=f"backend '{backend}' knows no mask"):
        hstu_attention(q, q, q, torch.tensor([0, 4]), scale=1.0, mask=Dilated(), backend=backend)


def test_attributes_of_another_batch_are_refused():
    q = torch.randn(4, 1, 4)
    for mask, message in (
        (SameCategory(torch.zeros(5)), "category has 5 entries, the batch needs 4"),
        (SameCategory([0, 0, 0, 0]), "category must be a tensor with one number for each token"),
        (FromTheEnd(torch.zeros(2)), "reach has 2 entries, the batch needs 1"),
        (object(), "must have sees"),
    ):
        with pytest.raises(FreeScaleError, match=message):
            hstu_attention(q, q, q, torch.tensor([0, 4]), scale=1.0, mask=mask)


def test_a_mask_must_answer_with_bool():
    class Counts(Dilated):
        def sees(self, i, j, **others):
            return i - j

    q = torch.randn(4, 1, 4)
    with pytest.raises(FreeScaleError, match="tensor of bool"):
        hstu_attention(q, q, q, torch.tensor([0, 4]), scale=1.0, mask=Counts())
