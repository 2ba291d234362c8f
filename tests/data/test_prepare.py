"""Raw interactions of every form become the same sorted histories; bad input becomes one clear error."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data import prepare as prepare_module
from freescale.data.parquet_source import ParquetSource
from freescale.data.prepare import ColumnNames, DatasetSummary, prepare
from freescale.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[2]
REAL_DATA = Path(os.environ.get("FREESCALE_DATA", REPOSITORY.parent / "shared" / "data"))
# user, item, rating, time; users 7 and 3 interleave, time is out of order, two events of user 7 tie.
EVENTS = [(7, 10, 5, 100), (3, 20, 4, 50), (7, 30, 3, 90), (3, 10, 2, 60), (7, 40, 1, 100), (3, 30, 5, 40)]
BY_TIME = {3: [30, 20, 10], 7: [30, 10, 40]}
BY_FILE = {3: [20, 10, 30], 7: [10, 30, 40]}


def histories(path: Path, feature: str = "item") -> dict[int, list[Any]]:
    source = ParquetSource(path)
    read = source.read(range(len(source)))
    pieces = np.split(read.columns[feature], read.offsets[1:-1])
    return {int(user): piece.tolist() for user, piece in zip(read.users, pieces)}


def lines(template: str, header: str = "") -> str:
    body = (template.format(user=u, item=i, rating=r, time=t) for u, i, r, t in EVENTS)
    return header + "".join(line + "\n" for line in body)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


TEXT_FORMS = {
    "movielens": ("ratings.dat", lines("{user}::{item}::{rating}::{time}"), BY_TIME),
    "inter": (
        "x.inter",
        lines(
            "{user}\t{item}\t{rating}\t{time}.0",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n",
        ),
        BY_TIME,
    ),
    "pairs": ("x.txt", lines("{user} {item}"), BY_FILE),
    "sequences": ("x.txt", "7 10 30 40\n\n3 20 10\n3 30\n", BY_FILE),
    "csv": ("x.csv", lines("{time},{user},{rating},{item}", "timestamp,userId,rating,movieId\n"), BY_TIME),
}


@pytest.mark.parametrize("asked", ["auto", "by name"])
@pytest.mark.parametrize("form", TEXT_FORMS)
def test_every_text_form_is_found_and_sorted(tmp_path: Path, form: str, asked: str) -> None:
    name, text, expected = TEXT_FORMS[form]
    source = write(tmp_path / name, text)
    summary = prepare(source, tmp_path / "out", format="auto" if asked == "auto" else form)
    assert histories(tmp_path / "out") == expected
    assert (summary.source_format, summary.num_users, summary.num_events) == (form, 2, 6)
    assert (summary.num_items, summary.max_item, summary.dropped_users) == (4, 40, 0)
    assert summary.decided
    if expected is BY_TIME:
        assert summary.features == ("item", "time", "action")
        assert histories(tmp_path / "out", "time") == {3: [40, 50, 60], 7: [90, 100, 100]}
        assert histories(tmp_path / "out", "action") == {3: [5, 4, 2], 7: [3, 5, 1]}


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
    assert prepare(tmp_path / "x.parquet", tmp_path / "out").source_format == "parquet"
    assert histories(tmp_path / "out") == BY_TIME
    assert histories(tmp_path / "out", "action") == {3: [5, 4, 2], 7: [3, 5, 1]}


def test_folders_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, (user, item, _, _) in reversed(list(enumerate(EVENTS))):
        write(tmp_path / "in" / f"part-{number}.csv", f"user,item\n{user},{item}\n")
    write(tmp_path / "in" / "_SUCCESS", "")
    prepare(tmp_path / "in", tmp_path / "out")
    assert histories(tmp_path / "out") == BY_FILE


def test_timestamps_fractions_and_nanoseconds_keep_their_order(tmp_path: Path) -> None:
    times = ["1.4", "1.3", "9007199254740993", "9007199254740992", "1e0", "-5"]
    rows = "".join(f"1,{item},{time}\n" for item, time in enumerate(times))
    prepare(write(tmp_path / "x.csv", "user,item,time\n" + rows), tmp_path / "out")
    assert histories(tmp_path / "out") == {1: [5, 4, 1, 0, 3, 2]}
    assert histories(tmp_path / "out", "time") == {1: [-5, 1, 1, 1, 9007199254740992, 9007199254740993]}
    stamps = pa.array([3, 1, 2], type=pa.timestamp("us"))
    pq.write_table(pa.table({"user": [1] * 3, "item": [3, 1, 2], "time": stamps}), tmp_path / "x.parquet")
    prepare(tmp_path / "x.parquet", tmp_path / "stamps")
    assert histories(tmp_path / "stamps") == {1: [1, 2, 3]}


def test_short_users_are_dropped_and_counts_leave_out_the_last_two_events(tmp_path: Path) -> None:
    source = write(tmp_path / "x.txt", "1 5 6 7 5\n2 5 9\n3 8 5 6\n")
    summary = prepare(source, tmp_path / "out")
    assert (summary.num_users, summary.dropped_users, summary.num_events) == (2, 1, 7)
    items = ParquetSource(tmp_path / "out").items
    assert items.ids.tolist() == [5, 6, 7, 8]
    assert items.counts.tolist() == [3, 2, 1, 1]
    assert items.train_counts.tolist() == [1, 1, 0, 1]
    with pytest.raises(DataError, match="No user has 5 events"):
        prepare(source, tmp_path / "none", min_events=5)


EVENT = st.tuples(st.integers(0, 6), st.integers(0, 2**63 - 1), st.integers(-3, 3) | st.just(2**62))


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(EVENT, min_size=1, max_size=20) | st.lists(EVENT, min_size=30, max_size=120),
    with_time=st.booleans(),
)
def test_order_is_that_of_a_stable_sort_whatever_the_memory(events: list[Any], with_time: bool) -> None:
    expected: dict[int, list[int]] = {}
    for user, item, _ in sorted(events, key=lambda e: (e[0], e[2] if with_time else 0)):
        expected.setdefault(user, []).append(item)
    columns = ColumnNames(time=None if with_time else "")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "_RUN_BATCHES", 4)  # so that even a few events are merged in ranges
        root = Path(folder)
        rows = "".join(f"{user},{item},{time}\n" for user, item, time in events)
        source = write(root / "x.csv", "user,item,time\n" + rows)
        for name, memory_mb in (("a", 512), ("b", 0.0001)):
            prepare(source, root / name, columns=columns, min_events=1, memory_mb=memory_mb, name="x")
        assert histories(root / "a") == expected
        assert list(histories(root / "b")) == sorted(expected)
        for file in (root / "a").iterdir():
            assert file.read_bytes() == (root / "b" / file.name).read_bytes(), file.name


def test_row_groups_and_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_ROW_GROUP_EVENTS", 5000)
    monkeypatch.setattr(prepare_module, "_SHARD_BYTES", 20_000)
    users = np.arange(3000).repeat(3)
    users = np.concatenate([users, np.full(9000, 3000), np.arange(3001, 3100).repeat(200)])
    np.random.default_rng(0).shuffle(users)
    np.savetxt(tmp_path / "x.txt", np.stack([users, np.arange(len(users))], axis=1), fmt="%d")
    summary = prepare(tmp_path / "x.txt", tmp_path / "out")
    source = ParquetSource(tmp_path / "out")
    sums = np.add.reduceat(source.lengths, np.cumsum(source.groups) - source.groups)
    assert summary.num_shards > 1
    assert source.groups.max() == 1024
    assert sorted(sums.tolist())[-2:] == [5000, 9000], "one user alone may be longer than a row group"
    assert dict(Counter(users.tolist())) == dict(zip(range(3100), source.lengths.tolist()))


# Peaks come from VmHWM, not from getrusage, whose peak a child inherits from the process that started it.
MEMORY_PROBE = """
import re, sys
from pathlib import Path
from freescale.data.prepare import prepare
def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
prepare(sys.argv[1], sys.argv[2], memory_mb=1)
before = peak_kb()
prepare(sys.argv[3], sys.argv[4], memory_mb=float(sys.argv[5]))
print((peak_kb() - before) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    num_events = 1_500_000
    # Worst case for memory: every chunk has events of all users.
    highs = {"user": 50_000, "item": 10_000, "rating": 5, "time": 10**9}
    table = {name: rng.integers(0, high, num_events) for name, high in highs.items()}
    pa.csv.write_csv(pa.table(table), tmp_path / "x.csv")
    small = write(tmp_path / "small.csv", "user,item\n1,1\n1,2\n1,3\n")
    paths = [small, tmp_path / "small", tmp_path / "x.csv", tmp_path / "out", "8"]
    command = [sys.executable, "-c", MEMORY_PROBE, *map(str, paths)]
    grown_mb = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (tmp_path / "x.csv").stat().st_size > 30e6
    # Measured: 70 MiB with this budget, 180 MiB with one that holds all events at once.
    assert grown_mb < 110, f"grew by {grown_mb} MiB with a budget of 8"
    assert ParquetSource(tmp_path / "out").lengths.sum() == num_events


def test_progress_rises_to_one(tmp_path: Path) -> None:
    seen: list[float] = []
    source = write(tmp_path / "x.txt", lines("{user} {item}"))
    prepare(source, tmp_path / "out", memory_mb=0.0001, progress=lambda done, message: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 1


HEADER = "user,item,time\n"
BAD_TEXT = {
    "empty": ("x.txt", "", "is empty"),
    "blank": ("x.txt", " \n\n", "is empty"),
    "header only": ("x.csv", HEADER, "no events"),
    "user is a word": ("x.csv", HEADER + "1,2,3\n\nbob,2,3\n", r"line 4: the user.*'bob' in 'bob,2,3'"),
    "item is a fraction": ("x.csv", HEADER + "1,2.5,3\n", r"line 2: the item.*'2.5'"),
    "negative": ("x.txt", "1 2\n1 -3\n", r"line 2: the item.*'-3' in '1 -3'.*0 to 9223372036854775807"),
    "beyond int64": ("x.txt", "1 2\n9223372036854775808 3\n", r"line 2: the user.*'9223372036854775808'"),
    "empty id": ("x.csv", HEADER + "1,,3\n", r"line 2: the item.*''"),
    "empty time": ("x.csv", HEADER + "1,2,3\n1,2,\n", r"line 3: the time.*'' in '1,2,'"),
    "time NaN": ("x.csv", HEADER + "1,2,3\n1,2,nan\n", r"line 3: the time.*'nan'.*finite"),
    "time is a date": ("x.csv", HEADER + "1,2,2020-01-01\n", r"line 2: the time.*'2020-01-01'"),
    "too few fields": ("x.csv", HEADER + "1,2,3\n\n1,2\n", r"line 4: wrong number.*2 in '1,2'.*3"),
    "too many fields": ("r.dat", "1::2::3::4\n1::2::3::4::5\n", r"line 2: wrong number.*5 in"),
    "three in pairs": ("x.txt", "1 2\n" * 50 + "1 2 3\n", r"line 51: wrong number.*3 in '1 2 3'.*2"),
    "bad token": ("x.txt", "1 2 3\n4 5\n\n6 7,8\n", r"line 4: the item.*'7,8'"),
    "missing column": ("x.csv", "usr,item\n1,2\n", r"no column for the user.*usr, item.*mean 'usr'"),
    "undecidable": ("x.txt", "1 2 3 4\n5 6 7 8\n", r"Cannot tell.*movielens, inter, pairs, sequences, csv"),
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
        prepare(source, tmp_path / "out", memory_mb=memory_mb)
    assert str(source) in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is left behind"


@settings(max_examples=100, deadline=None)
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


def test_bad_parquet_is_one_clear_error(tmp_path: Path) -> None:
    source = tmp_path / "x.parquet"

    def fails(table: dict[str, Any] | None, message: str, **options: Any) -> None:
        if table is not None:
            pq.write_table(pa.table(table), source)
        with pytest.raises(DataError, match=f"(?s){message}"):
            prepare(source, tmp_path / "out", **options)

    fails({"user": [1, 2], "item": [1, None]}, r"row 1: the item.*nothing")
    fails({"user": [1, 2], "item": [1.0, 2.5]}, r"row 1: the item.*'2.5'")
    fails({"user": [1, 2], "item": [[1], [2, -2]]}, r"row 1: the item.*'-2'")
    fails({"user": [1, 2], "item": [[1], [2]], "time": [[1], [2, 3]]}, r"row 1: lists of different lengths")
    fails({"user": [1, 2], "item": [[1], [2]], "time": [1, 2]}, "mixes lists and single values")
    fails({"user": [1], "item": [1], "time": [float("nan")]}, r"row 0: the time")
    fails({"user": pa.array([2**63], pa.uint64()), "item": [1]}, r"row 0: the user.*'9223372036854775808'")
    fails({"user": [{"a": 1}], "item": [1]}, r"row 0: the user")
    fails({"user": [1], "item": [1]}, "did you mean 'item'", columns=ColumnNames(item="itm"))
    fails({"user": [1], "item": [1]}, "two parts", columns=ColumnNames(item="user"))
    fails({"user": pa.array([], pa.int64()), "item": pa.array([], pa.int64())}, "no events")
    pq.write_table(pa.table({"user": range(9999), "item": range(9999)}), source)
    source.write_bytes(source.read_bytes()[:-500])
    fails(None, "x.parquet cannot be read as Parquet")
    source.write_bytes(b"")
    fails(None, "is empty")


def test_garbage_damaged_gzip_and_missing_input(tmp_path: Path) -> None:
    garbage = tmp_path / "x.bin"
    garbage.write_bytes(np.random.default_rng(0).bytes(100_000))
    for form in ("auto", "csv", "pairs", "movielens"):
        with pytest.raises(DataError, match="not text"):
            prepare(garbage, tmp_path / "out", format=form)
    with pytest.raises(DataError, match="as Parquet"):
        prepare(garbage, tmp_path / "out", format="parquet")
    packed = tmp_path / "x.txt.gz"
    packed.write_bytes(gzip.compress(os.urandom(5000).hex("\n").encode())[:-100])
    with pytest.raises(DataError, match=r"x\.txt\.gz"):
        prepare(packed, tmp_path / "out", format="pairs")
    with pytest.raises(DataError, match="There is no input"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(DataError, match="did you mean 'movielens'"):
        prepare(garbage, tmp_path / "out", format="movielense")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="Cannot tell"):
        prepare(tmp_path / "folder", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_stands_in_the_output_folder_is_safe(tmp_path: Path) -> None:
    source = write(tmp_path / "x.txt", lines("{user} {item}"))
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "thesis.txt", "precious")
    with pytest.raises(DataError, match="not empty and not a FreeScale data set"):
        prepare(source, tmp_path / "mine", overwrite=True)
    with pytest.raises(DataError, match="its own input"):
        prepare(tmp_path / "mine" / "thesis.txt", tmp_path / "mine", overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        prepare(source, tmp_path / "mine" / "thesis.txt")
    (tmp_path / "out").mkdir()
    prepare(source, tmp_path / "out", name="first")
    with pytest.raises(DataError, match="already holds a data set"):
        prepare(source, tmp_path / "out")
    write(tmp_path / "bad.txt", "1 2\n1 x\n")
    with pytest.raises(DataError, match="line 2"):
        prepare(tmp_path / "bad.txt", tmp_path / "out", format="pairs", overwrite=True)
    assert ParquetSource(tmp_path / "out").name == "first", "a failed run leaves the old data set"
    assert prepare(source, tmp_path / "out", overwrite=True).name == "out"
    with pytest.raises(DataError, match="already a FreeScale data set"):
        prepare(tmp_path / "out", tmp_path / "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.txt", "mine", "out", "x.txt"]


@pytest.mark.parametrize(
    "step", ["_write_run", "pq.ParquetWriter", "pq.ParquetWriter.write_table", "np.save"]
)
def test_a_full_disk_is_said_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"freescale.data.prepare.{step}", full)
    source = write(tmp_path / "x.txt", lines("{user} {item}"))
    with pytest.raises(DataError, match="No space left on the disk") as raised:
        prepare(source, tmp_path / "out", memory_mb=0.0001)
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]
    if Path("/proc/self/fd").exists():
        still_open = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not [name for name in still_open if str(tmp_path) in name]
    assert raised.value.next_step


FULL_DISK_PROBE = """
import resource, sys
from freescale.data.prepare import prepare
from freescale.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    prepare(sys.argv[1], sys.argv[2], memory_mb=float(sys.argv[3]))
except DataError as error:
    print(error.what)
"""


@pytest.mark.parametrize("memory_mb", [0.1, 512])
def test_a_write_that_really_fails(tmp_path: Path, memory_mb: float) -> None:
    items = np.random.default_rng(0).integers(0, 2**40, 30_000)
    np.savetxt(tmp_path / "x.txt", np.stack([items % 100, items], axis=1), fmt="%d")
    command = [sys.executable, "-c", FULL_DISK_PROBE, tmp_path / "x.txt", tmp_path / "out", memory_mb]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("No space left on the disk")
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.parametrize(
    ("name", "users", "items", "events"),
    [
        ("ml-1m.txt", 6040, 3416, 999_611),
        ("ml-1m-ratings-users-1-2999.dat", 2999, 3615, 487_650),
        ("ml-100k.inter", 943, 1682, 100_000),
        ("s3rec-Beauty.txt", 22_363, 12_101, 198_502),
    ],
)
def test_real_data(tmp_path: Path, name: str, users: int, items: int, events: int) -> None:
    if not (REAL_DATA / name).exists():
        pytest.skip(f"{name} is not here; set FREESCALE_DATA to its folder")
    summary: DatasetSummary = prepare(REAL_DATA / name, tmp_path / "out")
    assert (summary.num_users, summary.num_items, summary.num_events) == (users, items, events)
    if "time" in summary.features:
        times = histories(tmp_path / "out", "time")
        assert all(np.all(np.diff(history) >= 0) for history in times.values())
