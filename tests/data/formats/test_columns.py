"""Times of every kind keep their exact order."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.preparing.preparation import prepare
from tests.data.raw_forms import histories, write


def test_timestamps_fractions_and_nanoseconds_keep_their_order(tmp_path: Path) -> None:
    times = ["1.4", "1.3", "90071992547", "90071992546", "1e0", "-5"]
    rows = "".join(f"1,{item},{time}\n" for item, time in enumerate(times))
    prepare(write(tmp_path / "x.csv", "user,item,time\n" + rows), tmp_path / "out")
    assert histories(tmp_path / "out") == {1: [5, 4, 1, 0, 3, 2]}
    assert histories(tmp_path / "out", "time") == {1: [-5, 1, 1, 1, 90071992546, 90071992547]}
    stamps = pa.array([3, 1, 2], type=pa.timestamp("us"))
    pq.write_table(pa.table({"user": [1] * 3, "item": [3, 1, 2], "time": stamps}), tmp_path / "x.parquet")
    prepare(tmp_path / "x.parquet", tmp_path / "stamps")
    assert histories(tmp_path / "stamps") == {1: [1, 2, 3]}
    nanoseconds = [1_700_000_000_000_000_003, 1_700_000_000_000_000_001, 1_700_000_000_000_000_002]
    rows = "".join(f"1,{item},{time}\n" for item, time in enumerate(nanoseconds))
    prepare(write(tmp_path / "ns.csv", "user,item,time\n" + rows), tmp_path / "ns")
    assert histories(tmp_path / "ns") == {1: [1, 2, 0]}
    assert histories(tmp_path / "ns", "time") == {1: [1_700_000_000] * 3}
