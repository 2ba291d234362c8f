"""How many files a rank may have open at once: every other rank takes several of them, as connections.

Systems allow 1,024 unless told otherwise, which 140 ranks use up. gloo then ends the process from a thread of its own,
with nothing but a line of C++, so it is looked at before the first connection.
"""

from __future__ import annotations

import resource

from freescale.errors import FreeScaleError

OWN = 24
"""Without other ranks: libraries, data, logs."""

EACH_RANK = 7
"""Connections to one other rank; 33, 46 and 74 files were open on 2, 4 and 8 ranks."""

_ROOM = 2
"""Times as many are asked for: data sets may have more shards, models more tables."""


def allow_open_files(num_ranks: int) -> None:
    """Raise the limit of this process to what so many ranks need, as far as it may; refuse where that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN + EACH_RANK * num_ranks
    wanted = _ROOM * needed
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if max(allowed, soft) < needed:
        raise FreeScaleError(
            f"a rank of {num_ranks} needs about {needed:,} file descriptors",
            got=f"at most {hard:,} for this process",
            next_step=f"raise the limit (`ulimit -n {wanted}`; a container's `--ulimit nofile={wanted}`)",
        )
