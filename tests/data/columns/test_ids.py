"""Ids of any kind: what they are read as, and that a column is of one kind from its first event to its last."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.columns.ids import OtherIdsError, read_ids
from freescale.data.preparing.preparation import prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.manifest import WORD_FILES, load_manifest
from freescale.data.words.id_words import read_words
from freescale.errors import DataError

BUDGETS = [512, 0.0001]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([-3, 0, 12], pa.int32()),
        pa.array([-3.0, 0.0, 12.0]),
        pa.array(["-3", "0", "12.0"]),
        pa.array([b"-3", b"0", b"12"]),
        pa.array(["-3", "0.00", "12"], pa.large_string()),
        pa.array([-3, 0, 12], pa.decimal128(20, 0)),
    ],
    ids=lambda column: str(column.type),
)
def test_whole_numbers_in_whatever_form(column: Any) -> None:
    assert read_ids("item", column, "int64")["item"].tolist() == [-3, 0, 12]
    assert read_ids("item", column, "text")["item words"].to_pylist()[0] == "-3"


@pytest.mark.parametrize("column", [pa.array([5, 2**64 - 1], pa.uint64()), pa.array(["5", str(2**64 - 1)])])
def test_unsigned_numbers_keep_their_bits(column: Any) -> None:
    with pytest.raises(OtherIdsError) as found:
        read_ids("item", column, "int64")
    assert (found.value.kind, found.value.index) == ("uint64", 1)
    assert read_ids("item", column, "uint64")["item"].view(np.uint64).tolist() == [5, 2**64 - 1]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (["1", "x"], "int64"),
        (["1", "007"], "int64"),
        (["1", "+5"], "int64"),
        (["1", "1e5"], "int64"),
        (["1", "2.5"], "int64"),
        (["1", "-1"], "uint64"),
        (["1", str(2**64)], "uint64"),
    ],
)
def test_anything_else_makes_the_column_text(column: list[str], kind: Any) -> None:
    with pytest.raises(OtherIdsError) as found:
        read_ids("item", pa.array(column), kind)
    assert (found.value.kind, found.value.value, found.value.index) == ("text", column[1], 1)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["1", ""]),
        pa.array(["a", "NULL"]),
        pa.array(["a", "\ufffd"]),
        pa.array([1.5]),
        pa.array([float("nan")]),
        pa.array([2.0**60]),
        pa.array([True]),
        pa.array([[1]]),
    ],
    ids=str,
)
def test_what_can_be_no_id_is_refused(column: Any) -> None:
    for kind in ("int64", "uint64", "text"):
        with pytest.raises((ValueError, pa.ArrowException)):
            read_ids("item", column, kind)


def write(path: Path, rows: list[tuple[object, object, object]]) -> Path:
    lines = "".join(f"{user},{item},{time}\n" for user, item, time in rows)
    path.write_text("user,item,time\n" + lines, encoding="utf-8")
    return path


def histories(folder: Path) -> dict[str, list[str]]:
    """Word of a user -> words of items, in order."""
    source, kinds = ParquetSource(folder), load_manifest(folder)["ids"]
    read = source.read(range(len(source)))

    def named(role: str, ids: Any) -> list[str]:
        if kinds[role] == "text":
            unique, inverse = np.unique(ids, return_inverse=True)
            return [read_words(folder / WORD_FILES[role], unique).to_pylist()[n] for n in inverse]
        return [str(n) for n in (ids.view(np.uint64) if kinds[role] == "uint64" else ids).tolist()]

    items, ends = named("item", read.columns["item"]), read.offsets.tolist()
    return dict(zip(named("user", read.users), (items[a:b] for a, b in itertools.pairwise(ends))))


IDS = {
    "text": ["B00ABC", "ünï", "日本語", "007", "7", "a b"],
    "uuid": [f"{n:08x}-0000-4000-8000-{n:012x}" for n in range(6)],
    "negative": ["-5", "3", "-1", "0", "-9223372036854775808", "9223372036854775807"],
    "unsigned": ["0", "18446744073709551615", "9223372036854775808", "1", "2", "3"],
    "beyond 64 bits": ["1", "18446744073709551616", "-1", "2", "3", "4"],
}


@pytest.mark.parametrize("memory_mb", BUDGETS)
@pytest.mark.parametrize("form", IDS)
@pytest.mark.parametrize("parquet", [False, True], ids=["csv", "parquet"])
def test_histories_of_any_ids(tmp_path: Path, form: str, memory_mb: float, parquet: bool) -> None:
    ids = IDS[form]
    rows = [(ids[user], ids[(user + time) % 6], time) for time in (2, 0, 1, 3) for user in range(6)]
    source = tmp_path / "x.csv"
    if parquet:
        source = tmp_path / "x.parquet"
        pq.write_table(pa.table(dict(zip(("user", "item", "time"), zip(*rows)))), source)
    else:
        write(source, rows)
    prepare(source, tmp_path / "out", memory_mb=memory_mb)
    expected = {ids[user]: [ids[(user + time) % 6] for time in range(4)] for user in range(6)}
    assert histories(tmp_path / "out") == expected


@pytest.mark.parametrize("memory_mb", BUDGETS)
def test_numbers_with_text_far_behind_are_text_from_the_first_event(tmp_path: Path, memory_mb: float) -> None:
    rows = [(user, item, item) for user in range(40) for item in range(4)]
    source = write(tmp_path / "x.csv", [*rows, (3, "B1", 9)])
    summary = prepare(source, tmp_path / "out", memory_mb=memory_mb)
    assert load_manifest(tmp_path / "out")["ids"] == {"user": "int64", "item": "text"}
    assert f"item ids are text: {source}, line 162 has 'B1'" in summary.taken
    assert histories(tmp_path / "out")["3"] == ["0", "1", "2", "3", "B1"]


def test_a_number_with_zeros_before_it_is_another_id(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", [(1, "7", 1), (1, "007", 2), (1, "7", 3)])
    prepare(source, tmp_path / "out")
    assert histories(tmp_path / "out") == {"1": ["7", "007", "7"]}


def test_zeros_in_other_columns_do_not_matter(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text("user,zip,item\n" + "".join(f"1,0012{n},{n}\n" for n in range(4)))
    prepare(source, tmp_path / "out")
    assert load_manifest(tmp_path / "out")["ids"] == {"user": "int64", "item": "int64"}


def test_sequences_and_pairs_of_words(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("ann x y z\n\nbob 1 x\nlone\n")
    prepare(tmp_path / "s.txt", tmp_path / "s", format="sequences", min_events=1)
    assert histories(tmp_path / "s") == {"ann": ["x", "y", "z"], "bob": ["1", "x"]}
    (tmp_path / "p.txt").write_text("1 x\n1 y\n2 z\n")
    prepare(tmp_path / "p.txt", tmp_path / "p", format="pairs", min_events=1)
    assert histories(tmp_path / "p") == {"1": ["x", "y"], "2": ["z"]}


def test_words_of_users_that_were_left_out_are_not_kept(tmp_path: Path) -> None:
    rows = [("ann", item, time) for time, item in enumerate("xyz")] + [("bob", "w", 1)]
    prepare(write(tmp_path / "x.csv", rows), tmp_path / "out")
    for role, words in (("user", ["ann"]), ("item", ["x", "y", "z"])):
        assert sorted(pq.read_table(tmp_path / "out" / WORD_FILES[role])["word"].to_pylist()) == words


def test_asked_for_numbers_text_is_an_error_and_asked_for_text_numbers_are_words(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", [(1, n, n) for n in (1, 2, 3)] + [(1, "x", 4)])
    with pytest.raises(DataError, match=r"(?s)line 5: the item is no int64 id.*'x'.*--item-ids text"):
        prepare(source, tmp_path / "out", id_kinds={"item": "int64"})
    prepare(source, tmp_path / "out", id_kinds={"user": "text"})
    assert histories(tmp_path / "out") == {"1": ["1", "2", "3", "x"]}
    assert load_manifest(tmp_path / "out")["ids"]["user"] == "text"
    with pytest.raises(DataError, match=r"(?s)cannot be of this kind.*'words'.*int64, uint64, text"):
        prepare(source, tmp_path / "again", id_kinds={"item": "words"})  # type: ignore[dict-item]


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"user,item\n1,a\n1,caf\xe9\n1,caf\xe8\n")
    with pytest.raises(DataError, match=r"(?s)line 3: the item"):
        prepare(tmp_path / "x.csv", tmp_path / "out")
