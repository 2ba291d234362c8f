"""The same batches down the plain path and down the prioritized one, for tests that compare bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import exchange_counts
from freescale.comm.traffic.channels import open_channels
from freescale.comm.traffic.priority import Channels
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.registry import make_transport
from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.pipeline.prioritized.pipeline import PrioritizedPipeline

OPTIMIZERS: dict[str, Any] = {"sgd": SGD(), "rowwise_adagrad": RowwiseAdagrad(), "adam": Adam()}
Batch = dict[str, Tensor]


def learning_rate(step: int) -> float:
    return 0.1 * (1 + step % 7) / (1 + step // 7)


def make_embedding(
    specs: list[TableSpec], *, sockets: bool = False, staged: bool = False, limit_mb: float = 0.0
) -> ShardedEmbedding:
    group = dist.group.WORLD if dist.is_initialized() else None
    transport = None
    if staged:
        transport = make_transport(group, kind="host_staged")
    elif group is not None:
        transport = SocketTransport(group) if sockets else CollectiveTransport(group)
    return ShardedEmbedding(specs, group=group, transport=transport, replicate_below_mb=limit_mb)


def channels_of(*, sockets: bool, staged: bool = False) -> Channels:
    group = dist.group.WORLD if dist.is_initialized() else None
    if staged:
        return open_channels(group, kind="host_staged")
    if not sockets or group is None:
        return open_channels(group, kind="collective")
    express, bulk = SocketTransport(group), SocketTransport(group)
    for channel in (express, bulk):
        exchange_counts(channel, torch.zeros(channel.num_ranks, dtype=torch.int64))
    return Channels(express=express, bulk=bulk, ids=bulk)


def backward(vectors: dict[str, Tensor]) -> float:
    """A loss whose gradient depends on the values and on the place of every id."""
    total = torch.zeros(())
    for each in vectors.values():
        weight = torch.cos(torch.arange(each.shape[0], dtype=each.dtype))[:, None]
        total = total + (weight * each).sum() + (weight * each.square()).sum() / 3
    if total.requires_grad:
        total.backward()
    return float(total.detach())


def train_plainly(embedding: ShardedEmbedding, batches: list[Batch]) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        lookups = {name: embedding.lookup(name, rows) for name, rows in batch.items()}
        losses.append(backward({name: lookup.vectors() for name, lookup in lookups.items()}))
        for lookup in lookups.values():
            embedding.update(lookup, lr=learning_rate(step), step=step + 1)
    return losses


def train_prioritized(
    embedding: ShardedEmbedding,
    batches: list[Batch],
    *,
    after_step: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> tuple[list[float], list[Any]]:
    losses, traffic = [], []
    with PrioritizedPipeline(iter(batches), embedding=embedding, rows_of=lambda b: b, **options) as pipeline:
        for ready in pipeline:
            losses.append(backward(ready.vectors))
            pipeline.update(ready, lr=learning_rate(ready.step))
            traffic.append(ready.traffic)
            after_step(ready.step)
        pipeline.flush()
        waiting = getattr(pipeline.order, "waiting", dict)()
    assert not waiting, waiting
    return losses, traffic


def state_bits(embedding: ShardedEmbedding) -> dict[str, bytes]:
    """Every bit of this rank's rows and their optimizer state."""
    bits = {}
    for name, table in embedding.tables.items():
        for part, values in {"weight": table.weight, **table.state}.items():
            bits[f"{name}.{part}"] = values.contiguous().view(torch.uint8).numpy().tobytes()
    return bits


def random_batches(
    seed: int, specs: list[TableSpec], num_steps: int, rank: int, num_ranks: int
) -> list[Batch]:
    """Batches of every kind: sharing all rows with the last one, none, a few; empty ones, repeated ids, one owner."""
    rng = random.Random(seed)
    batches = []
    pools: dict[str, list[int]] = {}
    for _ in range(num_steps):
        batch = {}
        for spec in specs:
            kind = rng.choice(
                ["same", "other", "few", "empty ranks", "one id", "spread", "spread", "nothing"]
            )
            before = pools.get(spec.name, [0])
            rows = list(range(spec.num_rows))
            if kind == "same":
                pool = before
            elif kind == "other":
                pool = [row for row in rows if row not in before] or rows
            elif kind == "one id":
                pool = [rng.choice(rows)]
            else:
                pool = rng.sample(rows, min(len(rows), rng.choice([1, 5, 20])))
            everybody = []
            for _ in range(num_ranks):
                size = (
                    0
                    if kind == "nothing" or (kind == "empty ranks" and rng.random() < 0.5)
                    else rng.randint(0, 30)
                )
                everybody.append([rng.choice(pool) for _ in range(size)])
            if kind == "same":
                everybody[rng.randrange(num_ranks)] = list(pool)
            batch[spec.name] = torch.tensor(everybody[rank], dtype=torch.int64)
            pools[spec.name] = sorted({row for ids in everybody for row in ids}) or before
        batches.append(batch)
    return batches
