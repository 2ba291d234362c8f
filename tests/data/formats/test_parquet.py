"""Parquet by event and by user gives the same histories; a bad row becomes one error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.preparing.preparation import ColumnNames, prepare
from freescale.errors import DataError
from tests.data.raw_forms import BY_TIME, EVENTS, histories


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_parquet_by_event_and_by_user(tmp_path: Path, lists: bool, as_text: bool) -> None:
    table = pa.table(dict(zip(("user", "item", "rating", "time"), zip(*EVENTS))))
    if lists:
        grouped = table.group_by("user", use_threads=False)
        table = grouped.aggregate([(name, "list") for name in ("item", "rating", "time")])
        table = table.rename_columns([name.removesuffix("_list") for name in table.column_names])
    elif as_text:
        table = table.cast(pa.schema([(name, pa.string()) for name in table.column_names]))
    pq.write_table(table, tmp_path / "x.parquet")
    assert prepare(tmp_path / "x.parquet", tmp_path / "out", rewrite=True).source_format == "parquet"
    assert histories(tmp_path / "out") == BY_TIME
    assert histories(tmp_path / "out", "action") == {3: [5, 4, 2], 7: [3, 5, 1]}


def test_bad_parquet_is_one_clear_error(tmp_path: Path) -> None:
    source = tmp_path / "x.parquet"

    def fails(table: dict[str, Any] | None, message: str, **options: Any) -> None:
        if table is not None:
            pq.write_table(pa.table(table), source)
        with pytest.raises(DataError, match=f"(?s){message}"):
            prepare(source, tmp_path / "out", **options)

    fails({"user": [1, 2], "item": [1, None]}, r"row 1: the item.*nothing")
    fails({"user": [1, 2], "item": [1.0, 2.5]}, r"row 1: the item.*'2.5'")
    fails({"user": [1, 2], "item": [[1.0], [2.0, 2.5]]}, r"row 1: the item.*'2.5'")
    fails({"user": [1, 2], "item": [[1], [2]], "time": [[1], [2, 3]]}, r"row 1: lists of different lengths")
    fails({"user": [1, 2], "item": [[1], [2]], "time": [1, 2]}, "lists and single values are mixed")
    fails({"user": [1], "item": [1], "time": [float("nan")]}, r"row 0: the time")
    large = {"user": pa.array([2**63], pa.uint64()), "item": [1]}
    fails(large, r"row 0: the user.*'9223372036854775808'", id_kinds={"user": "int64"})
    fails({"user": [{"a": 1}], "item": [1]}, r"row 0: the user")
    fails({"user": [1], "item": [1]}, "did you mean 'item'", columns=ColumnNames(item="itm"))
    fails({"user": [1], "item": [1]}, "two parts", columns=ColumnNames(item="user"))
    fails({"user": pa.array([], pa.int64()), "item": pa.array([], pa.int64())}, "no events")
    pq.write_table(pa.table({"user": range(9999), "item": range(9999)}), source)
    source.write_bytes(source.read_bytes()[:-500])
    fails(None, "x.parquet cannot be read as Parquet")
    source.write_bytes(b"")
    fails(None, "is empty")
