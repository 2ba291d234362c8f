"""What origins that are tables have in common: how far they were sealed, and data files copied out of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from freescale.data.log.origin import Words


def sealed_up_to(before: Sequence[Words], table: str) -> int | None:
    """The version or snapshot of this table that was sealed last; None where none was.

    Args:
        before: words of the windows that are sealed, oldest first.
        table: the name that the table has for itself.
    """
    sealed = [words for words in before if words["table"] == table]
    return int(sealed[-1]["to"]) if sealed else None


def copy_files(
    paths: Iterable[str], work: Path, *, open_stream: Callable[[str], AbstractContextManager[Any]]
) -> Path:
    """A folder inside `work` with Parquet files, in the order of their paths.

    Args:
        paths: data files of a table, in its own words.
        work: folder of one's own.
        open_stream: opens one of them to read bytes.
    """
    folder = work / "files"
    folder.mkdir()
    for number, path in enumerate(paths):
        with open_stream(path) as stream, (folder / f"part-{number:06d}.parquet").open("wb") as file:
            shutil.copyfileobj(stream, file)
    return folder
