"""The same model in TorchRec's DistributedModelParallel and through the bridge: equal tables, and the time of a step.

    python benchmarks/torchrec_bridge.py [--rows 200000] [--dim 64] [--samples 32] [--events 60] [--rounds 9]

Two gloo ranks on the CPU, row-wise Adagrad, float32, Zipf ids, an MLP over three pooled features, dense gradients by
DDP on both sides. TorchRec is asked for row-wise sharding and its fused kernel. First 20 steps from the same rows:
tables, Adagrad sums and dense weights must agree to 1e-6. The sums begin at 1e-4, as in a table that has learnt: from
0 the first update divides a gradient by its own size, and makes much of how a sum was rounded. Then both sides train
in turns, 20 steps each a round: medians over the steps of a round without its first three, and the CPU time of all
threads of a rank, which says more on a busy machine. Needs requirements/torchrec.txt.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freescale.bridge import BridgedCollection, require_torchrec
from freescale.embedding import RowwiseAdagrad
from tests.bridge.in_torchrec import EPS, LR, fill, keyed, local_tables, sharded
from tests.bridge.their_model import KEYS, Config
from tests.ranks import run_on_ranks

STEPS, WARM = 20, 3
FIRST_SUM = 1e-4
LOSS_SCALE = 100.0  # so that rows move far in 20 steps


class Scorer(nn.Module):
    """Three features, each pooled over a sample, and an MLP."""

    def __init__(self, tables: nn.Module, dim: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = tables
        self.mix = nn.Sequential(nn.Linear(3 * dim, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, kjt: Any) -> Tensor:
        """The mean loss of this rank."""
        found = self.tables(kjt)
        return self.mix(torch.cat([self.mean(found[key]) for key in KEYS], 1)).square().mean() * LOSS_SCALE

    def mean(self, feature: Any) -> Tensor:
        """Of the vectors of each sample."""
        lengths, vectors = feature.lengths(), feature.values()
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        sums = torch.zeros(len(lengths), vectors.shape[1]).index_add(0, sample, vectors)
        return sums / lengths.clamp(min=1)[:, None]


def tables_of(options: argparse.Namespace) -> list[Config]:
    """Items, which two features share, and users."""
    return [
        Config("item", options.rows, options.dim, ["seen", "wanted"]),
        Config("user", max(1, options.rows // 4), options.dim, ["who"]),
    ]


def first_rows(configs: list[Config]) -> dict[str, dict[str, Tensor]]:
    """The same for both sides."""
    drawn = torch.Generator().manual_seed(9)
    return {
        config.name: {
            "weight": torch.randn(config.num_embeddings, config.embedding_dim, generator=drawn) / 3,
            "momentum1": torch.full((config.num_embeddings,), FIRST_SUM),
        }
        for config in configs
    }


def batch_of(step: int, rank: int, options: argparse.Namespace, configs: list[Config]) -> Any:
    """Histories of different lengths with Zipf ids."""
    drawn = torch.Generator().manual_seed(2 * step + rank)
    longest = 2 * options.events
    lengths = [torch.randint(0, longest, (options.samples,), generator=drawn) for _ in range(2)]
    lengths.append(torch.ones(options.samples, dtype=torch.int64))
    tops = [configs[0].num_embeddings] * 2 + [configs[1].num_embeddings]
    values = []
    for top, each in zip(tops, lengths, strict=True):
        share = torch.rand(int(each.sum()), generator=drawn, dtype=torch.float64)
        values.append((top**share).long().clamp_(max=top) - 1)
    return keyed(list(KEYS), torch.cat(values), torch.cat(lengths))


class InTorchRec:
    """One side."""

    def __init__(self, options: argparse.Namespace, configs: list[Config]) -> None:
        self.model = sharded(lambda tables: Scorer(tables, options.dim), configs=configs)
        fill(self.model, first_rows(configs))
        self.dense = [param for name, param in self.model.named_parameters() if "mix" in name]
        self.optimizer = torch.optim.SGD(self.dense, lr=1e-3)

    def train(self, batches: list[Any]) -> list[float]:
        """Seconds of each step."""
        seconds = []
        for batch in batches:
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(batch).backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def tables(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows and sums of this rank."""
        return local_tables(self.model)


class ThroughTheBridge:
    """The other."""

    def __init__(self, options: argparse.Namespace, configs: list[Config]) -> None:
        from torchrec.sparse.jagged_tensor import JaggedTensor

        self.collection = BridgedCollection(
            configs,
            optimizer=RowwiseAdagrad(eps=EPS),
            group=dist.group.WORLD,
            jagged=lambda values, lengths: JaggedTensor(values=values, lengths=lengths),
        )
        self.collection.load_tables(first_rows(configs))
        self.model = DistributedDataParallel(Scorer(self.collection, options.dim))
        self.dense = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.dense, lr=1e-3)

    def train(self, batches: list[Any]) -> list[float]:
        """Seconds of each step, from the end of the one before."""
        seconds = []
        with self.collection.pipeline(batches, kjt_of=lambda batch: batch) as pipe:
            start = time.perf_counter()
            for ready in pipe:
                self.optimizer.zero_grad()
                self.model(ready.batch).backward()
                self.optimizer.step()
                pipe.update(ready, lr=LR)
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
        return seconds

    def tables(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows and sums of this rank."""
        held = self.collection.embedding.tables
        rows = {name: table.weight.clone() for name, table in held.items()}
        return rows, {name: table.state["square_sum"][:, 0].clone() for name, table in held.items()}


def rank_main(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in one process a rank: check, then take turns."""
    require_torchrec()
    configs = tables_of(options)
    sides = {"TorchRec": InTorchRec(options, configs), "bridge": ThroughTheBridge(options, configs)}
    batches = [batch_of(step, rank, options, configs) for step in range(STEPS)]
    for side in sides.values():
        side.train(batches)
    apart = {"rows": 0.0, "sums": 0.0}
    for part, name in enumerate(apart):
        theirs, ours = (side.tables()[part] for side in sides.values())
        apart[name] = max(float((theirs[table] - ours[table]).abs().max()) for table in theirs)
    before = first_rows(configs)
    moved = 0.0
    for table, rows in sides["bridge"].tables()[0].items():
        first = sides["bridge"].collection.embedding.tables[table].first_row
        moved = max(moved, float((rows - before[table]["weight"][first : first + len(rows)]).abs().max()))
    pairs = zip(*(side.dense for side in sides.values()), strict=True)
    apart["dense weights"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds if max(apart.values()) <= 1e-6 else 0):
        first = STEPS * (number + 1)
        batches = [batch_of(first + step, rank, options, configs) for step in range(STEPS)]
        for name, side in sides.items():
            dist.barrier()
            start = time.process_time()
            times[name].append(statistics.median(side.train(batches)[WARM:]))
            cpu[name].append((time.process_time() - start) / STEPS)
    return {"apart": apart, "moved": moved, "times": times, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("rows", 200_000), ("dim", 64), ("samples", 32), ("events", 60), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    results = run_on_ranks(rank_main, 2, options, timeout=550)
    apart = {name: max(result["apart"][name] for result in results) for name in results[0]["apart"]}
    print(f"after {STEPS} steps apart by: " + ", ".join(f"{name} {far:.1e}" for name, far in apart.items()))
    print(f"rows moved by up to {max(result['moved'] for result in results):.2g} in them")
    if max(apart.values()) > 1e-6:
        raise SystemExit("the sides differ: no times")
    found = {}
    for what, key in (("wall ms a step", "times"), ("CPU ms a step and rank", "cpu")):
        rows = {}
        for name in results[0][key]:
            each = [1000 * max(result[key][name][n] for result in results) for n in range(options.rounds)]
            rows[name] = each
            print(f"{name:<10} {statistics.median(each):7.2f} {what}   ({min(each):.2f} to {max(each):.2f})")
        ratios = [theirs / ours for theirs, ours in zip(rows["TorchRec"], rows["bridge"], strict=True)]
        print(f"TorchRec / bridge {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        found[key] = {**rows, "ratios": ratios}
    facts = {"torch": torch.__version__, "machine": platform.machine(), **vars(options)}
    print(json.dumps({"apart": apart, **found, "facts": facts}))


if __name__ == "__main__":
    main()
