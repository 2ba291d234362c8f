"""A batch of the made-up log at full scale: written once on any CPU, put onto a device in micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrmv4_parts.inputs import CONTEXT, CROSSES
from freescale.data import SequenceBatch


def write(path: Path, *, samples: int, users: int, seed: int) -> None:
    """One batch of the made-up log at full scale: ids as hot as they would be with a million listeners."""
    from freescale.data.features.cross_hash import cross_ids
    from freescale.data.pools import PoolIndex, PoolRule
    from freescale.data.sources import dlrmv4_twin as twin
    from freescale.data.sources._twin_listener import make_listener

    source = twin.TwinSource(num_users=1_000_000, seed=seed)
    world, lengths = source.world, source.lengths
    draws = np.random.default_rng(seed)
    eligible = np.flatnonzero(lengths > 4200)
    # A user has anchors in proportion to the events beyond the first 4,086.
    weight = (lengths[eligible] - 4086) / (lengths[eligible] - 4086).sum()
    chosen = np.sort(draws.choice(eligible, users, p=weight, replace=False))
    counts = np.bincount(draws.integers(users, size=samples), minlength=users)
    parts: dict[str, list[Any]] = {
        name: [] for name in ("item", "time", "action", "sizes", "target", "label", "user")
    }
    hours, ways = [], []
    rule = PoolRule("action", (1, 2, 4), 1362, 20_000)
    for user, count in zip(chosen.tolist(), counts.tolist()):
        one = make_listener(world, user, int(lengths[user]))
        index = PoolIndex(one.action, np.array([0, len(one.item)]), rule)
        last = int(draws.integers(4086 + 30, len(one.item)))
        for anchor in range(last - count, last):
            places, _ = index.spans(np.zeros(1, np.int64), np.array([anchor]), most=4086)
            parts["item"].append(one.item[places].astype(np.int32))
            parts["time"].append((one.time[places] - 1_600_000_000).astype(np.int32))
            parts["action"].append(one.action[places].astype(np.uint8))
            parts["sizes"].append(len(places))
            parts["target"].append(one.item[anchor])
            parts["label"].append(one.action[anchor] == 1)
            parts["user"].append(user)
            hours.append(one.time[anchor] % 86_400 // 3600)
            ways.append(one.organic[anchor])
    target = np.array(parts["target"])
    members = {
        "user": np.array(parts["user"], np.int64),
        "item": target.astype(np.int64),
        "artist": world.artist_of[target],
        "album": world.album_of[target],
        "hour": np.array(hours, np.int64),
        "organic": np.array(ways, np.int64),
    }
    saved = {name: np.concatenate(parts[name]) for name in ("item", "time", "action")}
    saved |= {name: np.array(parts[name]) for name in ("sizes", "target", "label", "user")}
    for name in CROSSES:
        saved[name] = cross_ids(name, [members[each] for each in name.split("_x_")])
    unique = np.unique(np.concatenate([saved["item"], target]))
    saved |= {"unique": unique, "artist_of": world.artist_of[unique], "album_of": world.album_of[unique]}
    np.savez_compressed(path, **saved)
    sizes = saved["sizes"]
    print(
        f"{path}: {len(sizes):,} samples of {len(chosen)} listeners, {sizes.mean():.0f} events each (mean square "
        f"{np.mean(sizes**2.0) / sizes.mean() ** 2:.3f} x the mean's), {len(unique):,} items of {sizes.sum():,} events "
        f"({len(unique) / sizes.sum():.1%}), {path.stat().st_size / 2**20:.1f} MiB"
    )


class Batch:
    """The samples on a device, in micro-batches, with the ids that tables are asked for.

    Args:
        saved: what `write` has written.
        samples: how many of them.
        micro: samples of a micro-batch.
        once: items have one vector however often they occur; else every occurrence has one.
    """

    def __init__(
        self, saved: Any, *, samples: int, micro: int, once: bool, rows: dict[str, int], device: str
    ) -> None:
        sizes = saved["sizes"][:samples]
        ends = np.cumsum(sizes)
        total = int(ends[-1])
        item, time_, action = (saved[name][:total] for name in ("item", "time", "action"))
        target = saved["target"][:samples]
        lengths = sizes + 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shown = np.zeros(int(offsets[-1]), bool)
        shown[offsets[1:] - 1] = True

        def spread(events: Any, candidates: Any, dtype: Any) -> np.ndarray:
            out = np.empty(len(shown), dtype)
            out[~shown], out[shown] = events, candidates
            return out

        items = spread(item, target, np.int64)
        number = np.searchsorted(saved["unique"], items)
        if once:
            known, index = np.unique(number, return_inverse=True)
        else:
            known, index = number, np.arange(len(number))
        asked = time_[ends - 1].astype(np.int64) + 1_600_000_000
        moments = spread(time_.astype(np.int64) + 1_600_000_000, asked, np.int64)
        self.ids = {
            "item": saved["unique"][known].astype(np.int64),
            "artist": saved["artist_of"][known].astype(np.int64),
            "album": saved["album_of"][known].astype(np.int64),
            "user": saved["user"][:samples].astype(np.int64),
            **{
                name: (saved[name][:samples].view(np.uint64) % rows[name]).astype(np.int64)
                for name in CROSSES
            },
        }
        # Of smaller tables ids share rows.
        self.ids = {name: torch.from_numpy(ids % rows[name]) for name, ids in self.ids.items()}
        self.found: Any = None
        tokens = {
            "item_index": index.astype(np.int64),
            "time": moments,
            "target_time": np.repeat(asked, lengths),
            "action": spread(action, 0, np.int64),
            "label_listened": spread(0, saved["label"][:samples], np.float32),
        }
        self.parts: list[SequenceBatch] = []
        for first in range(0, samples, micro):
            begin, end = int(offsets[first]), int(offsets[min(first + micro, samples)])
            own = slice(first, min(first + micro, samples))
            self.parts.append(
                SequenceBatch(
                    offsets=torch.from_numpy(offsets[first : own.stop + 1] - begin),
                    tokens={
                        name: torch.from_numpy(values[begin:end].copy()).to(device)
                        for name, values in tokens.items()
                    },
                    samples={
                        "row": torch.arange(own.start, own.stop, device=device),
                        "loss_weights": torch.full((own.stop - own.start, 1), float(samples), device=device),
                    },
                    targets=torch.ones(own.stop - own.start, dtype=torch.int64),
                )
            )
        self.samples = samples
        self.tokens = lengths + len(CONTEXT)
        self.occurrences = len(items)
        self.num_items = len(known)
