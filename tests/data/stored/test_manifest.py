"""A folder is a data set when its manifest says so, whatever the version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freescale.data.stored.manifest import is_dataset, load_manifest, save_manifest
from freescale.errors import DataError

FIELDS = {"name": "x", "num_users": 2, "features": ["item", "time"], "time_unit": "s", "shards": []}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save_manifest(tmp_path, FIELDS)
    assert FIELDS.items() <= load_manifest(tmp_path).items()


@pytest.mark.parametrize(
    "change",
    [{"name": None}, {"num_users": "2"}, {"features": ["time"]}, {"version": 0}, {"format": "other"}],
)
def test_what_the_reader_could_not_use_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save_manifest(tmp_path, FIELDS | change)
    with pytest.raises(DataError, match=r"damaged|another version") as raised:
        load_manifest(tmp_path)
    assert raised.value.next_step


def test_is_dataset(tmp_path: Path) -> None:
    assert not is_dataset(tmp_path)
    assert not is_dataset(tmp_path / "nowhere")
    save_manifest(tmp_path, FIELDS)
    assert is_dataset(tmp_path)
    assert is_dataset(str(tmp_path))
    save_manifest(tmp_path, FIELDS | {"version": 99})
    assert is_dataset(tmp_path), "of another version, yet a data set"
    save_manifest(tmp_path, FIELDS | {"format": "something"})
    assert not is_dataset(tmp_path)
    for content in (b"\xff\xfe", b"[]", json.dumps("text").encode()):
        (tmp_path / "dataset.json").write_bytes(content)
        assert not is_dataset(tmp_path)
