"""Random batches of DLRMv4, which its reference and our parts are given alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.data import AnchorRule, PoolRule, RequestExamples
from freescale.data.sources.dlrmv4_twin import TwinSource

CROSSES = (
    "user_x_artist",
    "user_x_album",
    "user_x_hour",
    "item_x_hour",
    "artist_x_hour",
    "user_x_organic",
    "user_x_artist_x_hour",
)
CONTEXT = ("user", *CROSSES)


@dataclass(frozen=True)
class Inputs:
    """One batch: rows of every table, and where tokens point to."""

    rows: dict[str, Tensor]
    lengths: Tensor
    item: Tensor
    artist_of: Tensor
    album_of: Tensor
    target: Tensor
    action: Tensor
    time: Tensor
    context: dict[str, Tensor]
    label: Tensor


def inputs_of(lengths: list[int], *, dim: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Random rows and ids; times rise by sessions, up to 300 days."""
    draws = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=draws)

    num_items, num_artists, num_albums, batch = 300, 40, 90, len(lengths)
    sizes = {"item": num_items, "artist": num_artists, "album": num_albums} | dict.fromkeys(CONTEXT, 50)
    rows = {
        name: torch.randn(size, dim, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }
    total = sum(lengths)
    steps = torch.where(whole(20, total) == 0, whole(40_000, total), whole(60, total)) * 5
    times = [part.cumsum(0) + 1_641_600_000 for part in steps.split(lengths)]
    return Inputs(
        rows=rows,
        lengths=torch.tensor(lengths),
        item=whole(num_items, total),
        artist_of=whole(num_artists, num_items),
        album_of=whole(num_albums, num_items),
        target=whole(num_items, batch),
        action=1 << whole(3, total),
        time=torch.cat(times),
        context={name: whole(50, batch) for name in CONTEXT},
        label=whole(2, batch),
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """[n + 1] where each begins."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def real_lengths(count: int, *, seed: int, most: int | None = None, users: int = 60) -> list[int]:
    """Lengths of histories of anchors of the made-up log."""
    source = TwinSource(num_users=users, seed=seed)
    examples = RequestExamples(
        source=source,
        outcomes=("listened",),
        split="train",
        max_length=4087,
        anchors=AnchorRule("listened", 4086, 1),
        pools=PoolRule("action", (1, 2, 4), 1362, 20_000),
    )
    lengths = examples.lengths() - 1
    picked = np.random.default_rng(seed).choice(lengths, count)
    return (picked if most is None else np.maximum(picked * most // 4086, 1)).tolist()
