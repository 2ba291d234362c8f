"""One data set for a run: on all ranks before the first step, and again wherever a checkpoint of it goes on."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.comm.world import Ranks, gather
from freescale.data import DataDigest, differences
from freescale.errors import DataError


def agree_on_data(ranks: Ranks, data: DataDigest) -> tuple[str, ...]:
    """Refuse to go on where a rank has other data; says which, where, and what differs. Every rank must call it.

    Returns the hosts of all ranks.
    """
    everybody = gather(
        (socket.gethostname(), data.fingerprint), group=ranks.control, what="agree on the data"
    )
    hosts, fingerprints = zip(*everybody)
    if len(set(fingerprints)) == 1:
        return hosts
    # Only now: a data set has thousands of shards, and a run thousands of ranks.
    states = gather(data.state(), group=ranks.control, what="agree on the data")
    held = [DataDigest.from_state(state) for state in states]
    odd = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0])
    others = sum(fingerprint != fingerprints[0] for fingerprint in fingerprints) - 1
    where = ("on rank 0", f"on rank {odd}")
    found = differences(held[0], held[odd], where=where) or ["prepared by different versions of FreeScale"]
    raise DataError(
        f"rank {odd} on {hosts[odd]} has other data than rank 0 on {hosts[0]}"
        + (f", and so have {others} more ranks" if others else ""),
        got=f"{data.name}: {'; '.join(found)}",
        next_step="copy one prepared data set to all machines, or read it from a folder they share",
    )


def check_same_data(meta: Mapping[str, Any], data: DataDigest, *, path: Path) -> None:
    """A checkpoint goes on with the data it has learnt from; see `data_changes` for those who want others."""
    changes = data_changes(meta, data)
    if changes:
        raise DataError(
            f"{path} has learnt from other data: {DataDigest.from_state(meta['data']).name}\n  - "
            + "\n  - ".join(changes),
            got=f"now {data.name}",
            next_step="set data.path to the data it has learnt from, or go on with other data with --new-data",
        )


def data_changes(meta: Mapping[str, Any], data: DataDigest) -> list[str]:
    """How the data differ from those a checkpoint has learnt from; nothing where it says none."""
    if "data" not in meta:
        return []
    return differences(DataDigest.from_state(meta["data"]), data, where=("then", "now"))
