"""Attention, by tiles and by loops, against the plain reference: values, gradients, odd shapes, what may be seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale import kernels
from freescale.kernels import SequenceLayout, softmax_attention
from freescale.kernels.attention import reference
from freescale.kernels.attention.cpu.tile_layout import TileLayout, _bucket
from tests.effort import along_edges, examples

ODD_LENGTHS = [0, 1, 17, 63, 64, 65, 200, 0, 2]
INPUTS = ("q", "k", "v", "position_bias", "time_bias")
_backend = "auto"


@pytest.fixture(scope="module", params=["tiles", "loops"], autouse=True)
def backend(request):
    """Every test of this file runs once for each way to compute."""
    global _backend
    _backend = request.param


def hstu_attention(*args, **options):
    return kernels.hstu_attention(*args, **options, backend=_backend)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make_case(lengths, *, heads=2, width=3, v_width=5, seed=0, dtype=torch.float64):
    """Offsets, tensors that want gradients, and time stamps."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tokens, longest = sum(lengths), max(lengths, default=0)
    tensors = {
        "q": normal(tokens, heads, width),
        "k": normal(tokens, heads, width),
        "v": normal(tokens, heads, v_width),
        "position_bias": normal(max(1, longest)),
        "time_bias": normal(reference.NUM_TIME_BUCKETS),
    }
    gaps = torch.randint(0, 10_000, (tokens,), generator=generator)
    times = {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(1, 0)}
    return offsets_of(lengths), tensors, times


def silu(function, case, *, scale=0.1, **more):
    offsets, x, times = case
    biases = {"position_bias": x["position_bias"], "time_bias": x["time_bias"], **times}
    return function(x["q"], x["k"], x["v"], offsets, scale=scale, **biases, **more)


def softmax(function, case, *, scale=0.7, **more):
    offsets, x, _ = case
    return function(x["q"], x["k"], x["v"], offsets, scale=scale, **more)


def gradients(out, tensors, names):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return dict(zip(names, torch.autograd.grad((out * weight).sum(), [tensors[n] for n in names])))


def assert_same_as_reference(case, block, *, rtol=1e-10, atol=1e-11):
    layout = SequenceLayout(case[0], block=block)
    pairs = [
        (silu(hstu_attention, case, layout=layout), silu(reference.hstu_attention, case), INPUTS),
        (
            softmax(softmax_attention, case, layout=layout),
            softmax(reference.softmax_attention, case),
            INPUTS[:3],
        ),
    ]
    for ours, truth, names in pairs:
        torch.testing.assert_close(ours, truth, rtol=rtol, atol=atol)
        got, wanted = gradients(ours, case[1], names), gradients(truth, case[1], names)
        for name in names:
            torch.testing.assert_close(
                got[name], wanted[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"d{n}: {m}"
            )


@pytest.mark.parametrize(("block", "heads"), along_edges([16, 32, 64, 128], [1, 3]))
def test_values_and_all_gradients_equal_the_reference_on_odd_lengths(block, heads):
    assert_same_as_reference(make_case(ODD_LENGTHS, heads=heads), block)


def test_the_block_chosen_by_default_gives_the_same_values():
    assert_same_as_reference(make_case(ODD_LENGTHS), None)


@examples(13, thorough=200)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=8),
    block=st.sampled_from([16, 32, 64]),
    heads=st.integers(1, 3),
    v_width=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_jagged_batch_equals_the_reference(lengths, block, heads, v_width, seed):
    if sum(lengths):
        assert_same_as_reference(make_case(lengths, heads=heads, v_width=v_width, seed=seed), block)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_batch_without_tokens_has_an_empty_output_and_zero_gradients(lengths):
    case = make_case(lengths)
    for out, names in ((silu(hstu_attention, case), INPUTS), (softmax(softmax_attention, case), INPUTS[:3])):
        assert out.shape == (0, 2, 5)
        got = gradients(out, case[1], names)
        assert all((got[name] == 0).all() and got[name].shape == case[1][name].shape for name in names)


@pytest.mark.parametrize("with_position", [False, True])
@pytest.mark.parametrize("with_time", [False, True])
def test_each_bias_can_be_left_out(with_position, with_time):
    offsets, x, times = make_case([5, 40])
    biases = {"position_bias": x["position_bias"]} if with_position else {}
    biases |= {"time_bias": x["time_bias"], **times} if with_time else {}
    ours = hstu_attention(x["q"], x["k"], x["v"], offsets, scale=0.1, **biases)
    truth = reference.hstu_attention(x["q"], x["k"], x["v"], offsets, scale=0.1, **biases)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-11)


def test_numerical_gradients_agree():
    offsets, x, times = make_case([3, 0, 18], heads=1, width=2, v_width=1)
    layout = SequenceLayout(offsets, block=16)

    def silu_of(q, k, v, position_bias, time_bias):
        biases = {"position_bias": position_bias, "time_bias": time_bias, **times}
        return hstu_attention(q, k, v, offsets, scale=0.1, layout=layout, **biases)

    def softmax_of(q, k, v):
        return softmax_attention(q, k, v, offsets, scale=0.7, layout=layout)

    assert torch.autograd.gradcheck(silu_of, tuple(x[name] for name in INPUTS))
    assert torch.autograd.gradcheck(softmax_of, tuple(x[name] for name in INPUTS[:3]))


def test_float32_is_as_close_as_float32_can_be():
    case = make_case(ODD_LENGTHS, dtype=torch.float32)
    assert_same_as_reference(case, 32, rtol=2e-4, atol=2e-5)


def test_bfloat16_inputs_come_back_as_bfloat16_and_are_computed_wide():
    offsets, x, _ = make_case([70, 3])
    low = {name: x[name].detach().bfloat16() for name in "qkv"}
    for ours, truth in (
        (hstu_attention, reference.hstu_attention),
        (softmax_attention, reference.softmax_attention),
    ):
        got = ours(low["q"], low["k"], low["v"], offsets, scale=0.1)
        wanted = truth(*(low[name].double() for name in "qkv"), offsets, scale=0.1)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("attend", [silu, softmax])
@pytest.mark.parametrize("changed", [0, 30, 31, 32, 99])
def test_a_later_token_never_changes_an_earlier_output(attend, changed):
    kernel = hstu_attention if attend is silu else softmax_attention
    offsets, x, times = make_case([100])
    before = attend(kernel, (offsets, x, times), layout=SequenceLayout(offsets, block=32))
    moved = {name: x[name].detach().clone() for name in x}
    for name in "qkv":
        moved[name][changed:] += 1000.0
    after = attend(kernel, (offsets, moved, times), layout=SequenceLayout(offsets, block=32))
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.isclose(before[changed:], after[changed:]).all(-1).any()


@pytest.mark.parametrize("attend", [silu, softmax])
def test_sequences_do_not_see_each_other(attend):
    kernel = hstu_attention if attend is silu else softmax_attention
    lengths = [33, 5, 64, 0, 17]
    offsets, x, times = make_case(lengths)
    together = attend(kernel, (offsets, x, times))
    for n, length in enumerate(lengths):
        part = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = {name: value[part] if name in ("q", "k", "v") else value for name, value in x.items()}
        own_times = {name: value[part] for name, value in times.items()}
        apart = attend(kernel, (offsets_of([length]), alone, own_times))
        torch.testing.assert_close(together[part], apart, rtol=1e-10, atol=1e-12)


def test_gradients_do_not_cross_sequences():
    offsets, x, times = make_case([20, 40])
    for out in (silu(hstu_attention, (offsets, x, times)), softmax(softmax_attention, (offsets, x, times))):
        first = torch.autograd.grad(out[:20].square().sum(), [x[name] for name in "qkv"])
        assert all((grad[20:] == 0).all() and (grad[:20] != 0).any() for grad in first)


@pytest.fixture
def poisoned_memory():
    """Fill whatever torch.empty hands out with NaN, so that a slot nobody wrote cannot pass for a value."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_reads_memory_that_nobody_wrote(block):
    assert_same_as_reference(make_case(ODD_LENGTHS), block)


def test_the_backward_takes_gradients_that_are_not_contiguous():
    case = make_case([30, 7])
    for attend, kernel, truth in (
        (silu, hstu_attention, reference.hstu_attention),
        (softmax, softmax_attention, reference.softmax_attention),
    ):
        got = torch.autograd.grad(attend(kernel, case).sum(), case[1]["k"])
        wanted = torch.autograd.grad(attend(truth, case).sum(), case[1]["k"])
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


def test_softmax_survives_scores_that_overflow_exp():
    offsets, x, times = make_case([80])
    big = {**x, "q": x["q"] * 1000}
    got = softmax(softmax_attention, (offsets, big, times), layout=SequenceLayout(offsets, block=32))
    assert got.isfinite().all()
    torch.testing.assert_close(got, softmax(reference.softmax_attention, (offsets, big, times)))


@examples(67, thorough=200)
@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(-3, 3), min_size=1))
def test_time_buckets_are_those_of_the_reference(deltas):
    delta = torch.tensor(deltas)
    assert torch.equal(_bucket(delta).long(), reference.time_bucket(delta))


@examples(33, thorough=200)
@given(lengths=st.lists(st.integers(0, 100), max_size=10), block=st.sampled_from([16, 32, 64, None]))
def test_tiles_hold_every_token_once_and_zeros_elsewhere(lengths, block):
    layout = TileLayout(offsets_of(lengths), block=block)
    x = torch.arange(1, sum(lengths) + 1)[:, None].expand(-1, 2)
    tiles = layout.to_tiles(x)
    assert torch.equal(layout.to_tokens(tiles), x)
    assert (
        sorted(tiles[..., 0].flatten().tolist()) == [0] * (tiles[..., 0].numel() - len(x)) + x[:, 0].tolist()
    )
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    real = tiles[..., 0] > 0
    of_tile = layout.tile_sequence[:, None].expand(-1, layout.block)
    assert torch.equal(of_tile[real], owner[tiles[..., 0][real] - 1])


def test_a_position_table_shorter_than_a_sequence_is_refused():
    offsets, x, _ = make_case([40])
    with pytest.raises(ValueError, match="position_bias"):
        hstu_attention(x["q"], x["k"], x["v"], offsets, scale=1.0, position_bias=x["position_bias"][:39])


def test_a_time_bias_without_times_is_refused():
    offsets, x, _ = make_case([4])
    with pytest.raises(ValueError, match="query_time and key_time"):
        hstu_attention(x["q"], x["k"], x["v"], offsets, scale=1.0, time_bias=x["time_bias"])


@pytest.mark.parametrize("short", ["time_bias", "query_time", "key_time"])
def test_a_time_bias_that_does_not_fit_the_batch_is_refused(short):
    offsets, x, times = make_case([40])
    options = {"time_bias": x["time_bias"], **times}
    options[short] = options[short][:-1]
    with pytest.raises(ValueError, match=r"do not fit the batch\n.*(128 weights|39)"):
        hstu_attention(x["q"], x["k"], x["v"], offsets, scale=1.0, **options)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("backend", ["reference", "tiles"])
def test_query_heads_share_keys_and_values_as_in_torch(heads, key_heads, backend):
    lengths = [5, 0, 40, 1]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(46, n, 8, dtype=torch.float64, generator=draw).requires_grad_()
        for n in (heads, key_heads, key_heads)
    )
    got = softmax_attention(q, k, v, offsets, scale=0.3, backend=backend)
    wanted = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
            )[0].transpose(0, 1)
            for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())
        ]
    )
    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=draw)
    for a, b in zip(
        (got, *torch.autograd.grad((got * weight).sum(), (q, k, v))),
        (wanted, *torch.autograd.grad((wanted * weight).sum(), (q, k, v))),
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("heads", [(4, 3, 3), (4, 2, 4), (2, 4, 4)])
def test_heads_that_cannot_be_shared_are_refused(heads):
    q, k, v = (torch.randn(3, n, 8) for n in heads)
    with pytest.raises(ValueError, match="multiple"):
        softmax_attention(q, k, v, torch.tensor([0, 3]), scale=1.0)


@pytest.mark.parametrize("attention", [hstu_attention, softmax_attention])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 500, 600]), "end at 600, 900 tokens"),
        (torch.tensor([0, 500, 600, 1200]), "end at 1200, 900 tokens"),
        (torch.tensor([0, 600, 500, 900]), r"offsets\[2\] = 500 after 600"),
        (torch.tensor([500, 900]), r"offsets\[0\] = 500"),
        (torch.tensor([0.0, 900.0]), "float32 of shape"),
        (torch.tensor([[0, 900]]), r"shape \(1, 2\)"),
        (torch.tensor([], dtype=torch.int64), r"shape \(0,\)"),
        ([0, 900], "a list"),
    ],
)
def test_offsets_must_rise_from_0_to_the_number_of_tokens(attention, offsets, message):
    q = torch.zeros(900, 1, 8)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, offsets, scale=1.0)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, offsets, scale=1.0, layout=SequenceLayout(offsets))


@pytest.mark.parametrize("backend", ["loops", "tiles", "reference"])
def test_offsets_may_be_narrow(backend):
    offsets, x, _ = make_case([3, 0, 40])
    wide, narrow = (
        kernels.hstu_attention(x["q"], x["k"], x["v"], given, scale=1.0, backend=backend)
        for given in (offsets, offsets.int())
    )
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("attention", [hstu_attention, softmax_attention])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((9, 8), (9, 2, 8), (9, 2, 8)), r"must be \[tokens, heads, width\]\n.*q \[9, 8\]"),
        (((9, 2, 8), (8, 2, 8), (9, 2, 8)), r"the same tokens.*\n.*k \[8, 2, 8\]"),
        (((9, 2, 8), (9, 2, 8), (8, 2, 8)), "the same tokens"),
        (((9, 2, 8), (9, 2, 4), (9, 2, 8)), "the same width"),
        (((9, 2, 8), (9, 3, 8), (9, 3, 8)), "heads"),
        (((9, 2, 8), (9, 0, 8), (9, 0, 8)), "heads"),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(attention, shapes, message):
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes), torch.tensor([0, 9]), scale=1.0)


@pytest.mark.parametrize("attention", [kernels.hstu_attention, softmax_attention])
def test_an_unknown_backend_is_refused(attention):
    q = torch.zeros(9, 1, 8)
    with pytest.raises(
        ValueError, match=r"unknown\n.*'foo'\n.*'auto', 'loops', 'tiles', 'triton', 'reference'"
    ):
        attention(q, q, q, torch.tensor([0, 9]), scale=1.0, backend="foo")


@pytest.mark.parametrize("attention", [kernels.hstu_attention, softmax_attention])
def test_triton_on_the_cpu_needs_its_interpreter(attention, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("freescale.kernels.attention.api.has_triton", lambda: True)
    q = torch.zeros(9, 1, 8)
    with pytest.raises(ValueError, match="needs a GPU, or Triton's interpreter"):
        attention(q, q, q, torch.tensor([0, 9]), scale=1.0, backend="triton")


@pytest.mark.parametrize(
    ("q", "v"), [(torch.zeros(9, 1, 300), None), (torch.zeros(9, 1, 8), torch.zeros(9, 1, 8).half())]
)
def test_triton_refuses_what_its_kernels_cannot_hold(q, v, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("freescale.kernels.attention.api.has_triton", lambda: True)
    with pytest.raises(ValueError, match="of one type, with heads up to 256 wide"):
        kernels.hstu_attention(q, q, q if v is None else v, torch.tensor([0, 9]), scale=1.0, backend="triton")


def test_the_loops_say_that_they_have_no_softmax():
    q = torch.zeros(9, 1, 8)
    with pytest.raises(ValueError, match="no softmax"):
        softmax_attention(q, q, q, torch.tensor([0, 9]), scale=1.0, backend="loops")
