"""What rows of a table cost a training step on one GPU: look them up, take their gradients back, update them.

    python benchmarks/row_work.py [--rows 20000000] [--dim 128] [--ids 100000 1000000] [--quick]

Every step looks up other ids, gets a gradient for each and updates the table, row-wise Adagrad unless said otherwise:

    ours     `ShardedEmbedding`: call, backward, step; the sort is part of it
    ahead    the same with `prepare` done before: the sort runs under other work in a training loop
    torch    ten lines of plain torch: unique, indexing, index_add_; no autograd, which would only add to it
    sort     `prepare` alone
    hop      ours with torch's own thread for the backward. All others do it in the thread that calls: a model's
             backward starts that thread anyway, and to wake it for one node costs more than the rows of 100k ids

Milliseconds by the GPU's clock over a row of steps, so time of the host that the GPU must wait for counts. Contenders
take turns; each figure is the median of three rounds, with the largest distance from it. GB/s: bytes a step cannot do
without (vectors read and written, gradients read, rows and state read and written) by its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_time import ms_a_call
from torch import Tensor

from freescale.embedding import SGD, Adam, EmbeddingTable, RowwiseAdagrad, ShardedEmbedding, TableSpec
from freescale.embedding.optimizer import SparseOptimizer
from freescale.kernels.rows import plan_of_unique, sum_planned, unique_of

ROUNDS, BATCHES, EPS, LR = 3, 8, 1e-8, 0.01
GPU = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ids", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--quick", action="store_true", help="row-wise Adagrad alone")
    options = parser.parse_args()
    check()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"table {options.rows:,} x {options.dim}\n")
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rows": options.rows, "dim": options.dim}
    result["row-wise Adagrad"] = against_torch(options.rows, options.dim, options.ids)
    torch.cuda.empty_cache()
    if not options.quick:
        result["others"] = others(options.rows, options.dim, options.ids)
    print(json.dumps(result))


# Correct first.


def check() -> None:
    """Ours against plain torch in float64, against the plain path bit for bit, and against itself."""
    draw = torch.Generator(GPU).manual_seed(0)
    for optimizer in (SGD(), RowwiseAdagrad(), Adam()):
        for dtype in (torch.float32, torch.bfloat16):
            check_one(optimizer, dtype, draw)
    print("checked: float64, the plain path bit for bit, every order of other rows, planned ahead or not")


def check_one(optimizer: SparseOptimizer, dtype: torch.dtype, draw: torch.Generator) -> None:
    """Three steps with rows of 1 to 70,000 values."""
    rows, dim = 5_000, 128
    tables = [embedding_of(rows, dim, optimizer, dtype) for _ in range(4)]
    plain = EmbeddingTable(rows, dim, optimizer=optimizer, dtype=dtype, device=GPU)
    wide = EmbeddingTable(rows, dim, optimizer=optimizer, dtype=torch.float64, device=GPU)
    for step in (1, 2, 3):
        ids = some_ids(rows, draw)
        grad = torch.randn(len(ids), dim, generator=draw, device=GPU)
        step_of(tables[0], ids, grad)
        step_of(tables[1], tables[1].prepare("item", ids), grad)
        # Every value in its place among those of its row, and the rows in another order.
        moved = torch.argsort(ids * 7919 % rows, stable=True)
        step_of(tables[2], ids[moved], grad[moved])
        # As several ranks do: sorted by the CPU.
        found, places = torch.unique(ids, return_inverse=True)
        tables[3].tables["item"].apply_sums(
            plan_of_unique(found.cpu(), places.cpu(), GPU), grad, lr=LR, step=step
        )
        plan = tables[0].tables["item"].plan(ids)
        unique, inverse = unique_of(plan, ids)
        sums = sum_planned(grad, plan, len(unique))
        exact = torch.zeros(len(unique), dim, dtype=torch.float64, device=GPU)
        exact.index_add_(0, inverse, grad.double())
        assert (sums - exact).abs().max() < 1e-3, "sums"
        few = torch.bincount(inverse) <= 64
        in_turn = torch.zeros_like(sums).index_put_((inverse,), grad, accumulate=True)
        assert torch.allclose(sums[few], in_turn[few], rtol=0, atol=1e-5), "sums of few values"
        plain._apply_plainly(unique, sums, lr=LR, step=step)
        wide._apply_plainly(unique, sums.double(), lr=LR, step=step)
        ours = tables[0].tables["item"]
        for other in (each.tables["item"] for each in tables[1:]):
            assert torch.equal(ours.weight, other.weight), (
                type(optimizer).__name__,
                dtype,
                "not the same bits",
            )
            assert all(torch.equal(ours.state[name], value) for name, value in other.state.items())
        # The kernel of bfloat16 tables adds squares in another order, and a last bit may tip a rounding.
        tipped = (ours.weight != plain.weight)[unique[few]].float().mean()
        exactly = dtype == torch.float32 or not isinstance(optimizer, RowwiseAdagrad)
        assert tipped <= (0 if exactly else 1e-3), (type(optimizer).__name__, dtype, step, float(tipped))
        plain.weight.copy_(ours.weight)
        # bfloat16 has been rounded in every step, by at most one part in 128 of what it was then.
        tolerance = 1e-5 if dtype == torch.float32 else step / 64
        distance = (ours.weight.double() - wide.weight).abs() / (1 + wide.weight.abs())
        assert distance.max() < tolerance, (type(optimizer).__name__, dtype, float(distance.max()))


def some_ids(rows: int, draw: torch.Generator) -> Tensor:
    """Rows once, a few times, around the limits of the kernels, and one with most of the values."""
    counts = {11: 64, 12: 65, 13: 512, 14: 513, 15: 1024, 16: 1025, 17: 70_000}
    parts = [torch.randint(100, rows, (9_000,), generator=draw, device=GPU)]
    parts += [torch.full((count,), row, device=GPU) for row, count in counts.items()]
    ids = torch.cat(parts)
    return ids[torch.randperm(len(ids), generator=draw, device=GPU)]


# Contenders.


def embedding_of(rows: int, dim: int, optimizer: SparseOptimizer, dtype: torch.dtype) -> ShardedEmbedding:
    spec = TableSpec(name="item", num_rows=rows, dim=dim, optimizer=optimizer, dtype=dtype)
    return ShardedEmbedding([spec], device=GPU)


def step_of(embedding: ShardedEmbedding, ids: Any, grad: Tensor, *, hop: bool = False) -> None:
    """One step of a user."""
    vectors = embedding({"item": ids})["item"]
    with torch.autograd.set_multithreading_enabled(hop):
        vectors.backward(grad)
    embedding.step(lr=LR)


def torch_step(weight: Tensor, state: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    """The same by hand, row-wise Adagrad."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    vectors = weight[ids]
    summed = torch.zeros(len(unique), weight.shape[1], device=weight.device)
    summed.index_add_(0, inverse, grad)
    squares = state[unique] + summed.square().mean(dim=1, keepdim=True)
    state[unique] = squares
    weight[unique] -= LR * summed / (squares.sqrt() + EPS)
    return vectors


def in_turn(call: Callable[[int], Any]) -> Callable[[], Any]:
    """Another batch in every call."""
    done = 0

    def run() -> None:
        nonlocal done
        call(done % BATCHES)
        done += 1

    return run


def measured(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median and largest distance from it, in ms, of contenders that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        ms_a_call(call, 5)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(ms_a_call(call, repeats))
    return {
        name: (statistics.median(each), max(abs(x - statistics.median(each)) for x in each))
        for name, each in times.items()
    }


# Workloads.


def drawn(kind: str, count: int, rows: int) -> list[Tensor]:
    """BATCHES lists of ids. Popular rows are spread over the table, as `embedding.id_map=direct` does."""
    draw = torch.Generator(GPU).manual_seed(count)
    if kind == "uniform":
        return [torch.randint(0, rows, (count,), generator=draw, device=GPU) for _ in range(BATCHES)]
    if kind == "one row has a tenth":
        found = drawn("uniform", count, rows)
        for ids in found:
            ids[torch.randperm(count, generator=draw, device=GPU)[: count // 10]] = rows // 3
        return found
    until = (1.0 / torch.arange(1, rows + 1, dtype=torch.float64, device=GPU)).cumsum(0)
    at = [
        torch.rand(count, dtype=torch.float64, generator=draw, device=GPU) * until[-1] for _ in range(BATCHES)
    ]
    return [torch.searchsorted(until, each).clamp_(max=rows - 1) * 2_654_435_761 % rows for each in at]


def least_bytes(ids: Tensor, dim: int) -> int:
    """Of one step with float32 rows and row-wise Adagrad."""
    return 4 * dim * (3 * len(ids) + 2 * len(ids.unique())) + 64 * len(ids.unique())


def against_torch(rows: int, dim: int, counts: list[int]) -> list[dict[str, Any]]:
    """Row-wise Adagrad, float32."""
    embedding = embedding_of(rows, dim, RowwiseAdagrad(), torch.float32)
    table = embedding.tables["item"]
    squares = table.state["square_sum"]
    names = f"{'ours':>15} {'ahead':>15} {'torch':>15} {'sort':>8} {'hop':>8}"
    print(f"{'ids':>9} {'which':20} {'unique':>8} {names}  torch/ours  GB/s")
    found = []
    for count in counts:
        grad = torch.randn(count, dim, device=GPU)
        for kind in ("uniform", "Zipf 1.0", "one row has a tenth"):
            batches = drawn(kind, count, rows)
            plans = [embedding.prepare("item", ids) for ids in batches]
            times = measured(
                {
                    "ours": in_turn(lambda n, b=batches, g=grad: step_of(embedding, b[n], g)),
                    "ahead": in_turn(lambda n, p=plans, g=grad: step_of(embedding, p[n], g)),
                    "torch": in_turn(lambda n, b=batches, g=grad: torch_step(table.weight, squares, b[n], g)),
                    "hop": in_turn(lambda n, b=batches, g=grad: step_of(embedding, b[n], g, hop=True)),
                    "sort": in_turn(lambda n, b=batches: embedding.prepare("item", b[n])),
                },
                repeats=max(10, 10_000_000 // count),
            )
            unique = len(batches[0].unique())
            rate = least_bytes(batches[0], dim) / times["ours"][0] / 1e6
            ratio = times["torch"][0] / times["ours"][0]
            told = " ".join(f"{m:7.3f} ± {s:.3f}" for m, s in (times[x] for x in ("ours", "ahead", "torch")))
            alone = f"{times['sort'][0]:8.3f} {times['hop'][0]:8.3f}"
            print(f"{count:>9,} {kind:20} {unique:>8,} {told} {alone}  {ratio:9.2f}x {rate:5.0f}", flush=True)
            found.append({"ids": count, "kind": kind, "unique": unique, "ms": times, "torch/ours": ratio})
    return found


def others(rows: int, dim: int, counts: list[int]) -> list[dict[str, Any]]:
    """Other rules and bfloat16 rows, side by side with row-wise Adagrad in float32."""
    cases = {
        "adagrad": (RowwiseAdagrad(), torch.float32),
        "adagrad bf16": (RowwiseAdagrad(), torch.bfloat16),
        "adam": (Adam(), torch.float32),
        "sgd": (SGD(), torch.float32),
    }
    tables = {name: embedding_of(rows, dim, *case) for name, case in cases.items()}
    print(
        f"\n{'ids':>9} {'which':10}", *(f"{name:>16}" for name in cases), "  of row-wise Adagrad in float32"
    )
    found = []
    for count in counts:
        grad = torch.randn(count, dim, device=GPU)
        for kind in ("uniform", "Zipf 1.0"):
            batches = drawn(kind, count, rows)
            calls = {
                name: in_turn(lambda n, t=table, b=batches, g=grad: step_of(t, b[n], g))
                for name, table in tables.items()
            }
            times = measured(calls, repeats=max(10, 10_000_000 // count))
            ratios = {name: times[name][0] / times["adagrad"][0] for name in cases}
            print(
                f"{count:>9,} {kind:10}",
                *(f"{m:8.3f} ± {s:.3f}" for m, s in times.values()),
                "  "
                + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if name != "adagrad"),
                flush=True,
            )
            found.append({"ids": count, "kind": kind, "ms": times, "ratios": ratios})
    return found


if __name__ == "__main__":
    main()
