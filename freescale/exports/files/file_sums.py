"""Sizes and check sums of the files of an export or a delta, so that one that was changed or mixed up is not read.

A CRC takes half a second a GB, a tenth of what reading an export takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILES = "files"
"""Where a manifest says them: {name: [bytes, CRC-32]}."""
_BLOCK = 1 << 20


def sums_of(paths: Iterable[Path]) -> dict[str, list[int]]:
    """What a manifest says of these files, by name."""
    return {path.name: [path.stat().st_size, _crc(path)] for path in sorted(paths)}


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare files with what their manifest says of them, if it does: older ones say nothing.

    Raises:
        ValueError: one is not as it was written.
    """
    for name, (size, crc) in manifest.get(FILES, {}).items():
        path = folder / Path(name).name
        found = path.stat().st_size
        if found != size:
            raise ValueError(f"{name} is not as it was written: {found:,} bytes, not {size:,}")
        if _crc(path) != crc:
            raise ValueError(f"{name} is not as it was written: it has another check sum")


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_BLOCK):
            crc = zlib.crc32(chunk, crc)
    return crc
