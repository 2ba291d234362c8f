"""Text of every form is read whatever its dress; a bad line becomes one error that names it."""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.preparing.preparation import ColumnNames, prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.errors import DataError
from tests.data.raw_forms import BY_FILE, BY_TIME, EVENTS, TEXT_FORMS, histories, write
from tests.effort import examples


@pytest.mark.parametrize("form", TEXT_FORMS)
@pytest.mark.parametrize("change", ["\r\n", "no last newline", "blank lines", "byte order mark", "gzip"])
def test_harmless_differences_of_text(tmp_path: Path, form: str, change: str) -> None:
    name, text, expected = TEXT_FORMS[form]
    changes = {"\r\n": text.replace("\n", "\r\n"), "no last newline": text.rstrip("\n")}
    changes |= {"blank lines": text.replace("\n", "\n\n"), "byte order mark": "\ufeff" + text}
    source = tmp_path / (name + ".gz" if change == "gzip" else name)
    data = changes.get(change, text).encode()
    source.write_bytes(gzip.compress(data) if change == "gzip" else data)
    summary = prepare(source, tmp_path / "out")
    assert summary.source_format == form
    assert histories(tmp_path / "out") == expected


def test_named_columns_separator_quotes_and_columns_left_out(tmp_path: Path) -> None:
    header = '"who";"note";"what";"when"\n'
    rows = "".join(f'{u};"a; ""b""\nline {r}";"{i}";{t}\n' for u, i, r, t in EVENTS)
    source = write(tmp_path / "x.csv", header + rows)
    names = ColumnNames(user="who", item="what", time="when")
    for memory_mb in (512, 0.001):
        prepare(source, tmp_path / "out", columns=names, memory_mb=memory_mb, overwrite=True)
        assert histories(tmp_path / "out") == BY_TIME
    prepare(
        source, tmp_path / "no-time", columns=ColumnNames(user="who", item="what", time=""), separator=";"
    )
    assert histories(tmp_path / "no-time") == BY_FILE
    assert ParquetSource(tmp_path / "no-time").features == ("item",)


HEADER = "user,item,time\n"
BAD_TEXT = {
    "empty": ("x.txt", "", "is empty"),
    "blank": ("x.txt", " \n\n", "is empty"),
    "header only": ("x.csv", HEADER, "no events"),
    "user is a word": ("x.csv", HEADER + "1,2,3\n\nbob,2,3\n", r"line 4: the user.*'bob'.*--user-ids text"),
    "item is a fraction": ("x.csv", HEADER + "1,2.5,3\n", r"line 2: the item.*'2.5'"),
    "beyond int64": ("x.txt", "1 2\n9223372036854775808 3\n", r"line 2: the user.*'9223372036854775808'"),
    "empty id": ("x.csv", HEADER + "1,,3\n", r"line 2: the item.*''"),
    "empty time": ("x.csv", HEADER + "1,2,3\n1,2,\n", r"line 3: the time.*'' in '1,2,'"),
    "time NaN": ("x.csv", HEADER + "1,2,3\n1,2,nan\n", r"line 3: the time is missing.*'nan'"),
    "time is a local date": ("x.csv", HEADER + "1,2,31.1.2020\n", r"line 2: the time.*'31.1.2020'.*ISO"),
    "too few fields": ("x.csv", HEADER + "1,2,3\n\n1,2\n", r"line 4: wrong number.*2 in '1,2'.*3"),
    "too many fields": ("r.dat", "1::2::3::4\n1::2::3::4::5\n", r"line 2: wrong number.*5 in"),
    "three in pairs": ("x.txt", "1 2\n" * 50 + "1 2 3\n", r"line 51: wrong number.*3 in '1 2 3'.*2"),
    "bad token": ("x.txt", "1 2 3\n4 5\n\n6 7,8\n", r"line 4: the item.*'7,8'"),
    "missing column": ("x.csv", "usr,item\n1,2\n", r"no column for the user.*usr, item.*mean 'usr'"),
    "undecidable": (
        "x.txt",
        "1 2 3 4\n5 6 7 8\n",
        r"Cannot tell.*movielens, .*sequences, csv.*--columns user,item",
    ),
    "prose": ("x.txt", "Dear all\nhello\n", r"Cannot tell the format.*'Dear all'"),
    "latin-1": ("r.dat", "1::Mis\udce9rables::Drama\n", r"line 1: wrong number of fields"),
    "after quoted lines": ("x.csv", HEADER + '1,2,"3"\n1,"\n\n2",3\n1,x,3\n', r"line 6: the item.*'x'"),
    "open quote": ("x.csv", HEADER + '1,"2,3\n1,2,3\n', r"line 2"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
@pytest.mark.parametrize("memory_mb", [512, 0.0001])
def test_bad_text_is_one_clear_error(tmp_path: Path, case: str, memory_mb: float) -> None:
    name, text, message = BAD_TEXT[case]
    source = tmp_path / name
    source.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=f"(?s){message}") as raised:
        prepare(source, tmp_path / "out", memory_mb=memory_mb, id_kinds={"user": "int64", "item": "int64"})
    assert str(source) in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is left behind"


@examples(33, thorough=200)
@given(
    form=st.sampled_from(sorted(TEXT_FORMS)),
    asked=st.sampled_from(["auto", *TEXT_FORMS, "parquet"]),
    place=st.integers(0, 150),
    removed=st.integers(0, 40),
    inserted=st.binary(max_size=12) | st.text('0123456789-.,:;"\t\r\n eE', max_size=12).map(str.encode),
    memory_mb=st.sampled_from([512, 0.0001]),
)
def test_no_damage_gives_any_other_error(
    form: str, asked: str, place: int, removed: int, inserted: bytes, memory_mb: float
) -> None:
    name, text, _ = TEXT_FORMS[form]
    data = text.encode()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / name
        source.write_bytes(data[:place] + inserted + data[place + removed :])
        try:
            prepare(source, Path(folder) / "out", format=asked, memory_mb=memory_mb, min_events=1)
        except DataError:
            assert os.listdir(folder) == [name]
