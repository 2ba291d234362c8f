"""How many processes load the batches of a rank, and what they write: batches, or whole parcels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freescale.recipe.config import Config


@dataclass(frozen=True)
class LoaderProcesses:
    """How many processes load the batches of a rank.

    Args:
        here: those of this rank, as cores are free.
        most: that any rank may have. They plan steps ahead, so what all ranks plan a step by must be known before.
    """

    here: int
    most: int


def loader_processes(
    config: Config,
    *,
    replayed: bool,
    features: bool = False,
    on_gpu: bool = False,
    several: bool = False,
    sharing: int = 1,
) -> LoaderProcesses:
    """Some by themselves only where steps would wait for loading.

    Args:
        config: the recipe, which may say it.
        replayed: whether steps are replayed, so that a batch is all they wait for.
        features: whether batches have more than items.
        on_gpu: whether the rank computes on a GPU, beside which its host may as well load.
        several: whether there are other ranks; then a thread that talks to them needs the interpreter, too.
        sharing: ranks of this machine, which share its cores.
    """
    if config.data.workers is not None:
        return LoaderProcesses(config.data.workers, config.data.workers)
    # A batch of 9,400 events with 13 features takes one core 18 ms, of items alone 5, and its step some milliseconds.
    # DLRMv4's 345,000 events with 11 tables take 26 ms of a step of 58, which had 68 to 86 where the rank loaded them.
    # On two CPU ranks a process takes 10 of 67 ms off the threads of a rank (192 histories, 4,800 events).
    # Four ranks that share a GPU replay 9,400 events each in 14.4 ms with one process a rank, in 21.3 without, in 19.0
    # with two: theirs take turns with threads that wait for other ranks, and with each other for cores.
    most = 0
    if replayed and several:
        most = 3 if features else 1
    elif replayed:
        most = 8 if features else 4
    elif on_gpu:
        most = 3 if features else int(several)
    # One core for the thread that trains, one for the threads beside it.
    return LoaderProcesses(max(0, min(most, (os.cpu_count() or 1) // sharing - 2)), most)
