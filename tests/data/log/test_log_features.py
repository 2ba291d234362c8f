"""A log with a schema: what events say of themselves is sealed with them, and learnt from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.data import LogSource, append_log, load_log
from freescale.errors import DataError

SCHEMA = {
    "time": {"of": "event", "is": "time"},
    "action": {"of": "event", "is": "number", "outcome": True},
    "device": {"of": "event", "is": "id", "values": ["phone", "desk"]},
    "shop": {"of": "event", "is": "id", "rows": 32, "map": "hash"},
    "seconds": {"of": "event", "is": "number", "scale": "log", "outcome": True, "column": "dwell"},
    "hour": {"of": "request", "is": "number", "edges": [6, 12, 18]},
}
HEAD = "user,item,time,action,device,shop,dwell,hour\n"
FIRST = "1,10,5,0,phone,7,1.5,3\n1,11,6,1,desk,8,,4\n2,10,7,1,phone,7,2.5,20\n2,12,9,0,phone,9,4,21\n"
SECOND = "1,13,20,1,desk,7,8,7\n2,14,21,0,,8,1,9\n3,10,22,1,phone,9,3,8\n3,11,23,1,phone,9,3,8\n"


def _log(folder: Path, schema: Any = SCHEMA) -> Path:
    for name, text in (("a", FIRST), ("b", SECOND)):
        (folder / f"{name}.csv").write_text(HEAD + text)
        append_log(folder / "log", folder / f"{name}.csv", schema=schema if name == "a" else None)
    return folder / "log"


def test_columns_of_a_schema_are_sealed_and_follow_their_events_through_windows(tmp_path: Path) -> None:
    source = LogSource(_log(tmp_path))
    assert source.features == ("item", "time", "action")
    assert [each.name for each in source.schema] == ["item", *SCHEMA]
    read = source.read([source.entry(0).rows])  # the first row of the second window
    assert read.columns["item"].tolist() == [10, 11, 13]
    assert read.columns["device"].tolist() == [0, 1, 1]
    assert read.columns["shop"].tolist() == [7, 8, 7]
    assert read.columns["hour"].tolist() == [3, 4, 7]
    np.testing.assert_array_equal(read.columns["seconds"], np.float32([1.5, np.nan, 8]))
    assert load_log(tmp_path / "log").rules.schema is not None


def test_what_a_log_does_not_keep_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD + FIRST)
    wrong = {
        **SCHEMA,
        "genre": {"of": "item", "is": "id"},
        "tags": {"of": "event", "is": "ids"},
        "seconds": {"of": "event", "is": "number", "scale": "standard"},
    }
    with pytest.raises(DataError) as caught:
        append_log(tmp_path / "log", tmp_path / "a.csv", schema=wrong)
    for text in ("features.genre.of: item", "features.tags.is: ids", "features.seconds.scale: standard"):
        assert text in str(caught.value)
    words = {**SCHEMA, "device": {"of": "event", "is": "id"}}
    with pytest.raises(DataError, match="whole numbers in a log"):
        append_log(tmp_path / "log", tmp_path / "a.csv", schema=words)
    _log(tmp_path)
    (tmp_path / "c.csv").write_text(HEAD + "1,10,50,0,phone,7,1.5,3\n")
    with pytest.raises(DataError, match="made with another schema"):
        append_log(tmp_path / "log", tmp_path / "c.csv", schema={"time": {"of": "event", "is": "time"}})
    (tmp_path / "d.csv").write_text("user,item,time,action\n1,10,50,0\n")
    with pytest.raises(DataError, match="device"):
        append_log(tmp_path / "log", tmp_path / "d.csv")
