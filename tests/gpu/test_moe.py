"""Expert MLPs on a GPU: values, memory, determinism, no wait for the host; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.errors import FreeScaleError
from freescale.kernels import expert_mlp
from freescale.kernels.moe import reference
from freescale.kernels.moe.routing import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ("x", "weights", "w_in", "w_out")


def choose(tokens: int, per_token: int, among: int, seed: int = 0) -> Tensor:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(tokens, among, generator=draw, device="cuda").topk(per_token).indices


def make(
    *, tokens: int = 3000, per_token: int = 2, num_experts: int = 8, among: int | None = None, width: int = 256,
    hidden: int = 512, activation: str = "swiglu", dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:  # fmt: skip
    draw = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=draw, device="cuda")).to(dtype).requires_grad_()

    parts = 2 if activation == "swiglu" else 1
    return {
        "x": normal(tokens, width),
        "weights": torch.rand(tokens, per_token, generator=draw, device="cuda").requires_grad_(),
        "experts": choose(tokens, per_token, among or num_experts),
        "w_in": normal(num_experts, parts * hidden, width, scale=width**-0.5),
        "w_out": normal(num_experts, width, hidden, scale=hidden**-0.5),
    }


def results(case: dict[str, Tensor], out: Tensor) -> list[Tensor]:
    draw = torch.Generator(device="cuda").manual_seed(9)
    grad = torch.randn(out.shape, generator=draw, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [case[name] for name in NAMES], grad)]


def truth(case: dict[str, Tensor], activation: str) -> list[Tensor]:
    """In float32 proper; the caller's numbers are rounded already."""
    wide = {n: x.detach().float().requires_grad_() if n != "experts" else x for n, x in case.items()}
    return results(wide, reference.expert_mlp(*wide.values(), activation=activation))


def assert_near(got: list[Tensor], wanted: list[Tensor], limit: float) -> None:
    for name, mine, true in zip(("out", *NAMES), got, wanted):
        error = float((mine.float() - true).norm() / true.norm())
        assert error < limit, f"{name} is off by {error}"


@pytest.fixture
def poison() -> Any:
    """Uninitialised memory is full of NaN."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.mark.parametrize("save", ["preact", "input", "all"])
@pytest.mark.parametrize("activation", ["swiglu", "silu", "relu2"])
@pytest.mark.parametrize("backend", ["grouped", "triton"])
def test_bfloat16_equals_the_reference(
    backend: Any, activation: Any, save: Any, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freescale.kernels.moe import steps as expert_steps

    monkeypatch.setattr(expert_steps, "CHUNK_NUMBERS", 2000 * 256)
    case = make(activation=activation, among=7)
    out = expert_mlp(*case.values(), activation=activation, save=save, backend=backend)
    assert_near(results(case, out), truth(case, activation), 0.01)


@pytest.mark.parametrize(("width", "hidden"), [(72, 200), (33, 50), (1024, 4096)])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 0.01), (torch.float16, 0.002), (torch.float32, 1e-4)]
)
def test_triton_products_of_any_type_and_width(
    dtype: torch.dtype, limit: float, width: int, hidden: int
) -> None:
    case = make(width=width, hidden=hidden, dtype=dtype, tokens=1111)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        out = expert_mlp(*case.values(), backend="triton")
        assert_near(results(case, out), truth(case, "swiglu"), limit)
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("backend", ["grouped", "triton"])
@pytest.mark.parametrize(
    ("tokens", "per_token", "num_experts", "among"), [(1, 1, 4, 4), (2000, 1, 16, 1), (500, 4, 256, 256)]
)
def test_one_token_one_expert_and_many_empty_experts(
    backend: Any, tokens: int, per_token: int, num_experts: int, among: int, poison: None
) -> None:
    case = make(
        tokens=tokens,
        per_token=per_token,
        num_experts=num_experts,
        among=among,
        width=64,
        hidden=128,
    )
    out = expert_mlp(*case.values(), backend=backend)
    assert_near(results(case, out), truth(case, "swiglu"), 0.01)


@pytest.mark.parametrize(
    ("tokens", "per_token", "num_experts", "among"),
    [(1, 1, 1, 1), (70_000, 2, 5, 2), (65_536, 4, 16, 16), (9000, 8, 256, 256), (500, 1, 1000, 1000)],
)
def test_routing_equals_that_of_the_cpu(tokens: int, per_token: int, num_experts: int, among: int) -> None:
    experts = choose(tokens, per_token, among)
    for mine, wanted in zip(route(experts, num_experts), route(experts.cpu(), num_experts)):
        assert torch.equal(mine.cpu(), wanted)


@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize("backend", ["grouped", "triton"])
def test_two_runs_are_bit_identical(backend: Any, save: Any) -> None:
    case = make(tokens=20_000, per_token=4)
    runs = [results(case, expert_mlp(*case.values(), backend=backend, save=save)) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


@pytest.mark.parametrize("save", ["preact", "input", "all"])
@pytest.mark.parametrize("backend", ["grouped", "triton"])
def test_nothing_waits_for_the_host(backend: Any, save: Any) -> None:
    case = make()
    results(case, expert_mlp(*case.values(), backend=backend, save=save))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(case, expert_mlp(*case.values(), backend=backend, save=save))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["grouped", "triton"])
def test_more_than_two_to_the_31_hidden_numbers(backend: Any) -> None:
    case = make(tokens=70_000, per_token=2, num_experts=4, width=64, hidden=8192)
    assert 70_000 * 2 * 2 * 8192 > 2**31
    got = results(case, expert_mlp(*case.values(), backend=backend))
    # The last tokens have the last rows of every expert; their gradients depend on no other token.
    tail = slice(69_000, None)
    part = {n: x.detach()[tail] if n in ("x", "weights", "experts") else x for n, x in case.items()}
    wide = {n: x.detach().float().requires_grad_() if n != "experts" else x for n, x in part.items()}
    out = reference.expert_mlp(*wide.values(), activation="swiglu")
    draw = torch.Generator(device="cuda").manual_seed(9)
    grad = torch.randn(got[0].shape, generator=draw, device="cuda").bfloat16()[tail]
    wanted = torch.autograd.grad(out, [wide["x"], wide["weights"]], grad.float())
    assert_near([x[tail] for x in got[:3]], [out.detach(), *wanted], 0.01)


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize(("backend", "limit"), [("grouped", 3.45), ("triton", 3.15)])
def test_what_is_kept_and_the_peak_of_the_backward(backend: Any, limit: float, activation: Any) -> None:
    case = make(tokens=16_384, per_token=4, num_experts=8, width=512, hidden=2048, activation=activation)
    parts, unit = 2 if activation == "swiglu" else 1, 2 * 16_384 * 4 * 2048
    results(case, expert_mlp(*case.values(), activation=activation, backend=backend))
    kept: dict[int, int] = {}
    known = {case[name].data_ptr() for name in ("w_in", "w_out")}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = expert_mlp(*case.values(), activation=activation, backend=backend)
    floor = case["x"].nbytes + parts * unit
    assert floor < sum(kept.values()) <= 1.02 * floor
    torch.cuda.reset_peak_memory_stats()
    grad = torch.ones_like(out)
    grads = torch.autograd.grad(out, [case[name] for name in NAMES], grad)
    made = sum(x.nbytes for x in (*grads, out, grad))
    peak = (torch.cuda.max_memory_allocated() - before - made) / unit
    # SiLU has one hidden-sized tensor less.
    assert peak <= limit - (2 - parts), f"the backward needs {peak:.2f} hidden-sized tensors"


def test_grouped_products_of_another_type_are_refused_and_auto_takes_triton() -> None:
    case = make(dtype=torch.float16)
    with pytest.raises(FreeScaleError, match="bfloat16"):
        expert_mlp(*case.values(), backend="grouped")
    named, auto = (results(case, expert_mlp(*case.values(), backend=b)) for b in ("triton", "auto"))
    assert all(torch.equal(a, b) for a, b in zip(named, auto))
