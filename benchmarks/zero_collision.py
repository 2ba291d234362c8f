"""Zero-collision ids on one CPU thread: rates beside fbgemm's CPU operator, and how many ids find no row.

    python benchmarks/zero_collision.py [--table]

fbgemm is measured where fbgemm-gpu-cpu is installed (requirements-torchrec.txt); its operator can only read on a CPU,
so its table is filled by a loop of ours from the home slots it reports. Rounds of both sides alternate; best of
`--repeats`, in CPU time of the one thread, so that other work on the machine does not count.

insert, again (ids that are all there), hit and miss are a user's calls of ZeroCollisionMap; the loops inside them are
shown beside them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from freescale.embedding.ids.eviction import LRU
from freescale.embedding.ids.sizing import MEASURED, PROBES
from freescale.embedding.ids.zero_collision import ZeroCollisionMap
from freescale.kernels.id_table import api as id_probe
from freescale.kernels.id_table import reference as probe_reference
from freescale.kernels.id_table.layout import EMPTY, make_layout

NUM_IDS = 1_000_000
PROBE = 128
SIZES = (1_000_000, 1_330_000, 2_000_000, 4_000_000)
# Independent of our kernels: ids with random homes, placed one after the other. Shares that found no slot.
CHECKED = ((1.33, 64), (1.33, 128), (1.33, 256), (1.0, 128))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--table", action="store_true", help="measure the whole table of freescale/embedding/ids/sizing.py"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    check()
    rates = [measure(rows, options.repeats) for rows in SIZES]
    print(
        f"\nM ids/s, {NUM_IDS:,} random 62-bit ids, max_probe {PROBE}, one thread, best of {options.repeats}"
    )
    columns = list(rates[0])
    print("  ".join(f"{name:>14}" for name in columns))
    for row in rates:
        print("  ".join(f"{_shown(row[name]):>14}" for name in columns))
    shares = collision_table(MEASURED if options.table else sorted({ratio for ratio, _ in CHECKED}))
    simulated = {f"{ratio}x, P={probe}": simulate(ratio, probe) for ratio, probe in CHECKED}
    print("\nsimulated with random homes, for comparison:", {k: f"{v:.4%}" for k, v in simulated.items()})
    facts = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "num_ids": NUM_IDS,
        "max_probe": PROBE,
    }
    print(json.dumps({**facts, "rates": rates, "not_placed": shares, "simulated": simulated}))


def check() -> None:
    """Our loops against the plain rules, and the map against a dictionary, before any speed is printed."""
    layout = make_layout(400, num_buckets=2, max_probe=12)
    ours, truth = torch.full((layout.held_rows,), EMPTY), torch.full((layout.held_rows,), EMPTY)
    for seed in range(5):
        ids = torch.randint(0, 500, (200,), generator=torch.Generator().manual_seed(seed))
        rows, _, _ = id_probe.claim(ids, ours, None, layout)
        assert torch.equal(rows, probe_reference.claim(ids, truth, layout)[0])
    assert torch.equal(ours, truth)
    ids = random_ids(1).unique()
    ids_map = ZeroCollisionMap(4 * NUM_IDS, max_probe=PROBE)
    rows = ids_map.insert(ids)
    assert len(rows.unique()) == len(ids)
    assert torch.equal(ids_map.lookup(ids.flip(0)), rows.flip(0))
    print("checked: rows equal the reference's, nobody shares a row")


def measure(num_rows: int, repeats: int) -> dict[str, Any]:
    """Best rates of one table size; fbgemm's rounds stand between ours."""
    ids, strangers = random_ids(2), random_ids(3) | (1 << 62)
    layout = make_layout(num_rows, max_probe=PROBE)
    best: dict[str, float] = {}

    def clock(name: str, work: Callable[[], object]) -> None:
        start = time.thread_time()
        work()
        best[name] = min(best.get(name, float("inf")), time.thread_time() - start)

    fbgemm = FbgemmTable(ids, num_rows) if importlib.util.find_spec("fbgemm_gpu") else None
    for _ in range(repeats):
        identity = torch.full((layout.held_rows,), EMPTY)
        clock("insert loop", partial(id_probe.claim, ids, identity, None, layout))
        clock("hit loop", partial(id_probe.find, ids, identity, layout))
        plain, lru = (
            ZeroCollisionMap(num_rows, max_probe=PROBE, eviction=policy) for policy in (None, LRU())
        )
        clock("insert", partial(plain.insert, ids))
        clock("again", partial(plain.insert, ids))
        clock("hit", partial(plain.lookup, ids))
        clock("miss", partial(plain.lookup, strangers))
        clock("lru insert", partial(lru.insert, ids))
        clock("lru again", partial(lru.insert, ids))
        if fbgemm is not None:
            clock("fbgemm hit", lambda: fbgemm.find(ids))
            clock("fbgemm miss", lambda: fbgemm.find(strangers))
    rates: dict[str, Any] = {"rows": num_rows} | {name: NUM_IDS / s / 1e6 for name, s in best.items()}
    rates["loop / call"] = rates["insert loop"] / rates["insert"]
    if fbgemm is not None:
        rates["hit x"] = rates["hit"] / rates["fbgemm hit"]
        rates["miss x"] = rates["miss"] / rates["fbgemm miss"]
    return rates


class FbgemmTable:
    """A table of fbgemm's operator, filled by plain probing from the homes it gives when it finds nothing."""

    def __init__(self, ids: Tensor, num_rows: int) -> None:
        import fbgemm_gpu  # noqa: F401

        empty, _ = torch.ops.fbgemm.create_zch_buffer(num_rows, device=torch.device("cpu"), long_type=True)
        self._table = empty.clone()
        homes = self._run(ids, empty, 1)
        fill(self._table.view(-1).numpy(), ids.numpy(), homes.numpy(), PROBE)
        rows = self.find(ids)
        placed = self._table.view(-1)[rows] == ids
        # Ids that found no slot come back with their homes; all others with the slot that holds them.
        assert int((~placed).sum()) == len(ids) - int((self._table != -1).sum())

    def find(self, ids: Tensor) -> Tensor:
        """Slots, homes where an id is not there."""
        return self._run(ids, self._table, PROBE)

    def _run(self, ids: Tensor, table: Tensor, probe: int) -> Tensor:
        slots: Tensor = torch.ops.fbgemm.zero_collision_hash(
            ids, table, probe, circular_probe=True, readonly=True
        )[0]
        return slots


@njit
def fill(table: Any, ids: Any, homes: Any, probe: int) -> None:
    """One id after the other, the first empty slot from its home on."""
    for n in range(len(ids)):
        for step in range(probe):
            place = (homes[n] + step) % len(table)
            if table[place] == -1:
                table[place] = ids[n]
                break


def collision_table(ratios: Any) -> dict[str, list[float]]:
    """Share of the ids that find no slot, by rows an id and by probe length; buckets as they are by default."""
    print(
        f"\nids without a row, {NUM_IDS:,} random ids, mean of 2 seeds\n{'rows/id':>8}",
        *(f"{p:>9}" for p in PROBES),
    )
    shares = {}
    for ratio in ratios:
        row = [float(np.mean([not_placed(ratio, probe, seed) for seed in (4, 5)])) for probe in PROBES]
        shares[str(ratio)] = row
        print(f"{ratio:>8}", *(f"{share:>9.4%}" for share in row), flush=True)
    return shares


def not_placed(ratio: float, probe: int, seed: int) -> float:
    """The share for one seed."""
    layout = make_layout(int(NUM_IDS * ratio), max_probe=probe)
    rows, _, _ = id_probe.claim(random_ids(seed), torch.full((layout.held_rows,), EMPTY), None, layout)
    return float((rows < 0).double().mean())


def simulate(ratio: float, probe: int) -> float:
    """The same with homes from a random generator instead of a hash, by a loop that shares no code with ours."""
    num_rows = int(NUM_IDS * ratio)
    homes = np.random.default_rng(6).integers(0, num_rows, NUM_IDS)
    table = np.full(num_rows, -1)
    fill(table, np.arange(NUM_IDS), homes, probe)
    return float(1 - (table >= 0).sum() / NUM_IDS)


def random_ids(seed: int) -> Tensor:
    """Random 62-bit ids."""
    return torch.randint(0, 1 << 62, (NUM_IDS,), generator=torch.Generator().manual_seed(seed))


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


if __name__ == "__main__":
    main()
