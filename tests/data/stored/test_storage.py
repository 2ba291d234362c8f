"""Data that lives elsewhere: read through a bounded cache on disk, the same as if it were here."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from freescale.data.preparing.preparation import prepare
from freescale.data.source_kinds import open_source
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored import storage
from freescale.data.stored.storage import copy_all, is_address, local_path, parent_address, sizes
from freescale.errors import DataError
from tests.data.preparing.test_grouped_index import NAMES, by_user, write_folder
from tests.prepared_data import made_up, write_dataset


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(storage.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def elsewhere(folder: Path) -> str:
    """An address that pyarrow does not know and fsspec does: another file system, as far as anybody can tell."""
    return f"local://{folder}"


def test_paths_and_addresses() -> None:
    assert [is_address(path) for path in ("s3://b/x", "gs://b", "file:///x", "/x", "C:/x")] == [1, 1, 0, 0, 0]
    assert local_path("file:///a/b%20c") == Path("/a/b c")
    assert parent_address("s3://b/x/y.csv?region=eu") == "s3://b/x?region=eu"


def test_a_folder_written_as_file_is_read(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", made_up(200))
    assert by_user(open_source(f"file://{data}")) == by_user(ParquetSource(data))  # type: ignore[arg-type]
    raw = f"file://{data.with_suffix('.txt')}"
    assert prepare(raw, f"file://{tmp_path}/again", format="sequences").num_users == 200


def test_a_data_set_elsewhere_is_read_through_the_cache(tmp_path: Path, cache: Path) -> None:
    data = write_dataset(tmp_path / "data", made_up(200))
    source = open_source(elsewhere(data))
    assert isinstance(source, ParquetSource)
    assert not list(cache.rglob("shard-*.parquet")), "histories are copied when they are read"
    assert by_user(source) == by_user(ParquetSource(data))
    assert source.digests() == ParquetSource(data).digests()
    num_shards = len(list(data.glob("shard-*")))
    assert num_shards > 3
    assert len(list(cache.rglob("shard-*.parquet"))) == num_shards
    # What is here needs no other machine any more.
    again = pickle.loads(pickle.dumps(source))
    shutil.rmtree(data)
    assert by_user(again) == by_user(source)


def test_the_cache_stays_within_its_limit(tmp_path: Path, cache: Path) -> None:
    data = write_dataset(tmp_path / "data", made_up(200))
    shards = [file.stat().st_size for file in data.glob("shard-*")]
    limit = sum(file.stat().st_size for file in data.iterdir()) - sum(shards) + 2 * max(shards)
    source = ParquetSource(elsewhere(data), cache_mb=0, disk_cache_gb=limit / 2**30)
    assert by_user(source) == by_user(ParquetSource(data))
    kept = [file.stat().st_size for file in cache.rglob("*") if file.is_file()]
    assert 0 < sum(kept) <= limit
    assert len(list(cache.rglob("shard-*.parquet"))) < len(shards)


def test_another_version_of_a_data_set_is_not_mixed_with_the_first(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", made_up(200))
    first = by_user(ParquetSource(elsewhere(data)))
    histories = made_up(200)
    histories[0] = histories[0][::-1]
    write_dataset(data, histories)
    second = by_user(ParquetSource(elsewhere(data)))
    assert second != first
    assert second == by_user(ParquetSource(data))


def test_a_damaged_copy_is_found(tmp_path: Path, cache: Path) -> None:
    data = write_dataset(tmp_path / "data", made_up(200))
    by_user(ParquetSource(elsewhere(data)))
    shard = sorted(cache.rglob("shard-*.parquet"))[0]
    shard.write_bytes(b"x" * shard.stat().st_size)
    with pytest.raises(DataError, match="cut off"):
        by_user(ParquetSource(elsewhere(data)))


def _read(source: ParquetSource, answers: Any) -> None:
    answers.put(by_user(source))


def test_a_forked_process_copies_by_way_of_a_new_one(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", made_up(10))
    source = ParquetSource(elsewhere(data))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_read, args=(source, answers))
    process.start()
    assert answers.get(timeout=100) == by_user(ParquetSource(data))
    process.join(timeout=20)


def test_raw_input_and_grouped_files_elsewhere(tmp_path: Path) -> None:
    raw = write_folder(tmp_path / "raw")
    prepare(raw, tmp_path / "here", columns=NAMES)
    summary = prepare(elsewhere(raw), tmp_path / "index", columns=NAMES)
    assert f"histories stay in {elsewhere(raw)}" in " ".join(summary.taken)
    assert sorted(os.listdir(tmp_path / "index")) == ["dataset.json", "items.parquet", "lengths.npy"]
    assert by_user(ParquetSource(tmp_path / "index")) == by_user(ParquetSource(tmp_path / "here"))
    (tmp_path / "x.csv").write_text(
        "user,item\n" + "".join(f"{u},w{n}\n" for u in range(3) for n in range(4))
    )
    assert prepare(elsewhere(tmp_path / "x.csv"), tmp_path / "csv").num_events == 12
    assert len(open_source(elsewhere(tmp_path / "x.csv"), cache=tmp_path / "cached").lengths) == 3


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a FreeScale data set"):
        open_source(elsewhere(tmp_path / "nothing"))
    with pytest.raises(DataError, match="There is no input"):
        prepare(elsewhere(tmp_path / "nothing"), tmp_path / "out")
    with pytest.raises(DataError, match=r"(?s)cannot be opened.*s3://, gs://"):
        sizes("nosuchthing://bucket/x")
    with pytest.raises(DataError, match="prepare writes to this machine"):
        prepare(tmp_path, "s3://bucket/out")
    data = write_dataset(tmp_path / "data", made_up(200))
    next(data.glob("shard-*")).unlink()
    with pytest.raises(DataError, match="it is not at local://"):
        ParquetSource(elsewhere(data))


def test_a_folder_is_copied_as_it_is(tmp_path: Path) -> None:
    raw = write_folder(tmp_path / "raw")
    copied = copy_all(elsewhere(raw), tmp_path / "copy")
    assert {str(f.relative_to(copied)): f.read_bytes() for f in copied.rglob("*") if f.is_file()} == {
        str(f.relative_to(raw)): f.read_bytes() for f in raw.rglob("*") if f.is_file()
    }
