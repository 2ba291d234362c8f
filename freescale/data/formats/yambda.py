"""Yambda's events (`flat/*/multi_event.parquet`), with what MLPerf's DLRMv4 makes of them.

    uid, item_id, timestamp             user, item, time
    event_type, played_ratio_pct        action: listened (half of the track or more), liked, skipped; 0: anything else
                                        listened: 1 or 0 of what was played, missing for the rest
    timestamp                           hour of the day
    is_organic                          organic: organic, recommended

Asked for by name (`--format yambda`): its files are Parquet files like others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.data.formats.parquet import unreadable
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.errors import DataError
from freescale.registry import register

COLUMNS = ("uid", "item_id", "timestamp", "is_organic", "played_ratio_pct", "event_type")
LISTENED, LIKED, SKIPPED = 1, 2, 4
_ENOUGH_PERCENT = 50
_HOUR_S, _DAY_HOURS = 3600, 24
_ROLES = {"user": "uid", "item": "item_id", "time": "timestamp"}


@register("format", "yambda")
class YambdaFormat:
    """One event a row, with its kind and how much of a track was played."""

    suffixes: tuple[str, ...] = ()
    in_folders = False

    def recognises(self, sample: RawSample, /) -> str | None:
        """Never by itself."""
        return None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the file, each time with about how many bytes of it were read before."""
        size, done = path.stat().st_size, 0

        def locate(event: int) -> tuple[str, str]:
            return f"{path}, row {done + event}", "that row"

        try:
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
                if missing:
                    raise DataError(
                        f"{path} is no file of Yambda's events",
                        got=f"no column {', '.join(missing)}",
                        allowed=", ".join(COLUMNS),
                        next_step="give flat/*/multi_event.parquet, or read it with --format parquet",
                    )
                wanted = {*reading.values.features.features, *_ROLES}
                reading.values.take({role: _ROLES.get(role, role) for role in wanted}, [])
                num_rows = max(1, file.metadata.num_rows)
                for batch in file.iter_batches(reading.chunk_events, columns=[*COLUMNS], use_threads=False):
                    raw = {role: column for role, column in _columns(batch).items() if role in wanted}
                    yield reading.values.events(raw, locate), size * done // num_rows
                    done += batch.num_rows
        except (OSError, KeyError, pa.ArrowException) as error:
            raise unreadable(path, error) from error


def _columns(batch: Any) -> dict[str, Any]:
    """Columns by the part they play."""
    kind = pc.cast(batch.column("event_type"), pa.string())
    is_listen, is_like = (_flags(pc.equal(kind, word)) for word in ("listen", "like"))
    played = pc.fill_null(pc.cast(batch.column("played_ratio_pct"), pa.float64()), 0.0)
    enough = played.to_numpy(zero_copy_only=False) >= _ENOUGH_PERCENT
    action = np.where(is_listen, np.where(enough, LISTENED, SKIPPED), np.where(is_like, LIKED, 0))
    time = batch.column("timestamp").to_numpy(zero_copy_only=False).astype(np.int64)
    hours = pa.array([str(hour) for hour in range(_DAY_HOURS)])
    organic = _flags(pc.cast(batch.column("is_organic"), pa.bool_()))
    return {
        "user": batch.column("uid"),
        "item": batch.column("item_id"),
        "time": pa.array(time),
        "action": pa.array(action.astype(np.int64)),
        "listened": pa.array(np.where(is_listen, enough, np.nan).astype(np.float32), from_pandas=True),
        "hour": hours.take(pa.array(time // _HOUR_S % _DAY_HOURS)),
        "organic": pa.array(["recommended", "organic"]).take(pa.array(organic.astype(np.int64))),
    }


def _flags(values: Any) -> Any:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False).astype(bool)
