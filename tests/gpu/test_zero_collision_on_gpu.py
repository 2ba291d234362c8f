"""The id kernels on a real GPU: the rows of the CPU, and no id lost or doubled under stress."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freescale.embedding.ids.eviction import LFU, LRU, TTL
from freescale.embedding.ids.id_stats import histogram
from freescale.embedding.ids.zero_collision import ZeroCollisionMap
from freescale.kernels.id_table import api as id_probe
from freescale.kernels.id_table.layout import EMPTY, make_layout
from tests.gpu.test_on_gpu import train_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

GROUPS = [1, 2, 4, 8]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("max_probe", [1, 7, 128])
def test_a_bulk_insert_ends_as_if_the_smallest_had_come_first(group: int, max_probe: int) -> None:
    from freescale.kernels.id_table.triton import probe as probe_triton

    layout = make_layout(120_000, num_buckets=4, max_probe=max_probe)
    tiles = probe_triton.Tiles(block=128, group=group, warps=4)
    here, there = (
        torch.full((layout.held_rows,), EMPTY),
        torch.full((layout.held_rows,), EMPTY, device="cuda"),
    )
    occupied = id_probe.occupied_bits(there)
    generator = torch.Generator().manual_seed(group)
    for _ in range(4):
        ids = torch.randint(-(2**63), 2**63 - 1, (40_000,), generator=generator)
        ids = torch.cat([ids, ids[:9_000], torch.tensor([EMPTY, -(2**63), 2**63 - 1])])
        ids = ids[torch.randperm(len(ids), generator=generator)]
        rows, new = probe_triton.claim(ids.cuda(), there, occupied, layout, tiles=tiles)
        ascending = ids.unique()
        _, true_new, _ = id_probe.claim(ascending, here, None, layout)
        assert torch.equal(there.cpu(), here)
        assert torch.equal(rows.cpu(), id_probe.find(ids, here, layout))
        assert torch.equal(rows[new].cpu().sort().values, true_new.sort().values)
        assert torch.equal(there[rows[new]], ids.cuda()[new])
        assert torch.equal(occupied.cpu(), id_probe.occupied_bits(here))
        assert torch.equal(probe_triton.find(ids.cuda(), there, layout, tiles=tiles), rows)


@pytest.mark.parametrize("policy", [None, TTL(2), LRU(), LFU()], ids=["none", "ttl", "lru", "lfu"])
@pytest.mark.parametrize("admit_after", [1, 2])
def test_a_map_on_the_gpu_is_a_map_on_the_cpu(policy, admit_after: int) -> None:
    options = {"max_probe": 16, "num_buckets": 8, "eviction": policy, "admit_after": admit_after, "guard": 1}
    cpu, gpu = (ZeroCollisionMap(4096, device=device, **options) for device in ("cpu", "cuda"))
    for batch in range(30):
        ids = torch.randint(300 * batch, 300 * batch + 3000, (2000,)).unique()
        ours, truth = gpu.assign(ids.cuda(), batch), cpu.assign(ids, batch)
        assert torch.equal(ours.rows.cpu(), truth.rows)
        assert torch.equal(ours.evicted_ids.cpu().sort().values, truth.evicted_ids.sort().values)
        assert torch.equal(ours.new_rows.cpu().sort().values, truth.new_rows.sort().values)
    for name, values in cpu.state_dict().items():
        assert torch.equal(gpu.state_dict()[name].cpu(), values), name
    assert gpu.stats() == cpu.stats()


@pytest.mark.parametrize("mode", ["max", "add", "set"])
@pytest.mark.parametrize("num_rows", [1 << 20, 999_983])
def test_marks_of_use_are_those_of_the_cpu(mode: str, num_rows: int) -> None:
    from freescale.kernels.id_table.triton import touch as probe_touch

    generator = torch.Generator().manual_seed(num_rows)
    truth = [torch.full((num_rows,), 3, dtype=torch.int32), torch.arange(num_rows) % 5 - 2]
    by_bits, directly = ([values.cuda() for values in truth] for _ in range(2))
    # The same batch number again: a row is counted once a batch, however often it comes.
    for now in (3, 4, 4, 6):
        rows = torch.randint(-1, num_rows, (700_000,), generator=generator)
        id_probe.touch(rows, *truth, torch.tensor([now - 4]), now=now, mode=mode)
        value = torch.tensor([now - 4], device="cuda")
        probe_touch.touch_by_bits(rows.cuda(), *by_bits, value, now, mode)
        probe_touch.touch_directly(rows.cuda(), *directly, value, now, mode)
        for ours in (by_bits, directly):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, truth))


def test_histograms_count_the_same_on_every_device() -> None:
    numbers = torch.cat([torch.arange(5000), 1 << torch.arange(63), (1 << torch.arange(63)) - 1])
    assert histogram(numbers.cuda()) == histogram(numbers)


def test_a_hundred_million_operations_lose_and_double_nobody() -> None:
    """Rounds of inserts with repeats beside readers on another stream; the table is checked as a whole after each."""
    ids_map = ZeroCollisionMap(1 << 22, max_probe=128, eviction=LRU(), guard=0, device="cuda")
    reader = torch.cuda.Stream()
    generator = torch.Generator(device="cuda").manual_seed(1)
    total = 0
    while total < 100_000_000:
        first = total // 4
        ids = torch.randint(first, first + 6_000_000, (4_000_000,), device="cuda", generator=generator)
        ids = ids * 0x5DEECE66D + 11
        known = ids_map.residents()[0][:1_000_000]
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            early = torch.stack([ids_map.lookup(known) for _ in range(3)])
        done = ids_map.assign(ids)
        torch.cuda.synchronize()
        total += len(ids) + 3 * len(known)
        residents, rows = ids_map.residents()
        assert len(residents.unique()) == len(residents)
        assert len(rows.unique()) == len(rows)
        found = ids_map.lookup(ids)
        own = found >= 0
        assert torch.equal(found[own], done.rows[own])
        assert torch.equal(done.rows[~own], ids_map.layout.overflow(ids[~own]))
        assert bool((ids_map.lookup(done.evicted_ids) < 0).all())
        gone = torch.isin(known, done.evicted_ids)
        assert bool((early[:, ~gone] == ids_map.lookup(known[~gone])).all())
        stats = ids_map.stats()
        assert stats["occupied"] == len(residents)


def test_training_with_learnt_ids_follows_the_cpu(tmp_path: Path) -> None:
    recipe = ("model.dtype=float64", "run.steps=40", "run.eval_every=40", "embedding.id_map=zero_collision")
    recipe += ("embedding.rows=128", "embedding.eviction=lru", "embedding.buckets=4")
    recipe += ("data.global_batch=6", "head.num_negatives=2")
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)
    np.testing.assert_array_equal(gpu["tensors"]["ids.identity"], cpu["tensors"]["ids.identity"])
