r"""What the busiest owner of rows serves, over the mean: rows as the id map puts them, and popular ones dealt evenly.

Every rank of a step draws ids (Zipf), asks for each different row once, and whoever owns it sends it: counted exactly,
with the maps and blocks that train. Popularity is known from other draws than those that are counted. Checked first:
the same ids ask for as many rows either way.

    python benchmarks/hot_owners.py                  # 8, 64 and 256 ranks, one minute of one core
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable

import numpy as np
import torch

from freescale.embedding import SGD, DirectMap, HashMap, SpreadMap, TableSpec
from freescale.embedding.sharding.plan import plan_tables
from freescale.pipeline import busiest_owner

MAPS = {"direct": DirectMap, "hash": HashMap}


def zipf_ids(
    num_items: int, exponent: float, names: np.ndarray
) -> Callable[[int, np.random.Generator], np.ndarray]:
    """Draws ids; how popular an item is has nothing to do with its number."""
    cumulative = np.cumsum(np.arange(1, num_items + 1, dtype=np.float64) ** -exponent)
    cumulative /= cumulative[-1]
    return lambda count, rng: names[np.searchsorted(cumulative, rng.random(count))]


def served(
    id_map: DirectMap | HashMap | SpreadMap, batches: list[np.ndarray], edges: np.ndarray
) -> np.ndarray:
    """Rows that each owner sends to all ranks in a step."""
    total = np.zeros(len(edges) - 1)
    for ids in batches:
        rows = np.unique(id_map.rows(torch.from_numpy(ids)).numpy())
        total += np.diff(np.searchsorted(rows, edges))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--items", type=int, default=2_000_000)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--draws", type=int, default=26_700, help="events of a rank")
    parser.add_argument("--known", type=int, default=20_000_000, help="events from which popularity is known")
    parser.add_argument("--spread", type=int, default=65_536)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    draw = zipf_ids(options.items, options.zipf, rng.permutation(options.items))
    counts = np.bincount(draw(options.known, rng), minlength=options.items)
    ids, rows = np.arange(options.items), []
    print(
        f"{options.items:,} items, Zipf {options.zipf:g}, {options.draws:,} events a rank; busiest owner / mean\n"
    )
    print(f"{'ranks':>6} {'map':<8}{'as it is':>10}{'spread':>10}   spread, step by step")
    for kind, make in MAPS.items():
        plain = make(options.items)
        spread = SpreadMap(plain, ids=ids, counts=counts, most=options.spread)
        for num_ranks in options.ranks:
            spec = TableSpec(name="item", num_rows=options.items, dim=1, optimizer=SGD())
            edges = np.array(plan_tables([spec], num_ranks=num_ranks)[0].edges())
            found: dict[str, list[float]] = {"plain": [], "spread": []}
            for _ in range(options.steps):
                batches = [draw(options.draws, rng) for _ in range(num_ranks)]
                both = {"plain": served(plain, batches, edges), "spread": served(spread, batches, edges)}
                if both["plain"].sum() != both["spread"].sum():
                    raise SystemExit("FAILED: spread rows are not one-to-one")
                for name, loads in both.items():
                    found[name].append(busiest_owner(loads.tolist()))
            middle = {name: statistics.median(each) for name, each in found.items()}
            rows.append({"ranks": num_ranks, "map": kind, **middle, "worst_spread": max(found["spread"])})
            steps = " ".join(f"{each:.3f}" for each in found["spread"])
            print(
                f"{num_ranks:>6} {kind:<8}{middle['plain']:>10.3f}{middle['spread']:>10.3f}   {steps}",
                flush=True,
            )
    print(
        json.dumps({"claim": "hot_owners", "date": str(datetime.date.today()), "rows": rows, **vars(options)})
    )


if __name__ == "__main__":
    main()
