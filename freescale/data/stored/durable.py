"""Bytes and names that outlive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable: new, renamed and removed ones."""
    _sync(folder)


def sync_tree(folder: Path) -> None:
    """Make all files of a folder durable, and their names; before the folder gets the name under which it counts."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def write_durably(path: Path, text: str) -> None:
    """A file that is there as a whole or not at all, whatever happens."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
