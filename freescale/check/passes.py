"""One forward and backward of a model over some samples, as a rank would do it; rules compare such passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data import Examples, SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model import Recommender, dropout_keys
from freescale.pipeline import ids_of, with_indices

NUM_SAMPLES = 8
SEED = 20_240_229


@dataclass(frozen=True)
class Pass:
    """What a pass gave.

    Args:
        loss: what the head returned.
        states: [T, D] what the encoder returned.
        gradients: of parameters by name; None where none came.
        rows: [U, D] gradient of every item vector of the subject, whether the pass used it or not; None if none came.
    """

    loss: Tensor
    states: Tensor
    gradients: dict[str, Tensor | None]
    rows: Tensor | None

    @property
    def scale(self) -> float:
        """Size of the largest gradient: one that is zero but for rounding is as good as zero."""
        there = [grad for grad in (*self.gradients.values(), self.rows) if grad is not None and grad.numel()]
        return max((float(grad.abs().max()) for grad in there), default=0.0)


class Subject:
    """A model and some real samples, in double precision where the model can.

    Args:
        model: encoder and head; it is copied before every pass and never changed.
        batch: samples, on the CPU, with ids.
        dim: width of item vectors.
        device: where to compute.
        dtype: of weights and item vectors.
    """

    def __init__(
        self,
        model: Recommender,
        batch: SequenceBatch,
        *,
        dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model = without_torch_dropout(copy.deepcopy(model).to(device=device, dtype=dtype)).train()
        self.batch, self.device, self.dtype = batch, device, dtype
        self.ids = torch.cat([ids.flatten() for ids in ids_of(batch)]).unique()
        drawn = torch.Generator().manual_seed(SEED)
        vectors = 0.1 * torch.randn(len(self.ids), dim, generator=drawn, dtype=torch.float64)
        self.table = vectors.to(device=device, dtype=dtype)

    @property
    def tolerance(self) -> float:
        """How far two ways to the same number may be apart, relative to its size."""
        return 1e-9 if self.dtype == torch.float64 else 1e-3

    def fresh(self) -> Recommender:
        """The model as it was given, in training mode."""
        return copy.deepcopy(self.model)

    def rows_of(self, batch: SequenceBatch) -> tuple[Tensor, SequenceBatch, Tensor]:
        """The unique item vectors of a batch as a leaf, the batch with indices into them, where they stand here."""
        ids, inverse = torch.cat([each.flatten() for each in ids_of(batch)]).unique(return_inverse=True)
        places = torch.searchsorted(self.ids, ids).to(self.device)
        indexed = _copied(with_indices(batch, inverse).to(self.device))
        return self.table[places].clone().requires_grad_(), indexed, places

    def run(self, batch: SequenceBatch, *, model: Recommender | None = None, seed: int = 1) -> Pass:
        """Forward and backward over a batch; torch's random numbers begin from `seed`."""
        model = self.fresh() if model is None else model
        rows, indexed, places = self.rows_of(batch)
        loss, states = self.learn(model, rows, indexed, seed=seed)
        gradients = {
            name: None if param.grad is None else param.grad.detach().clone()
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        spread = None
        if rows.grad is not None:
            spread = torch.zeros_like(self.table).index_copy(0, places, rows.grad)
        return Pass(loss.detach(), states.detach(), gradients, spread)

    def learn(
        self, model: Recommender, rows: Tensor, indexed: SequenceBatch, *, seed: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Loss and states of what `rows_of` gives; gradients are in the model and the rows afterwards."""
        layout = SequenceLayout(indexed.offsets, device=self.device)
        torch.manual_seed(seed)
        with keyed(indexed):
            states, seen = model.encode(rows, indexed, layout)
            check_states(states, indexed, width=rows.shape[1])
            loss = model.head.loss(states, seen, indexed, layout)
            check_loss(loss)
            loss.backward()
        return loss, states

    def states(self, batch: SequenceBatch, *, seed: int = 1) -> Tensor:
        """What the encoder makes of a batch with indices (of `rows_of` of the whole)."""
        batch = _copied(batch)
        layout = SequenceLayout(batch.offsets, device=self.device)
        torch.manual_seed(seed)
        with torch.no_grad(), keyed(batch):
            return self.fresh().encode(self.table, batch, layout)[0]

    def indexed(self) -> SequenceBatch:
        """The whole batch with indices into the table."""
        ids = torch.cat([each.flatten() for each in ids_of(self.batch)])
        return with_indices(self.batch, torch.searchsorted(self.ids, ids)).to(self.device)

    def singles(self) -> list[SequenceBatch]:
        """Every sample as a batch of its own."""
        return [self.batch.select([n]) for n in range(len(self.batch))]


class BadOutputError(Exception):
    """An encoder or a head returned something that is no states or no loss; the text is the sentence."""


def check_states(states: object, batch: SequenceBatch, *, width: int) -> None:
    """Raise unless there is one state a token."""
    if not isinstance(states, Tensor):
        raise BadOutputError(f"your encoder returned a {type(states).__name__}: return one tensor of states")
    wanted = (batch.num_tokens, width)
    if tuple(states.shape) != wanted:
        raise BadOutputError(
            f"your encoder returned {list(states.shape)}: return one state a token, {list(wanted)}, "
            "in the order of the tokens"
        )


def check_loss(loss: object) -> None:
    """Raise unless this is one finite number with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise BadOutputError(f"your loss is {shape}: return one number, the sum over all targets")
    if not loss.requires_grad:
        raise BadOutputError("your loss has no gradient: it must be computed by torch from states and rows")
    if not bool(torch.isfinite(loss).all()):
        raise BadOutputError(f"your loss is {loss.detach().item()} on real samples with small random weights")


def keyed(batch: SequenceBatch) -> AbstractContextManager[None]:
    """Masks of `freescale.Dropout` follow the sample, as in training."""
    return dropout_keys(seed=SEED, step=0, batch=batch)


def _copied(batch: SequenceBatch) -> SequenceBatch:
    """With columns of its own: code that writes into them shows, and spoils no other pass."""
    tokens = {name: values.clone() for name, values in batch.tokens.items()}
    samples = {name: values.clone() for name, values in batch.samples.items()}
    return batch.with_tokens(**tokens).with_samples(**samples)


def choose_batch(examples: Examples, *, max_samples: int = NUM_SAMPLES) -> SequenceBatch:
    """Real training samples of different lengths, short ones and long ones; the same for the same data."""
    lengths = examples.lengths()
    usable = np.flatnonzero(lengths > 0)
    order = usable[np.argsort(lengths[usable], kind="stable")]
    wanted = np.unique(np.linspace(0, len(order) - 1, min(max_samples, len(order))).round().astype(np.int64))
    # Not in the order of their lengths: code that only works when sorted must show.
    rows = order[wanted]
    return examples.batch(np.concatenate([rows[1::2], rows[::2]]), step=0)


def without_torch_dropout(model: Recommender) -> Recommender:
    """The model with torch's own dropout off, whose masks would hide everything else; a rule of its own names it."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def distance(one: Tensor | None, other: Tensor | None, *, scale: float = 0.0) -> float:
    """Largest difference, relative to the largest number or to a larger `scale`; a missing gradient is zero."""
    if one is None or other is None:
        there = other if one is None else one
        return 0.0 if there is None else distance(there, torch.zeros_like(there), scale=scale)
    if one.shape != other.shape:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    scale = max(float(one.abs().max()), float(other.abs().max()), scale, 1e-30)
    return float((one - other).abs().max()) / scale


def summed(values: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there."""
    there = [value for value in values if value is not None]
    return torch.stack(there).sum(0) if there else None
