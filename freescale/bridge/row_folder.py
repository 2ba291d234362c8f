"""A folder of rows: tables from elsewhere by the ids their rows belong to, for runs to start from.

    tables.json          where they come from; of each table its size, and a digest
    item.safetensors     ids [N] ascending, weight [N, dim]; square_sum [N, 1], seen [N] where they are known

`embedding.start_from` names such a folder in a recipe. Nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from freescale.bridge.saved_tables import RowsById
from freescale.data import write_tensors
from freescale.errors import CheckpointError

_FACTS, _FORMAT, _VERSION = "tables.json", "freescale-rows", 1
_CHUNK_BYTES = 1 << 24


def write_row_folder(
    out: Path, tables: Mapping[str, RowsById], *, origin: Mapping[str, Any], details: Mapping[str, Any]
) -> Path:
    """Write tables into a new folder, all or nothing.

    Args:
        out: the folder.
        tables: rows by the name of their table.
        origin: where they come from.
        details: more to know of a table, by its name.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("the folder is not empty, or none", got=out, next_step="choose another one")
    staged = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    staged.mkdir(parents=True)
    try:
        facts: dict[str, Any] = {}
        for name, rows in tables.items():
            parts = {
                "ids": rows.ids,
                "weight": rows.weight,
                "square_sum": rows.square_sum,
                "seen": rows.seen,
            }
            path = staged / _file_of(name)
            write_tensors(path, {part: each for part, each in parts.items() if each is not None})
            facts[name] = {
                "rows": len(rows.ids),
                "dim": rows.weight.shape[1],
                "bytes": path.stat().st_size,
                "digest": _digest(path),
                **details.get(name, {}),
            }
        kept = {"format": _FORMAT, "version": _VERSION, "origin": dict(origin), "tables": facts}
        (staged / _FACTS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        os.replace(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return out


@dataclass(frozen=True)
class RowFolder:
    """A folder of rows, opened.

    Args:
        path: of the folder.
        facts: what tables.json says.
    """

    path: Path
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> RowFolder:
        """Raises a CheckpointError where it is none, or has lost a file."""
        try:
            facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
            kind = (facts.get("format"), facts.get("version"))
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"there are no rows to start from: the folder has no {_FACTS} that can be read",
                got=path,
                next_step="make one: freescale import torchrec CHECKPOINT OUT",
            ) from error
        if kind != (_FORMAT, _VERSION):
            raise CheckpointError(
                "rows in a form this version does not know", got=kind, allowed=(_FORMAT, _VERSION)
            )
        for name, table in facts["tables"].items():
            file = path / _file_of(name)
            size = file.stat().st_size if file.exists() else None
            if size != table["bytes"]:
                raise CheckpointError(
                    f"the rows of table {name!r} are not whole",
                    got=f"{file}: {'missing' if size is None else f'{size:,} bytes'}",
                    allowed=f"{table['bytes']:,} bytes",
                    next_step="import them again",
                )
        return cls(path, facts)

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """What is known of each table, by name."""
        return dict(self.facts["tables"])

    def digest(self) -> str:
        """Stands for the contents: ranks that see another one would learn something else."""
        return hashlib.blake2b(json.dumps(self.facts, sort_keys=True).encode(), digest_size=8).hexdigest()

    def rows(self, name: str) -> RowsById:
        """Rows of a table; memory-mapped, so that a rank that needs few of them reads few."""
        from safetensors import safe_open

        with safe_open(self.path / _file_of(name), framework="pt") as file:
            parts: dict[str, Tensor] = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
        return RowsById(
            ids=parts["ids"],
            weight=parts["weight"],
            square_sum=parts.get("square_sum"),
            seen=parts.get("seen"),
        )


def _file_of(table: str) -> str:
    return f"{table}.safetensors"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
