"""A whole step on one device: tables, model, optimizers; and its kernels held against float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrmv4_parts.inputs import CONTEXT, CROSSES, Inputs
from dlrmv4_parts.ours import our_model
from dlrmv4_parts.reference import Theirs
from dlrmv4_parts.samples import Batch
from freescale.data import FIRST, SLOT
from freescale.embedding import ShardedEmbedding, TableSpec, as_compute
from freescale.embedding.optimizers.rowwise_adagrad import RowwiseAdagrad
from freescale.model import dropout_keys

REAL = {"item": 9_390_624, "artist": 1_293_395, "album": 3_367_692, "user": 1_000_001}
CROSS_ROWS = dict(
    zip(CROSSES, (100_000_000, 40_000_000, 24_000_000, 40_000_000, 32_000_000, 2_000_000, 40_000_000))
)
DIM, HEADS, LAYERS, LENGTH = 512, 4, 3, 4096


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
