"""DLRMv4 on one GPU: samples a second and MFU at real lengths, with tables that fill it; the reference beside it.

    PYTHONPATH=. python benchmarks/dlrmv4_speed.py --write batch.npz             # on any CPU: a batch of 1,024
    PYTHONPATH=. python benchmarks/dlrmv4_speed.py --data batch.npz [--peer DIR] # on a GPU

A step is all of it but loading and finding unique ids, which training does ahead: rows of 11 tables, item vectors,
forward, backward, clipped Adam, row-wise Adagrad.
Samples are 2.5 anchors of each of 410 listeners, which is what one of eight ranks gets of 8,192 anchors in the order of
the benchmark. Two yardsticks: FLOPs of the three layers at the real lengths, and at 4,096 tokens for every sample, as
the reference counts them. A short last layer computes less, and is measured by the same yardsticks.

DIR is the folder `recommendation_v4` of a checkout of mlcommons/training. Its dense code is run with its own kernels on
the same samples, rows given; no tables, no optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlrmv4_reference import CONTEXT, CROSSES, Inputs, Theirs, our_model, stand_ins
from torch import Tensor

from freescale.data import FIRST, SLOT, SequenceBatch
from freescale.embedding import ShardedEmbedding, TableSpec, as_compute
from freescale.embedding.optimizers.rowwise_adagrad import RowwiseAdagrad
from freescale.embedding.tables.table import EmbeddingTable
from freescale.model import dropout_keys

PEAK = 989e12
"""bf16 of an H100 or H200, dense."""
REAL = {"item": 9_390_624, "artist": 1_293_395, "album": 3_367_692, "user": 1_000_001}
CROSS_ROWS = dict(
    zip(CROSSES, (100_000_000, 40_000_000, 24_000_000, 40_000_000, 32_000_000, 2_000_000, 40_000_000))
)
DIM, HEADS, LAYERS, LENGTH = 512, 4, 3, 4096


def write(path: Path, *, samples: int, users: int, seed: int) -> None:
    """One batch of the made-up log at full scale: ids as hot as they would be with a million listeners."""
    from freescale.data.features.cross_hash import cross_ids
    from freescale.data.pools import PoolIndex, PoolRule
    from freescale.data.sources import dlrmv4_twin as twin
    from freescale.data.sources._twin_listener import make_listener

    source = twin.TwinSource(num_users=1_000_000, seed=seed)
    world, lengths = source.world, source.lengths
    draws = np.random.default_rng(seed)
    eligible = np.flatnonzero(lengths > 4200)
    # A user has anchors in proportion to the events beyond the first 4,086.
    weight = (lengths[eligible] - 4086) / (lengths[eligible] - 4086).sum()
    chosen = np.sort(draws.choice(eligible, users, p=weight, replace=False))
    counts = np.bincount(draws.integers(users, size=samples), minlength=users)
    parts: dict[str, list[Any]] = {
        name: [] for name in ("item", "time", "action", "sizes", "target", "label", "user")
    }
    hours, ways = [], []
    rule = PoolRule("action", (1, 2, 4), 1362, 20_000)
    for user, count in zip(chosen.tolist(), counts.tolist()):
        one = make_listener(world, user, int(lengths[user]))
        index = PoolIndex(one.action, np.array([0, len(one.item)]), rule)
        last = int(draws.integers(4086 + 30, len(one.item)))
        for anchor in range(last - count, last):
            places, _ = index.spans(np.zeros(1, np.int64), np.array([anchor]), most=4086)
            parts["item"].append(one.item[places].astype(np.int32))
            parts["time"].append((one.time[places] - 1_600_000_000).astype(np.int32))
            parts["action"].append(one.action[places].astype(np.uint8))
            parts["sizes"].append(len(places))
            parts["target"].append(one.item[anchor])
            parts["label"].append(one.action[anchor] == 1)
            parts["user"].append(user)
            hours.append(one.time[anchor] % 86_400 // 3600)
            ways.append(one.organic[anchor])
    target = np.array(parts["target"])
    members = {
        "user": np.array(parts["user"], np.int64),
        "item": target.astype(np.int64),
        "artist": world.artist_of[target],
        "album": world.album_of[target],
        "hour": np.array(hours, np.int64),
        "organic": np.array(ways, np.int64),
    }
    saved = {name: np.concatenate(parts[name]) for name in ("item", "time", "action")}
    saved |= {name: np.array(parts[name]) for name in ("sizes", "target", "label", "user")}
    for name in CROSSES:
        saved[name] = cross_ids(name, [members[each] for each in name.split("_x_")])
    unique = np.unique(np.concatenate([saved["item"], target]))
    saved |= {"unique": unique, "artist_of": world.artist_of[unique], "album_of": world.album_of[unique]}
    np.savez_compressed(path, **saved)
    sizes = saved["sizes"]
    print(
        f"{path}: {len(sizes):,} samples of {len(chosen)} listeners, {sizes.mean():.0f} events each (mean square "
        f"{np.mean(sizes**2.0) / sizes.mean() ** 2:.3f} x the mean's), {len(unique):,} items of {sizes.sum():,} events "
        f"({len(unique) / sizes.sum():.1%}), {path.stat().st_size / 2**20:.1f} MiB"
    )


class Batch:
    """The samples on a device, in micro-batches, with the ids that tables are asked for.

    Args:
        saved: what `write` has written.
        samples: how many of them.
        micro: samples of a micro-batch.
        once: items have one vector however often they occur; else every occurrence has one.
    """

    def __init__(
        self, saved: Any, *, samples: int, micro: int, once: bool, rows: dict[str, int], device: str
    ) -> None:
        sizes = saved["sizes"][:samples]
        ends = np.cumsum(sizes)
        total = int(ends[-1])
        item, time_, action = (saved[name][:total] for name in ("item", "time", "action"))
        target = saved["target"][:samples]
        lengths = sizes + 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shown = np.zeros(int(offsets[-1]), bool)
        shown[offsets[1:] - 1] = True

        def spread(events: Any, candidates: Any, dtype: Any) -> np.ndarray:
            out = np.empty(len(shown), dtype)
            out[~shown], out[shown] = events, candidates
            return out

        items = spread(item, target, np.int64)
        number = np.searchsorted(saved["unique"], items)
        if once:
            known, index = np.unique(number, return_inverse=True)
        else:
            known, index = number, np.arange(len(number))
        asked = time_[ends - 1].astype(np.int64) + 1_600_000_000
        moments = spread(time_.astype(np.int64) + 1_600_000_000, asked, np.int64)
        self.ids = {
            "item": saved["unique"][known].astype(np.int64),
            "artist": saved["artist_of"][known].astype(np.int64),
            "album": saved["album_of"][known].astype(np.int64),
            "user": saved["user"][:samples].astype(np.int64),
            **{
                name: (saved[name][:samples].view(np.uint64) % rows[name]).astype(np.int64)
                for name in CROSSES
            },
        }
        # Of smaller tables ids share rows.
        self.ids = {name: torch.from_numpy(ids % rows[name]) for name, ids in self.ids.items()}
        self.found: Any = None
        tokens = {
            "item_index": index.astype(np.int64),
            "time": moments,
            "target_time": np.repeat(asked, lengths),
            "action": spread(action, 0, np.int64),
            "label_listened": spread(0, saved["label"][:samples], np.float32),
        }
        self.parts: list[SequenceBatch] = []
        for first in range(0, samples, micro):
            begin, end = int(offsets[first]), int(offsets[min(first + micro, samples)])
            own = slice(first, min(first + micro, samples))
            self.parts.append(
                SequenceBatch(
                    offsets=torch.from_numpy(offsets[first : own.stop + 1] - begin),
                    tokens={
                        name: torch.from_numpy(values[begin:end].copy()).to(device)
                        for name, values in tokens.items()
                    },
                    samples={
                        "row": torch.arange(own.start, own.stop, device=device),
                        "loss_weights": torch.full((own.stop - own.start, 1), float(samples), device=device),
                    },
                    targets=torch.ones(own.stop - own.start, dtype=torch.int64),
                )
            )
        self.samples = samples
        self.tokens = lengths + len(CONTEXT)
        self.occurrences = len(items)
        self.num_items = len(known)


def flops(tokens: np.ndarray) -> tuple[float, float]:
    """FLOPs a sample of the three layers, forward and backward: at these lengths, and at 4,096 tokens."""

    def of(linear: float, square: float) -> float:
        products = 6 * linear * DIM * (4 * DIM + 3 * DIM)
        return LAYERS * (products + 7 * square / 2 * 2 * DIM)

    return of(float(tokens.mean()), float(np.mean(tokens.astype(float) ** 2))), of(LENGTH, float(LENGTH) ** 2)


class Trainer:
    """The model, the tables and their optimizers."""

    def __init__(self, *, short: bool, device: str, embedding: ShardedEmbedding) -> None:
        torch.manual_seed(1)
        self.device, self.embedding = device, embedding
        self.model = our_model(
            dim=DIM, heads=HEADS, layers=LAYERS, short=short, length=LENGTH, dropout=0.1
        ).to(device)
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=1e-6,
            betas=(0.95, 0.999),
            weight_decay=0.0,
            fused=True if on_gpu else None,
        )
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=on_gpu)
        self.number = 0

    def step(self, batch: Batch) -> Tensor:
        """One step; the loss."""
        self.number += 1
        lookups = self.embedding.lookups(self._found(batch))
        rows = {name: lookup.rows for name, lookup in lookups.items()}
        slots = {name + SLOT: lookups[name].inverse + FIRST for name in lookups}
        with self.autocast:
            assert self.model.items is not None
            encoded = as_compute(self.model.items(slots, rows))
        leaf = encoded.detach().requires_grad_()
        tables = {name: rows[name] for name in CONTEXT}
        total, first = torch.zeros((), device=leaf.device), 0
        for part in batch.parts:
            own = {name + SLOT: slots[name + SLOT][first : first + len(part)] for name in CONTEXT}
            first += len(part)
            with self.autocast, dropout_keys(seed=1, step=self.number):
                loss = self.model(leaf, part.with_samples(**own), None, tables)
            loss.backward()
            total = total + loss.detach()
        encoded.backward(leaf.grad)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.embedding.update_all(list(lookups.values()), lr=1e-6, step=self.number)
        return total

    def _found(self, batch: Batch) -> Any:
        """Unique rows, which training finds ahead, on the CPU."""
        if batch.found is None:
            batch.found = self.embedding.find_all(batch.ids)
        return batch.found

    def dense(self, batch: Batch) -> Callable[[], Any]:
        """Forward and backward where rows are given: what the reference's dense code is asked for."""
        lookups = self.embedding.lookups(self._found(batch))
        rows = {name: lookup.rows for name, lookup in lookups.items()}
        slots = {name + SLOT: lookups[name].inverse + FIRST for name in lookups}
        part = batch.parts[0].with_samples(
            **{name + SLOT: slots[name + SLOT][: batch.samples] for name in CONTEXT}
        )
        tables = {name: rows[name] for name in CONTEXT}

        def call() -> None:
            self.number += 1
            with self.autocast, dropout_keys(seed=1, step=self.number):
                assert self.model.items is not None
                loss = self.model(as_compute(self.model.items(slots, rows)), part, None, tables)
            loss.backward()
            self.model.zero_grad(set_to_none=True)
            for each in rows.values():
                each.grad = None

        return call


def check(saved: Any, device: str) -> None:
    """Loss and gradients of a few samples by the fused kernels in bf16, against plain parts in float64.

    What is printed is the distance of all gradients together, and the worst of a single weight. bf16 has 8 bits: near
    1 % is what rounding does.
    """
    rows = dict.fromkeys((*REAL, *CROSS_ROWS), 2000)
    few = {**saved, "sizes": np.array([700, 37, 1300, 64])}
    batch = Batch(few, samples=4, micro=4, once=True, rows=rows, device=device)
    specs = [
        TableSpec(name=name, num_rows=2000, dim=DIM, optimizer=RowwiseAdagrad(), init_std=1.0)
        for name in rows
    ]
    embedding = ShardedEmbedding(specs, group=None, device=torch.device(device))
    for short in (False, True):
        found = {}
        for wide in (False, True):
            torch.manual_seed(1)
            model = our_model(dim=DIM, heads=HEADS, layers=LAYERS, short=short, length=LENGTH).to(device)
            model = model.double() if wide else model
            lookups = embedding.lookups(embedding.find_all(batch.ids))
            kind = torch.float64 if wide else torch.float32
            given = {name: lookup.rows.detach().to(kind).requires_grad_() for name, lookup in lookups.items()}
            slots = {name + SLOT: lookups[name].inverse + FIRST for name in lookups}
            part = batch.parts[0].with_samples(**{name + SLOT: slots[name + SLOT] for name in CONTEXT})
            assert model.items is not None
            with torch.autocast(device, torch.bfloat16, enabled=not wide):
                vectors = as_compute(model.items(slots, given))
                loss = model(vectors, part, None, {name: given[name] for name in CONTEXT})
            loss.backward()
            grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
            found[wide] = loss.double(), {**grads, **{name: each.grad for name, each in given.items()}}
        (loss, ours), (truth, theirs) = found[False], found[True]
        off = {
            name: float((ours[name].double() - grad).norm() / grad.norm().clamp(min=1e-30))
            for name, grad in theirs.items()
        }
        whole = sum(float((ours[name].double() - grad).norm() ** 2) for name, grad in theirs.items())
        whole = (whole / sum(float(grad.norm() ** 2) for grad in theirs.values())) ** 0.5
        worst = max(off, key=off.__getitem__)
        print(
            f"check, last layer {'short' if short else 'whole'}: loss {float(loss):.6f} against {float(truth):.6f}, "
            f"gradients {whole:.2e} off, worst {worst} {off[worst]:.2e}",
            flush=True,
        )
        if whole > 0.05 or abs(float(loss - truth)) > 0.01 * float(truth):
            sys.exit("the fused kernels compute something else")


def timed(call: Callable[[], Any], *, rounds: int, warmup: int, device: str) -> list[float]:
    """Seconds of each round."""
    found = []
    for number in range(warmup + rounds):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        if number >= warmup:
            found.append(time.perf_counter() - began)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(name: str, seconds: list[float], batch: Batch, device: str, **others: Any) -> dict[str, Any]:
    """One row, printed as it comes."""
    real, dense = flops(batch.tokens)
    best = float(np.median(seconds))
    rate = batch.samples / best
    memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    row = {
        "name": name,
        "samples": batch.samples,
        "micro-batch": len(batch.parts[0]),
        "ms": [round(1000 * each, 2) for each in seconds],
        "samples/s": rate,
        "mfu_real": rate * real / PEAK,
        "mfu_4096": rate * dense / PEAK,
        "peak_gb": memory,
        **others,
    }
    print(
        f"{name:44} {batch.samples:>6} {1000 * best:>9.1f} {rate:>10.0f} {row['mfu_real']:>7.1%} "
        f"{row['mfu_4096']:>7.1%} {memory:>8.1f}   {' '.join(f'{1000 * each:.1f}' for each in seconds)}",
        flush=True,
    )
    return row


def theirs_on(batch: Batch, saved: Any, *, samples: int, device: str, kernels: str) -> Callable[[], Any]:
    """Forward and backward of the reference's dense code, rows given."""
    from generative_recommenders.common import HammerKernel

    torch.manual_seed(1)
    peer = Theirs(dim=DIM, heads=HEADS, layers=LAYERS, dropout=0.1, bf16=device == "cuda")
    peer.model.to(device)
    peer.model.set_hammer_kernel(getattr(HammerKernel, kernels))
    sizes = saved["sizes"][:samples].astype(np.int64)
    total = int(sizes.sum())
    number = np.searchsorted(saved["unique"], saved["item"][:total])
    target = np.searchsorted(saved["unique"], saved["target"][:samples])

    def there(values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    given = Inputs(
        rows={},
        lengths=there(sizes),
        item=there(number.astype(np.int64)),
        artist_of=there(saved["artist_of"].astype(np.int64)),
        album_of=there(saved["album_of"].astype(np.int64)),
        target=there(target.astype(np.int64)),
        action=there(saved["action"][:total].astype(np.int64)),
        time=there(saved["time"][:total].astype(np.int64) + 1_600_000_000),
        context={name: there(np.arange(samples)) for name in CONTEXT},
        label=there(saved["label"][:samples].astype(np.int64)),
    )
    shapes = {"item": total, "artist": total, "album": total}
    events = {name: torch.randn(count, DIM, device=device).requires_grad_() for name, count in shapes.items()}
    asked = {name: torch.randn(samples, DIM, device=device).requires_grad_() for name in (*shapes, *CONTEXT)}

    def call() -> None:
        _, loss = peer.of_rows(given, events, asked)
        loss.backward()
        peer.model.zero_grad(set_to_none=True)
        for each in (*events.values(), *asked.values()):
            each.grad = None

    return call


def _any_numbers(table: EmbeddingTable, rows: Tensor) -> Tensor:
    weight = table.weight
    return torch.randn(len(rows), table.dim, dtype=weight.dtype, device=weight.device) * table._init_std


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="make a batch and stop")
    parser.add_argument("--data", type=Path, help="a batch that was written")
    parser.add_argument("--peer", type=Path, help="folder recommendation_v4 of a checkout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=256)
    parser.add_argument("--users", type=int, default=410)
    parser.add_argument("--crosses", type=float, default=8.3, help="rows of crosses are divided by it")
    parser.add_argument(
        "--tables", type=float, default=1.0, help="rows of the other tables are divided by it"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--quick-tables", action="store_true", help="fill tables with any numbers, in less time"
    )
    parser.add_argument("--check", action="store_true", help="hold the kernels against float64 first")
    parser.add_argument(
        "--dense", action="store_true", help="also without tables and optimizers, as the peer is run"
    )
    parser.add_argument("--only", nargs="*", help="of: whole short occurrences peer")
    options = parser.parse_args()
    if options.write:
        write(options.write, samples=options.samples, users=options.users, seed=1)
        return
    saved = dict(np.load(options.data))
    device, only = options.device, options.only or ["whole", "short", "occurrences", "peer"]
    rows = {name: int(count / options.tables) for name, count in REAL.items()}
    rows |= {name: int(count / options.crosses) for name, count in CROSS_ROWS.items()}
    if options.check:
        check(saved, device)
    if options.quick_tables:
        EmbeddingTable.initial = _any_numbers  # type: ignore[method-assign]
    began = time.perf_counter()
    specs = [
        TableSpec(
            name=name, num_rows=count, dim=DIM, optimizer=RowwiseAdagrad(), init_std=(3 * count) ** -0.5
        )
        for name, count in rows.items()
    ]
    embedding = ShardedEmbedding(specs, group=None, device=torch.device(device))
    _wait(device)
    gigabytes = sum(rows.values()) * DIM * 4 / 1e9
    print(
        f"{sum(rows.values()):,} rows in 11 tables, {gigabytes:.1f} GB, made in {time.perf_counter() - began:.1f} s"
    )
    print(
        f"{'':44} {'batch':>6} {'ms':>9} {'samples/s':>10} {'real':>7} {'4,096':>7} {'peak GB':>8}   rounds (ms)"
    )
    found = []

    def made(samples: int, *, once: bool = True) -> Batch:
        return Batch(saved, samples=samples, micro=options.micro, once=once, rows=rows, device=device)

    shape = {"rounds": options.rounds, "warmup": options.warmup, "device": device}
    whole = made(options.samples)
    cases = [("whole", False, whole, "last layer whole"), ("short", True, whole, "last layer short")]
    if "occurrences" in only:
        part = made(options.micro)
        every = made(options.micro, once=False)
        cases += [
            ("occurrences", True, part, "one micro-batch, items once"),
            ("occurrences", True, every, "one micro-batch, every occurrence"),
        ]
    if options.dense:
        cases.append(
            ("dense", True, made(options.micro), "one micro-batch, dense code alone, last layer short")
        )
        cases.append(("dense", False, cases[-1][2], "one micro-batch, dense code alone, last layer whole"))
    for key, short, batch, name in cases:
        if key not in only and key != "dense":
            continue
        trainer = Trainer(short=short, device=device, embedding=embedding)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            call = trainer.dense(batch) if key == "dense" else (lambda: trainer.step(batch))  # noqa: B023
            seconds = timed(call, **shape)
            share = batch.num_items / batch.occurrences
            found.append(report(name, seconds, batch, device, items_share=share))
        except torch.OutOfMemoryError as error:
            print(f"{name}: {str(error)[:200]}", flush=True)
        trainer = call = None
        if device == "cuda":
            torch.cuda.empty_cache()
    if options.peer and "peer" in only:
        sys.path.insert(0, str(options.peer))
        made_up = stand_ins()
        del embedding
        if device == "cuda":
            torch.cuda.empty_cache()
        batch = made(options.micro)
        kernels = "TRITON" if device == "cuda" else "PYTORCH"
        try:
            call = theirs_on(batch, saved, samples=options.micro, device=device, kernels=kernels)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = timed(call, **shape)
            found.append(
                report(f"reference, dense code alone ({kernels})", seconds, batch, device, stood_in=made_up)
            )
        except Exception as error:
            print(f"reference ({kernels}) cannot run: {type(error).__name__}: {str(error)[:300]}", flush=True)
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    print(json.dumps({"claim": "dlrmv4_speed", "tables_gb": gigabytes, "rows": found, **facts}))


if __name__ == "__main__":
    main()
