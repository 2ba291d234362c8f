"""One rank of embedding_step.py: the workload, and the two libraries that train on it.

Started by embedding_step.py, one process a rank, with the Python of the library it shows: nothing here needs both.
Commands arrive as JSON lines on stdin, answers leave as JSON lines on stdout:

    {"do": "check", "ids", "dtype", "shares", "init", "out"}   three steps from given weights; the result is saved
    {"do": "round", "ids", "steps"}                            steps on batches drawn before; seconds and events
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

NUM_ROWS, DIM, HIDDEN = 100_000, 64, 64
SEQUENCES, MEAN_LENGTH, SIGMA, LONGEST = 64, 100, 1.0, 1000
POOL = 24  # batches drawn ahead; a round is a multiple of it, so that every round does the same work
TABLE_LR, DENSE_LR, EPS = 0.02, 1e-3, 1e-8
SEED = 7


# The workload


@dataclass
class Batch:
    """What one rank computes in one step; TorchRec's pipelines want `to` and `record_stream`."""

    lengths: Tensor
    ids: Tensor
    labels: Tensor
    events: int
    global_events: int
    features: Any = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Already there."""
        return self

    def record_stream(self, stream: object) -> None:
        """Nothing is in flight on a CPU."""


def draw_lengths(step: int, share: int) -> np.ndarray:
    """Lengths of the sequences of one share: lognormal with the given mean before the cap."""
    rng = np.random.default_rng([SEED, step, share])
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, SEQUENCES)
    return np.clip(lengths, 1, LONGEST).astype(np.int64)


def draw_ids(kind: str, step: int, share: int, count: int) -> np.ndarray:
    """Zipf with exponent 1, popular ids scattered over the table, or uniform."""
    rng = np.random.default_rng([SEED, step, share, 1])
    if kind == "uniform":
        return rng.integers(0, NUM_ROWS, count)
    weight = 1.0 / np.arange(1, NUM_ROWS + 1)
    place = np.searchsorted(np.cumsum(weight) / weight.sum(), rng.random(count))
    return np.random.default_rng(SEED).permutation(NUM_ROWS)[np.minimum(place, NUM_ROWS - 1)]


def draw_batch(kind: str, step: int, *, shares: list[int], num_shares: int) -> Batch:
    """The shares of a global batch that one rank computes. Depends on (kind, step, shares) alone."""
    lengths = [draw_lengths(step, share) for share in range(num_shares)]
    ids = [draw_ids(kind, step, share, int(lengths[share].sum())) for share in shares]
    labels = [
        np.random.default_rng([SEED, step, share, 2]).integers(0, 2, len(part))
        for share, part in zip(shares, ids)
    ]
    return Batch(
        lengths=torch.from_numpy(np.concatenate([lengths[share] for share in shares])),
        ids=torch.from_numpy(np.concatenate(ids)),
        labels=torch.from_numpy(np.concatenate(labels)).float(),
        events=sum(map(len, ids)),
        global_events=int(sum(map(np.sum, lengths))),
    )


def make_mlp(dtype: torch.dtype, *, smooth: bool) -> nn.Module:
    """Two layers; smooth where results are compared, since a ReLU near zero flips with the rounding of its input."""
    torch.manual_seed(SEED)
    bend = nn.Tanh() if smooth else nn.ReLU()
    return nn.Sequential(nn.Linear(DIM, HIDDEN), bend, nn.Linear(HIDDEN, 1)).to(dtype)


def loss_sum(mlp: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
    """Summed over the events of this rank."""
    logits = mlp(vectors).squeeze(-1)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")


# The libraries


class Trainer(Protocol):
    """One library, ready to train."""

    def steps(self, batches: Iterator[Batch], count: int) -> None:
        """Train on the next batches; count 0 means all there are."""

    def local_rows(self) -> Tensor:
        """The rows of the table that live on this rank; changing them changes the table."""

    def dense(self) -> list[Tensor]:
        """The parameters of the MLP."""

    def table_mib(self) -> float:
        """Rows and optimizer state held by this rank."""


class FreeScale:
    """ShardedEmbedding by its public calls; dense gradients summed by DDP as `freescale train` does.

    CPU ranks that were told that they share a machine talk over sockets of their own, others over gloo.
    """

    def __init__(self, dtype: torch.dtype, *, smooth: bool) -> None:
        from freescale.embedding import RowwiseAdagrad
        from freescale.embedding.sharding.plan import TableSpec
        from freescale.embedding.sharding.sharded import ShardedEmbedding
        from freescale.train.compute.dense_gradients import Sums, reduced_in_backward

        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        spec = TableSpec(
            name="item", num_rows=NUM_ROWS, dim=DIM, optimizer=RowwiseAdagrad(eps=EPS), dtype=dtype
        )
        self.embedding = ShardedEmbedding([spec], group=group)
        mlp = make_mlp(dtype, smooth=smooth)
        self.mlp, self.sums = (mlp, Sums()) if group is None else reduced_in_backward(mlp, group)
        self.adam = torch.optim.Adam(self.mlp.parameters(), lr=DENSE_LR)

    def steps(self, batches: Iterator[Batch], count: int) -> None:
        """Train."""
        for done, batch in enumerate(batches, start=1):
            self.adam.zero_grad()
            vectors = self.embedding({"item": batch.ids})["item"]
            loss = loss_sum(self.mlp, vectors, batch.labels) / batch.global_events
            loss.backward()
            self.embedding.step(lr=TABLE_LR)
            self.sums.wait()
            self.adam.step()
            if done == count:
                return

    def local_rows(self) -> Tensor:
        """Rows of this rank."""
        return self.embedding.tables["item"].weight

    def dense(self) -> list[Tensor]:
        """Of the MLP."""
        return [parameter.detach() for parameter in self.mlp.parameters()]

    def table_mib(self) -> float:
        """Of this rank."""
        table = self.embedding.tables["item"]
        return sum(t.nbytes for t in (table.weight, *table.state.values())) / 2**20


class TorchRec:
    """EmbeddingCollection, row-wise, under DistributedModelParallel; the optimizer of the table is fused.

    Its sequence all-to-all divides the gradients of the rows by the number of ranks, and its DDP those of the MLP.
    So the loss is multiplied by it, and both sides learn the same.

    Args:
        pipelined: TrainPipelineSparseDist instead of a plain loop.
    """

    def __init__(self, dtype: torch.dtype, *, smooth: bool, pipelined: bool) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingPlan
        from torchrec.modules.embedding_configs import EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingCollection

        assert dtype == torch.float32
        config = EmbeddingConfig(
            name="item", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=["item"]
        )
        tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        sharder = EmbeddingCollectionSharder(
            fused_params={
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "learning_rate": TABLE_LR,
                "eps": EPS,
            }
        )
        plan = construct_module_sharding_plan(
            tables,
            {"item": row_wise(compute_kernel="fused")},
            sharder=sharder,
            world_size=dist.get_world_size(),
            local_size=dist.get_world_size(),
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            _TorchRecModel(tables, make_mlp(dtype, smooth=smooth), dist.get_world_size()),
            device=torch.device("cpu"),
            plan=ShardingPlan({"tables": plan}),
            sharders=[sharder],
        )
        self._dense = [p for n, p in self.model.named_parameters() if "mlp" in n]
        self.adam = torch.optim.Adam(self._dense, lr=DENSE_LR)
        self.pipeline: Any = None
        if pipelined:
            from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
            from torchrec.streamable import Pipelineable

            Pipelineable.register(Batch)
            self.pipeline = TrainPipelineSparseDist(self.model, self.adam, torch.device("cpu"))
        self._source: Iterator[Batch] | None = None
        self._ready: Iterator[Batch] = iter(())

    def steps(self, batches: Iterator[Batch], count: int) -> None:
        """Train."""
        if self.pipeline is not None:
            return self._pipelined_steps(batches, count)
        for done, batch in enumerate(batches, start=1):
            self.adam.zero_grad()
            loss, _ = self.model(_with_features(batch))
            loss.backward()
            self.adam.step()
            if done == count:
                return

    def _pipelined_steps(self, batches: Iterator[Batch], count: int) -> None:
        """The pipeline holds batches it has begun with, so an iterator stays with it as long as it is the same."""
        if self._source is not batches:
            self._source, self._ready = batches, map(_with_features, batches)
        done = 0
        while done != count or count == 0:
            try:
                self.pipeline.progress(self._ready)
            except StopIteration:
                return
            done += 1

    def local_rows(self) -> Tensor:
        """Rows of this rank."""
        (table,) = (v for k, v in self.model.state_dict().items() if "embeddings" in k)
        return table.local_shards()[0].tensor

    def dense(self) -> list[Tensor]:
        """Of the MLP."""
        return [parameter.detach() for parameter in self._dense]

    def table_mib(self) -> float:
        """Of this rank."""
        state = self.model.fused_optimizer.state_dict()["state"]
        shards = [t.local_shards()[0].tensor for part in state.values() for t in part.values()]
        return sum(t.nbytes for t in (self.local_rows(), *shards)) / 2**20


class _TorchRecModel(nn.Module):
    def __init__(self, tables: nn.Module, mlp: nn.Module, num_ranks: int) -> None:
        super().__init__()
        self.tables, self.mlp, self.num_ranks = tables, mlp, num_ranks

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        vectors = self.tables(batch.features)["item"].values()
        loss = loss_sum(self.mlp, vectors, batch.labels) * self.num_ranks / batch.global_events
        return loss, loss.detach()


def _with_features(batch: Batch) -> Batch:
    """With a new KeyedJaggedTensor, as a loader would give: it remembers what it once computed."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    features = KeyedJaggedTensor(keys=["item"], values=batch.ids, lengths=batch.lengths)
    return replace(batch, features=features)


def make_trainer(side: str, dtype: torch.dtype, *, smooth: bool) -> Trainer:
    if side.startswith("freescale"):
        return FreeScale(dtype, smooth=smooth)
    return TorchRec(dtype, smooth=smooth, pipelined=side == "torchrec-pipelined")


# Commands


def check(side: str, *, ids: str, dtype: str, shares: list[list[int]], init: str, out: str) -> dict[str, Any]:
    """Three steps from the weights of a file, on the shares of this rank; saves rows and dense parameters."""
    rank, num_shares = dist.get_rank(), sum(map(len, shares))
    trainer = make_trainer(side, getattr(torch, dtype), smooth=True)
    rows = trainer.local_rows()
    first = -(-NUM_ROWS // dist.get_world_size()) * rank
    rows.copy_(torch.load(init)[first : first + len(rows)])
    batches = [draw_batch(ids, step, shares=shares[rank], num_shares=num_shares) for step in range(3)]
    trainer.steps(iter(batches), 0)
    torch.save({"rows": trainer.local_rows(), "dense": trainer.dense()}, f"{out}-{rank}")
    return {}


class Rounds:
    """Endless batches of each kind for one trainer."""

    def __init__(self, side: str) -> None:
        self._trainer = make_trainer(side, torch.float32, smooth=False)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._pool = {
            kind: [draw_batch(kind, step, shares=[rank], num_shares=num_ranks) for step in range(POOL)]
            for kind in ("zipf", "uniform")
        }
        self._endless = {kind: self._forever(pool) for kind, pool in self._pool.items()}

    @staticmethod
    def _forever(pool: list[Batch]) -> Iterator[Batch]:
        while True:
            yield from pool

    def run(self, *, ids: str, steps: int) -> dict[str, Any]:
        """Train; seconds from the moment all ranks are ready until all are done, and events of all ranks."""
        assert steps % POOL == 0
        whole = time.process_time()
        self._trainer.steps(self._endless[ids], 4)  # warm, and rids a pipeline of the other kind's batches
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        self._trainer.steps(self._endless[ids], steps)
        dist.barrier()
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - start_cpu,
            "cpu_seconds_all": time.process_time() - whole,
            "events": sum(batch.global_events for batch in self._pool[ids]) * steps // POOL,
            "table_mib": self._trainer.table_mib(),
        }


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "freescale", "torchrec", "fbgemm-gpu-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    side = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds: Rounds | None = None
    print(json.dumps(versions()), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "check":
            answer = check(side, **command)
        else:
            rounds = rounds or Rounds(side)
            answer = rounds.run(**command)
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
