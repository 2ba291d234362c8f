"""Row work beside fbgemm's table-batched embeddings (TBE): look rows up, take gradients back, row-wise Adagrad.

    PYTHONPATH=.:DIR python benchmarks/row_peers.py [--rows 20000000] [--dim 128] [--ids 100000 1000000]

DIR holds the package fbgemm_gpu of a version that fits torch (1.6.0 for torch 2.11). One table of float32 rows on the
GPU, no pooling: an offset for every id. Checked first: both leave the same table after three steps, to 1e-6. Then
contenders take turns, as in row_work.py:

    ours           `ShardedEmbedding`: call, backward, step; the sort is part of it, and its bits are always the same
    ahead          the same with `prepare` done before
    fbgemm         its call and backward; the update is part of the backward
    deterministic  the same under `torch.use_deterministic_algorithms`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from row_work import EPS, GPU, LR, drawn, embedding_of, in_turn, measured, step_of
from torch import Tensor

from freescale.embedding import RowwiseAdagrad


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ids", type=int, nargs="+", default=[100_000, 1_000_000])
    options = parser.parse_args()
    worst = check(options.dim)
    print(f"checked: tables of both after three steps differ by at most {worst:.1e}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.rows:,} x {options.dim}")
    found = compare(options.rows, options.dim, options.ids)
    print(json.dumps({"claim": "row_peers", "gpu": torch.cuda.get_device_name(), "rows": found}))


def tbe_of(rows: int, dim: int) -> Any:
    """One table of fbgemm's."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
        pooling_mode=PoolingMode.NONE,
        weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32,
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def tbe_step(tbe: Any, ids: Tensor, offsets: Tensor, grad: Tensor) -> None:
    """One step; no thread is woken for the backward, as in ours."""
    vectors = tbe(ids, offsets)
    with torch.autograd.set_multithreading_enabled(False):
        vectors.backward(grad)


def check(dim: int) -> float:
    """The largest difference of two tables after three steps."""
    rows, count = 5_000, 40_000
    embedding, tbe = embedding_of(rows, dim, RowwiseAdagrad(), torch.float32), tbe_of(rows, dim)
    weight = tbe.split_embedding_weights()[0]
    weight.copy_(embedding.tables["item"].weight)
    offsets = torch.arange(count + 1, device=GPU)
    for step, ids in enumerate(drawn("Zipf 1.0", count, rows)[:3]):
        grad = torch.randn(count, dim, generator=torch.Generator(GPU).manual_seed(step), device=GPU)
        step_of(embedding, ids, grad)
        tbe_step(tbe, ids, offsets, grad)
    worst = float((embedding.tables["item"].weight - weight).abs().max())
    assert worst < 1e-6, f"FAILED: tables differ by {worst:.1e}"
    return worst


def compare(rows: int, dim: int, counts: list[int]) -> list[dict[str, Any]]:
    """All contenders in turn, by number and kind of ids."""
    embedding, tbe = embedding_of(rows, dim, RowwiseAdagrad(), torch.float32), tbe_of(rows, dim)
    names = ("ours", "ahead", "fbgemm", "deterministic")
    print(f"{'ids':>9} {'which':20}", *(f"{name:>15}" for name in names), " fbgemm/ours")
    found = []
    for count in counts:
        grad, offsets = torch.randn(count, dim, device=GPU), torch.arange(count + 1, device=GPU)
        for kind in ("uniform", "Zipf 1.0", "one row has a tenth"):
            batches = drawn(kind, count, rows)
            plans = [embedding.prepare("item", ids) for ids in batches]

            def theirs(n: int, b: Any = batches, o: Tensor = offsets, g: Tensor = grad) -> None:
                tbe_step(tbe, b[n], o, g)

            times = measured(
                {
                    "ours": in_turn(lambda n, b=batches, g=grad: step_of(embedding, b[n], g)),
                    "ahead": in_turn(lambda n, p=plans, g=grad: step_of(embedding, p[n], g)),
                    "fbgemm": in_turn(theirs),
                    "deterministic": in_turn(deterministic(theirs)),
                },
                repeats=max(10, 10_000_000 // count),
            )
            ratio = times["fbgemm"][0] / times["ours"][0]
            told = " ".join(f"{times[name][0]:7.3f} ± {times[name][1]:.3f}" for name in names)
            print(f"{count:>9,} {kind:20} {told}  {ratio:9.2f}x", flush=True)
            found.append({"ids": count, "kind": kind, "ms": times, "fbgemm/ours": ratio})
    return found


def deterministic(call: Callable[[int], None]) -> Callable[[int], None]:
    """A call whose kernels may not add in any order."""

    def run(n: int) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            call(n)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


if __name__ == "__main__":
    main()
