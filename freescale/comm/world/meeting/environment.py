"""Who this process is in a run: what torchrun, Slurm, MPI, Kubernetes or `freescale train` say in the environment.

The first of these that speaks is believed: RANK and WORLD_SIZE (`freescale train`, torchrun, Ray Train, one's own
script), Open MPI, MPICH and Intel MPI, Slurm, a Kubernetes indexed job. So torchrun wins inside a Slurm job, where
Slurm counts nodes only. What the first leaves open, such as LOCAL_RANK, is asked from the others that see the same
rank of the same number. MASTER_ADDR and MASTER_PORT are taken where they are set and derived where that is safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from freescale.comm.world.meeting.launchers import Membership, all_said, missing, number_in
from freescale.errors import TrainingError

DEFAULT_PORT = 29500
"""The port of a rendezvous nobody named; torch's own."""


def own_membership(environment: Mapping[str, str] = os.environ) -> Membership:
    """Who this process is; raises TrainingError when variables are missing or make no sense."""
    said = all_said(environment)
    if not said:
        _check_nobody_is_missing(environment)
        return Membership()
    known = said[0]
    for other in said[1:]:
        if (other.rank, other.num_ranks) == (known.rank, known.num_ranks):
            known = _completed(known, other)
    known = replace(
        known,
        master=environment.get("MASTER_ADDR") or known.master,
        port=number_in(environment, "MASTER_PORT") or known.port,
    )
    if known.local_rank is None and known.local_num_ranks:
        known = replace(known, local_rank=known.rank % known.local_num_ranks)
    _check(known, environment)
    return known if known.master is None or known.port else replace(known, port=DEFAULT_PORT)


def launched_by(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """What the first launcher says that started this process among others; None if it was started by itself."""
    return next(iter(all_said(environment)), None)


def publish_membership(who: Membership, environment: MutableMapping[str, str] = os.environ) -> None:
    """Put it under the names of torchrun, where torch and the processes this one starts look for it."""
    if who.alone:
        return
    values = {
        "RANK": who.rank,
        "WORLD_SIZE": who.num_ranks,
        "LOCAL_RANK": who.local_rank,
        "LOCAL_WORLD_SIZE": who.local_num_ranks,
        "MASTER_ADDR": who.master,
        "MASTER_PORT": who.port,
    }
    environment.update({name: str(value) for name, value in values.items() if value is not None})


def _completed(known: Membership, other: Membership) -> Membership:
    """What is known, and from another that means the same process what is not."""
    return replace(
        known,
        local_rank=known.local_rank if known.local_rank is not None else other.local_rank,
        local_num_ranks=known.local_num_ranks or other.local_num_ranks,
        node=known.node if known.node is not None else other.node,
        master=known.master or other.master,
        port=known.port or other.port,
    )


def _check(who: Membership, environment: Mapping[str, str]) -> None:
    world = number_in(environment, "WORLD_SIZE")
    if world is not None and world != who.num_ranks:
        raise TrainingError(
            f"WORLD_SIZE and {who.launcher} contradict each other",
            got=f"WORLD_SIZE={world}, {who.launcher} started {who.num_ranks} processes",
            next_step="start as many processes as WORLD_SIZE says, or unset WORLD_SIZE",
        )
    for name, number, limit in (
        ("rank", who.rank, who.num_ranks),
        ("local rank", who.local_rank, who.local_num_ranks),
        ("number of ranks on this machine", who.local_num_ranks, who.num_ranks + 1),
    ):
        if number is not None and limit is not None and not 0 <= number < limit:
            raise TrainingError(
                f"{who.launcher} says a {name} that cannot be",
                got=number,
                allowed=f"0 to {limit - 1}",
                next_step="unset the variables of a launcher that did not start this process",
            )
    if who.num_ranks > 1 and who.master is None and "FREESCALE_RENDEZVOUS" not in environment:
        raise missing("MASTER_ADDR", beside=f"{who.num_ranks} ranks by {who.launcher}")


def _check_nobody_is_missing(environment: Mapping[str, str]) -> None:
    """WORLD_SIZE promises others, but nothing says who this is."""
    if (number_in(environment, "WORLD_SIZE") or 1) > 1:
        raise missing("RANK", beside=f"WORLD_SIZE={environment['WORLD_SIZE']}")
