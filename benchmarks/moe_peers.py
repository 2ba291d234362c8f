"""Expert layers of other projects behind one signature, for benchmarks/moe_layer.py: `--peer NAME=DIR`.

    scattermoe    a checkout of ScatterMoE; scattermoe/{mlp,parallel_experts}.py and kernels/ suffice
    liger         a checkout of Liger-Kernel; src/liger_kernel/{utils,ops/utils,ops/fused_moe*}.py suffice
    megablocks    a checkout of MegaBlocks; its compiled extensions (grouped_gemm, megablocks_ops, stk) are stood in for
                  by torch: sort, bincount, cumsum and torch's own grouped product
    megablocks-low    the same with memory_optimized_mlp

Each peer is made for one shape and holds its own copies of the matrices in its own layout. It gives the function of
(x, weights) to time and the list of its parameters.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Layer = tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]


def make_peer(
    name: str, directory: str, experts: Tensor, w_in: Tensor, w_out: Tensor, activation: str
) -> Layer:
    """The layer of this project on these matrices and this routing."""
    makers = {
        "scattermoe": _scattermoe,
        "liger": _liger,
        "megablocks": _megablocks,
        "megablocks-low": _megablocks_low,
    }
    return makers[name](Path(directory), experts, w_in, w_out, activation)


def _bare_package(name: str, path: Path) -> None:
    """A package whose own __init__ is not run: it would import what the layer does not need."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package


def _parameter(x: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x.detach().clone())


def _scattermoe(root: Path, experts: Tensor, w_in: Tensor, w_out: Tensor, activation: str) -> Layer:
    _bare_package("scattermoe", root / "scattermoe")
    from scattermoe import mlp

    glu = activation == "swiglu"
    kind, (num_experts, width, hidden) = mlp.GLUMLP if glu else mlp.MLP, w_out.shape
    with torch.device("meta"):
        layer = kind(width, hidden, num_experts, experts.shape[1], activation=torch.nn.SiLU())
    # Its first half is what ours has second: up, then gate.
    swapped = torch.cat(w_in.chunk(2, dim=1)[::-1], dim=1) if glu else w_in
    layer.experts.weight, layer.output_experts.weight = _parameter(swapped), _parameter(w_out)
    return lambda x, weights: layer(x, weights.to(x.dtype), experts), list(layer.parameters())


def _liger(root: Path, experts: Tensor, w_in: Tensor, w_out: Tensor, activation: str) -> Layer:
    if activation != "swiglu":
        raise ValueError("Liger's fused layer knows SwiGLU only")
    source = root / "src" / "liger_kernel"
    _bare_package("liger_kernel", source)
    _bare_package("liger_kernel.ops", source / "ops")
    # Its tuning takes minutes a shape and can run out of memory; LIGER_FUSED_MOE_AUTOTUNE=1 brings it back.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    parameters, index = [_parameter(w_in), _parameter(w_out)], experts.to(torch.int32)
    return lambda x, weights: LigerFusedMoEFunction.apply(x, *parameters, index, weights), parameters


def _megablocks_low(root: Path, *args: Any) -> Layer:
    return _megablocks(root, *args, low=True)


def _megablocks(
    root: Path, experts: Tensor, w_in: Tensor, w_out: Tensor, activation: str, *, low: bool = False
) -> Layer:
    _stand_in_for_extensions()
    sys.path.insert(0, str(root))
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    glu, (num_experts, width, hidden) = activation == "swiglu", w_out.shape
    args = Arguments(
        hidden_size=width,
        ffn_hidden_size=hidden,
        bias=False,
        return_bias=False,
        activation_fn=F.silu,
        moe_num_experts=num_experts,
        moe_top_k=experts.shape[1],
        memory_optimized_mlp=low,
        mlp_type="glu" if glu else "mlp",
        mlp_impl="grouped",
        fp16=False,
        bf16=w_in.dtype == torch.bfloat16,
        device=w_in.device,
        init_method=lambda x: x,
        output_layer_init_method=lambda x: x,
    )
    layer = ParallelDroplessMLP(args)
    names = ["w1", "v1"] if glu else ["w1"]
    for name, part in zip(names, w_in.chunk(len(names), dim=1)):
        setattr(layer.mlp, name, _parameter(part.reshape(-1, width)))
    layer.mlp.w2 = _parameter(w_out.transpose(1, 2).reshape(-1, width))

    def forward(x: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = layer.forward_once(x, weights.to(x.dtype), experts)[0]
        return out

    return forward, list(layer.parameters())


def _stand_in_for_extensions() -> None:
    """What MegaBlocks compiles from CUDA sources, by torch."""
    if "megablocks_ops" in sys.modules:
        return

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made
        return made

    def sort(x: Tensor, end_bit: int, out: Tensor, order: Tensor) -> None:
        values, places = x.sort(stable=True)
        out.copy_(values)
        order.copy_(places)

    def grouped(a: Tensor, b: Tensor, sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        ends = sizes.cumsum(0).to(a.device, torch.int32, non_blocking=True)
        return F.grouped_mm(a.t() if trans_a else a, b.transpose(1, 2) if trans_b else b, offs=ends)

    def into(a: Tensor, b: Tensor, sizes: Tensor, c: Tensor | None = None, **turns: bool) -> Tensor:
        with torch.no_grad():
            made = grouped(a, b, sizes, **turns)
        return made if c is None else c.copy_(made)

    module(
        "megablocks_ops",
        sort=sort,
        histogram=lambda x, num: torch.bincount(x, minlength=num).to(torch.int32),
        inclusive_cumsum=lambda x, dim, out: out.copy_(x.cumsum(dim)),
        exclusive_cumsum=lambda x, dim, out: out.copy_(x.cumsum(dim) - x),
    )
    module("grouped_gemm", ops=module("grouped_gemm.ops", gmm=grouped))
    sys.modules["grouped_gemm"].backend = module("grouped_gemm.backend", gmm=into)  # type: ignore[attr-defined]
    keep = {"custom_fwd": lambda f: f, "custom_bwd": lambda f: f}
    stk = module("stk", Matrix=object, ops=module("stk.ops"), backend=module("stk.backend"))
    stk.backend.triton_kernels = module("stk.backend.triton_kernels")
    stk.backend.autocast = module("stk.backend.autocast", **keep)
