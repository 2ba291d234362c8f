"""Shapes, inputs and every way to compute a layer of experts; calls that take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from moe_peers import make_peer
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.moe import reference
from freescale.kernels.moe.api import expert_mlp
from freescale.kernels.moe.fused import FusedSteps, Tiles
from freescale.kernels.moe.routing import route
from freescale.kernels.moe.steps import run_experts

# width, experts, experts a token, tokens
SHAPES = {
    "conf1": (512, 4, 1, 65_536),
    "conf2": (1024, 8, 2, 65_536),
    "conf3": (1024, 16, 4, 65_536),
    "conf4": (2048, 16, 4, 32_768),
    "conf5": (512, 16, 4, 32_768),
    "conf6": (1024, 16, 4, 16_384),
    "conf7": (2048, 8, 4, 8_192),
}
Call = Callable[[], Any]
Layer = tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]


def choices(routing: str, tokens: int, num_experts: int, per_token: int) -> Tensor:
    """[tokens, per_token] distinct experts: drawn evenly, dealt out evenly, or with popularity 1 / rank."""
    draw = torch.Generator(device="cuda").manual_seed(1)
    if routing == "balanced":
        first = torch.arange(tokens, device="cuda")[:, None] * per_token
        return (first + torch.arange(per_token, device="cuda")) % num_experts
    noise = torch.empty(tokens, num_experts, device="cuda").exponential_(generator=draw)
    popularity = torch.arange(1, num_experts + 1, device="cuda") if routing == "zipf" else 1
    return (noise * popularity).topk(per_token, largest=False).indices


class Case:
    """One shape, activation and routing, with its inputs on the GPU."""

    def __init__(self, shape: str, activation: str, routing: str) -> None:
        self.width, self.num_experts, self.per_token, self.tokens = SHAPES[shape]
        self.hidden, self.activation = 4 * self.width, activation
        self.parts = 2 if activation == "swiglu" else 1
        draw = torch.Generator(device="cuda").manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, generator=draw, device="cuda").mul_(scale).bfloat16()

        self.x, self.grad = normal(self.tokens, self.width), normal(self.tokens, self.width)
        scores = torch.rand(self.tokens, self.per_token, generator=draw, device="cuda") + 0.1
        self.weights = scores / scores.sum(1, keepdim=True)
        self.experts = choices(routing, self.tokens, self.num_experts, self.per_token)
        self.w_in = normal(self.num_experts, self.parts * self.hidden, self.width, scale=self.width**-0.5)
        self.w_out = normal(self.num_experts, self.width, self.hidden, scale=self.hidden**-0.5)
        self.rows = self.tokens * self.per_token
        self.truth: tuple[list[Tensor], dict[int, list[Tensor]]] | None = None

    @property
    def flops(self) -> float:
        """Forward and backward: three products of each of the matrices."""
        return 3 * 2 * self.rows * self.width * self.hidden * (self.parts + 1)

    @property
    def floor(self) -> int:
        """Bytes of the input and of the numbers before the activation."""
        return 2 * (self.tokens * self.width + self.rows * self.hidden * self.parts)

    def ours(self, *, backend: str, save: str = "preact") -> Layer:
        """Our layer as models call it."""
        parameters = self._parameters()
        options: dict[str, Any] = {"activation": self.activation, "backend": backend, "save": save}
        return lambda x, weights: expert_mlp(x, weights, self.experts, *parameters, **options), parameters

    def mixed(self, by_torch: list[str], tiles: Tiles | None) -> Layer:
        """Our layer with some products by torch, or other tiles."""
        steps = FusedSteps(self.activation, by_torch=frozenset(by_torch), tiles=tiles)  # type: ignore[arg-type]
        parameters = self._parameters()

        def layer(x: Tensor, weights: Tensor) -> Tensor:
            return run_experts(
                steps, x, weights, route(self.experts, self.num_experts), *parameters, save="preact"
            )

        return layer, parameters

    def grouped(self) -> Layer:
        """Grouped products of torch, and autograd."""
        w_in, w_out = self._parameters()

        def layer(x: Tensor, weights: Tensor) -> Tensor:
            order = self.experts.flatten().argsort(stable=True)
            counts = torch.bincount(self.experts.flatten(), minlength=self.num_experts)
            ends = counts.cumsum(0).to(torch.int32)
            hidden = F.grouped_mm(x[order // self.per_token], w_in.transpose(1, 2), offs=ends)
            rows = F.grouped_mm(
                reference.activated(hidden, self.activation), w_out.transpose(1, 2), offs=ends
            )
            places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
            by_token = rows[places].view(*weights.shape, -1)
            return (by_token * weights[..., None].to(rows.dtype)).sum(1)

        return layer, [w_in, w_out]

    def loop(self) -> Layer:
        """One expert after the other, and autograd."""
        w_in, w_out = self._parameters()
        return (
            lambda x, weights: reference.expert_mlp(
                x, weights, self.experts, w_in, w_out, activation=self.activation
            ),
            [w_in, w_out],
        )

    def peer(self, name: str, directory: str) -> Layer:
        """The layer of another project."""
        return make_peer(name, directory, self.experts, self.w_in, self.w_out, self.activation)

    def _parameters(self) -> list[Tensor]:
        return [x.detach().requires_grad_() for x in (self.w_in, self.w_out)]


def take_turns(calls: dict[str, Call], *, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; they take turns so that a noisy moment meets all of them.

    Each is called once before it is timed: after a neighbour that leaves the GPU cool, clocks are higher for a while.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn_number in range(rounds + 1):
        for name, call in calls.items():
            call()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn_number:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}
