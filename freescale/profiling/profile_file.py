"""The file of a profile: whether it can be written is found out before minutes of measuring, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path

from freescale.errors import ConfigError


def check_place(out: Path) -> None:
    """Make the folder of a profile, and see that a file can be written there.

    Raises:
        ConfigError: it cannot.
    """
    if out.is_dir():
        raise ConfigError(
            "--out names a folder, not a file", got=out, next_step=f"--out {out / 'profile.json'}"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(
            "--out cannot be written",
            got=f"{out}: {error.strerror or error}",
            next_step="choose a file in a folder that this user may write to: --out profile.json",
        ) from None
