"""From histories to training and evaluation batches: the split, the cut, targets and negatives.

A history of n events is split by its end (leave-one-out): the last event is the test target, the one before it the
validation target, and the rest is for training. An example with k known events holds k inputs and, at every position,
the next event as target:

    split    inputs          target of the last position
    train    0 .. n-4        n-3
    valid    0 .. n-3        n-2
    test     0 .. n-2        n-1

A `SplitSource` says itself where targets stand: see `temporal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.data.features.feature_batch import BatchFeatures
from freescale.data.negatives import draw_negatives
from freescale.data.source import Histories, IntArray, SequenceSource, Split, SplitSource
from freescale.data.stored.item_texts import item_numbers
from freescale.jagged import spans
from freescale.kernels.rows import unique

HELD_BACK: dict[Split, int] = {"train": 2, "valid": 1, "test": 0}


def input_lengths(lengths: IntArray, *, split: Split, max_length: int) -> IntArray:
    """Number of inputs each history gives in a split, after the cut; 0 where it is too short to give any."""
    return np.clip(np.asarray(lengths) - HELD_BACK[split] - 1, 0, max_length)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Makes batches of one split from a source; picklable, so that loader processes can hold it.

    Args:
        source: where histories come from.
        split: "train", "valid" or "test".
        max_length: inputs kept, the latest ones.
        use_time: add "time" and "target_time" where the data has time stamps.
        num_negatives: negatives a sample; 0 for none.
        seed: seed of the negatives.
        features: makes the features of a schema; None for item, time and action alone.
    """

    source: SequenceSource
    split: Split = "train"
    max_length: int = 200
    use_time: bool = True
    num_negatives: int = 0
    seed: int = 0
    features: BatchFeatures | None = None

    def lengths(self) -> IntArray:
        """Inputs of every example of this split, by row, without reading a history."""
        if isinstance(self.source, SplitSource):
            return np.clip(self.source.ends(self.split) - 1, 0, self.max_length)
        return input_lengths(self.source.lengths, split=self.split, max_length=self.max_length)

    @property
    def groups(self) -> IntArray:
        """Rows of each run that is stored together."""
        return self.source.groups

    def missed(self) -> npt.NDArray[np.bool_]:
        """Rows whose target is an item that nothing was learnt of: it cannot be recommended, and there is no batch."""
        if isinstance(self.source, SplitSource):
            return self.source.missed(self.split)
        return np.zeros(len(self.source.lengths), dtype=bool)

    def batch(self, rows: Sequence[int] | IntArray, *, step: int = 0) -> SequenceBatch:
        """The examples of these rows as one jagged batch."""
        rows = np.asarray(rows, dtype=np.int64)
        histories = self.source.read(rows)
        known = self._known(histories, rows)
        inputs = np.minimum(known, self.max_length)
        index, offsets = spans(histories.offsets[:-1] + known - inputs, inputs)
        tokens = self._token_features(histories, index)
        samples = {"row": torch.from_numpy(rows)}
        if self.features is not None:
            tokens |= as_tensors(self.features.tokens(histories, index))
            samples |= as_tensors(self.features.samples(histories))
        if self.num_negatives:
            samples["negatives"] = torch.from_numpy(self._negatives(rows, step))
        batch = SequenceBatch(offsets=torch.from_numpy(offsets), tokens=tokens, samples=samples)
        return batch if self.features is None else with_unique_items(batch, self.features)

    def seen(self, rows: Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
        """(offsets, items) of everything these users did before the target of this split, uncut."""
        rows = np.asarray(rows, dtype=np.int64)
        histories = self.source.read(rows)
        index, offsets = spans(histories.offsets[:-1], self._known(histories, rows))
        return offsets, histories.columns["item"][index].astype(np.int64)

    def part(self, rows: Sequence[int] | IntArray) -> Histories:
        """What these users did up to the target of this split, the target included, uncut; nothing without one."""
        rows = np.asarray(rows, dtype=np.int64)
        histories = self.source.read(rows)
        known = self._known(histories, rows)
        index, offsets = spans(histories.offsets[:-1], np.where(known > 0, known + 1, 0))
        columns = {name: values[index] for name, values in histories.columns.items()}
        return replace(histories, offsets=offsets, columns=columns)

    def _known(self, histories: Histories, rows: IntArray) -> IntArray:
        """How many events of each history stand before its target."""
        if isinstance(self.source, SplitSource):
            return np.maximum(self.source.ends(self.split)[rows] - 1, 0)
        return np.maximum(histories.lengths - HELD_BACK[self.split] - 1, 0)

    def _token_features(self, histories: Histories, index: IntArray) -> dict[str, torch.Tensor]:
        columns = histories.columns
        wanted = {"item": ("item", index), "target": ("item", index + 1)}
        if self.use_time and "time" in columns:
            wanted |= {"time": ("time", index), "target_time": ("time", index + 1)}
        # An action may be a feature of another kind: then it is made with the others.
        if "action" in columns and "action" in self.source.features:
            wanted |= {"action": ("action", index), "target_action": ("action", index + 1)}
        return {
            name: torch.from_numpy(columns[column][where].copy()) for name, (column, where) in wanted.items()
        }

    def _negatives(self, rows: IntArray, step: int) -> IntArray:
        ids = self.source.items.ids
        drawn = draw_negatives(
            rows, num_negatives=self.num_negatives, num_items=len(ids), seed=self.seed, step=step
        )
        return ids[drawn]


def with_unique_items(batch: SequenceBatch, features: BatchFeatures) -> SequenceBatch:
    """The batch with what is known of its items, once for each of them."""
    tokens, samples = batch.tokens, batch.samples
    parts = {"item": tokens["item"]}
    if tokens["target"] is not tokens["item"]:  # of requests they are the same
        parts["target"] = tokens["target"]
    if "negatives" in samples:
        parts["negatives"] = samples["negatives"]
    ids, index = unique(torch.cat([part.flatten() for part in parts.values()]))
    found = dict(zip(parts, index.split([part.numel() for part in parts.values()])))
    batch = batch.with_tokens(item_index=found["item"], target_index=found.get("target", found["item"]))
    if "negatives" in found:
        batch = batch.with_samples(negative_index=found["negatives"].view(samples["negatives"].shape))
    if not features.of_items:
        # A log has another catalogue with every window, and ids are all that is known of an item there.
        return batch.with_items(item=ids)
    numbers = item_numbers(features.source.items.ids, ids.numpy())
    return batch.with_items(**as_tensors(features.items(numbers)))


def as_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Named arrays as tensors, those in one piece without a copy."""
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
