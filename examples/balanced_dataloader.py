"""Balance an ordinary PyTorch training loop: any model, any map-style data set, an ordinary DataLoader.

    python examples/balanced_dataloader.py
    torchrun --nproc-per-node 2 examples/balanced_dataloader.py

Takes a few seconds on a CPU. Both commands print the same losses: the samples of a step are chosen before they are
shared out, and every loss is divided by the GLOBAL number of samples.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from freescale import BalancedSampler

NUM_WORDS, NUM_CLASSES = 500, 4
GLOBAL_BATCH, NUM_EPOCHS = 128, 3


class Texts(Dataset):
    """Rows as dictionaries, columns by name, as in a Hugging Face data set: texts[7], texts["length"].

    Every class has its own favourite words; lengths are long-tailed.
    """

    def __init__(self, num_rows: int, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._columns = {
            "length": np.clip(np.exp(rng.normal(np.log(40), 1.0, num_rows)), 2, 1000).astype(np.int64),
            "label": rng.integers(NUM_CLASSES, size=num_rows),
        }
        self._columns["input_ids"] = [
            rng.integers(NUM_WORDS // NUM_CLASSES, size=length) * NUM_CLASSES
            + np.where(rng.random(length) < 0.5, label, rng.integers(NUM_CLASSES, size=length))
            for length, label in zip(self._columns["length"], self._columns["label"])
        ]

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, key: int | str):
        if isinstance(key, str):
            return self._columns[key]
        return {name: column[key] for name, column in self._columns.items()}


def collate(rows: list[dict]) -> dict[str, Tensor]:
    """Texts laid end to end, nothing padded; an empty list is fine, since a rank may have no sample in a step."""
    words = [torch.from_numpy(row["input_ids"]) for row in rows]
    lengths = torch.tensor([0, *(len(text) for text in words)])
    return {
        "words": torch.cat(words) if words else torch.zeros(0, dtype=torch.int64),
        "starts": lengths.cumsum(0)[:-1],
        "labels": torch.tensor([row["label"] for row in rows], dtype=torch.int64),
    }


class Classifier(nn.Module):
    """Mean of word vectors, one hidden layer: a plain PyTorch model that knows nothing of FreeScale."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(NUM_WORDS, 32, mode="mean")
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))

    def forward(self, words: Tensor, starts: Tensor) -> Tensor:
        """Log-odds of the classes of every text."""
        return self.head(self.words(words, starts))


def train(rank: int, num_ranks: int) -> None:
    texts = Texts(2000)
    torch.manual_seed(0)
    model: nn.Module = Classifier()
    if num_ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    sampler = BalancedSampler(texts["length"], global_batch=GLOBAL_BATCH, num_ranks=num_ranks, rank=rank)
    loader = DataLoader(texts, batch_sampler=sampler, collate_fn=collate)
    step = 0
    for epoch in range(NUM_EPOCHS):
        total = torch.zeros(2)
        for batch in loader:  # one pass over the loader is one epoch; the next pass is the next epoch
            plan = sampler.plan(step)
            loss = F.cross_entropy(model(batch["words"], batch["starts"]), batch["labels"], reduction="sum")
            optimizer.zero_grad()
            # Divide by the global count. DDP averages over the ranks, so the factor num_ranks makes it a sum.
            (loss / plan.global_samples * num_ranks).backward()
            optimizer.step()
            total += torch.tensor([loss.item(), len(batch["labels"])])
            step += 1
        if num_ranks > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(
                f"epoch {epoch}  loss {total[0] / total[1]:.4f}  {int(total[1])} samples on {num_ranks} rank(s)"
            )


def idle_share(lengths: np.ndarray, *, num_ranks: int, balanced: bool) -> float:
    """Planned share of an epoch that ranks would spend waiting for the slowest of them."""
    sampler = BalancedSampler(
        lengths, global_batch=32 * num_ranks, num_ranks=num_ranks, rank=0, balanced=balanced, drop_last=True
    )
    return float(np.mean([1 - 1 / plan.imbalance for plan in sampler.plans(0, len(sampler))]))


def main() -> None:
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    train(rank, num_ranks)
    if rank == 0:
        lengths = Texts(2000)["length"]
        for balanced in (False, True):
            share = idle_share(lengths, num_ranks=8, balanced=balanced)
            print(f"planned idle time on 8 ranks, {'balanced' if balanced else 'random'}: {share:.2%}")
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
