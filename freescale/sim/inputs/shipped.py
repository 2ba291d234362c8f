"""Files that come with the simulator: clusters and profiles, by their names."""

from __future__ import annotations

from importlib import resources


def shipped_names(folder: str, suffix: str) -> list[str]:
    """Names of the files of a folder, without their suffix."""
    entries = (resources.files("freescale.sim") / folder).iterdir()
    return sorted(entry.name.removesuffix(suffix) for entry in entries if entry.name.endswith(suffix))


def shipped_text(folder: str, file: str) -> str:
    """What such a file says."""
    return (resources.files("freescale.sim") / folder / file).read_text("utf-8")
