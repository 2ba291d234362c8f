"""Raw files as they come are read right, event by event, or refused with one message that names the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.data.preparing.preparation import prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.manifest import WORD_FILES, load_manifest
from freescale.data.words.id_words import read_words
from freescale.errors import DataError
from tests.data.messy_cases import CASES, START, Case, documented, table
from tests.data.messy_files import FOLDER, messy_file


def in_own_ids(folder: Path, role: str, ids: Any) -> list[Any]:
    kind = load_manifest(folder)["ids"][role]
    if kind == "text":
        return read_words(folder / WORD_FILES[role], ids).to_pylist()
    return (ids.view(np.uint64) if kind == "uint64" else ids).tolist()


def events_of(folder: Path) -> dict[Any, list[tuple[Any, Any, Any]]]:
    source = ParquetSource(folder)
    read = source.read(range(len(source)))
    items = in_own_ids(folder, "item", read.columns["item"])
    nothing = np.full(len(items), None)
    times = read.columns["time"] - START if "time" in read.columns else nothing
    events = list(zip(items, times.tolist(), read.columns.get("action", nothing).tolist()))
    users = in_own_ids(folder, "user", read.users)
    return {user: events[read.offsets[n] : read.offsets[n + 1]] for n, user in enumerate(users)}


@pytest.mark.parametrize("memory_mb", [512, 0.0001])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_messy_files(tmp_path: Path, case: Case, memory_mb: float) -> None:
    source = messy_file(case.file, tmp_path)
    options = {"memory_mb": memory_mb, **case.options}
    if case.events is None:
        with pytest.raises(DataError, match=f"(?s){case.said}") as raised:
            prepare(source, tmp_path / "out", **options)
        assert source.name in str(raised.value)
        assert raised.value.next_step
        assert [path.name for path in tmp_path.iterdir()] == [source.name], "nothing is left behind"
        return
    summary = prepare(source, tmp_path / "out", **options)
    assert events_of(tmp_path / "out") == case.events
    assert summary.num_skipped == case.skipped
    assert re.search(case.said, "\n".join(summary.taken), re.S), summary.taken


def test_the_table_in_the_docs_is_this_list() -> None:
    assert documented() == table(), "python -m tests.data.messy_cases writes it again"


def test_every_file_is_used() -> None:
    assert {path.name for path in FOLDER.iterdir()} <= {case.file for case in CASES}
    assert len({case.file for case in CASES}) >= 40
