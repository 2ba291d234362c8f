"""Every product of a layer of experts alone: by torch, and by Triton with each tile size tried."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from freescale.kernels.moe.fused import FusedSteps, Tile, tiles_for
from freescale.kernels.moe.grouped import GroupedSteps
from freescale.kernels.moe.routing import route
from freescale.kernels.moe.steps import Routed, Span, Steps
from moe_parts.cases import Call, Case, take_turns

# Tried by --sweep: columns, inner, warps, stages, group, registers (see `Tile` in kernels/moe/fused).
LARGE = [
    (256, 64, 8, 3),
    (256, 64, 8, 4),
    (256, 64, 8, 4, 16),
    (128, 64, 4, 4),
    (128, 64, 8, 3),
    (128, 128, 8, 3),
]
OVER_ROWS = [
    (256, 64, 8, 5),
    (256, 64, 8, 7),
    (256, 64, 8, 5, 4),
    (128, 64, 4, 5),
    (128, 64, 8, 5),
    (128, 64, 8, 7),
]
CANDIDATES = {
    "hidden": [
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 64, 8, 4, 16),
        (64, 64, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
    ],
    "rows": LARGE,
    "d_hidden": [
        (128, 64, 8, 3, 8, 128),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 64, 8, 3, 16, 128),
        (64, 64, 4, 4),
        (256, 64, 8, 3),
    ],
    "d_w_out": OVER_ROWS,
    "d_w_in": OVER_ROWS,
    "d_rows": LARGE,
}
# Without a gate the first product has one set of sums.
WITHOUT_GATE = [(256, 64, 8, 3), (256, 64, 8, 4), (256, 64, 8, 4, 16), (128, 64, 8, 3), (128, 64, 4, 3)]


class Stage:
    """The inputs of every step alone."""

    def __init__(self, case: Case) -> None:
        self.case, made = case, route(case.experts, case.num_experts)
        self.span = Span(made, 0, case.rows, made.offsets)
        self.source, self.grad = Routed(case.x, made.tokens), Routed(case.grad, made.tokens)
        self.hidden, self.activated = GroupedSteps(case.activation).activated(  # type: ignore[arg-type]
            self.source, case.w_in, self.span, keep=True
        )
        self.by_row = torch.rand(case.rows, device="cuda")
        assert self.hidden is not None
        self.scratch = torch.empty_like(self.hidden)

    def call(self, steps: Steps, step: str) -> Call:
        """One step; routed copies are made anew, as in a training step. d_hidden overwrites, so it gets a copy."""
        case, span = self.case, self.span
        x, grad = Routed(case.x, span.tokens), Routed(case.grad, span.tokens)
        hidden = self.hidden
        assert hidden is not None
        calls: dict[str, Call] = {
            "hidden": lambda: steps.activated(Routed(case.x, span.tokens), case.w_in, span, keep=True),
            "rows": lambda: steps.rows(self.activated, case.w_out, span),
            "d_hidden": lambda: steps.d_hidden(
                Routed(case.grad, span.tokens), case.w_out, self.scratch.copy_(hidden), self.by_row, span
            ),
            "copy": lambda: self.scratch.copy_(hidden),
            # The gradient's copy is there already from d_hidden, that of x is not.
            "d_w_out": lambda: steps.d_w_out(grad, self.activated, span, None),
            "d_w_in": lambda: steps.d_w_in(hidden, Routed(case.x, span.tokens), span, None),
            "d_rows": lambda: steps.d_rows(hidden, case.w_in, span),
            "combine": lambda: steps.combine(x.copied(steps), span.routing.places, case.weights),
            "route": lambda: route(case.experts, case.num_experts),
        }
        return calls[step]


def sweep(shape: str, activation: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of every step by torch and by Triton with each tile."""
    case = Case(shape, activation, "random")
    stage, result, best = Stage(case), {}, {}
    grouped = GroupedSteps(activation)  # type: ignore[arg-type]
    for step in args.steps or [*CANDIDATES, "combine", "route"]:
        calls: dict[str, Call] = {"torch": stage.call(grouped, step)}
        tried = WITHOUT_GATE if step == "hidden" and case.parts == 1 else CANDIDATES.get(step, [])
        for numbers in tried:
            tiles = tiles_for(activation, torch.bfloat16, case.width)._replace(**{step: Tile(*numbers)})  # type: ignore[arg-type]
            steps = FusedSteps(activation, tiles=tiles)  # type: ignore[arg-type]
            call = stage.call(steps, step)
            try:
                call()
                torch.cuda.synchronize()
                calls[str(numbers)] = call
            except Exception as error:
                print(f"{shape} {activation} {step:9} {numbers}: {type(error).__name__} {str(error)[:80]}")
        times = take_turns({**calls, "copy": stage.call(grouped, "copy")}, rounds=args.rounds)
        copy = times.pop("copy") if step == "d_hidden" else 0 * times.pop("copy")
        times = {name: ms - copy for name, ms in times.items()}
        parts = {"hidden": case.parts, "d_w_in": case.parts, "d_rows": case.parts}.get(step, 1)
        flops = 2 * case.rows * case.width * case.hidden * parts if step in CANDIDATES else 0
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            print(
                f"{shape} {activation:7} {step:9} {name:24} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s",
                flush=True,
            )
        result[step] = {name: round(ms, 4) for name, ms in times.items()}
        best[step] = min(times, key=lambda name: times[name])
    print(f"{shape} {activation}: best {best}")
    return {"ms": result, "best": best}
