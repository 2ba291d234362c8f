"""One delta on disk: delta.json says what the other files hold, and what size and check sum each has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from freescale.data import read_arrays, read_tensors, write_arrays, write_tensors
from freescale.errors import CheckpointError
from freescale.exports.chains.row_rounding import Rounded
from freescale.exports.chains.table_rows import TableDelta
from freescale.exports.chains.version import Delta
from freescale.exports.files.damage import damage_told
from freescale.exports.files.file_sums import FILES, check_files, sums_of

FORMAT = "freescale-chain"
VERSION = 1
_DELTA, _ROWS, _MODEL, _WORDS = "delta.json", "rows.safetensors", "model.safetensors", "words.parquet"


def write_delta(
    folder: Path,
    delta: Delta,
    *,
    seq: int,
    parent: str,
    fingerprint: str,
    facts: Mapping[str, Any],
    rounded: Rounded | None = None,
) -> None:
    """Write a delta into an empty folder; `rounded` are its vectors in 8 bits, where the chain keeps them so."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: dict[str, Any] = {"ids": delta.ids, "deleted": delta.deleted}
    rows |= {"vectors": delta.vectors} if rounded is None else rounded._asdict()
    write_arrays(folder / _ROWS, rows)
    for name, table in delta.tables.items():
        own: dict[str, Any] = {"vectors": table.vectors, "deleted": table.deleted}
        own |= {"numbers": table.numbers, "others": table.others}
        own |= {} if table.ids is None else {"ids": table.ids}
        write_arrays(folder / _table_rows(name), own)
    write_tensors(folder / _MODEL, delta.dense)
    if delta.words is not None:
        pq.write_table(pa.table({"word": delta.words}), folder / _WORDS)
    said = {
        "format": FORMAT,
        "version": VERSION,
        "seq": seq,
        "parent": parent,
        "fingerprint": fingerprint,
        "changed": len(delta.ids),
        "deleted": len(delta.deleted),
        "facts": dict(facts),
        "tables": list(delta.tables),
        FILES: sums_of(folder.iterdir()),
        "manifest": dict(delta.manifest),
    }
    (folder / _DELTA).write_text(json.dumps(said, indent=1))


def read_delta(folder: Path) -> tuple[dict[str, Any], Delta]:
    """A delta, its files compared with what delta.json says of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not folder.exists():
        raise damaged_chain(folder, "it is not there")
    with damage_told(partial(damaged_chain, folder)):
        said = json.loads((folder / _DELTA).read_text())
        said |= {"seq": int(said["seq"]), **{name: str(said[name]) for name in ("parent", "fingerprint")}}
        check_files(folder, said)
        rows = read_arrays(folder / _ROWS)
        words = None
        if _WORDS in said[FILES]:
            words = pq.read_table(folder / _WORDS).column("word").cast(pa.large_string()).combine_chunks()
            words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
        manifest = said["manifest"]
        dense = read_tensors(folder / _MODEL)
        exact = rows.get("vectors")
        vectors = Rounded(rows["numbers"], rows["factors"]).vectors() if exact is None else exact
        tables = {}
        for name in said.get("tables", ()):
            own = read_arrays(folder / _table_rows(name))
            parts = (own[part] for part in ("vectors", "deleted", "numbers", "others"))
            tables[name] = TableDelta(own.get("ids"), *parts)
        return said, Delta(manifest, dense, rows["ids"], vectors, rows["deleted"], words, tables)


def _table_rows(name: str) -> str:
    """File of the rows of a table of features."""
    return f"rows-{name}.safetensors"


def damaged_chain(path: Path, why: str) -> CheckpointError:
    """The error of a part of a chain that cannot be trusted."""
    return CheckpointError(
        f"{path} is missing, damaged or of another chain",
        got=why,
        next_step="copy the chain again, or publish into a new folder",
    )
