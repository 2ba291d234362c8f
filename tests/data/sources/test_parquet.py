"""Any rows in any order, from any process, in bounded memory; a damaged data set is named, not half read."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.writing import dataset_writer
from freescale.data.source import Histories, SequenceSource
from freescale.data.sources.parquet import ParquetSource, RowRangeError
from freescale.errors import DataError
from tests.effort import examples

NUM_USERS = 300


def history(user: int) -> tuple[list[int], list[int], list[float]]:
    """Items, times and actions of a user, known without reading anything."""
    steps = range(3 + user * 7 % 20)
    return [user * 100 + s for s in steps], [10 * s + user for s in steps], [s % 5 + 0.5 for s in steps]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    columns = zip(*(history(user) for user in range(NUM_USERS)))
    table = pa.table(dict(zip(("user", "item", "time", "action"), (range(NUM_USERS), *columns))))
    pq.write_table(table, root / "raw.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_writer, "_ROW_GROUP_USERS", 16)
        patch.setattr(dataset_writer, "_SHARD_BYTES", 8000)
        prepare(root / "raw.parquet", root / "data", name="known", rewrite=True)
    return root / "data"


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def check(read: Histories, rows: list[int]) -> None:
    assert read.users.tolist() == rows
    assert read.lengths.tolist() == [len(history(row)[0]) for row in rows]
    for position, name in enumerate(("item", "time", "action")):
        expected = [value for row in rows for value in history(row)[position]]
        assert read.columns[name].tolist() == expected, name
    assert [read.columns[name].dtype for name in ("item", "time", "action")] == [
        np.int64,
        np.int64,
        np.float32,
    ]


def test_what_is_known_before_reading(dataset: Path) -> None:
    source = ParquetSource(dataset)
    protocol: SequenceSource = source
    assert protocol.name == "known"
    assert source.features == ("item", "time", "action")
    assert len(source) == NUM_USERS
    assert source.lengths.tolist() == [len(history(user)[0]) for user in range(NUM_USERS)]
    assert isinstance(source.lengths, np.memmap)
    assert source.groups.sum() == NUM_USERS
    assert source.groups.max() == 16
    assert len(list(dataset.glob("shard-*.parquet"))) > 2
    assert source.items.counts.sum() == source.lengths.sum()
    assert source.items.ids.tolist() == sorted(item for user in range(NUM_USERS) for item in history(user)[0])
    assert not source._files, "nothing was opened for that"


@examples(17, thorough=200)
@given(rows=st.lists(st.integers(0, NUM_USERS - 1), max_size=60), cache_mb=st.sampled_from([0, 0.01, 256]))
def test_random_access(dataset: Path, rows: list[int], cache_mb: float) -> None:
    source = ParquetSource(dataset, cache_mb=cache_mb)
    check(source.read(rows), rows)
    check(source.read(np.array(rows, dtype=np.int32)), rows)


def test_sequential_access(dataset: Path) -> None:
    source = ParquetSource(dataset)
    check(source.read(range(NUM_USERS)), list(range(NUM_USERS)))
    for start in range(0, NUM_USERS, 7):
        rows = list(range(start, min(NUM_USERS, start + 7)))
        check(source.read(rows), rows)


def test_only_the_row_groups_needed_are_decoded(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ParquetSource(dataset)
    decoded: list[int] = []
    decode = source._decode
    monkeypatch.setattr(source, "_decode", lambda number: decoded.append(number) or decode(number))
    source.read([33, 5, 34, 6, 33])
    assert sorted(decoded) == [0, 2], "each once, however often it is asked for"
    source.read([40, 0])
    assert len(decoded) == 2, "the cache answers"


def test_the_cache_is_bounded_and_drops_the_oldest(dataset: Path) -> None:
    all_groups = ParquetSource(dataset)
    all_groups.read(range(NUM_USERS))
    sizes = [group.num_bytes for group in all_groups._cache.values()]
    source = ParquetSource(dataset, cache_mb=3.5 * max(sizes) / 2**20)
    for row in np.random.default_rng(0).integers(0, NUM_USERS, 200).tolist():
        check(source.read([row]), [row])
        held = sum(group.num_bytes for group in source._cache.values())
        assert held == source._cached_bytes <= 3.5 * max(sizes)
    assert len(source._cache) >= 3
    source.read([0])
    source.read([16])
    source.read([0])
    source.read([32])
    assert list(source._cache)[-3:] == [1, 0, 2], "least recently used first"


def test_open_files_are_bounded(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freescale.data.sources.parquet._MAX_OPEN_SHARDS", 2)
    source = ParquetSource(dataset, cache_mb=0)
    for row in (0, NUM_USERS - 1, 150, 0, 150, NUM_USERS - 1):
        check(source.read([row]), [row])
        assert len(source._files) <= 2


def test_pickling_carries_no_data(dataset: Path) -> None:
    source = ParquetSource(dataset, cache_mb=1)
    source.read(range(NUM_USERS))
    message = pickle.dumps(source)
    assert len(message) < 10_000
    again = pickle.loads(message)
    check(again.read([7, 3]), [7, 3])
    assert again.cache_mb == 1
    assert isinstance(again.lengths, np.memmap)


def read_elsewhere(source: ParquetSource, rows: list[int], answers: Any) -> None:
    read = source.read(rows)
    assert source._pid == os.getpid(), "files are opened by the process that reads"
    answers.put((os.getpid(), read.users.tolist(), read.columns["item"].tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_at_the_same_time(dataset: Path, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    context = multiprocessing.get_context(method)
    source = ParquetSource(dataset, cache_mb=0)
    source.read([0, NUM_USERS - 1])  # so that files are open when the process forks
    answers = context.Queue()
    orders = [np.random.default_rng(n).permutation(NUM_USERS).tolist() for n in range(2)]
    workers = [context.Process(target=read_elsewhere, args=(source, rows, answers)) for rows in orders]
    for worker in workers:
        worker.start()
    for row in range(0, NUM_USERS, 11):
        check(source.read([row]), [row])
    received = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    expected = [(rows, [item for row in rows for item in history(row)[0]]) for rows in orders]
    assert sorted((users, items) for _, users, items in received) == sorted(expected)
    assert os.getpid() not in {pid for pid, _, _ in received}


@pytest.mark.parametrize("rows", [[NUM_USERS], [0, -1], [2**40], [[1, 2]], [0.5], [True]])
def test_rows_that_are_not_there(dataset: Path, rows: list[Any]) -> None:
    source = ParquetSource(dataset)
    with pytest.raises(DataError, match=r"row|Rows"):
        source.read(rows)
    with pytest.raises(IndexError):
        source.read(rows)
    assert issubclass(RowRangeError, IndexError)


def test_no_rows_are_no_histories(dataset: Path) -> None:
    read = ParquetSource(dataset).read([])
    assert len(read.users) == 0
    assert read.offsets.tolist() == [0]
    assert read.columns["item"].dtype == np.int64


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        manifest = json.loads((path / "dataset.json").read_text())
        change(manifest)
        (path / "dataset.json").write_text(json.dumps(manifest))

    return apply


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep])  # type: ignore[func-returns-value]


def flip(name: str, place: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[place] ^= 64
        (path / name).write_bytes(content)

    return change


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda path: (path / "dataset.json").unlink(), "run `freescale prepare INPUT"),
    "no folder": (shutil.rmtree, "run `freescale prepare INPUT"),
    "manifest cut": (cut("dataset.json", 100), "dataset.json is missing or damaged"),
    "other json": (lambda path: (path / "dataset.json").write_text("[]"), "freescale-dataset"),
    "newer version": (edit(lambda m: m.update(version=3)), "(?s)another version.*version 3.*version 1 or 2"),
    "unknown feature": (edit(lambda m: m.update(features=["item", ["x"]])), "features"),
    "no shards": (edit(lambda m: m.pop("shards")), "'shards' is None"),
    "odd shard": (edit(lambda m: m["shards"].append(7)), "shard entry 7"),
    "wrong users": (edit(lambda m: m.update(num_users=5)), "do not add up"),
    "no lengths": (lambda path: (path / "lengths.npy").unlink(), "lengths.npy"),
    "lengths cut": (cut("lengths.npy", 300), "lengths.npy"),
    "lengths of others": (lambda path: np.save(path / "lengths.npy", np.arange(7)), "lengths.npy"),
    "a length flipped": (flip("lengths.npy", -3), "lengths.npy"),
    "pickled lengths": (lambda path: np.save(path / "lengths.npy", np.array([{}])), "lengths.npy"),
    "no shard": (lambda path: (path / "shard-00001.parquet").unlink(), "shard-00001.parquet"),
    "shard cut": (cut("shard-00001.parquet", 3000), "(?s)shard-00001.parquet.*3000 bytes"),
    "shard empty": (cut("shard-00001.parquet", 0), "shard-00001.parquet"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_on_opening(copy: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(copy)
    with pytest.raises(DataError, match=message) as raised:
        ParquetSource(copy)
    assert raised.value.next_step


def test_a_sound_file_that_may_not_be_opened_is_not_called_damaged(copy: Path) -> None:
    """Nobody is to prepare the data again because a limit is low."""
    source = ParquetSource(copy)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(DataError, match=r"shard-00000\.parquet cannot be opened") as raised:
            source.read([0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in str(raised.value.next_step)


def test_damage_inside_a_shard_is_found_on_reading(copy: Path) -> None:
    path = copy / "shard-00000.parquet"
    whole = path.read_bytes()
    middle = len(whole) // 3
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    source = ParquetSource(copy)
    with pytest.raises(DataError, match=r"shard-00000\.parquet"):
        source.read(range(NUM_USERS))
    size = len(whole)
    path.write_bytes(whole[: size - 40] + b"\xff" * 32 + whole[size - 8 :])
    with pytest.raises(DataError, match=r"shard-00000\.parquet"):
        ParquetSource(copy)
    path.write_bytes(whole)
    (copy / "items.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"items\.parquet"):
        _ = ParquetSource(copy).items


def test_files_of_two_data_sets_do_not_mix(copy: Path) -> None:
    np.save(copy / "lengths.npy", np.roll(np.load(copy / "lengths.npy"), 1))
    with pytest.raises(DataError, match=r"lengths\.npy"):
        ParquetSource(copy).read([0])
    edit(lambda m: m["shards"][0]["row_groups"].__setitem__(slice(0, 2), [8, 24]))(copy)
    with pytest.raises(DataError, match="row groups are not those"):
        ParquetSource(copy).read([0])
