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
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from moe_parts.cases import SHAPES, Case, Layer, take_turns
from moe_parts.sweep import sweep
from torch import Tensor

from freescale.kernels.moe import reference
from freescale.kernels.moe.fused import Tile, tiles_for

CHECKED_TOKENS = 512


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
