"""Parquet that is grouped by user is only indexed, and read as if it had been written anew; or it says why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.columns.roles import ColumnNames
from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.writing import grouped_index
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.manifest import load_manifest
from freescale.errors import DataError

NAMES = ColumnNames(user="who", item="what", time="when", action="stars")


def table(users: range, *, seed: int = 0) -> pa.Table:
    drawn = np.random.default_rng(seed)
    sizes = drawn.integers(1, 9, len(users))
    return pa.table(
        {
            "who": pa.array([7 * user - 20 for user in users], pa.int32()),
            "what": [drawn.integers(-30, 30, n).tolist() for n in sizes],
            "when": [np.sort(drawn.integers(10**9, 2 * 10**9, n)).tolist() for n in sizes],
            "stars": pa.array([drawn.integers(1, 6, n).tolist() for n in sizes], pa.list_(pa.float64())),
            "country": ["de"] * len(users),
        }
    )


def write_folder(folder: Path) -> Path:
    """As warehouses write it: several files, some in folders, one that is no data."""
    (folder / "day=1").mkdir(parents=True)
    pq.write_table(table(range(0, 40), seed=1), folder / "part-0.parquet", row_group_size=16)
    pq.write_table(table(range(40, 60), seed=2), folder / "day=1" / "part-1.parquet", row_group_size=7)
    (folder / "_SUCCESS").write_text("")
    return folder


def by_user(source: ParquetSource) -> dict[int, dict[str, list[Any]]]:
    read = source.read(range(len(source)))
    return {
        int(user): {name: column[start:stop].tolist() for name, column in read.columns.items()}
        for user, start, stop in zip(read.users, read.offsets, read.offsets[1:])
        if stop > start
    }


def test_an_index_reads_like_histories_written_anew(tmp_path: Path) -> None:
    raw = write_folder(tmp_path / "raw")
    summary = prepare(raw, tmp_path / "index", columns=NAMES)
    assert "only indexed" in " ".join(summary.taken)
    assert not list((tmp_path / "index").glob("shard-*"))
    # Formats read a folder's own files; both say the same of those.
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(raw.rglob("*.parquet"))):
        (flat / f"{number}.parquet").write_bytes(file.read_bytes())
    again = prepare(flat, tmp_path / "anew", columns=NAMES, rewrite=True)
    assert "indexed" not in " ".join(again.taken)
    index, anew = ParquetSource(tmp_path / "index"), ParquetSource(tmp_path / "anew")
    assert by_user(index) == by_user(anew)
    for name in ("ids", "counts", "train_counts"):
        assert getattr(index.items, name).tolist() == getattr(anew.items, name).tolist()
    assert summary.num_events == again.num_events
    assert index.features == anew.features == ("item", "time", "action")


def test_users_with_few_events_have_empty_histories(tmp_path: Path) -> None:
    prepare(write_folder(tmp_path / "raw"), tmp_path / "index", columns=NAMES, min_events=5)
    source = ParquetSource(tmp_path / "index")
    assert set(source.lengths.tolist()) == {0, 5, 6, 7, 8}
    assert load_manifest(tmp_path / "index")["dropped_users"] == int((source.lengths == 0).sum())
    assert all(len(history["item"]) >= 5 for history in by_user(source).values())


def test_one_file_is_enough(tmp_path: Path) -> None:
    pq.write_table(table(range(9)), tmp_path / "x.parquet")
    assert "only indexed" in " ".join(prepare(tmp_path / "x.parquet", tmp_path / "out", columns=NAMES).taken)
    assert len(by_user(ParquetSource(tmp_path / "out"))) > 3


USERS, ITEMS = [1, 2, 3, 4, 5], [[1, 2, 3], [4, 5, 6], [7, 8], [9], [1, 1, 1]]
UNFIT = {
    "text items": (USERS, [[str(n) for n in items] for items in ITEMS], "items .* are string"),
    "text users": (list("abcde"), ITEMS, "users .* are string"),
    "unsigned": (USERS, pa.array(ITEMS, pa.list_(pa.uint64())), "items .* are uint64"),
    "a user twice": ([1, 2, 3, 1, 5], ITEMS, "user 1 stands in more than one row"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_written_anew_and_told(tmp_path: Path, case: str) -> None:
    users, items, message = UNFIT[case]
    pq.write_table(pa.table({"user": users, "item": items}), tmp_path / "x.parquet")
    summary = prepare(tmp_path / "x.parquet", tmp_path / "out", min_events=1)
    assert "histories are written anew" in " ".join(summary.taken)
    assert re.search(message, " ".join(summary.taken))
    assert list((tmp_path / "out").glob("shard-*"))
    assert summary.num_events == 12


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([[1, 3, 2], [4, 5, 6]], "not in the order of time"),
        ([[10**12, 2 * 10**12, 2 * 10**12], [10**12] * 3], "not in seconds"),
        ([[20240131, 20240201, 20240301], [20240131] * 3], "dates written as digits, such as 20240131"),
        ([[1.5, 2.0, 3.0], [4.0, 5.0, 6.0]], "times .* are double"),
    ],
)
def test_times_that_do_not_fit_are_told(tmp_path: Path, times: Any, message: str) -> None:
    pq.write_table(
        pa.table({"user": [1, 2], "item": [[1, 2, 3], [4, 5, 6]], "time": times}), tmp_path / "x.parquet"
    )
    decided = " ".join(prepare(tmp_path / "x.parquet", tmp_path / "out").taken)
    assert re.search(f"written anew: .*{message}", decided)


def test_row_groups_too_large_for_a_reader_are_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_index, "_MOST_GROUP_BYTES", 100)
    pq.write_table(table(range(9)), tmp_path / "x.parquet")
    assert "of memory" in " ".join(prepare(tmp_path / "x.parquet", tmp_path / "out", columns=NAMES).taken)


def test_files_that_are_gone_or_exchanged_are_found_on_opening(tmp_path: Path) -> None:
    raw = write_folder(tmp_path / "raw")
    prepare(raw, tmp_path / "index", columns=NAMES)
    file = raw / "part-0.parquet"
    kept = file.read_bytes()
    pq.write_table(table(range(0, 40), seed=9), file, row_group_size=16)
    with pytest.raises(DataError, match=r"part-0\.parquet is missing or damaged"):
        ParquetSource(tmp_path / "index")
    file.write_bytes(kept)
    ParquetSource(tmp_path / "index")
    file.unlink()
    with pytest.raises(DataError, match="cannot be opened"):
        ParquetSource(tmp_path / "index")
