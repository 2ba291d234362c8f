"""Row groups and shards are bounded; short users are left out, and the items are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.writing import dataset_writer
from freescale.data.sources.parquet import ParquetSource
from freescale.errors import DataError
from tests.data.raw_forms import write


def test_row_groups_and_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_writer, "_ROW_GROUP_EVENTS", 5000)
    monkeypatch.setattr(dataset_writer, "_SHARD_BYTES", 20_000)
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
