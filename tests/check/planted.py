"""Encoders, heads and sources that break one rule each, as people do; and the same without a mistake."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from freescale.model import Needs, RetrievalHead
from tests.list_source import ListSource

DIM = 6


def padded_of(vectors, batch):
    return nn.utils.rnn.pad_sequence(vectors.split(batch.lengths.tolist()), batch_first=True)


def inside(batch, longest):
    return torch.arange(longest) < batch.lengths[:, None]


class Gru(nn.Module):
    """Without a mistake."""

    def __init__(self, bidirectional=False):
        super().__init__()
        width = DIM // 2 if bidirectional else DIM
        self.gru = nn.GRU(DIM, width, batch_first=True, bidirectional=bidirectional)

    def forward(self, vectors, batch, layout):
        padded = self.before(padded_of(vectors, batch), batch)
        return self.gru(padded)[0][inside(batch, padded.shape[1])]

    def before(self, padded, batch):
        return padded


class BatchNormed(Gru):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, vectors, batch, layout):
        return super().forward(self.norm(vectors), batch, layout)


class StatelessBatchNorm(BatchNormed):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM, track_running_stats=False)


class DividedByPadding(Gru):
    def before(self, padded, batch):
        return padded / padded.shape[1]


class LessTheMean(Gru):
    def forward(self, vectors, batch, layout):
        return super().forward(vectors - vectors.mean(0), batch, layout)


class NumpyNoise(Gru):
    def before(self, padded, batch):
        return padded * (1 + 0.1 * np.random.rand())


class PythonNoise(Gru):
    def before(self, padded, batch):
        return padded * (1 + 0.1 * random.random())


class OwnGenerator(Gru):
    def before(self, padded, batch):
        return padded * (1 + 0.1 * np.random.default_rng().random())


class FunctionalDropout(Gru):
    def before(self, padded, batch):
        return F.dropout(padded, 0.5, self.training)


class TorchDropout(Gru):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def before(self, padded, batch):
        return self.drop(padded)


class CountsItsCalls(Gru):
    calls = 0

    def before(self, padded, batch):
        self.calls += 1
        return padded * self.calls


class RunningMean(Gru):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def before(self, padded, batch):
        self.mean += 0.1 * padded.detach().mean((0, 1))
        return padded


class WritesIntoTheBatch(Gru):
    def before(self, padded, batch):
        batch.tokens["item"].add_(1)
        return padded


class Bidirectional(Gru):
    def __init__(self):
        super().__init__(bidirectional=True)


class ReadsTheTarget(Gru):
    def forward(self, vectors, batch, layout):
        return super().forward(vectors, batch, layout) + 0.01 * batch.tokens["target_index"][:, None]


class UnusedWeights(Gru):
    def __init__(self):
        super().__init__()
        self.later = nn.Linear(DIM, DIM)


class OnlyForLongHistories(Gru):
    def __init__(self):
        super().__init__()
        self.long = nn.Linear(DIM, DIM)

    def before(self, padded, batch):
        return self.long(padded) if padded.shape[1] > 3 else padded


class NoEmptyHistories(Gru):
    def forward(self, vectors, batch, layout):
        assert int(batch.lengths.min()) > 0, "packed sequences need events"
        return super().forward(vectors, batch, layout)


class WrongShape(Gru):
    def forward(self, vectors, batch, layout):
        return padded_of(vectors, batch)


class WrongWidth(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(DIM + 1, DIM + 1)

    def forward(self, vectors, batch, layout):
        return self.mix(vectors)


def softmax_sum(head, states, rows, batch, reduction="sum"):
    users, items = head.queries(states), head.candidates(rows)
    sample = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    right = (users * items[batch.tokens["target_index"]]).sum(-1, keepdim=True)
    wrong = torch.einsum("td,tnd->tn", users, items[batch.samples["negative_index"][sample]])
    logits = torch.cat([right, wrong], 1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction=reduction)


class OwnSoftmax(RetrievalHead):
    """Without a mistake."""

    def loss(self, states, rows, batch, layout):
        return softmax_sum(self, states, rows, batch)


class MeanLoss(RetrievalHead):
    def loss(self, states, rows, batch, layout):
        return softmax_sum(self, states, rows, batch, "mean")


class MeanOverSamples(RetrievalHead):
    def loss(self, states, rows, batch, layout):
        return softmax_sum(self, states, rows, batch) / len(batch)


class InBatchNegatives(RetrievalHead):
    needs = Needs()

    def loss(self, states, rows, batch, layout):
        logits = self.queries(states) @ self.candidates(rows).T
        return F.cross_entropy(logits, batch.tokens["target_index"], reduction="sum")


class OneLossATarget(RetrievalHead):
    def loss(self, states, rows, batch, layout):
        return softmax_sum(self, states, rows, batch, "none")


class AConstantASample(RetrievalHead):
    def loss(self, states, rows, batch, layout):
        return softmax_sum(self, states, rows, batch) + len(batch)


class Detached(RetrievalHead):
    def loss(self, states, rows, batch, layout):
        return softmax_sum(self, states.detach(), rows.detach(), batch)


HISTORIES = [[(7 * user + 3 * n * n) % 40 for n in range(4 + user % 7)] for user in range(30)]


class Lists(ListSource):
    """Without a mistake."""

    def __init__(self):
        super().__init__(HISTORIES, features=("item",))


class ReadsOtherwiseTwice(Lists):
    reads = 0

    def read(self, rows):
        self.reads += 1
        found = super().read(rows)
        found.columns["item"][:] = (
            found.columns["item"][::-1].copy() if self.reads % 2 else found.columns["item"]
        )
        return found


class DependsOnNeighbours(Lists):
    def read(self, rows):
        found = super().read(rows)
        found.columns["item"][:] = (found.columns["item"] + min(rows)) % 40
        return found


class WrongLengths(Lists):
    @property
    def lengths(self):
        return super().lengths + 1


class UnknownItems(Lists):
    def read(self, rows):
        found = super().read(rows)
        found.columns["item"][:] += 1000
        return found


class CannotTravel(Lists):
    def __init__(self):
        super().__init__()
        self.how = lambda: None
