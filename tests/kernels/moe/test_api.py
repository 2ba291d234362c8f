"""Expert MLPs: every way to compute them against the reference, gradients included; Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch

from freescale.errors import FreeScaleError
from freescale.kernels import expert_mlp
from freescale.kernels.moe import reference
from freescale.kernels.moe import steps as expert_steps
from freescale.kernels.moe.fused import FusedSteps, Tile, Tiles
from freescale.kernels.moe.routing import route
from freescale.kernels.moe.steps import run_experts
from tests.kernels.moe.test_routing import choose

ACTIVATIONS = ("swiglu", "silu", "relu2")
SAVES = ("preact", "input", "all")
# Small enough for the interpreter, and no divisor of the widths below.
SMALL = Tiles(*(Tile(32, 32, 4, 2) for _ in Tiles._fields))
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def make(
    *, tokens=70, per_token=2, num_experts=5, among=None, width=12, hidden=8, activation="swiglu",
    dtype=torch.float64, seed=0,
):  # fmt: skip
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        x = scale * torch.randn(*shape, generator=draw, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    parts = 2 if activation == "swiglu" else 1
    weights = torch.rand(tokens, per_token, generator=draw, dtype=torch.float64)
    return {
        "x": normal(tokens, width),
        "weights": weights.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_(),
        "experts": choose(tokens, per_token, num_experts, among=among, seed=seed),
        "w_in": normal(num_experts, parts * hidden, width, scale=width**-0.5),
        "w_out": normal(num_experts, width, hidden, scale=hidden**-0.5),
    }


def leaves(case):
    return [case[name] for name in ("x", "weights", "w_in", "w_out")]


def results(case, out, **options):
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves(case), grad, **options)


def truth(case, activation):
    wide = {
        name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in case.items()
    }
    return results(wide, reference.expert_mlp(*wide.values(), activation=activation))


def compare(case, got, activation, tolerance):
    for mine, wanted in zip(got, truth(case, activation)):
        torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of "input" already at a hundred rows of 12."""
    monkeypatch.setattr(expert_steps, "CHUNK_NUMBERS", 1200)


@pytest.fixture
def poison():
    """Uninitialised memory is full of NaN."""
    # What torch.use_deterministic_algorithms does, without its import of the compiler: that takes ten seconds.
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_equals_the_reference(activation, save, chunks, poison):
    case = make(activation=activation, among=4, tokens=190)
    out = expert_mlp(*case.values(), activation=activation, save=save, backend="eager")
    compare(case, results(case, out), activation, 1e-10)


@interpreted
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grouped_equals_the_reference(activation, save, chunks, poison):
    pytest.importorskip("triton")
    case = make(activation=activation, among=4, tokens=190, dtype=torch.float32)
    out = expert_mlp(*case.values(), activation=activation, save=save, backend="grouped")
    compare(case, results(case, out), activation, 1e-5)


@interpreted
@pytest.mark.parametrize(
    ("activation", "save", "dtype"),
    [
        ("swiglu", "preact", torch.float32),
        ("swiglu", "input", torch.float16),
        ("silu", "preact", torch.float32),
        ("silu", "all", torch.float16),
        ("relu2", "preact", torch.float16),
        ("relu2", "all", torch.float32),
    ],
)
def test_triton_products_equal_the_reference_at_odd_widths(activation, save, dtype, chunks, poison):
    pytest.importorskip("triton")
    # Chunks end at tiles of 128 rows, so only "input" needs more than that.
    tokens = 130 if save == "input" else 40
    case = make(
        activation=activation, num_experts=3, among=2, tokens=tokens, width=21, hidden=35, dtype=dtype
    )  # fmt: skip
    routing = route(case["experts"], 3)
    steps = FusedSteps(activation, tiles=SMALL)
    out = run_experts(steps, case["x"], case["weights"], routing, case["w_in"], case["w_out"], save=save)
    compare(case, results(case, out), activation, 1e-5 if dtype == torch.float32 else 2e-2)


@interpreted
def test_experts_without_rows_get_zeros_whatever_torch_leaves_there(monkeypatch):
    pytest.importorskip("triton")
    plain = torch.nn.functional.grouped_mm

    def careless(a, b, *, offs):
        out = plain(a, b, offs=offs)
        if out.ndim == 3:
            out[offs.diff(prepend=offs[:1] * 0) == 0] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless)
    case = make(among=3, dtype=torch.float32)
    compare(case, results(case, expert_mlp(*case.values(), backend="grouped")), "swiglu", 1e-5)


def test_chunks_cover_the_rows_and_their_offsets_stay_inside(chunks):
    routing = route(choose(300, 2, 7, among=5), 7)
    assert len(expert_steps._spans(routing, 1, chunked=True)) == 1
    spans = expert_steps._spans(routing, 12, chunked=True)
    assert len(spans) == expert_steps.MAX_CHUNKS
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == 600
    counts = sum(span.offsets.diff() for span in spans)
    assert torch.equal(counts, routing.offsets.diff())
    assert all(span.offsets[-1] == span.stop - span.start and span.offsets[0] == 0 for span in spans)


@interpreted
@pytest.mark.parametrize("step", ["hidden", "rows", "d_hidden", "d_w_out", "d_w_in", "d_rows"])
def test_any_product_can_be_left_to_torch(step):
    pytest.importorskip("triton")
    case = make(num_experts=2, tokens=20, dtype=torch.float32)
    routing = route(case["experts"], 2)
    steps = FusedSteps("swiglu", tiles=SMALL, by_torch=frozenset([step]))
    out = run_experts(steps, case["x"], case["weights"], routing, case["w_in"], case["w_out"], save="preact")
    compare(case, results(case, out), "swiglu", 1e-5)


@interpreted
@pytest.mark.parametrize("backend", ["eager", "grouped", "triton"])
@pytest.mark.parametrize(("tokens", "per_token", "among"), [(1, 1, None), (1, 3, None), (40, 1, 1)])
def test_one_token_and_all_tokens_to_one_expert(backend, tokens, per_token, among):
    pytest.importorskip("triton")
    case = make(tokens=tokens, per_token=per_token, num_experts=3, among=among, dtype=torch.float32)
    out = expert_mlp(*case.values(), backend=backend)
    compare(case, results(case, out), "swiglu", 1e-5)


def test_many_experts_most_of_them_without_tokens():
    case = make(tokens=9, num_experts=256)
    compare(case, results(case, expert_mlp(*case.values())), "swiglu", 1e-10)


def test_numerical_gradients_agree():
    case = make(tokens=5, num_experts=3, width=3, hidden=2)

    def layer(x, weights, w_in, w_out):
        return expert_mlp(x, weights, case["experts"], w_in, w_out, save="all")

    assert torch.autograd.gradcheck(layer, leaves(case), fast_mode=True)


@pytest.mark.parametrize("backend", ["eager", "grouped"])
def test_two_runs_are_bit_identical(backend):
    if backend == "grouped" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    pytest.importorskip("triton")
    case = make(dtype=torch.float32)
    first, second = (results(case, expert_mlp(*case.values(), backend=backend)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_second_backward_is_refused_where_the_first_wrote_over_what_was_kept():
    case = make()
    out = expert_mlp(*case.values(), save="preact")
    results(case, out, retain_graph=True)
    with pytest.raises(FreeScaleError, match="second time"):
        results(case, out)


@pytest.mark.parametrize("save", ["input", "all"])
def test_other_ways_to_save_allow_a_second_backward(save):
    case = make()
    out = expert_mlp(*case.values(), save=save)
    first, second = results(case, out, retain_graph=True), results(case, out)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def kept_bytes(case, **options):
    """Bytes held for the backward besides the matrices."""
    known = {case[name].data_ptr() for name in ("w_in", "w_out")}
    kept = {}

    def pack(x):
        if x.data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = expert_mlp(*case.values(), **options)
    del out
    return sum(kept.values())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_kept_is_the_input_and_the_numbers_before_the_activation(activation):
    case = make(tokens=500, width=256, hidden=1024, dtype=torch.float32, activation=activation)
    parts = 2 if activation == "swiglu" else 1
    x, hidden = case["x"].nbytes, 4 * 500 * 2 * 1024 * parts
    assert x + hidden < kept_bytes(case, activation=activation) <= 1.02 * (x + hidden)
    assert x < kept_bytes(case, activation=activation, save="input") <= 1.10 * x
    assert kept_bytes(case, activation=activation, save="all") > x + hidden + 2 * x


def test_without_gradients_nothing_is_kept_and_values_are_the_same():
    case = make()
    with torch.no_grad():
        out = expert_mlp(*case.values())
    assert not out.requires_grad
    torch.testing.assert_close(out, expert_mlp(*case.values()).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["x", "weights", "w_in", "w_out"])
def test_inputs_that_need_no_gradient_get_none(frozen):
    case = make()
    full = dict(zip(("x", "weights", "w_in", "w_out"), results(case, expert_mlp(*case.values()))[1:]))
    case[frozen] = case[frozen].detach()
    out = expert_mlp(*case.values())
    rest = {name: case[name] for name in full if name != frozen}
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    for (name, _), got in zip(rest.items(), torch.autograd.grad(out, list(rest.values()), grad)):
        torch.testing.assert_close(got, full[name], rtol=1e-12, atol=1e-12)


def test_autocast_gives_its_type_and_gradients_of_the_parameters_type():
    case = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = expert_mlp(*case.values())
    assert out.dtype == torch.bfloat16
    got = results(case, out)
    assert [x.dtype for x in got[1:]] == [torch.float32] * 4
    for mine, wanted in zip(got, truth(case, "swiglu")):
        assert (mine.double() - wanted).norm() < 0.03 * wanted.norm()


def test_no_tokens_have_zero_gradients():
    case = make(tokens=0)
    out, *grads = results(case, expert_mlp(*case.values()))
    assert out.shape == (0, 12)
    assert all((grad == 0).all() for grad in grads)


def test_rows_that_are_not_dense_are_read_right():
    case = make()
    case["x"] = torch.randn(70, 24, dtype=torch.float64)[:, ::2].requires_grad_()
    case["weights"] = torch.rand(2, 70, dtype=torch.float64).t().requires_grad_()
    compare(case, results(case, expert_mlp(*case.values())), "swiglu", 1e-10)


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("triton", {}, "float64"),
        ("grouped", {"dtype": torch.float32, "width": 13}, "multiple of 16 bytes"),
        ("fast", {}, "unknown"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_its_reason(backend, options, reason):
    pytest.importorskip("triton")
    with pytest.raises(FreeScaleError, match=reason):
        expert_mlp(*make(**options).values(), backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(70, 11)}, "do not fit"),
        ({"weights": torch.ones(70, 3)}, "do not fit each other"),
        ({"experts": torch.ones(70, 2)}, "numbers"),
        ({"w_out": torch.ones(5, 12, 9)}, "matrices do not fit"),
        (
            {"weights": torch.ones(70, 6), "experts": torch.ones(70, 6, dtype=torch.int64)},
            "this many experts",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(change, message):
    with pytest.raises(FreeScaleError, match=message):
        expert_mlp(*{**make(dtype=torch.float32), **change}.values())


@pytest.mark.parametrize("option", [{"activation": "gelu"}, {"save": "some"}])
def test_unknown_names_are_listed(option):
    with pytest.raises(FreeScaleError, match="unknown"):
        expert_mlp(*make().values(), **option)
