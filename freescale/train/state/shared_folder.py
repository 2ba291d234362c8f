"""Folders that several machines write into: whether they are one folder at all."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from freescale.comm.world import Ranks, fail_together, from_first, gather, here
from freescale.data import sync_folder
from freescale.errors import CheckpointError

PATIENCE_S = 5.0
"""How long a file of another machine may take to show: network file systems remember for seconds what was not there."""


def check_shared(folder: Path, *, ranks: Ranks) -> None:
    """Refuse a folder that is not the same on all machines, or that some rank cannot write into.

    Rank 0 leaves a file for the others to find, and each of them one for rank 0.

    Raises:
        CheckpointError: on every rank, with the name of the rank and its machine.
    """
    if ranks.num_ranks == 1:
        return
    nonce = secrets.token_hex(8)
    nonce = from_first(lambda: _leave(folder, nonce, 0), ranks=ranks, what="look for the run folder")
    try:
        failure: Exception | None = None
        try:
            _look(folder, nonce, ranks=ranks)
        except Exception as error:
            failure = error
        fail_together(failure, ranks=ranks, what="look for the run folder")
        hosts = gather(here(ranks), group=ranks.control, what="look for the run folder")
        from_first(lambda: _see_all(folder, nonce, hosts), ranks=ranks, what="look for the run folder")
    finally:
        (folder / _name(nonce, ranks.rank)).unlink(missing_ok=True)


def appears(is_there: Callable[[], bool], *, folder: Path) -> bool:
    """Whether something in a folder of a network file system shows within a few seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
        if folder.exists():
            os.listdir(folder)  # makes a client ask its server again
    return True


def _name(nonce: str, rank: int) -> str:
    return f".shared-{nonce}-{rank}"


def _leave(folder: Path, nonce: str, rank: int) -> str:
    (folder / _name(nonce, rank)).touch()
    sync_folder(folder)
    return nonce


def _look(folder: Path, nonce: str, *, ranks: Ranks) -> None:
    if ranks.is_first:
        return
    probe = folder / _name(nonce, 0)
    if not appears(probe.exists, folder=folder):
        raise CheckpointError(
            f"run.out is not shared: {here(ranks)} does not see what rank 0 has written",
            got=probe,
            next_step="choose a run.out on a file system that all machines share",
        )
    try:
        _leave(folder, nonce, ranks.rank)
    except OSError as error:
        raise CheckpointError(
            f"run.out cannot be written: {here(ranks)} may not create files there",
            got=f"{folder}: {error.strerror}",
            next_step="make the folder writable on all machines, or choose another run.out",
        ) from None


def _see_all(folder: Path, nonce: str, hosts: list[str]) -> None:
    for rank, host in enumerate(hosts):
        probe = folder / _name(nonce, rank)
        if not appears(probe.exists, folder=folder):
            raise CheckpointError(
                f"run.out is not shared: rank 0 does not see what {host} has written",
                got=probe,
                next_step="choose a run.out on a file system that all machines share",
            )
