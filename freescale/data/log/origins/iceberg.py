"""An Iceberg table as an origin: what its snapshots have appended since the last that was sealed. Needs `pyiceberg`.

Catalogs are those of pyiceberg: `~/.pyiceberg.yaml`, or `PYICEBERG_CATALOG__NAME__URI` and others in the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freescale.data.log.origin import Words, missing_package, nothing_new, unfinished
from freescale.data.log.origins._table_files import copy_files, sealed_up_to
from freescale.errors import DataError
from freescale.registry import register

_ADDED = 1
"""Status of an entry of a manifest: this snapshot has added the file."""


@register("origin", "iceberg")
class IcebergSnapshots:
    """A table that is only appended to: a snapshot that does something else is refused.

    Args:
        where: CATALOG.SPACE.NAME.
    """

    kind = "iceberg"

    def __init__(self, where: str) -> None:
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError:
            raise missing_package("pyiceberg[sql-sqlite,pyarrow]", f"iceberg:{where}") from None
        catalog, _, name = where.partition(".")
        self._where = where
        try:
            self._table: Any = load_catalog(catalog).load_table(name)
        except Exception as error:
            raise DataError(
                f"There is no Iceberg table {name} in the catalog {catalog}",
                got=str(error),
                next_step="iceberg:CATALOG.SPACE.NAME, with the catalog in ~/.pyiceberg.yaml or the environment",
            ) from error

    def describe(self) -> str:
        """Where it is."""
        return f"iceberg:{self._where}"

    def new(self, before: list[Words]) -> Words:
        """From behind the last snapshot that was sealed up to the one there is now."""
        table = str(self._table.metadata.table_uuid)
        first = sealed_up_to(before, table)
        current = self._table.current_snapshot()
        if current is None or current.snapshot_id == first:
            raise nothing_new(self.describe(), "no snapshot" if current is None else f"snapshot {first}")
        words: Words = {"kind": self.kind, "table": table, "from": first, "to": int(current.snapshot_id)}
        if not self._added(words):
            raise nothing_new(self.describe(), f"up to snapshot {words['to']}")
        return words

    def again(self, words: Words) -> Words:
        """The same snapshots of the same table."""
        known = self._table.snapshot_by_id(words["to"])
        if str(self._table.metadata.table_uuid) != words["table"] or known is None:
            raise unfinished(self.describe(), "it is another table, or lacks a snapshot")
        return words

    def fetch(self, words: Words, work: Path) -> Path:
        """The files that these snapshots have added."""
        return copy_files(
            self._added(words), work, open_stream=lambda path: self._table.io.new_input(path).open()
        )

    def _added(self, words: Words) -> list[str]:
        """Data files of all snapshots behind the first up to the last, oldest snapshot first."""
        found: list[str] = []
        for snapshot in self._snapshots(words["from"], words["to"]):
            operation = str(snapshot.summary.operation.value if snapshot.summary else "append")
            if operation != "append":
                raise DataError(
                    f"{self.describe()}: snapshot {snapshot.snapshot_id} does more than append",
                    got=operation,
                    allowed="a table that rows are only added to",
                    next_step="write new events into another table",
                )
            added = []
            for manifest in snapshot.manifests(self._table.io):
                if manifest.added_snapshot_id != snapshot.snapshot_id:
                    continue  # an older one, carried along
                for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True):
                    if int(entry.status) == _ADDED and entry.snapshot_id == snapshot.snapshot_id:
                        added.append(str(entry.data_file.file_path))
            found += sorted(added)
        return found

    def _snapshots(self, first: int | None, last: int) -> list[Any]:
        """Behind `first` up to `last`, each the parent of the next."""
        found = []
        number: int | None = last
        while number is not None and number != first:
            snapshot = self._table.snapshot_by_id(number)
            if snapshot is None:
                raise DataError(
                    f"{self.describe()}: snapshot {number} is gone",
                    got="expired",
                    next_step="seal more often than snapshots expire; what is gone cannot be sealed",
                )
            found.append(snapshot)
            number = snapshot.parent_snapshot_id
        if number != first:
            raise DataError(
                f"{self.describe()}: the table does not come from snapshot {first}, which was sealed last",
                got=f"snapshot {last}",
                next_step="bring the table back to a history that has it",
            )
        return found[::-1]
