"""One delta on disk: delta.json says what the other files hold, and what size and check sum each has."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from freescale.errors import CheckpointError
from freescale.exports.damage import damage_told
from freescale.exports.row_rounding import Rounded
from freescale.exports.table_rows import TableDelta
from freescale.exports.version import Delta

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
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import save_file

    rows: dict[str, Any] = {"ids": delta.ids, "deleted": delta.deleted}
    rows |= {"vectors": delta.vectors} if rounded is None else rounded._asdict()
    save_arrays({name: np.ascontiguousarray(values) for name, values in rows.items()}, folder / _ROWS)
    for name, table in delta.tables.items():
        own = {"vectors": table.vectors, "deleted": table.deleted}
        own |= {"numbers": table.numbers, "others": table.others}
        own |= {} if table.ids is None else {"ids": table.ids}
        arrays = {part: np.ascontiguousarray(values) for part, values in own.items()}
        save_arrays(arrays, folder / _table_rows(name))
    save_file({name: value.contiguous() for name, value in delta.dense.items()}, folder / _MODEL)
    if delta.words is not None:
        pq.write_table(pa.table({"word": delta.words}), folder / _WORDS)
    files = {path.name: [path.stat().st_size, _crc(path)] for path in sorted(folder.iterdir())}
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
        "files": files,
        "manifest": dict(delta.manifest),
    }
    (folder / _DELTA).write_text(json.dumps(said, indent=1))


def read_delta(folder: Path) -> tuple[dict[str, Any], Delta]:
    """A delta, its files compared with what delta.json says of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file as load_arrays
    from safetensors.torch import load_file

    if not folder.exists():
        raise damaged_chain(folder, "it is not there")
    with damage_told(partial(damaged_chain, folder)):
        said = json.loads((folder / _DELTA).read_text())
        for name, (size, crc) in said["files"].items():
            path = folder / Path(name).name
            if path.stat().st_size != size or _crc(path) != crc:
                raise ValueError(f"{name} is not as it was written")
        rows = load_arrays(folder / _ROWS)
        words = None
        if _WORDS in said["files"]:
            words = pq.read_table(folder / _WORDS).column("word").cast(pa.large_string()).combine_chunks()
            words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
        manifest = said["manifest"]
        dense = load_file(folder / _MODEL)
        exact = rows.get("vectors")
        vectors = Rounded(rows["numbers"], rows["factors"]).vectors() if exact is None else exact
        tables = {}
        for name in said.get("tables", ()):
            own = load_arrays(folder / _table_rows(name))
            parts = (own[part] for part in ("vectors", "deleted", "numbers", "others"))
            tables[name] = TableDelta(own.get("ids"), *parts)
        return said, Delta(manifest, dense, rows["ids"], vectors, rows["deleted"], words, tables)


def _table_rows(name: str) -> str:
    """File of the rows of a table of features."""
    return f"rows-{name}.safetensors"


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def damaged_chain(path: Path, why: str) -> CheckpointError:
    """The error of a part of a chain that cannot be trusted."""
    return CheckpointError(
        f"{path} is missing, damaged or of another chain",
        got=why,
        next_step="copy the chain again, or publish into a new folder",
    )
