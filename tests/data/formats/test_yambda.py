"""Yambda's files become the events that the benchmark makes of them, and train with its recipe."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data import AnchorRule, ParquetSource, PoolRule, RequestExamples, open_source, prepare
from freescale.data.sources.dlrmv4_twin import TwinSource
from freescale.errors import DataError
from tests.yambda_files import write_yambda

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def source():
    return TwinSource(num_users=20, length_scale=0.05, seed=2)


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("yambda")
    events = write_yambda(folder, source, row_group=700)
    sys.argv = ["yambda_items.py", str(folder), str(folder / "items.parquet")]
    runpy.run_path(str(ROOT / "examples" / "yambda_items.py"), run_name="__main__")
    out = folder / "prepared"
    schema = ROOT / "recipes" / "mlperf_dlrmv4.yaml"
    prepare(events, out, format="yambda", schema=schema, items=folder / "items.parquet", memory_mb=1)
    return out


def test_every_event_is_what_it_was(source, prepared):
    found = ParquetSource(prepared)
    order = np.argsort(found.read(np.arange(len(found.lengths))).users)
    read, expected = found.read(order), source.read(np.arange(20))
    assert read.users.tolist() == expected.users.tolist()
    assert read.offsets.tolist() == expected.offsets.tolist()
    for name in ("item", "time", "action", "hour", "organic"):
        np.testing.assert_array_equal(read.columns[name], expected.columns[name], err_msg=name)
    np.testing.assert_array_equal(read.columns["listened"], expected.columns["listened"])
    of_items = found.item_features().take(np.arange(len(found.items.ids)), ["artist", "album"])
    np.testing.assert_array_equal(of_items["artist"], source.world.artist_of[found.items.ids - 1] + 1)
    np.testing.assert_array_equal(of_items["album"], source.world.album_of[found.items.ids - 1] + 1)


def test_flat_columns_give_the_same_requests(prepared):
    def examples(kind):
        return RequestExamples(
            source=open_source(prepared, kind=kind),
            outcomes=("listened",),
            max_length=30,
            anchors=AnchorRule("listened", history=20, days=5),
            pools=PoolRule("action", (1, 2, 4), 12, 80),
        )

    whole, flat = examples("auto"), examples("columns")
    assert whole.lengths().tolist() == flat.lengths().tolist()
    rows = np.arange(0, len(whole.index.user), 97)
    for name, values in whole.batch(rows).tokens.items():
        assert np.array_equal(values, flat.batch(rows).tokens[name], equal_nan=True), name
    a, b = whole.source.read([3, 0, 3]), flat.source.read([3, 0, 3])
    assert a.users.tolist() == b.users.tolist()
    for name, column in a.columns.items():
        assert column.dtype == b.columns[name].dtype
        np.testing.assert_array_equal(column, b.columns[name])


def test_another_file_is_refused(tmp_path):
    pq.write_table(pa.table({"uid": [1], "item_id": [2], "timestamp": [3]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"no file of Yambda's events"):
        prepare(tmp_path / "x.parquet", tmp_path / "out", format="yambda")
