"""A format from outside the package is one file: read by name, found by itself, checked like those that ship."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freescale.data import prepare
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.data.preparing.reading.raw_input import format_names
from freescale.errors import DataError
from freescale.registry import load_plugin, register
from tests.data.raw_forms import BY_FILE, BY_TIME, EVENTS, TEXT_FORMS, histories, write

TEXT = "#arrows\n" + "".join(f"{user}>{item}\n" for user, item, _, _ in EVENTS)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch, own_kinds: None) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "extend" / "plugins"))
    sys.modules.pop("own_format", None)
    load_plugin("own_format")
    yield
    sys.modules.pop("own_format", None)


@pytest.mark.parametrize("memory_mb", [512, 0.0001])
@pytest.mark.parametrize(
    ("name", "asked", "decided"),
    [
        ("x.txt", "arrows", "as asked for"),
        ("x.arrows", "auto", "the name ends in .arrows"),
        ("x.txt", "auto", "the first line says so"),
        ("x.csv", "auto", "the first line says so"),
    ],
)
def test_a_format_from_outside_is_read_by_name_and_found(
    tmp_path: Path, name: str, asked: str, decided: str, memory_mb: float
) -> None:
    source = write(tmp_path / name, TEXT)
    summary = prepare(source, tmp_path / "out", format=asked, memory_mb=memory_mb)
    assert (summary.source_format, summary.decided) == ("arrows", decided)
    assert histories(tmp_path / "out") == BY_FILE


def test_a_folder_of_files_from_outside(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, (user, item, _, _) in enumerate(EVENTS):
        write(tmp_path / "in" / f"{number}.arrows", f"#arrows\n{user}>{item}\n")
    assert prepare(tmp_path / "in", tmp_path / "out").decided == "the folder holds arrows files"
    assert histories(tmp_path / "out") == BY_FILE


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_formats_that_ship_are_still_found(tmp_path: Path, form: str) -> None:
    name, text, expected = TEXT_FORMS[form]
    assert prepare(write(tmp_path / name, text), tmp_path / "out").source_format == form
    assert histories(tmp_path / "out") == expected


def test_names_and_the_nearest_one(tmp_path: Path) -> None:
    shipped = ["parquet", "jsonl", "movielens", "inter", "pairs", "sequences", "csv", "yambda"]
    assert format_names() == ["auto", *shipped, "arrows"]
    with pytest.raises(DataError, match=r"(?s)auto, parquet, jsonl, .*, arrows.*did you mean 'arrows'"):
        prepare(write(tmp_path / "x", TEXT), tmp_path / "out", format="arows")


def test_bad_values_are_named_with_their_event(tmp_path: Path) -> None:
    source = write(tmp_path / "x.arrows", "#arrows\n1>2 3\n4>5 six\n")
    for memory_mb in (512, 0.0001):
        with pytest.raises(DataError, match=r"(?s)x\.arrows, event 3: the item.*'six'"):
            prepare(source, tmp_path / "out", memory_mb=memory_mb, id_kinds={"item": "int64"})


def reads(columns: Any) -> type:
    @register("format", "fixed")
    class Fixed:
        suffixes: tuple[str, ...] = ()
        in_folders = False

        def recognises(self, sample: RawSample) -> str | None:
            return None

        def chunks(self, path: Path, reading: Reading) -> Any:
            yield columns, 1

    return Fixed


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1]}, "other columns.*got: *user"),
        ({"user": [1], "item": [1], "price": [1]}, "other columns.*price"),
        ([1, 2], "other columns.*list"),
        ({"user": [1, 2], "item": [1]}, "different lengths.*2 in user, 1 in item"),
        ({"user": [1], "item": [[1]]}, "the item cannot be used"),
        ({"user": [0.5], "item": [1]}, "event 0: the user cannot be used"),
        ({"user": 3, "item": 4}, "no flat columns"),
        ({"user": [], "item": []}, "the user cannot|no events"),
    ],
)
def test_what_a_format_must_not_give(tmp_path: Path, columns: Any, message: str) -> None:
    reads(columns)
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepare(write(tmp_path / "x", "x"), tmp_path / "out", format="fixed")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_times_with_fractions_are_ordered_exactly(tmp_path: Path) -> None:
    users, items, actions, times = zip(*EVENTS)
    reads({"user": users, "item": items, "action": actions, "time": [time + 0.25 for time in times]})
    summary = prepare(write(tmp_path / "x", "x"), tmp_path / "out", format="fixed")
    assert summary.features == ("item", "time", "action")
    assert histories(tmp_path / "out") == BY_TIME


def test_an_incomplete_format_is_refused(tmp_path: Path) -> None:
    @register("format", "half")
    class Half:
        suffixes = (".half",)

        def recognises(self, sample: RawSample) -> str | None:
            return None

    with pytest.raises(DataError, match="without in_folders, chunks"):
        prepare(write(tmp_path / "x.half", "x"), tmp_path / "out", format="half")
