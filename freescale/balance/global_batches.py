"""The global batch of every step: a pure function of seed, step and data, never of the number of ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import IntArray, checked_lengths
from freescale.balance.epoch_order import epoch_order
from freescale.balance.window import deal_by_count, deal_by_tokens
from freescale.errors import PlanError

# A window of one recipe must not depend on how many ranks happen to run it. Where the recipe does not say, a
# rank's share is taken to be this many samples.
SAMPLES_A_RANK = 8


@dataclass(frozen=True)
class Mixing:
    """What a window or a token budget costs in randomness.

    Args:
        fewest: samples of the smallest step, in means of a step.
        most: samples of the largest step, in means of a step.
        most_tokens: tokens of the largest step, in means of a step.
        sorted_share: share of the variance of log lengths that lies between steps: near 0 for random batches,
            1 if every step had samples of one length only.
    """

    fewest: float
    most: float
    most_tokens: float
    sorted_share: float


class GlobalBatches:
    """Which rows make the global batch of step t, counted from 0 over all epochs.

    Every epoch visits every row exactly once (`drop_last` leaves out the incomplete last batch) in an order
    drawn from (seed, epoch). Ranks, balancing and costs have no say, so a run continues on the same batches
    when the number of ranks changes.

    Args:
        lengths: [rows] tokens of every row.
        global_batch: samples a step; the last batch of an epoch may be smaller.
        global_tokens: tokens a step instead: as many rows, in order, as fit, and at least one. The number of
            steps then differs a little from epoch to epoch.
        seed: a number >= 0.
        groups: sizes of the runs of rows that are stored together; with `shuffle_rows` the order keeps to few
            of them at a time.
        shuffle_rows: rows that are shuffled among each other; None shuffles the whole epoch.
        shuffle: False goes through the rows as they stand, in every epoch alike.
        drop_last: leave out the batch that is cut short by the end of the epoch.
        window: inside every run of this many steps the rows are dealt again so that long ones meet in the
            same step; the number of samples a step then swings (`mixing` tells how much).
        window_ranks: the number of ranks the window is dealt for, part of the recipe and of the curve. Used
            with `global_batch` only; None takes one rank for every 8 samples of the global batch.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.integer],
        *,
        global_batch: int | None = None,
        global_tokens: int | None = None,
        seed: int = 0,
        groups: Sequence[int] | npt.NDArray[np.integer] | None = None,
        shuffle_rows: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        window: int = 1,
        window_ranks: int | None = None,
    ) -> None:
        # As they are: those of billions of rows lie in a file that all processes of a machine share.
        self.lengths = checked_lengths(lengths)
        _check_recipe(
            global_batch=global_batch,
            global_tokens=global_tokens,
            seed=seed,
            window=window,
            window_ranks=window_ranks,
            shuffle_rows=shuffle_rows,
        )
        self.global_batch = global_batch
        self.global_tokens = global_tokens
        self.seed = int(seed)
        self.groups = None if groups is None else _checked_groups(groups, num_rows=len(self.lengths))
        self.shuffle_rows = shuffle_rows
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.window = window
        self.window_ranks = window_ranks or max(1, (global_batch or 1) // SAMPLES_A_RANK)
        self._epochs: dict[int, tuple[IntArray | None, IntArray]] = {}
        self._dealt: dict[tuple[int, int], list[IntArray]] = {}
        self._epoch_starts = [0]
        if self.steps_in_epoch(0) == 0:
            raise PlanError(
                "An epoch has no complete global batch, and drop_last leaves out the incomplete one.",
                got=f"{len(self.lengths)} samples, {int(self.lengths.sum())} tokens",
                next_step="set drop_last=False or make the global batch smaller",
            )

    def batch(self, step: int) -> IntArray:
        """Row numbers of the global batch of this step."""
        epoch, step_in_epoch = self.locate(step)
        if self.window > 1:
            return self._window(epoch, step_in_epoch // self.window)[step_in_epoch % self.window].copy()
        order, bounds = self._epoch(epoch)
        return _rows(order, int(bounds[step_in_epoch]), int(bounds[step_in_epoch + 1]))

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step and its place in that epoch."""
        if step < 0:
            raise PlanError("Steps count from 0.", got=step)
        if self.global_batch is not None:
            return divmod(step, self.steps_in_epoch(0))
        while self._epoch_starts[-1] <= step:
            self._append_epoch_start()
        epoch = int(np.searchsorted(self._epoch_starts, step, side="right")) - 1
        return epoch, step - self._epoch_starts[epoch]

    def steps_in_epoch(self, epoch: int) -> int:
        """Steps of this epoch; the same for all epochs unless batches are defined by tokens."""
        if self.global_batch is None:
            return self.first_step(epoch + 1) - self.first_step(epoch)
        num_full, rest = divmod(len(self.lengths), self.global_batch)
        return num_full + (1 if rest and not self.drop_last else 0)

    def first_step(self, epoch: int) -> int:
        """The step, counted over all epochs, with which an epoch begins."""
        if epoch < 0:
            raise PlanError("Epochs count from 0.", got=epoch)
        if self.global_batch is not None:
            return epoch * self.steps_in_epoch(0)
        while len(self._epoch_starts) <= epoch:
            self._append_epoch_start()
        return self._epoch_starts[epoch]

    def some_steps(self, count: int) -> list[int]:
        """So many steps that tell what others will be like, and the last of an epoch, which may be short."""
        steps = self.steps_in_epoch(0)
        return sorted({*range(min(steps, count)), steps - 1})

    def lengths_of(self, rows: IntArray) -> IntArray:
        """Tokens of these rows."""
        return self.lengths[rows].astype(np.int64, copy=False)

    def targets_of(self, rows: IntArray) -> IntArray:
        """Tokens with a loss of these rows: all."""
        return self.lengths_of(rows)

    def mixing(self, *, first_step: int = 0, num_steps: int = 64) -> Mixing:
        """How unlike the batches of these steps are."""
        batches = [self.lengths_of(self.batch(step)) for step in range(first_step, first_step + num_steps)]
        counts = np.array([len(batch) for batch in batches], dtype=np.float64)
        tokens = np.array([batch.sum() for batch in batches], dtype=np.float64)
        logs = [np.log1p(batch.astype(np.float64)) for batch in batches]
        every = np.concatenate(logs)
        between = sum(len(log) * (float(log.mean()) - float(every.mean())) ** 2 for log in logs)
        total = float(np.square(every - every.mean()).sum())
        return Mixing(
            fewest=float(counts.min() / counts.mean()),
            most=float(counts.max() / counts.mean()),
            most_tokens=float(tokens.max() / max(tokens.mean(), 1.0)),
            sorted_share=between / total if total > 0 else 0.0,
        )

    def recipe(self) -> dict[str, Any]:
        """Everything that decides the batches, as plain values: equal recipes make equal batches."""
        by_length = self.global_tokens is not None or self.window > 1
        streaming = self.groups is not None and self.shuffle_rows is not None
        return {
            "num_rows": len(self.lengths),
            "global_batch": self.global_batch,
            "global_tokens": self.global_tokens,
            "seed": self.seed,
            "drop_last": self.drop_last,
            **({} if self.shuffle else {"shuffle": False}),
            "shuffle_rows": self.shuffle_rows if streaming else None,
            "groups": _digest(self.groups) if streaming and self.groups is not None else None,
            "window": self.window,
            "window_ranks": self.window_ranks if self.window > 1 and self.global_batch is not None else None,
            "lengths": _digest(self.lengths) if by_length else None,
        }

    def _append_epoch_start(self) -> None:
        epoch = len(self._epoch_starts) - 1
        _, bounds = self._epoch(epoch)
        self._epoch_starts.append(self._epoch_starts[-1] + len(bounds) - 1)

    def _epoch(self, epoch: int) -> tuple[IntArray | None, IntArray]:
        """Row order (None: as rows stand) and batch bounds of an epoch; it and one neighbour stay in memory."""
        if epoch not in self._epochs:
            order = None
            if self.shuffle:
                order = epoch_order(
                    len(self.lengths),
                    seed=self.seed,
                    epoch=epoch,
                    groups=None if self.groups is None else self.groups.astype(np.int64, copy=False),
                    shuffle_rows=self.shuffle_rows,
                )
            while len(self._epochs) > 1:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = (order, self._bounds(order))
        return self._epochs[epoch]

    def _bounds(self, order: IntArray | None) -> IntArray:
        num_rows = len(self.lengths)
        if self.global_batch is not None:
            starts = np.arange(0, num_rows + 1, self.global_batch, dtype=np.int64)
            keep_rest = not self.drop_last and starts[-1] < num_rows
            return np.append(starts, num_rows) if keep_rest else starts
        assert self.global_tokens is not None
        ends = np.cumsum(self.lengths if order is None else self.lengths[order], dtype=np.int64)
        bounds = [0]
        while bounds[-1] < num_rows:
            before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
            stop = int(np.searchsorted(ends, before + self.global_tokens, side="right"))
            bounds.append(max(stop, bounds[-1] + 1))
        last_tokens = int(ends[-1]) - (int(ends[bounds[-2] - 1]) if bounds[-2] else 0)
        if self.drop_last and last_tokens < self.global_tokens:
            bounds.pop()
        return np.asarray(bounds, dtype=np.int64)

    def _window(self, epoch: int, number: int) -> list[IntArray]:
        """The steps of one window, long samples together; the last two windows stay in memory."""
        key = (epoch, number)
        if key not in self._dealt:
            order, bounds = self._epoch(epoch)
            ends = bounds[number * self.window : (number + 1) * self.window + 1]
            steps = [_rows(order, start, stop) for start, stop in itertools.pairwise(ends.tolist())]
            while len(self._dealt) > 1:
                self._dealt.pop(next(iter(self._dealt)))
            self._dealt[key] = self._deal(steps, epoch=epoch, number=number)
        return self._dealt[key]

    def _deal(self, steps: list[IntArray], *, epoch: int, number: int) -> list[IntArray]:
        draw = (self.seed, epoch, number)
        if self.global_tokens is not None:
            return deal_by_tokens(steps, self.lengths, max_tokens=self.global_tokens, draw=draw)
        return deal_by_count(steps, self.lengths, num_ranks=self.window_ranks, draw=draw)


def _rows(order: IntArray | None, start: int, stop: int) -> IntArray:
    """Rows of a part of an epoch."""
    return np.arange(start, stop, dtype=np.int64) if order is None else order[start:stop].copy()


def _digest(values: npt.NDArray[np.integer]) -> str:
    """The same for the same numbers, however wide they are stored."""
    return hashlib.blake2b(np.ascontiguousarray(values, np.int64).tobytes(), digest_size=8).hexdigest()


def _check_recipe(
    *,
    global_batch: int | None,
    global_tokens: int | None,
    seed: int,
    window: int,
    window_ranks: int | None,
    shuffle_rows: int | None,
) -> None:
    if (global_batch is None) == (global_tokens is None):
        raise PlanError(
            "A global batch is defined either by samples or by tokens.",
            got=f"global_batch={global_batch}, global_tokens={global_tokens}",
            allowed="exactly one of the two",
        )
    named = {
        "global_batch": global_batch,
        "global_tokens": global_tokens,
        "window": window,
        "window_ranks": window_ranks,
        "shuffle_rows": shuffle_rows,
    }
    for name, value in named.items():
        if value is not None and value < 1:
            raise PlanError(f"{name} must be at least 1.", got=value)
    if seed < 0:
        raise PlanError("The seed must not be negative.", got=seed)


def _checked_groups(
    groups: Sequence[int] | npt.NDArray[np.integer], *, num_rows: int
) -> npt.NDArray[np.integer]:
    sizes = checked_lengths(groups)
    if int(sizes.sum()) != num_rows:
        raise PlanError(
            "Group sizes must add up to the number of samples.",
            got=f"{int(sizes.sum())} rows in groups, {num_rows} samples",
        )
    return sizes
