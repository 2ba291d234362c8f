"""Zero-collision ids on a GPU: insert, hit and miss rates by table size and load; what a training step pays for them.

    python benchmarks/zero_collision_gpu.py [--rows 20 24 26] [--sweep] [--step-only | --kernels-only] [--device cuda]

Rates are of the kernels alone (CUDA events, best of 5):

    insert   of new ids into an empty table
    hit      of ids that are there
    touch    a hit that also marks its row as used in this batch, a new one each time, and sets its score; bits first
    direct   the same, every row written by itself, as a batch that is small against its table does
    again    what a training step does with ids that are all there: the kernels of insert, then of touch
    miss     of ids that are not there
    call     ZeroCollisionMap.insert of new ids as a user calls it, allocations and counts included, beside `insert`
    recall   the same call with ids that are all there

Bytes: what must move at least, an id in, a row number out, one 32-byte sector of the table for each id (two with an
insert, which is read and written), against the copy rate measured in the same run. --sweep tries other launch shapes
and prints the best of each kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from freescale.comm.world.ranks import Ranks
from freescale.embedding.ids.zero_collision import ZeroCollisionMap
from freescale.kernels.id_table import api as id_probe
from freescale.kernels.id_table.layout import EMPTY, SlotLayout, make_layout
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress

LOADS = (0.5, 0.75, 0.9)
BLOCK = 10
REPEATS = 5
KINDS = ("insert", "call", "recall", "hit", "touch", "direct", "again", "miss")
RECIPE = (
    "synthetic.users=20000",
    "synthetic.items=50000",
    "synthetic.mean_length=100",
    "data.global_batch=256",
    "model.dim=256",
    "model.heads=4",
    "model.layers=4",
    "model.dropout=0",
    "model.dtype=bfloat16",
    "head.num_negatives=256",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[20, 24, 26], help="tables of 2^N rows")
    parser.add_argument("--sweep", action="store_true", help="try other launch shapes")
    parser.add_argument("--step-only", action="store_true", help="only the training step")
    parser.add_argument("--kernels-only", action="store_true", help="no training step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, to try the script on a CPU")
    options = parser.parse_args()
    result: dict[str, Any] = {"device": options.device}
    if not options.step_only:
        result |= measure_kernels(options.rows, sweep=options.sweep)
    if not options.kernels_only:
        result["training step"] = training_step(options.device, options.steps, small=options.small)
    print(json.dumps(result))


def measure_kernels(powers: list[int], *, sweep: bool) -> dict[str, Any]:
    """Rates of all kernels, after a check against the CPU."""
    check()
    copied = copy_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, copies read and write {copied:.2f} TB/s\n")
    print(
        f"{'rows':>6} {'load':>5}", *(f"{kind:>8}" for kind in KINDS), "  G ids/s; TB/s (share): insert, hit"
    )
    rates = []
    for power, load in itertools.product(powers, LOADS):
        row = measure(1 << power, load)
        rates.append(row)
        moved = [row[kind] * size / 1000 for kind, size in (("insert", 80), ("hit", 48))]
        shares = ", ".join(f"{rate:.2f} ({rate / copied:.0%})" for rate in moved)
        print(f"2^{power:<4} {load:>5}", *(f"{row[kind]:>8.2f}" for kind in KINDS), "  ", shares, flush=True)
    best = sweep_shapes(1 << max(powers)) if sweep else None
    return {"gpu": name, "copy_tb_s": copied, "rates": rates, "best_shapes": best}


def check() -> None:
    """Rows and marks of a bulk insert on the GPU are those of the CPU, which gets the ids in ascending order."""
    from freescale.kernels.id_table.triton import probe as probe_triton
    from freescale.kernels.id_table.triton import touch as probe_touch

    layout = make_layout(1_400_000, max_probe=128)
    ids = random_ids(1_000_000, seed=1)
    here = torch.full((layout.held_rows,), EMPTY)
    id_probe.claim(ids.cpu().unique(), here, None, layout)
    there, occupied = empty_table(layout)
    rows, _, _ = id_probe.claim(ids, there, occupied, layout)
    assert torch.equal(there.cpu(), here)
    assert torch.equal(rows.cpu(), id_probe.find(ids.cpu(), here, layout))
    for mode in ("max", "add", "set"):
        truth = use_marks(layout, "cpu")
        id_probe.touch(rows.cpu(), *truth, torch.tensor([7]), now=9, mode=mode)
        bits, by_rows = use_marks(layout, "cuda"), use_marks(layout, "cuda")
        marks = probe_touch.no_marks(bits[0])
        probe_triton.find(ids, there, layout, marks=marks)
        probe_touch.fold(marks, *bits, torch.tensor([7], device="cuda"), 9, mode)
        probe_touch.touch_directly(rows, *by_rows, torch.tensor([7], device="cuda"), 9, mode)
        for ours in (bits, by_rows):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, truth))
    print("checked: the GPU gives the rows and the marks of the CPU")


def measure(num_rows: int, load: float, find_tiles: Any = None, claim_tiles: Any = None) -> dict[str, float]:
    """G ids/s of one size and load; every kernel alone."""
    from freescale.kernels.id_table.triton import probe as probe_triton
    from freescale.kernels.id_table.triton import touch as probe_touch

    find_tiles, claim_tiles = find_tiles or probe_triton.FIND, claim_tiles or probe_triton.CLAIM
    layout = make_layout(num_rows, max_probe=128)
    ids = random_ids(int(layout.held_slots * load), seed=2)
    strangers = random_ids(len(ids), seed=3) | (1 << 62)
    identity, occupied = empty_table(layout)
    rows = torch.empty_like(ids)
    new = torch.empty_like(ids, dtype=torch.int8)
    used, score = use_marks(layout, "cuda")
    value = torch.full((1,), 9, device="cuda")
    batch = itertools.count(1)

    def fresh() -> None:
        identity.fill_(EMPTY)
        occupied.zero_()
        rows.fill_(-1)

    def insert() -> None:
        probe_triton.launch_claim(ids, identity, occupied, rows, new, layout, claim_tiles)

    def find(asked: Tensor, marks: Tensor | None = None) -> Tensor:
        return probe_triton.find(asked, identity, layout, marks=marks, tiles=find_tiles)

    def touch() -> None:
        marks = probe_touch.no_marks(used)
        find(ids, marks)
        probe_touch.fold(marks, used, score, value, next(batch), "max")

    def direct() -> None:
        probe_touch.touch_directly(find(ids), used, score, value, next(batch), "max")

    def again() -> None:
        insert()
        probe_touch.touch(rows, used, score, value, next(batch), "max")

    ids_map = ZeroCollisionMap(num_rows, max_probe=128, device="cuda")

    def empty() -> None:
        ids_map.state_dict()["identity"].fill_(EMPTY)
        ids_map.restored()

    seconds = {
        "insert": best_of(insert, before=fresh),
        "call": best_of(lambda: ids_map.insert(ids), before=empty),
        "recall": best_of(lambda: ids_map.insert(ids)),
        "hit": best_of(lambda: find(ids)),
        "touch": best_of(touch),
        "direct": best_of(direct),
        "again": best_of(again, before=lambda: rows.fill_(-1)),
        "miss": best_of(lambda: find(strangers)),
    }
    return {"rows": num_rows, "load": load} | {kind: len(ids) / s / 1e9 for kind, s in seconds.items()}


def sweep_shapes(num_rows: int) -> dict[str, Any]:
    """The fastest launch shape of each kernel at load 0.75."""
    from freescale.kernels.id_table.triton.probe import Tiles

    best: dict[str, Any] = {}
    for block, group, warps in itertools.product((32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 4)):
        if block < 32 * warps:
            continue
        tiles = Tiles(block=block, group=group, warps=warps)
        row = measure(num_rows, 0.75, tiles, tiles)
        for kind in KINDS:
            if row[kind] > best.get(kind, (0.0,))[0]:
                best[kind] = (row[kind], block, group, warps)
        print(
            f"  block {block:>3} group {group} warps {warps}: "
            + "  ".join(f"{k} {row[k]:.2f}" for k in best),
            flush=True,
        )
    print("best (G ids/s, block, group, warps):", best)
    return best


def training_step(device: str, steps: int, *, small: bool) -> dict[str, float]:
    """Median milliseconds of a whole step with direct indexing and with learnt ids; blocks of steps alternate.

    Blocks, because a thread makes the next batches ready while one computes: step by step, it would do so while another
    side is measured. The first half of all blocks meets most ids for the first time, and compiles.
    """
    recipe = ["synthetic.users=500", "synthetic.items=2000", "model.dim=64"] if small else list(RECIPE)
    sides = {
        "direct": [],
        "zero_collision": ["embedding.id_map=zero_collision"],
        "zero_collision, lru": ["embedding.id_map=zero_collision", "embedding.eviction=lru"],
    }
    runs = {name: open_run(device, [*recipe, *extra], steps) for name, extra in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    num_blocks = max(2, steps // BLOCK)
    for block in range(num_blocks):
        for name, batches in runs.items():
            start = time.perf_counter()
            for _ in range(BLOCK):
                next(batches)
            if device == "cuda":
                torch.cuda.synchronize()
            if block >= num_blocks // 2:
                times[name].append(1000 * (time.perf_counter() - start) / BLOCK)
    for batches in runs.values():
        batches.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"training step, {name}: {value:.2f} ms ({value / medians['direct'] - 1:+.1%})")
    return medians


def open_run(device: str, recipe: list[str], steps: int) -> Generator[None, None, None]:
    """A run that takes one training step at each `next`."""
    out = tempfile.mkdtemp()
    # More steps than are taken: at the end of the data there would be nothing to make ready.
    length = f"run.steps={steps + 4 * BLOCK}"
    config = load_config(None, [*recipe, f"run.out={out}", f"run.device={device}", length])
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device(device))
    run = build_run(config, build_source(config), ranks, Progress())

    def go() -> Generator[None, None, None]:
        with run.open_schedule(0) as schedule:
            for ready in schedule:
                run.train_step.run(ready, schedule)
                yield

    return go()


def best_of(work: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of a few launches, by the GPU's own clock."""
    best = float("inf")
    for _ in range(REPEATS + 1):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return best


def copy_rate() -> float:
    """TB/s read and written by a large copy on the GPU."""
    a, b = (torch.empty(1 << 28, dtype=torch.int64, device="cuda") for _ in range(2))
    return 2 * a.numel() * 8 / best_of(lambda: b.copy_(a)) / 1e12


def empty_table(layout: SlotLayout) -> tuple[Tensor, Tensor]:
    identity = torch.full((layout.held_rows,), EMPTY, device="cuda")
    return identity, id_probe.occupied_bits(identity)


def use_marks(layout: SlotLayout, device: str) -> tuple[Tensor, Tensor]:
    """When rows were used last, and their scores."""
    used = torch.zeros(layout.held_rows, dtype=torch.int32, device=device)
    return used, torch.arange(layout.held_rows, device=device) % 11


def random_ids(count: int, *, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 1 << 62, (count,), device="cuda", generator=generator)


if __name__ == "__main__":
    main()
