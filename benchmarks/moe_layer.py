"""Expert MLPs on a GPU: time, TFLOP/s, what is kept for the backward and its peak, beside other ways and projects.

    PYTHONPATH=. python benchmarks/moe_layer.py [--shapes conf2 conf5] [--activations swiglu silu]
        [--routings random balanced zipf] [--peer NAME=DIR ...] [--budget 240] [--rounds 5]
    PYTHONPATH=. python benchmarks/moe_layer.py --sweep --shapes conf5 [--steps hidden d_w_in ...]

The seven shapes are those of the MoEBlaze paper, bf16, hidden width four times the width. Values and gradients are
checked against float32 first. All contenders take turns, round after round; the table has medians of a forward and a
backward. Peers: see moe_peers.py. `saved` is what is held for the backward without the matrices, over X + H: the input
and the numbers before the activation. `peak` is the most the backward needs beyond inputs and gradients, in units of
one hidden-sized tensor (rows x hidden width). `--sweep` times every product alone, by torch and by Triton with each
tile size tried. Cells that do not fit into `--budget` seconds are left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from moe_peers import make_peer
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.moe import reference
from freescale.kernels.moe.api import expert_mlp
from freescale.kernels.moe.fused import FusedSteps, Tile, Tiles, tiles_for
from freescale.kernels.moe.grouped import GroupedSteps
from freescale.kernels.moe.routing import route
from freescale.kernels.moe.steps import Routed, Span, Steps, run_experts

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
CHECKED_TOKENS = 512
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


def turn(case: Case, layer: Layer) -> Callable[[], list[Tensor]]:
    """A forward and a backward; gives the output and the gradients of x, weights and parameters."""
    forward, parameters = layer
    x, weights = case.x.detach().requires_grad_(), case.weights.detach().requires_grad_()

    def call() -> list[Tensor]:
        out = forward(x, weights)
        grads = torch.autograd.grad(out, [x, weights, *parameters], case.grad)
        return [out.detach(), *grads]

    return call


def wanted(case: Case) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """In float32: output and gradients of some tokens, and of the matrices of the least and the most chosen expert."""
    part = slice(0, CHECKED_TOKENS)
    leaves = [t.float().requires_grad_() for t in (case.x[part], case.weights[part])]
    truth = [*leaves, case.experts[part], case.w_in.float(), case.w_out.float()]
    out = reference.expert_mlp(*truth, activation=case.activation)
    tokens = [out.detach(), *torch.autograd.grad(out, leaves, case.grad[part].float())]
    counts, matrices = torch.bincount(case.experts.flatten(), minlength=case.num_experts), {}
    for expert in {int(counts.argmin()), int(counts.argmax())}:
        pair = [w[expert : expert + 1].float().requires_grad_() for w in (case.w_in, case.w_out)]
        mine = torch.where(case.experts == expert, 0, 1)
        used = (mine == 0).any(1)
        args = [case.x[used].float(), case.weights[used], mine[used], *pair]
        out = reference.expert_mlp(*args, activation=case.activation)
        grads = torch.autograd.grad(out, pair, case.grad[used].float())
        matrices[expert] = [grad[0] for grad in grads]
    return tokens, matrices


def check(case: Case, results: list[Tensor], *, ours: bool) -> float:
    """Largest relative error against float32; of matrices only where layouts are ours."""
    if case.truth is None:
        case.truth = wanted(case)
    tokens, matrices = case.truth
    pairs = [(got[:CHECKED_TOKENS], want) for got, want in zip(results, tokens)]
    for expert, wants in matrices.items() if ours else ():
        pairs += [(got[expert], want) for got, want in zip(results[3:], wants)]
    errors = [float((got.float() - want).norm() / want.norm().clamp(min=1e-9)) for got, want in pairs]
    return max(e if e == e else float("inf") for e in errors)


def memory(case: Case, layer: Layer) -> dict[str, float]:
    """What is kept for the backward over X + H, and the backward's peak beyond inputs and gradients."""
    forward, parameters = layer
    known = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    x, weights = case.x.detach().requires_grad_(), case.weights.detach().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward(x, weights)
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(out, [x, weights, *parameters], case.grad)
    torch.cuda.synchronize()
    made = sum(g.numel() * g.element_size() for g in (*grads, out))
    peak = torch.cuda.max_memory_allocated() - before - made
    unit = 2 * case.rows * case.hidden
    return {
        "saved": sum(kept.values()) / case.floor,
        "saved_x": sum(kept.values()) / case.x.nbytes,
        "peak": peak / unit,
    }


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


def contenders(case: Case, args: argparse.Namespace) -> dict[str, Callable[[], Layer]]:
    """Every way to compute the layer, ours first; some shapes leave out what has no say there."""
    made: dict[str, Callable[[], Layer]] = {
        "ours, grouped": lambda: case.ours(backend="grouped"),
        "ours, triton": lambda: case.ours(backend="triton"),
        "ours, save=input": lambda: case.ours(backend="grouped", save="input"),
        "ours, triton, save=input": lambda: case.ours(backend="triton", save="input"),
    }
    if args.by_torch:
        made["ours, mixed"] = lambda: case.mixed(args.by_torch, args.tiles)
    made["grouped_mm + autograd"] = case.grouped
    made["per-expert loop"] = case.loop
    for entry in args.peer:
        name, _, directory = entry.partition("=")
        made[name] = lambda name=name, directory=directory: case.peer(name, directory)  # type: ignore[misc]
    return {name: make for name, make in made.items() if not args.only or name in args.only}


def measure(shape: str, activation: str, routing: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cell: check, memory, then time, for every contender that can run."""
    case, calls, rows, missing = Case(shape, activation, routing), {}, {}, {}
    for name, make in contenders(case, args).items():
        try:
            layer = make()
            call = turn(case, layer)
            ours = name.startswith(("ours", "grouped", "per-expert"))
            error = check(case, call(), ours=ours)
            if not error < 0.02:
                wrong = f"{shape} {activation} {routing}: {name} is off by {error}"
                # Another project's layer may be called wrongly here: it is left out, and the others go on.
                raise SystemExit(wrong) if ours else ValueError(wrong)
            rows[name] = {"error": error, **memory(case, layer)}
            calls[name] = call
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
            torch.cuda.empty_cache()
    for name, ms in take_turns(calls, rounds=args.rounds).items():
        rows[name] |= {"ms": ms, "tflops": case.flops / ms / 1e9}
    for name, row in rows.items():
        print(
            f"{shape} {activation:7} {routing:9} {name:26} {row['ms']:8.2f} {row['tflops']:8.0f} "
            f"{row['saved']:7.3f} {row['saved_x']:7.2f} {row['peak']:7.2f} {row['error']:9.1e}",
            flush=True,
        )
    for name, why in missing.items():
        print(f"{shape} {activation:7} {routing:9} {name:26} {why}", flush=True)
    return {"rows": rows, "missing": missing}


def verdicts(cells: dict[str, Any]) -> dict[str, Any]:
    """Per cell: our best time over the best of the others, and the same for the peak of the backward."""
    out = {}
    for cell, found in cells.items():
        rows = found["rows"]
        ours = {n: r for n, r in rows.items() if n.startswith("ours") and "input" not in n}
        others = {n: r for n, r in rows.items() if not n.startswith("ours")}
        if not ours or not others:
            continue
        best, rival = min(ours, key=lambda n: ours[n]["ms"]), min(others, key=lambda n: others[n]["ms"])
        out[cell] = {
            "ours": best,
            "tflops": round(ours[best]["tflops"]),
            "rival": rival,
            "speed_over_rival": round(others[rival]["ms"] / ours[best]["ms"], 3),
            "peak_over_lowest": round(ours[best]["peak"] / min(r["peak"] for r in others.values()), 3),
        }
        print(f"{cell:28} {out[cell]}")
    return out


# Tried by --sweep: columns, inner, warps, stages, group, registers (see `expert_fused.Tile`).
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--activations", nargs="+", default=["swiglu", "silu"])
    parser.add_argument("--routings", nargs="+", default=["random", "balanced", "zipf"])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--only", nargs="*", help="names of the contenders to run")
    parser.add_argument(
        "--by-torch",
        nargs="*",
        default=["rows", "d_w_out", "d_w_in", "d_rows"],
        help="steps of 'ours, mixed' that torch does",
    )
    parser.add_argument(
        "--tiles", type=json.loads, help="{\"hidden\": [128, 64, 8, 4], ...} for 'ours, mixed'"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=240, help="seconds")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--steps", nargs="*", help="steps to sweep")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    if args.tiles:
        half = tiles_for(args.activations[0], torch.bfloat16, SHAPES[args.shapes[0]][0])
        args.tiles = half._replace(**{name: Tile(*numbers) for name, numbers in args.tiles.items()})
    began, cells, left_out = time.monotonic(), {}, []
    print(
        f"{'shape':5} {'':7} {'routing':9} {'contender':26} {'f+b ms':>8} {'TFLOP/s':>8} {'/(X+H)':>7} {'/X':>7} "
        f"{'peak/U':>7} {'error':>9}"
    )
    for routing in ["sweep"] if args.sweep else args.routings:
        for activation in args.activations:
            for shape in args.shapes:
                cell = f"{shape} {activation} {routing}"
                if time.monotonic() - began > args.budget:
                    left_out.append(cell)
                elif args.sweep:
                    cells[cell] = sweep(shape, activation, args)
                else:
                    cells[cell] = measure(shape, activation, routing, args)
                torch.cuda.empty_cache()
    import triton

    result = {"cells": cells, "left_out": left_out, "verdicts": {} if args.sweep else verdicts(cells)}
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    device = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    print(json.dumps({"benchmark": "moe_layer", **device, **versions, **result}))


if __name__ == "__main__":
    main()
