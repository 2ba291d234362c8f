"""Columns play the parts they are named for; one that looks like time is never dropped in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from freescale.data.columns.roles import ColumnNames, choose_columns
from freescale.data.columns.time_like import looks_like_time
from freescale.errors import DataError

HERE = Path("x.csv")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "created_at",
            "event_time",
            "eventTime",
            "date",
            "Date",
            "dt",
            "timestamps",
            "purchase_date",
            "when",
        ),
        *(
            "unix_timestamp",
            "watched_at",
            "ts_ms",
            "event_ts",
            "visit day",
            "local-datetime",
            "eventtimestamp",
        ),
    ],
)
def test_names_of_times(name: str) -> None:
    assert looks_like_time(name, [])
    with pytest.raises(DataError, match=rf"(?s)looks like time.*{name}.*--time {name}.*--time ''"):
        choose_columns(HERE, ["user", "item", name], ColumnNames())
    assert choose_columns(HERE, ["user", "item", name], ColumnNames(time="")) == {"user": 0, "item": 1}
    assert choose_columns(HERE, ["user", "item", name], ColumnNames(time=name))["time"] == 2


@pytest.mark.parametrize(
    "name", ["price", "watch_time", "time_spent", "duration", "category", "format", "timezone"]
)
def test_names_of_other_things(name: str) -> None:
    assert not looks_like_time(name, ["1", "20"])
    assert choose_columns(HERE, ["user", "item", name], ColumnNames(), lambda n: [1, 2]) == {
        "user": 0,
        "item": 1,
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["2024-01-31", "2024-02-01"], True),
        (["31.01.2024"], True),
        (["1706702400", ""], True),
        ([1_706_702_400_000, None], True),
        ([[1_706_702_400, 1_706_702_401], []], True),
        ([1_706_702_400, 5], False),
        (["5", "17"], False),
        ([0.5, 12.0], False),
        (["B00X", "2024-01-31"], False),
        ([True, False], False),
        ([], False),
        ([None], False),
    ],
)
def test_values_of_times(values: list[object], expected: bool) -> None:
    assert looks_like_time("c7", values) == expected


def test_a_second_time_is_only_ignored() -> None:
    assert choose_columns(HERE, ["user", "item", "ts", "created_at"], ColumnNames())["time"] == 2


def test_all_missing_columns_are_told_at_once() -> None:
    names = ColumnNames(time="when", action="stars")
    with pytest.raises(DataError) as raised:
        choose_columns(HERE, ["a", "b", "whem"], names)
    for told in ("user:", "item:", "time: 'when'", "action: 'stars'", "mean 'whem'", "--user", "a, b, whem"):
        assert told in str(raised.value)
