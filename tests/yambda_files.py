"""Files in the layout of Yambda, made of the twin's events: multi_event.parquet and the two mappings of items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.sources.dlrmv4_twin import TwinSource

OTHER = np.array(["dislike", "unlike", "undislike"])


def write_yambda(folder: Path, source: TwinSource, *, row_group: int = 5000) -> Path:
    """The events, sorted by user and time as the real file is, and the mappings; the file of events."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(
        [
            ("uid", pa.uint32()),
            ("timestamp", pa.uint32()),
            ("item_id", pa.uint32()),
            ("is_organic", pa.uint8()),
            ("played_ratio_pct", pa.uint16()),
            ("track_length_seconds", pa.uint32()),
            ("event_type", pa.dictionary(pa.int8(), pa.string())),
        ]
    )
    path = folder / "multi_event.parquet"
    with pq.ParquetWriter(path, schema) as file:
        for block in np.array_split(np.arange(len(source.lengths)), max(1, len(source.lengths) // 50)):
            file.write_table(_events(source, block, schema), row_group_size=row_group)
    for name, owners in (("artist", source.world.artist_of), ("album", source.world.album_of)):
        item = np.arange(len(owners)) + 1
        # The first item stands twice: the last row counts.
        table = {"item_id": np.append(1, item), f"{name}_id": np.append(7, owners + 1)}
        pq.write_table(pa.table(table), folder / f"{name}_item_mapping.parquet")
    return path


def _events(source: TwinSource, block: np.ndarray, schema: pa.Schema) -> pa.Table:
    read = source.read(block)
    action, number = read.columns["action"], np.arange(int(read.offsets[-1]))
    played = np.where(action == 1, 50 + number % 51, number % 50)
    kind = np.where(action == 2, "like", np.where(action == 0, OTHER[number % 3], "listen"))
    is_listen = kind == "listen"
    columns = [
        pa.array(np.repeat(read.users, read.lengths), pa.uint32()),
        pa.array(read.columns["time"], pa.uint32()),
        pa.array(read.columns["item"], pa.uint32()),
        pa.array(read.columns["organic"], pa.uint8()),
        pa.array(played, pa.uint16(), mask=~is_listen),
        pa.array(np.full(len(number), 200), pa.uint32(), mask=~is_listen),
        pa.array(kind).dictionary_encode().cast(schema.field("event_type").type),
    ]
    return pa.table(columns, schema=schema)
