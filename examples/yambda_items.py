"""Artist and album of every item of Yambda in one file, as `freescale prepare --items` takes it.

    python examples/yambda_items.py YAMBDA_DIR items.parquet

YAMBDA_DIR holds artist_item_mapping.parquet and album_item_mapping.parquet. An item that has several keeps the one that
stands last, as the code of MLPerf's DLRMv4 does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def owners(path: Path, column: str, num_items: int) -> np.ndarray:
    """[items] the id in `column` of each item, -1 where it has none."""
    found = np.full(num_items, -1, np.int64)
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(1 << 20, columns=["item_id", column]):
            found[batch.column(0).to_numpy()] = batch.column(1).to_numpy()
    return found


def main(folder: str, out: str) -> None:
    """Join the two files by item."""
    files = {name: Path(folder) / f"{name}_item_mapping.parquet" for name in ("artist", "album")}
    largest = 0
    for path in files.values():
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1 << 20, columns=["item_id"]):
                largest = max(largest, int(batch.column(0).to_numpy().max(initial=0)))
    columns = {name: owners(path, f"{name}_id", largest + 1) for name, path in files.items()}
    known = np.flatnonzero((columns["artist"] >= 0) | (columns["album"] >= 0))
    table = {"item": pa.array(known)}
    for name, values in columns.items():
        table[name] = pa.array(values[known], mask=values[known] < 0)
    pq.write_table(pa.table(table), out)
    print(f"{out}: {len(known):,} items")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} YAMBDA_DIR items.parquet")
    main(*sys.argv[1:])
