"""Use ShardedEmbedding in a model of your own: two tables, spread over the ranks by rows.

    python examples/sharded_embedding.py
    torchrun --nproc-per-node 2 examples/sharded_embedding.py

Takes a few seconds on a CPU. Both commands print the same losses; on two ranks each rank holds half of the large
table.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from freescale import ShardedEmbedding, TableSpec
from freescale.embedding import RowwiseAdagrad

NUM_USERS, NUM_ITEMS, DIM = 20_000, 300, 16
GLOBAL_BATCH, NUM_STEPS = 512, 60


def global_batch(step: int) -> dict[str, Tensor]:
    """Clicks of one step, a function of the step alone: users like items of their own kind."""
    draw = torch.Generator().manual_seed(step)
    users = torch.randint(200, (GLOBAL_BATCH,), generator=draw) * (NUM_USERS // 200)
    items = torch.randint(NUM_ITEMS, (GLOBAL_BATCH,), generator=draw)
    liked = (users // 100 + items) % 3 == 0
    return {"user": users, "item": items, "clicked": liked.float()}


def share_of(batch: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    """This rank's samples. Any way of sharing out gives the same curve; shares need not be equal."""
    return {name: values[rank::num_ranks] for name, values in batch.items()}


def main() -> None:
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    tables = ShardedEmbedding(
        [
            TableSpec(name="user", num_rows=NUM_USERS, dim=DIM, optimizer=RowwiseAdagrad(), init_std=0.1),
            TableSpec(name="item", num_rows=NUM_ITEMS, dim=DIM, optimizer=RowwiseAdagrad(), init_std=0.1),
        ],
        replicate_below_mb=0.1,  # the item table is small: every rank keeps all of it
    )
    print(f"rank {rank}: {tables.memory_mib():.2f} MiB of tables")
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)

    for step in range(NUM_STEPS):
        batch = share_of(global_batch(step), rank, num_ranks)
        vectors = tables({"user": batch["user"], "item": batch["item"]})
        logits = head(torch.cat([vectors["user"], vectors["item"]], dim=1)).squeeze(1)
        # The sum over this rank's samples divided by the GLOBAL number of samples.
        loss = F.binary_cross_entropy_with_logits(logits, batch["clicked"], reduction="sum") / GLOBAL_BATCH
        optimizer.zero_grad()
        loss.backward()
        if num_ranks > 1:
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        tables.step(lr=0.1)  # gradients of rows go to their owners, which update them in place
        whole = loss.detach().clone()
        if num_ranks > 1:
            dist.all_reduce(whole)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {whole:.4f}")
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
