"""Where an id may live: its bucket, its home slot, the window it is probed in, and the row it shares if that is full.

    rows   |----------------- bucket 0 -----------------|--------- bucket 1 --- ...
           | slots, one id each              | overflow | slots ...
             home ─> probe ─> ... ─┐ wraps inside the bucket

Bucket and home come from one 64-bit hash of the id. A window never leaves its bucket, so buckets know nothing of
each other: they can live on any rank, and what is in one depends only on the ids that belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.errors import PlanError

EMPTY = -0x61C8864680B583EB
"""Marks an empty slot. This one id of the 2^64 can have no slot of its own: it always shares an overflow row."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
# Slots come in groups of eight: a GPU reads memory in sectors of four or more ids anyway.
SLOT_GROUP = 8
_MAX_OVERFLOW = 8
# Buckets fill unevenly; with 4,096 rows or more that adds nothing to the windows that are full.
_GOOD_BUCKET_ROWS = 4096
_MAX_BUCKETS = 4096


@dataclass(frozen=True)
class SlotLayout:
    """How a table is cut into buckets, and which of them are held here.

    Args:
        num_buckets: buckets of the whole table.
        bucket_rows: rows of a bucket, its overflow rows included.
        bucket_slots: rows of a bucket that belong to one id each.
        max_probe: slots an id may live in, from its home on.
        first_bucket: first bucket held here.
        held_buckets: how many are held here.
    """

    num_buckets: int
    bucket_rows: int
    bucket_slots: int
    max_probe: int
    first_bucket: int
    held_buckets: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """All of it, in the order in which kernels take it."""
        return (
            self.num_buckets,
            self.bucket_rows,
            self.bucket_slots,
            self.max_probe,
            self.first_bucket,
            self.held_buckets,
        )

    @property
    def overflow_rows(self) -> int:
        """Shared rows at the end of each bucket."""
        return self.bucket_rows - self.bucket_slots

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return self.num_buckets * self.bucket_rows

    @property
    def held_rows(self) -> int:
        """Rows held here."""
        return self.held_buckets * self.bucket_rows

    @property
    def held_slots(self) -> int:
        """Slots held here."""
        return self.held_buckets * self.bucket_slots

    def part(self, first_bucket: int, held_buckets: int) -> SlotLayout:
        """The same table, seen by who holds these buckets."""
        return SlotLayout(
            self.num_buckets, self.bucket_rows, self.bucket_slots, self.max_probe, first_bucket, held_buckets
        )

    def bucket(self, ids: Tensor) -> Tensor:
        """Bucket of every id, counted over the whole table."""
        return (_high_half(id_hash(ids)) * self.num_buckets) >> 32

    def home(self, ids: Tensor) -> Tensor:
        """Place of every id's home slot in its bucket."""
        return ((id_hash(ids) & 0xFFFFFFFF) * self.bucket_slots) >> 32

    def overflow(self, ids: Tensor) -> Tensor:
        """Row held here that an id shares when it has no slot; -1 where its bucket is not held here."""
        hashes = id_hash(ids)
        bucket = ((_high_half(hashes) * self.num_buckets) >> 32) - self.first_bucket
        shared = (((hashes >> 16) & 0xFFFF) * self.overflow_rows) >> 16
        held = (bucket >= 0) & (bucket < self.held_buckets)
        return torch.where(held, bucket * self.bucket_rows + self.bucket_slots + shared, -1)

    def depth(self, ids: Tensor, rows: Tensor) -> Tensor:
        """How many slots behind its home each id lives; 0 is at home."""
        return (rows % self.bucket_rows - self.home(ids)) % self.bucket_slots


def make_layout(num_rows: int, *, num_buckets: int | None = None, max_probe: int = 128) -> SlotLayout:
    """A layout of at least num_rows rows; buckets are as many as keep 4,096 rows each, unless given."""
    if num_rows < 2 * SLOT_GROUP:
        raise PlanError(
            "a zero-collision table needs a few rows", got=num_rows, allowed=f"{2 * SLOT_GROUP} or more"
        )
    if max_probe < 1:
        raise PlanError("max_probe counts the slots an id may live in", got=max_probe, allowed="1 or more")
    if num_buckets is None:
        num_buckets = min(_MAX_BUCKETS, 1 << max(0, (num_rows // _GOOD_BUCKET_ROWS).bit_length() - 1))
    if num_buckets < 1 or num_rows < num_buckets * 2 * SLOT_GROUP:
        raise PlanError(
            "the table is too small for its buckets",
            got=f"{num_rows:,} rows in {num_buckets:,} buckets",
            allowed=f"1 bucket or more, of {2 * SLOT_GROUP} rows or more",
            next_step="take more rows or fewer buckets",
        )
    bucket_rows = -(-num_rows // num_buckets)
    shared = max(1, min(_MAX_OVERFLOW, bucket_rows // 64))
    bucket_slots = (bucket_rows - shared) // SLOT_GROUP * SLOT_GROUP
    if bucket_slots >= 1 << 31:
        raise PlanError("a bucket is too large", got=f"{bucket_rows:,} rows", next_step="take more buckets")
    return SlotLayout(num_buckets, bucket_rows, bucket_slots, min(max_probe, bucket_slots), 0, num_buckets)


def id_hash(ids: Tensor) -> Tensor:
    """64 mixed bits of every id as int64 (splitmix64's finaliser); one-to-one."""
    x = ids.long() + _signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _high_half(x: Tensor) -> Tensor:
    return _shift_right(x, 32)
