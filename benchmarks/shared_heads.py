"""Grouped-query attention on a GPU: kernels that read shared heads in place, against heads repeated before the call.

    python benchmarks/shared_heads.py

Both sides run the same Triton softmax kernels, forward and backward, in turn; best of `--rounds`. Before anything is
timed both must equal the reference in float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_time import ms_a_call
from torch import Tensor

from freescale.kernels import SequenceLayout, softmax_attention
from freescale.kernels.attention import reference

# (sequences, mean length, heads, heads of keys and values, width)
SHAPES = ((64, 512, 32, 8, 64), (16, 2048, 32, 8, 64), (16, 2048, 32, 4, 64), (16, 2048, 16, 4, 128))
LIMIT = 2e-2  # of the largest value: bfloat16 keeps 8 bits


class Case:
    """Inputs of one shape, lengths between half and one and a half of the mean."""

    def __init__(self, sequences: int, length: int, heads: int, key_heads: int, width: int) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(length // 2, length + length // 2, (sequences,), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.layout = SequenceLayout(self.offsets, device="cuda")
        self.group, self.scale = heads // key_heads, width**-0.5
        tokens = int(self.offsets[-1])
        self.inputs = [
            torch.randn(tokens, n, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for n in (heads, key_heads, key_heads)
        ]
        self.grad = torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16)

    def shared(self) -> Tensor:
        """Heads of keys and values as they are."""
        q, k, v = self.inputs
        return softmax_attention(
            q, k, v, self.offsets, scale=self.scale, layout=self.layout, backend="triton"
        )

    def repeated(self) -> Tensor:
        """One head for each query head, written out first."""
        q, *rest = self.inputs
        k, v = (x.repeat_interleave(self.group, dim=1) for x in rest)
        return softmax_attention(
            q, k, v, self.offsets, scale=self.scale, layout=self.layout, backend="triton"
        )

    def gradients(self, attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Forward and backward."""
        return torch.autograd.grad(attend(), self.inputs, self.grad)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    check()
    rows = [measure(shape, options.rounds) for shape in SHAPES]
    names = list(rows[0])
    print("  ".join(f"{name:>18}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>18}" for name in names))
    facts = {"rows": rows, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"claim": "shared heads cost no copies", **facts}))


def check() -> None:
    """Values and gradients of both sides against the reference."""
    case = Case(5, 200, 8, 2, 64)
    wide = [x.detach().double().requires_grad_() for x in case.inputs]
    truth = reference.softmax_attention(*wide, case.offsets, scale=case.scale)
    wanted = (truth, *torch.autograd.grad(truth, wide, case.grad.double()))
    for attend in (case.shared, case.repeated):
        for a, b in zip((attend(), *case.gradients(attend)), wanted, strict=True):
            error = float((a.double() - b).abs().max() / b.abs().max())
            assert error < LIMIT, error
    print("checked: values and gradients of both sides equal the reference")


def measure(shape: tuple[int, int, int, int, int], rounds: int) -> dict[str, Any]:
    case = Case(*shape)
    sides = {"shared": case.shared, "repeated": case.repeated}
    best = {name: [float("inf")] * 2 for name in sides}
    peak = {}
    for _ in range(rounds):
        for name, attend in sides.items():
            times = (timed(attend), timed(partial(case.gradients, attend)))
            best[name] = [min(pair) for pair in zip(best[name], times)]
    for name, attend in sides.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.gradients(attend)
        peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        "shape": "{}x{} {}/{}x{}".format(*shape),
        **{f"{name} fwd ms": round(best[name][0], 3) for name in sides},
        **{f"{name} both ms": round(best[name][1], 3) for name in sides},
        **{f"{name} peak MiB": round(peak[name]) for name in sides},
    }


def timed(call: Callable[[], Any], *, calls: int = 5) -> float:
    call()
    return ms_a_call(call, calls)


if __name__ == "__main__":
    main()
