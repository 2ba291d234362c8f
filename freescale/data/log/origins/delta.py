"""A Delta table as an origin: what its versions have added since the last one that was sealed. Needs `deltalake`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from freescale.data.log.origin import Words, missing_package, nothing_new, unfinished
from freescale.data.log.origins._table_files import copy_files, sealed_up_to
from freescale.errors import DataError
from freescale.registry import register


@register("origin", "delta")
class DeltaVersions:
    """A table that only grows: a version that takes rows away is refused.

    Args:
        where: path of the table, or an address that deltalake reads.
    """

    kind = "delta"

    def __init__(self, where: str) -> None:
        try:
            import deltalake
        except ImportError:
            raise missing_package("deltalake", f"delta:{where}") from None
        self._open, self._where = deltalake.DeltaTable, where
        try:
            self._table: Any = self._open(where)
        except Exception as error:
            raise DataError(
                f"There is no Delta table {where}", got=str(error), next_step="check its path"
            ) from error

    def describe(self) -> str:
        """Where it is."""
        return f"delta:{self._where}"

    def new(self, before: list[Words]) -> Words:
        """From behind the last version that was sealed up to the one there is now."""
        table = str(self._table.metadata().id)
        first = sealed_up_to(before, table)
        last = int(self._table.version())
        if first is not None and last < first:
            raise DataError(
                f"{self.describe()} goes back", got=f"version {last}", allowed=f"version {first} or later"
            )
        words: Words = {"kind": self.kind, "table": table, "from": first, "to": last}
        if first == last or not self._added(words):
            raise nothing_new(self.describe(), f"up to version {last}")
        return words

    def again(self, words: Words) -> Words:
        """The same versions of the same table."""
        if str(self._table.metadata().id) != words["table"] or int(self._table.version()) < words["to"]:
            raise unfinished(self.describe(), "it is another table, or lacks a version")
        return words

    def fetch(self, words: Words, work: Path) -> Path:
        """The files that these versions have added."""
        return copy_files(self._added(words), work, open_stream=_open_uri)

    def _added(self, words: Words) -> list[str]:
        """Files of the last version that the first did not have."""
        after = self._files(words["to"])
        if words["from"] is None:
            return sorted(after)
        before = self._files(words["from"])
        gone = sorted(before - after)
        if gone:
            raise DataError(
                f"{self.describe()}: files of version {words['from']} are gone in version {words['to']}",
                got=gone[0],
                allowed="a table that rows are only added to; nothing deleted, updated or compacted in between",
                next_step="seal before a table is compacted, or write new events into another table",
            )
        return sorted(after - before)

    def _files(self, version: int) -> set[str]:
        try:
            return set(self._open(self._where, version=version).file_uris())
        except Exception as error:
            raise DataError(f"{self.describe()}: version {version} cannot be read", got=str(error)) from error


def _open_uri(uri: str) -> AbstractContextManager[Any]:
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path)).open("rb")
    from pyarrow import fs

    source, path = fs.FileSystem.from_uri(uri)
    return source.open_input_stream(path)
