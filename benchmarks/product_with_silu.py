"""Would a product of ours that ends with the SiLU be faster than the library's with the SiLU kernel behind it?

The projection of an HSTU layer, [T, 512] x [512, 2048] in bfloat16: its numbers are kept, and the SiLU of three of four
parts is written beside them. As two kernels those three are read once more. As one, in Triton, with copies by TMA and
programs that stay: tiles in one loop that the compiler flattens ("flat", which writes the SiLU of all four parts, since
it flattens no branch), or flattened by hand ("by hand"). Each shape in a process of its own (what a compiler gets wrong
ends all work of a process on a GPU), in turns with the library, six rounds; checked first.

    PYTHONPATH=. python benchmarks/product_with_silu.py
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import torch
import triton
import triton.language as tl
from gpu_time import ms_a_call
from triton.tools.tensor_descriptor import TensorDescriptor

from freescale.kernels.hstu.row_programs import by_rows
from freescale.kernels.runtime import kernels_of

ROWS, INNER, WIDTH, UNTOUCHED = 102_273, 512, 2048, 512
ROUNDS, REPEATS = 6, 30
NOTHING, THREE, ALL = 0, 1, 2
"""The SiLU of how many parts is written."""

# Way, tile (rows, columns, inner), parts of a tile that are written one after the other, warps, stages, programs, SiLU.
SHAPES = [
    ("flat", 128, 256, 64, 2, 8, 4, 132, NOTHING),
    ("flat", 128, 256, 64, 2, 8, 3, 132, ALL),
    ("flat", 128, 256, 64, 2, 8, 4, 132, ALL),
    ("by hand", 128, 256, 64, 2, 8, 4, 132, NOTHING),
    ("by hand", 128, 256, 64, 2, 8, 4, 132, THREE),
    ("by hand", 128, 256, 64, 2, 8, 3, 132, THREE),
    ("by hand", 128, 256, 64, 1, 8, 3, 132, THREE),
    ("by hand", 128, 128, 64, 1, 8, 4, 132, THREE),
    ("flat", 128, 128, 64, 1, 4, 4, 264, ALL),
    ("by hand", 128, 128, 64, 1, 4, 3, 264, THREE),
    ("by hand", 128, 256, 64, 2, 8, 3, 132, ALL),
]


@triton.jit
def _write(part, out, silu, m, n, skip: tl.constexpr, how: tl.constexpr):
    """A part of a tile, and its SiLU."""
    narrow = part.to(tl.bfloat16)
    out.store([m, n], narrow)
    if how == 1:  # noqa: SIM102  known when it is compiled, the other is not
        if n >= skip:
            x = narrow.to(tl.float32)
            silu.store([m, n - skip], (x * tl.sigmoid(x)).to(tl.bfloat16))
    if how == 2:
        x = narrow.to(tl.float32)
        silu.store([m, n], (x * tl.sigmoid(x)).to(tl.bfloat16))


@triton.jit
def _finish(
    acc, out, silu, m, n,
    skip: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """All parts of a tile."""
    if parts == 1:
        _write(acc, out, silu, m, n, skip, how)
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (rows, 2, columns // 2)), (0, 2, 1)))
        _write(left, out, silu, m, n, skip, how)
        _write(right, out, silu, m, n + columns // 2, skip, how)


@triton.jit
def flat(
    a, b, out, silu, num_rows,
    width: tl.constexpr, inner: tl.constexpr, skip: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    step: tl.constexpr, parts: tl.constexpr, how: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    """Flattened by the compiler."""
    across: tl.constexpr = width // columns
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, rows) * across, programs, flatten=True):
        m, n = (tile // across) * rows, (tile % across) * columns
        acc = tl.zeros((rows, columns), tl.float32)
        for k in range(0, inner, step):
            acc = tl.dot(a.load([m, k]), b.load([k, n]), acc)
        _finish(acc, out, silu, m, n, skip, rows, columns, parts, how)


@triton.jit
def by_hand(
    a, b, out, silu, num_rows,
    width: tl.constexpr, inner: tl.constexpr, skip: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    step: tl.constexpr, parts: tl.constexpr, how: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    """Flattened here."""
    across: tl.constexpr = width // columns
    turns: tl.constexpr = inner // step
    own = (tl.cdiv(num_rows, rows) * across - tl.program_id(0) + programs - 1) // programs
    tile = tl.program_id(0) - programs
    m = 0
    n = 0
    acc = tl.zeros((rows, columns), tl.float32)
    for i in tl.range(0, own * turns):
        k = i % turns
        if k == 0:
            tile += programs
            m = (tile // across) * rows
            n = (tile % across) * columns
        acc = tl.dot(a.load([m, k * step]), b.load([k * step, n]), acc)
        if k == turns - 1:
            _finish(acc, out, silu, m, n, skip, rows, columns, parts, how)
            acc = tl.zeros((rows, columns), tl.float32)


def measure(way, rows, columns, step, parts, warps, stages, programs, how):
    """Microseconds of the library, of the library and the SiLU behind it, and of this one."""
    x = torch.randn(ROWS, INNER, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(INNER, WIDTH, device="cuda", dtype=torch.bfloat16) * INNER**-0.5
    out = torch.empty(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    three = torch.empty(ROWS, WIDTH - UNTOUCHED, device="cuda", dtype=torch.bfloat16)
    target = three if how == THREE else torch.empty_like(out)
    silu_kernel = kernels_of("hstu.triton.rows").silu_kernel

    def library():
        torch.mm(x, weight, out=out)

    def both():
        library()
        by_rows(silu_kernel, UNTOUCHED, {"X": out, "Out": three}, {})

    both()
    wanted, wanted_silu = out.float(), three.float()
    tiles = [[rows, step], [step, columns], [rows, columns // parts], [rows, columns // parts]]
    given = [TensorDescriptor.from_tensor(*pair) for pair in zip((x, weight, out, target), tiles)]
    constants = (WIDTH, INNER, UNTOUCHED, rows, columns, step, parts, how, programs)
    kernel = {"flat": flat, "by hand": by_hand}[way]

    def ours():
        kernel[(programs,)](*given, ROWS, *constants, num_warps=warps, num_stages=stages)

    for each in (out, three, target):
        each.fill_(float("nan"))
    ours()
    assert (out.float() - wanted).abs().max() < 0.05, "the product is wrong"
    if how != NOTHING:
        found = three if how == THREE else target[:, UNTOUCHED:]
        assert (found.float() - wanted_silu).abs().max() < 0.05, "the SiLU is wrong"
    calls = {"library": library, "library and SiLU": both, "ours": ours}
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            times[name].append(1000 * ms_a_call(call, REPEATS))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
        return
    rows = []
    print(f"{'way, shape, SiLU':44} {'library':>8} {'and SiLU':>9} {'ours':>8}  us")
    for shape in SHAPES:
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(shape)], capture_output=True, text=True, check=False
        )
        name = (
            f"{shape[0]} {' '.join(map(str, shape[1:-1]))} {('none', 'three parts', 'all parts')[shape[-1]]}"
        )
        if done.returncode:
            print(f"{name:44} failed: {done.stderr.strip().splitlines()[-1][:100]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:44} " + " ".join(f"{found[key]:8.1f}" for key in found), flush=True)
        rows.append({"shape": shape, **found})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "us": rows}))


if __name__ == "__main__":
    main()
