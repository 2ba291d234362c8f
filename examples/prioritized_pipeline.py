"""Hide the embedding traffic of a model of your own: PrioritizedPipeline around the loop of sharded_embedding.py.

    python examples/prioritized_pipeline.py
    torchrun --nproc-per-node 2 examples/prioritized_pipeline.py

Takes a few seconds on a CPU. Both commands print the same losses. On two ranks the last line says how much of the
traffic travelled while the model computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from freescale import PrioritizedPipeline, ShardedEmbedding, TableSpec
from freescale.embedding import RowwiseAdagrad

NUM_USERS, NUM_ITEMS, DIM = 20_000, 3_000, 16
GLOBAL_BATCH, NUM_STEPS = 512, 60


def my_batches(rank: int, num_ranks: int) -> Iterator[dict[str, Tensor]]:
    """This rank's clicks of every step: most users come back late, a third of the items is liked by all of them."""
    for step in range(NUM_STEPS):
        draw = torch.Generator().manual_seed(step)
        users = torch.randint(NUM_USERS, (GLOBAL_BATCH,), generator=draw)
        items = torch.randint(300, (GLOBAL_BATCH,), generator=draw) * (NUM_ITEMS // 300)
        liked = (items // 10) % 3 == 0
        batch = {"user": users, "item": items, "clicked": liked.float()}
        yield {name: values[rank::num_ranks] for name, values in batch.items()}


def main() -> None:
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    tables = ShardedEmbedding(
        [
            TableSpec(name="user", num_rows=NUM_USERS, dim=DIM, optimizer=RowwiseAdagrad(), init_std=0.1),
            TableSpec(name="item", num_rows=NUM_ITEMS, dim=DIM, optimizer=RowwiseAdagrad(), init_std=0.1),
        ],
        group=dist.group.WORLD if num_ranks > 1 else None,
    )
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.003)
    exposed, hidden = 0.0, 0.0

    with PrioritizedPipeline(
        my_batches(rank, num_ranks),
        embedding=tables,
        rows_of=lambda batch: {"user": batch["user"], "item": batch["item"]},
    ) as pipeline:
        for ready in pipeline:  # rows of the batch are here; ids of the next two are on their way
            vectors = ready.vectors
            logits = head(torch.cat([vectors["user"], vectors["item"]], dim=1)).squeeze(1)
            clicked = ready.batch["clicked"]
            # The sum over this rank's samples divided by the GLOBAL number of samples.
            loss = F.binary_cross_entropy_with_logits(logits, clicked, reduction="sum") / GLOBAL_BATCH
            optimizer.zero_grad()
            loss.backward()
            if num_ranks > 1:
                for parameter in head.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            pipeline.update(ready, lr=0.01)  # gradients the next batch needs go home now, the others under it
            exposed, hidden = exposed + ready.traffic.exposed_bytes, hidden + ready.traffic.hidden_bytes
            whole = loss.detach().clone()
            if num_ranks > 1:
                dist.all_reduce(whole)
            if rank == 0 and (ready.step + 1) % 20 == 0:
                print(f"step {ready.step + 1}  loss {whole:.4f}")
    # Leaving the block has flushed: tables.state_dict() holds every update.
    if rank == 0 and num_ranks > 1:
        print(f"{hidden / (hidden + exposed):.0%} of the bytes travelled while the model computed")
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
