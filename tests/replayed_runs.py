"""Runs on a CPU whose steps are replayed: computed again over the memory of the batch they were recorded with.

A CUDA graph reads fixed places; what the host knew of the batch at hand when it was recorded is in it for ever. So a
replay here makes views of the recorded batch anew, lets nothing more be brought to them, copies another batch's parcel
over theirs, and computes. A step that looks at anything but that memory then comes out wrong. Attention and dropout on
a CPU read lengths of the host, so encoder and head are plain ones, made of what is on the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.kernels.rows import take
from freescale.kernels.runtime import linear
from freescale.model import Recommender, RetrievalHead
from freescale.pipeline import PaddedBatch
from freescale.recipe import assembly
from freescale.train.compute.padded_compute import PaddedCompute
from freescale.train.compute.recorder import CutGraph, Recorder
from freescale.train.compute.recordings import Recording
from tests import padded_runs

build_model = assembly.build_model


class Neighbours(nn.Module):
    """An encoder: a token hears of the one before it, of its position and of its time."""

    takes_pads = True

    def __init__(self, dim: int, longest: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * dim, dim)
        self.position = nn.Parameter(torch.randn(longest, dim) * 0.1)

    def forward(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token."""
        before = torch.where(layout.positions[:, None] > 0, vectors_TD.roll(1, dims=0), 0)
        hour = (batch.tokens["time"] % 86_400 / 86_400).to(vectors_TD.dtype)
        x = torch.cat([vectors_TD + take(self.position, layout.positions), before], dim=1)
        mixed = linear(x, self.mix.weight, self.mix.bias)  # whose gradients can wait
        return torch.tanh(mixed * (1 + hour[:, None]))


class PlainSoftmax(RetrievalHead):
    """A head: the next item against the negatives of the sample."""

    takes_pads = True

    def loss(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """Sum over tokens; pads have none."""
        negatives = batch.samples["negative_index"].index_select(0, layout.sequence_of_token)
        asked = torch.cat([batch.tokens["target_index"][:, None], negatives], dim=1)
        logits = torch.einsum("td,tnd->tn", states_TD, take(rows_UD, asked))
        real = torch.arange(len(logits)) < layout.device_offsets[-1]
        return torch.where(real, -logits.log_softmax(1)[:, 0], 0).sum()


def plain_model(config: Any, *given: Any, **named: Any) -> Recommender:
    """Takes the place of `build_model` in `recipe.assembly`."""
    model = build_model(config, *given, **named)
    longest = config.data.max_length * 2 + 4
    torch.manual_seed(1)
    kind = next(model.parameters()).dtype
    return Recommender(
        encoder=Neighbours(config.model.dim, longest).to(kind),
        head=PlainSoftmax(),
        items=model.items,
        tokens=model.tokens,
    )


class Again:
    """What takes the place of a graph."""

    def __init__(self, work: Any) -> None:
        self.replay = work


class AgainRecorder(Recorder):
    """Records work as what does it again."""

    on = True  # type: ignore[assignment]

    def record(self, work: Any) -> Any:
        """Whatever it was, again."""
        return Again(work)


def record_again(
    self: PaddedCompute, padded: PaddedBatch, memory: Tensor, again: PaddedBatch
) -> Recording | None:
    """Takes the place of `PaddedCompute._record`."""
    room = self._room(padded)

    def replay() -> None:
        content = memory.clone()
        views = padded.again(memory).views
        views.layout.seal()
        memory.copy_(content)
        self._compute(room, views)
        if self.later is not None:
            self.later.groups(self._gradients.direct)

    graph: Any = CutGraph(None, Again(replay))  # type: ignore[arg-type]
    later: list[Any] = []
    if self.later is not None:
        self._gradients.compute(room, padded.views)
        for num_weights, pieces in self.later.groups(self._gradients.direct):
            self.later.compute(num_weights)
            later.append((Again(partial(self.later.compute, num_weights)) if num_weights else None, pieces))
    return Recording([graph], memory, again, later)


def replay_steps(monkeypatch: Any, *, replayed: bool) -> None:
    """From now on runs pad their batches, and replay them where `replayed`."""
    monkeypatch.setattr(assembly, "build_model", plain_model)
    monkeypatch.setattr(assembly, "build_capture", padded_runs.padded_capture)
    if replayed:
        monkeypatch.setattr(padded_runs, "Recorder", AgainRecorder)
        monkeypatch.setattr(PaddedCompute, "_record", record_again)
