"""The expert MLPs of a mixture of experts, as models call them: checks the inputs and picks the way to compute them.

CPU, odd types    plain PyTorch, one product an expert                                        eager
GPU, bf16         torch's grouped products, everything between them fused in Triton           grouped
GPU, otherwise    Triton products that read tokens where they stand                           fused
truth             one expert at a time, autograd backward                                     reference
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from freescale.errors import FreeScaleError
from freescale.kernels.moe import reference
from freescale.kernels.moe.eager import EagerSteps
from freescale.kernels.moe.fused import FusedSteps, why_not_fused
from freescale.kernels.moe.grouped import GroupedSteps, why_not_grouped
from freescale.kernels.moe.routing import route
from freescale.kernels.moe.steps import Activation, Save, Steps, run_experts
from freescale.kernels.runtime import later

Backend = Literal["auto", "reference", "eager", "grouped", "triton"]
ACTIVATIONS = ("swiglu", "silu", "relu2")
BACKENDS = ("reference", "eager", "grouped", "triton")
SAVES = ("preact", "input", "all")


def expert_mlp(
    x_LD: Tensor,
    weights_LK: Tensor,
    experts_LK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    activation: Activation = "swiglu",
    save: Save = "preact",
    backend: Backend = "auto",
) -> Tensor:
    """Every token through its experts: the sum over its choices of weight * w_out[e] activation(w_in[e] x).

    Differentiable in x, weights, w_in and w_out; sums have one order, so results are the same in every run.

    Args:
        x_LD: [tokens, width].
        weights_LK: [tokens, K] float32, the weight of every choice.
        experts_LK: [tokens, K] which expert, distinct within a token.
        w_in: [E, hidden, width]; for "swiglu" [E, 2 hidden, width], the gate's rows first.
        w_out: [E, width, hidden].
        activation: "swiglu" is SiLU(gate) * up; "silu"; "relu2" is the square of ReLU.
        save: what is kept for the backward besides x and index tensors. "preact": the numbers before the activation,
            which the backward overwrites, so it can run only once. "input": nothing; w_in x is computed again.
            "all": also x in the experts' order; the backward may run again.
        backend: "auto" takes the fastest that can run; a name is taken at its word or refused.
    """
    _check(x_LD, weights_LK, experts_LK, w_in, w_out, activation, save)
    learnt = w_in, w_out
    x, w_in, w_out = (_cast(t) for t in (x_LD, w_in, w_out))
    weights = weights_LK.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()
    if not len(x):
        # Connected to its inputs, so that their gradients are zeros and not missing.
        return x + 0 * (weights.sum() + w_in.sum() + w_out.sum()).to(x.dtype)
    chosen = _choose(backend, x, w_in, w_out)
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "reference":
            return reference.expert_mlp(x, weights, experts_LK, w_in, w_out, activation=activation)
        routing = route(experts_LK, len(w_in))
        takers = later(learnt[0]), later(learnt[1])
        return run_experts(
            _steps(chosen, activation), x, weights, routing, w_in, w_out, save=save, takers=takers
        )


def _steps(backend: Backend, activation: Activation) -> Steps:
    makers: dict[str, type[EagerSteps | GroupedSteps | FusedSteps]]
    makers = {"eager": EagerSteps, "grouped": GroupedSteps, "triton": FusedSteps}
    return makers[backend](activation)


def _choose(backend: Backend, x: Tensor, w_in: Tensor, w_out: Tensor) -> Backend:
    """The way to compute that "auto" stands for, or a complaint about one that cannot."""
    reasons = {"grouped": why_not_grouped, "triton": why_not_fused}
    if backend == "auto":
        if x.device.type == "cuda":
            for name in ("grouped", "triton"):
                if reasons[name](x, w_in, w_out) is None:
                    return name
        return "eager"
    if backend not in BACKENDS:
        raise FreeScaleError(
            "backend is unknown", got=repr(backend), allowed=", ".join(map(repr, ("auto", *BACKENDS)))
        )
    why_not = reasons[backend](x, w_in, w_out) if backend in reasons else None
    if why_not is not None:
        raise FreeScaleError(
            f"backend {backend!r} cannot run here: {why_not}", next_step="take 'auto' or 'eager'"
        )
    return backend


def _cast(x: Tensor) -> Tensor:
    """The type autocast would give to a product's operand; last dimension dense."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    return x.contiguous()


def _check(
    x: Tensor, weights: Tensor, experts: Tensor, w_in: Tensor, w_out: Tensor, activation: str, save: str
) -> None:
    """Complain about shapes and names that do not fit each other."""
    for name, got, allowed in (("activation", activation, ACTIVATIONS), ("save", save, SAVES)):
        if got not in allowed:
            raise FreeScaleError(f"{name} is unknown", got=repr(got), allowed=", ".join(map(repr, allowed)))
    if x.ndim != 2 or weights.ndim != 2 or weights.shape != experts.shape or len(weights) != len(x):
        got = f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, experts {tuple(experts.shape)}"
        raise FreeScaleError(
            "tokens, weights and experts do not fit each other",
            got=got,
            allowed="x (L, D), weights (L, K), experts (L, K)",
        )
    num_experts, hidden = len(w_in), w_out.shape[-1]
    wanted = (num_experts, 2 * hidden if activation == "swiglu" else hidden, x.shape[1])
    if tuple(w_in.shape) != wanted or tuple(w_out.shape) != (num_experts, x.shape[1], hidden):
        raise FreeScaleError(
            "the experts' matrices do not fit tokens or activation",
            got=f"w_in {tuple(w_in.shape)}, w_out {tuple(w_out.shape)} for width {x.shape[1]} and {activation!r}",
            allowed='w_in (E, H, D), or (E, 2H, D) for "swiglu", and w_out (E, D, H)',
        )
    if not 1 <= weights.shape[1] <= num_experts:
        raise FreeScaleError(
            "a token cannot choose this many experts", got=weights.shape[1], allowed=f"1 to {num_experts}"
        )
    if experts.dtype not in (torch.int32, torch.int64):
        raise FreeScaleError("experts are numbers", got=experts.dtype, allowed="int32 or int64")
