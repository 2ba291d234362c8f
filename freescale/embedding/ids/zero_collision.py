"""ZeroCollisionMap: any 64-bit id gets a row of its own, found by probing; full windows let old ids go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.ids.admission import LONG_AGO, make_admission
from freescale.embedding.ids.eviction import FIRST, Eviction, check_policy
from freescale.embedding.ids.id_stats import COUNTS, histogram
from freescale.embedding.whole_numbers import check_whole
from freescale.errors import CheckpointError, ConfigError, DataError
from freescale.kernels import id_table
from freescale.kernels.id_table import EMPTY, SlotLayout, make_layout
from freescale.kernels.rows import unique


@dataclass(frozen=True)
class Assignment:
    """What one batch of ids did to a map.

    Args:
        rows: row of every id, in the shape of the ids; ids without one of their own have a shared overflow row.
        new_ids: ids that have a row of their own from now on.
        new_rows: their rows; whatever is kept for a row must be made afresh.
        evicted_ids: ids that lost their rows to some of the new ones.
        counts: what happened, in the order of COUNTS; on the CPU.
    """

    rows: Tensor
    new_ids: Tensor
    new_rows: Tensor
    evicted_ids: Tensor
    counts: Tensor


class ZeroCollisionMap:
    """Gives every id a row of its own, as long as there is one.

    Ids are placed in the order they stand (on a GPU smallest first): pass them in ascending order, and rows and
    evictions are the same on every device. Lookups only read; any number of threads may look up at once, also while
    one thread inserts: they find every id that was there before, unless it is just being evicted.

    Args:
        num_rows: rows of the table; rounded up to whole buckets. A few rows of each bucket are shared ones.
        max_probe: slots an id may live in.
        eviction: who gives way when all of them are taken (TTL, LRU, LFU, ByScore); None: nobody, the id shares a row.
        num_buckets: parts that probing never leaves, and that ranks hold as a whole; chosen by size unless given.
        admit_after: batches an id must be seen in before it gets a row.
        admission: "count_min" (estimated, small) or "exact".
        guard: rows used in this many batches before the current one are not taken over. A pipeline that resolves the
            ids of later batches early must have no more than this many batches under way.
        device: where the map lives.
        held: (first, number) of the buckets held here; all unless given.

    Examples:
        >>> ids = ZeroCollisionMap(1_000_000, eviction=LRU())
        >>> rows = ids.insert(torch.tensor([7, -3, 2**62]))
        >>> ids.lookup(torch.tensor([7, 8]))       # the row of 7, and -1
    """

    def __init__(
        self,
        num_rows: int,
        *,
        max_probe: int = 128,
        eviction: Eviction | None = None,
        num_buckets: int | None = None,
        admit_after: int = 1,
        admission: str = "count_min",
        guard: int = 3,
        device: torch.device | str = "cpu",
        held: tuple[int, int] | None = None,
    ) -> None:
        if guard < 0:
            raise ConfigError("guard counts batches", got=guard, allowed="0 or more")
        if eviction is not None:
            check_policy(eviction)
        layout = make_layout(num_rows, num_buckets=num_buckets, max_probe=max_probe)
        self.layout: SlotLayout = layout.part(*held) if held else layout
        self.device = torch.device(device)
        self.eviction = eviction
        self.guard = guard
        rows = self.layout.held_rows
        self._identity = torch.full((rows,), EMPTY, dtype=torch.int64, device=device)
        self._occupied_bits = id_table.occupied_bits(self._identity) if self._identity.is_cuda else None
        self._used = torch.full((rows if eviction else 0,), LONG_AGO, dtype=torch.int32, device=device)
        self._score = torch.full((rows if eviction else 0,), self._blank, dtype=torch.int64, device=device)
        self._admission = make_admission(admission, self.layout, min_batches=admit_after, device=device)
        # [time of the last batch, number of batches]
        self._clock = torch.tensor([FIRST, 0])
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64)
        self.occupied = 0
        """Slots held here that are taken."""

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return self.layout.num_rows

    @property
    def occupancy(self) -> float:
        """Share of the slots held here that are taken."""
        return self.occupied / max(1, self.layout.held_slots)

    def insert(self, ids: Tensor, now: int | None = None, *, ttl: Tensor | int | None = None) -> Tensor:
        """Rows of these ids; those that have none get one. `now` never falls; without it, time is the batch number."""
        if self.eviction is not None or self._admission is not None:
            return self.assign(ids, now, ttl=ttl).rows
        flat = self._flat(ids)
        self._tick(now)
        rows, num_new = id_table.claim_rows(flat, self._identity, self._occupied_bits, self.layout)
        self.occupied += num_new
        self._count(len(flat), len(flat), num_new, 0, id_table.share(flat, rows, self.layout))
        return rows.view(ids.shape)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of these ids, -1 where one has no row of its own. Changes nothing."""
        return id_table.find(self._flat(ids), self._identity, self.layout).view(ids.shape)

    def lookup_or_shared(self, ids: Tensor) -> Tensor:
        """Rows of these ids; one that has none shares the overflow row it would share in training. Changes nothing."""
        flat = self._flat(ids)
        rows = id_table.find(flat, self._identity, self.layout)
        return torch.where(rows < 0, self.layout.overflow(flat), rows).view(ids.shape)

    def assign(self, ids: Tensor, now: int | None = None, *, ttl: Tensor | int | None = None) -> Assignment:
        """Like `insert`, and tells whose rows changed."""
        flat = self._flat(ids)
        now, batch = self._tick(now)
        admitted = self._admit(flat, batch)
        asked = flat if admitted is None else flat[admitted]
        ttl = ttl if admitted is None or not isinstance(ttl, Tensor) else ttl[admitted]
        rows, new_rows, new_ids = id_table.claim(asked, self._identity, self._occupied_bits, self.layout)
        self.occupied += len(new_rows)
        evicted = flat[:0]
        if self.eviction is not None:
            values = self.eviction.values(asked, now=now, ttl=ttl)
            self._touch(rows, values, batch)
            taken, evicted = self._evict(asked, rows, values, now, batch)
            new_rows = torch.cat([new_rows, taken])
            new_ids = torch.cat([new_ids, self._identity[taken]])
        collisions = id_table.share(asked, rows, self.layout)
        counts = self._count(len(flat), len(asked), len(new_rows), len(evicted), collisions)
        if admitted is not None:
            rows = self.layout.overflow(flat).masked_scatter_(admitted, rows)
        return Assignment(rows.view(ids.shape), new_ids, new_rows, evicted, counts)

    def residents(self) -> tuple[Tensor, Tensor]:
        """Ids that have a row of their own, ascending, and their rows."""
        rows = (self._identity != EMPTY).nonzero().flatten()
        ids, order = self._identity[rows].sort()
        return ids, rows[order]

    def stats(self) -> dict[str, Any]:
        """Occupancy, counts since the map was made or restored, histograms of slots from home and of age in batches."""
        ids, rows = self.residents()
        counts = dict(zip(COUNTS, self._counts.tolist()))
        age = int(self._clock[1]) - self._used[rows].long() if self.eviction else rows[:0]
        return {
            "rows": self.layout.held_rows,
            "slots": self.layout.held_slots,
            "occupied": self.occupied,
            "occupancy": self.occupancy,
            **counts,
            "overflow": counts["collisions"] + counts["not_admitted"],
            "probe_histogram": histogram(self.layout.depth(ids, rows)),
            "age_histogram": histogram(age),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, in place: one row a bucket held here, and the clock. Call `restored` after filling them."""
        shape = (self.layout.held_buckets, self.layout.bucket_rows)
        state = {"identity": self._identity.view(shape)}
        if self.eviction is not None:
            state |= {"used": self._used.view(shape), "score": self._score.view(shape)}
        if self._admission is not None:
            state |= self._admission.state()
        return state | {"clock": self._clock}

    def restored(self) -> None:
        """The tensors of `state_dict` were filled from a checkpoint: bring the rest in line with them."""
        self.occupied = int((self._identity != EMPTY).sum())
        if self._occupied_bits is not None:
            self._occupied_bits = id_table.occupied_bits(self._identity)
        if self._admission is not None:
            self._admission.restored()
        self._counts.zero_()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the state of a map of the same size and policy."""
        mine = self.state_dict()
        theirs = {name: tuple(values.shape) for name, values in state.items()}
        shapes = {name: tuple(values.shape) for name, values in mine.items()}
        if theirs != shapes:
            raise CheckpointError(
                "the saved map has another size or policy",
                got=", ".join(f"{name} {shape}" for name, shape in theirs.items()),
                allowed=", ".join(f"{name} {shape}" for name, shape in shapes.items()),
                next_step="make the map with the rows, buckets, eviction and admission it was saved with",
            )
        for name, values in mine.items():
            values.copy_(state[name])
        self.restored()

    @property
    def _blank(self) -> int:
        """Score of a row nobody has used yet."""
        return 0 if self.eviction is not None and self.eviction.mode == "add" else FIRST

    def _flat(self, ids: Tensor) -> Tensor:
        check_whole(ids, what="ids")
        return ids.reshape(-1).to(device=self.device, dtype=torch.int64).contiguous()

    def _tick(self, now: int | None) -> tuple[int, int]:
        last, batch = self._clock.tolist()
        now = batch + 1 if now is None else int(now)
        if now < last:
            raise DataError(
                "time runs backwards",
                got=f"now={now} after {last}",
                next_step="pass times that never fall, or none",
            )
        self._clock.copy_(torch.tensor([now, batch + 1]))
        return now, batch + 1

    def _admit(self, flat: Tensor, batch: int) -> Tensor | None:
        """Which ids may have a row: those that have one, and those seen often enough; None: all."""
        if self._admission is None:
            return None
        known = id_table.find(flat, self._identity, self.layout) >= 0
        missing, inverse = unique(flat[~known])
        if len(missing):
            known[~known] = self._admission.admitted(missing, batch=batch)[inverse]
        return known

    def _touch(self, rows: Tensor, values: Tensor, batch: int) -> None:
        assert self.eviction is not None
        id_table.touch(rows, self._used, self._score, values, now=batch, mode=self.eviction.mode)

    def _evict(
        self, asked: Tensor, rows: Tensor, values: Tensor, now: int, batch: int
    ) -> tuple[Tensor, Tensor]:
        """Take rows over for ids without one, smallest first; fills `rows`; gives the rows taken and who had them."""
        assert self.eviction is not None
        outside = (rows < 0).nonzero().flatten()
        if len(outside) == 0:
            return rows[:0], asked[:0]
        wanting, inverse = unique(asked[outside])
        taken, gone = id_table.evict(
            wanting,
            self._identity,
            self._used,
            self._score,
            self.layout,
            now=batch,
            safe_from=batch - self.guard,
            threshold=self.eviction.threshold(now),
            blank=1 if self.eviction.mode == "add" else FIRST,
        )
        rows[outside] = taken[inverse]
        self._touch(rows[outside], values[outside] if len(values) > 1 else values, batch)
        got = taken >= 0
        return taken[got], gone[got]

    def _count(self, given: int, admitted: int, new: int, evicted: int, collisions: int) -> Tensor:
        """Counts of one batch, added to those of all."""
        counts = torch.tensor(
            [given, admitted - new - collisions, new, evicted, collisions, given - admitted]
        )
        self._counts += counts
        return counts
