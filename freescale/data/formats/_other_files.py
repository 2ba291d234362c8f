"""Files that are no text and no Parquet, told by their first bytes, each with what helps."""

from __future__ import annotations

from pathlib import Path

from freescale.data.excerpt import excerpt
from freescale.errors import DataError

_TO_PARQUET = "write the table as Parquet or CSV first"
_TO_UTF8 = "convert it first: `iconv -f {} -t UTF-8 INPUT > OUTPUT`"
# First bytes -> what such a file is, and what helps. Longer ones first: UTF-32 starts as UTF-16 does.
_KNOWN = (
    (b"\xff\xfe\x00\x00", "text in UTF-32", _TO_UTF8.format("UTF-32")),
    (b"\x00\x00\xfe\xff", "text in UTF-32", _TO_UTF8.format("UTF-32")),
    (b"\xff\xfe", "text in UTF-16", _TO_UTF8.format("UTF-16")),
    (b"\xfe\xff", "text in UTF-16", _TO_UTF8.format("UTF-16")),
    (b"\x1f\x8b", "packed by gzip", "let its name end in .gz"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd", "let its name end in .zst"),
    (b"\x04\x22\x4d\x18", "packed by lz4", "let its name end in .lz4"),
    (b"BZh", "packed by bzip2", "let its name end in .bz2"),
    (b"\xfd7zXZ", "packed by xz", "unpack it first: `unxz INPUT`"),
    (b"PK\x03\x04", "a zip archive or an Excel workbook", "unpack it first, or save the sheet as CSV"),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "save the sheet as CSV"),
    (b"SQLite format 3", "an SQLite database", _TO_PARQUET),
    (b"ARROW1", "an Arrow file", "write the table as Parquet first (`pyarrow.parquet.write_table`)"),
    (b"ORC", "an ORC file", _TO_PARQUET),
    (b"Obj\x01", "an Avro file", _TO_PARQUET),
    (b"\x89HDF", "an HDF5 file", _TO_PARQUET),
    (b"\x93NUMPY", "a numpy array", _TO_PARQUET),
    (b"\x80\x04\x95", "a pickle, which may run code when it is loaded", _TO_PARQUET),
    (b"PAR1", "a Parquet file", "ask for it: `--format parquet`"),
)


def check_readable(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes say that it is no text in UTF-8, by the name of what it is."""
    for start, kind, next_step in _KNOWN:
        if head.startswith(start) and not (start.isalnum() and _goes_on_as_text(head)):
            raise DataError(
                f"{path} is {kind}",
                got=f"first bytes {head[:8]!r}",
                allowed="text in UTF-8, plain or packed with its ending (.gz, .bz2, .zst, .lz4), or Parquet",
                next_step=next_step,
            )
    if b"\0" in head[:200] and len(head) > 3 and (not any(head[1:200:2]) or not any(head[0:200:2])):
        raise DataError(
            f"{path} is text in UTF-16 without its mark",
            got=f"first bytes {head[:8]!r}",
            allowed="text in UTF-8",
            next_step=_TO_UTF8.format("UTF-16LE" if head[0] else "UTF-16BE"),
        )
    if b"\r" in head.rstrip(b"\r") and b"\n" not in head:
        raise DataError(
            f"{path}: lines end in carriage returns alone",
            got=repr(excerpt(head, 40)),
            allowed="lines that end in \\n or \\r\\n",
            next_step="convert it first: `tr '\\r' '\\n' < INPUT > OUTPUT`",
        )


def _goes_on_as_text(head: bytes) -> bool:
    """A first line may begin with the letters ORC."""
    return not any(letter < 9 for letter in head[:64])
