"""Prioritized communication on GPUs: the bits of the plain path, with rows moved on a stream of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.optimizer import updated
from freescale.embedding.sharding.plan import TablePlan, TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.pipeline.prioritized.pipeline import PrioritizedPipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_ROWS, DIM, NUM_STEPS = 20_000, 64, 60
OPTIMIZERS = [SGD(), RowwiseAdagrad(), Adam()]


def batches(rank: int) -> list[torch.Tensor]:
    """Skewed rows: every batch shares some with the next."""
    draws = [torch.Generator().manual_seed(1000 * rank + step) for step in range(NUM_STEPS)]
    return [(NUM_ROWS * torch.rand(8_000, generator=draw) ** 4).long() for draw in draws]


def spread(specs: list[TableSpec], *, num_ranks: int, replicate_below_mb: float = 0.0) -> list[TablePlan]:
    """The plan of one rank as if there were others."""
    return [TablePlan(spec=spec, num_ranks=1, replicated=False) for spec in specs]


def busy(matrix: torch.Tensor) -> None:
    """Work that keeps the main stream behind the CPU, so that a missing wait would show."""
    for _ in range(20):
        matrix.copy_((matrix @ matrix).clamp(-1, 1))


def train(
    embedding: ShardedEmbedding,
    rank: int,
    *,
    prioritized: bool,
    beside: bool = False,
    steady: float = float("inf"),
) -> dict[str, torch.Tensor]:
    """The table afterwards; from step `steady` on nobody may wait for the GPU."""
    matrix = torch.randn(1024, 1024, device=embedding.device)
    with PrioritizedPipeline(
        batches(rank),
        embedding=embedding,
        rows_of=lambda rows: {"item": rows},
        prioritized=lambda step: prioritized,
        check=False,
        beside=beside,
    ) as pipeline:
        for ready in pipeline:
            torch.cuda.set_sync_debug_mode("error" if ready.step >= steady else "default")
            busy(matrix)
            vectors = ready.vectors["item"]
            weight = torch.cos(torch.arange(len(vectors), device=vectors.device))[:, None]
            (weight * vectors.square() + vectors).sum().backward()
            busy(matrix)
            pipeline.update(ready, lr=0.1 / (1 + ready.step))
            if beside:
                busy(matrix)  # as gradients of weights would be
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    table = embedding.tables["item"]
    return {"weight": table.weight.cpu(), **{name: value.cpu() for name, value in table.state.items()}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_one_gpu_with_a_stream_beside_has_the_bits_of_the_plain_path(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank whose table is treated as spread out: every stage runs, only the wire is missing."""
    monkeypatch.setattr("freescale.embedding.sharding.sharded.plan_tables", spread)
    spec = TableSpec(name="item", num_rows=NUM_ROWS, dim=DIM, optimizer=optimizer, init_std=1.0)
    plain = train(ShardedEmbedding([spec], device="cuda"), 0, prioritized=False)
    for beside in (False, True):
        ours = train(ShardedEmbedding([spec], device="cuda"), 0, prioritized=True, beside=beside)
        for name, values in plain.items():
            assert torch.equal(ours[name], values), (name, beside)


def test_no_thread_waits_for_the_gpu_in_a_steady_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freescale.embedding.sharding.sharded.plan_tables", spread)
    spec = TableSpec(name="item", num_rows=NUM_ROWS, dim=DIM, optimizer=RowwiseAdagrad(), init_std=1.0)
    try:
        train(ShardedEmbedding([spec], device="cuda"), 0, prioritized=True, steady=20)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_a_row_gets_the_same_bits_whichever_rows_are_updated_with_it(optimizer: Any) -> None:
    for num_rows, dim in ((3, 64), (1000, 64), (4099, 50)):
        rows, grad = (torch.randn(num_rows, dim, device="cuda") for _ in range(2))
        state = {
            name: torch.rand(shape, device="cuda")
            for name, shape in optimizer.state_shapes(num_rows, dim).items()
        }
        some = torch.arange(0, num_rows, 3, device="cuda")
        part = {name: values[some] for name, values in state.items()}
        apart = updated(optimizer, rows[some], part, grad[some], lr=0.1, step=3)
        together = updated(optimizer, rows, state, grad, lr=0.1, step=3)
        assert torch.equal(apart, together[some])
        assert all(torch.equal(values, state[name][some]) for name, values in part.items())


def on_nccl(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2)
    spec = TableSpec(name="item", num_rows=NUM_ROWS, dim=DIM, optimizer=Adam(), init_std=1.0)
    plain, ours = (
        train(ShardedEmbedding([spec], group=dist.group.WORLD, device=f"cuda:{rank}"), rank, prioritized=way)
        for way in (False, True)
    )
    for name, values in plain.items():
        assert torch.equal(ours[name], values), name
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_over_nccl_have_the_bits_of_the_plain_path() -> None:
    multiprocessing.spawn(on_nccl, args=(29571,), nprocs=2)
