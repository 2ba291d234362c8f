"""Times of every kind are whole seconds since 1970 in UTC; what cannot be told apart is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.columns.times import TimeReader
from freescale.data.preparing.preparation import prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.errors import DataError
from tests.data.raw_forms import histories, write

NOON = 1_706_702_400  # 2024-01-31 12:00 UTC


def read(values: Any, unit: str = "auto", kind: Any = None) -> tuple[list[int], list[float]]:
    reader = TimeReader(unit)
    column = pa.array(values, type=kind)
    reader.learn(column)
    events = reader.read(column)
    return events["time"].tolist(), events.get("fraction", np.zeros(len(values))).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-31 12",
        "2024-01-31 12:00",
        "2024-01-31T12:00:00",
        "2024-01-31T12:00:00Z",
        "2024-01-31t12:00:00z",
        "2024-01-31 12:00:00 UTC",
        "2024-01-31 12:00:00 GMT",
        "2024-01-31T13:00:00+01:00",
        "2024-01-31T13:00+01",
        "2024-01-31 07:00:00 -0500",
        "2024-01-31 12:00:00,000",
        "2024/01/31 12:00",
        "1706702400",
        "1706702400.0",
        "1.7067024e9",
        "1706702400000",
        "1706702400000000",
        "1706702400000000000",
        "202401311200",
        "20240131120000",
    ],
)
def test_one_moment_in_many_ways(text: str) -> None:
    assert read([text]) == ([NOON], [0.0])
    assert read([text] * 3) == ([NOON] * 3, [0.0] * 3)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+05:30"])
def test_parquet_timestamps_and_numbers_of_any_unit_are_the_same_seconds(
    tmp_path: Path, unit: str, zone: str | None
) -> None:
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    ticks = pa.array([(NOON + n) * per_second for n in (2, 0, 1)])
    for number, times in enumerate([ticks, ticks.cast(pa.timestamp(unit, zone))]):
        source, out = tmp_path / f"{number}.parquet", tmp_path / str(number)
        pq.write_table(pa.table({"user": [1] * 3, "item": [2, 0, 1], "time": times}), source)
        prepare(source, out)
        assert histories(out, "time") == {1: [NOON, NOON + 1, NOON + 2]}
        assert json.loads((out / "dataset.json").read_text())["time_unit"] == "s"


@given(
    moments=st.lists(st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)), min_size=1, max_size=20),
    hours=st.integers(-12, 12),
    way=st.sampled_from(["iso", "local", "s", "ms", "us"]),
)
def test_order_is_exact_and_seconds_are_whole(moments: list[datetime], hours: int, way: str) -> None:
    zoned = [moment.replace(tzinfo=timezone(timedelta(hours=hours))) for moment in moments]
    ticks = [(moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) for moment in zoned]
    if way == "local":
        ticks = [tick + hours * 3600 * 10**6 for tick in ticks]
    texts: list[Any] = {
        "iso": [moment.isoformat() for moment in zoned],
        "local": [moment.isoformat(sep=" ") for moment in moments],
        "s": [f"{tick // 10**6}.{tick % 10**6:06d}" for tick in ticks],
        "ms": [tick // 1000 for tick in ticks],
        "us": ticks,
    }[way]
    seconds, fractions = read(texts)
    assert seconds == [tick // 10**6 for tick in ticks]
    kept = [tick // 1000 if way == "ms" else tick for tick in ticks]
    order = sorted(range(len(kept)), key=lambda n: (seconds[n], fractions[n]))
    assert [kept[n] for n in order] == sorted(kept)


@pytest.mark.parametrize(
    "values",
    [
        ["2024-02-30"],
        ["2024-01-31 25:00"],
        ["31.01.2024"],
        ["01/31/2024"],
        ["Jan 31, 2024"],
        ["9999-12-31"],
        ["2024-01-31", "1706702400", "2024-01-31"],
        [1_706_702_400, 1_706_702_400_000, 1_706_702_400],
        [1_706_702_400_000, 0, 1_706_702_400_000],
        [20240131, 20240131, *[20240130] * 20, 20240230],
        [1e300],
        [float("inf"), 1.0],
        [True],
        [timedelta(days=1)],
    ],
)
def test_what_is_no_time_among_these_is_refused(values: list[Any]) -> None:
    with pytest.raises((ValueError, pa.ArrowException)):
        read(values)


def test_a_named_unit_is_taken_as_it_is() -> None:
    assert read([5, 1_706_702_400_000], unit="ms") == ([0, 1_706_702_400], [0.005, 0.0])
    assert read([20240131], unit="s") == ([20240131], [0.0])
    assert read([2**62, -3], unit="s") == ([2**62, -3], [0.0, 0.0])


def test_relative_times_keep_their_order_and_are_told(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "user,item,time\n1,3,9\n1,1,7\n1,2,8\n")
    summary = prepare(source, tmp_path / "out")
    assert histories(tmp_path / "out") == {1: [1, 2, 3]}
    assert "from 1970-01-01 00:00:07 to 1970-01-01 00:00:09 (no dates?" in "\n".join(summary.taken)
    with pytest.raises(DataError, match="auto, s, ms, us, ns"):
        prepare(source, tmp_path / "other", time_unit="minutes")


def test_a_unit_holds_for_all_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, scale in enumerate((1, 1000)):
        rows = "".join(f"1,{item},{(NOON + item) * scale}\n" for item in range(4))
        write(tmp_path / "in" / f"{number}.csv", "user,item,time\n" + rows)
    with pytest.raises(DataError, match=r"1\.csv, line 2: the time"):
        prepare(tmp_path / "in", tmp_path / "out")


def test_a_data_set_that_does_not_say_seconds_is_refused_and_the_new_one_is_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", f"user,item,time\n1,3,{NOON}\n1,1,{NOON + 1}\n1,2,{NOON + 2}\n")
    for name in ("old", "new"):
        prepare(source, tmp_path / name, name="x")
    file = tmp_path / "old" / "dataset.json"
    manifest = json.loads(file.read_text())
    del manifest["time_unit"]
    file.write_text(json.dumps(manifest))
    assert ParquetSource(tmp_path / "old").features == ("item", "time")  # numbers of text were kept: seconds
    file.write_text(json.dumps({**manifest, "source_format": "parquet"}))
    with pytest.raises(DataError, match=r"(?s)does not say.*'time_unit' is None.*freescale prepare"):
        ParquetSource(tmp_path / "old")
    assert manifest["shards"] == json.loads((tmp_path / "new" / "dataset.json").read_text())["shards"]
    file.write_text(json.dumps({**manifest, "features": ["item"]}))
    assert ParquetSource(tmp_path / "old").features == ("item",), "without times nothing can be wrong"
