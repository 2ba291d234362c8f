"""Dropout whose masks are keyed by (seed, step, sample, position, site, column): the same on any number of ranks.

A module is called like torch's. What it must know beside x is where it stands, and whose numbers it is given:

    site                a number, given to every Dropout of a model when a `Recommender` is made of it
    seed, step          told by the training step, for all that happens in it
    sample, position    told by `Recommender.forward`, for the batch or micro-batch that goes through it

So a module of your own only calls `Dropout(p)`. Outside of a training step, tell it yourself:

    with dropout_keys(seed=1, step=step, batch=batch):
        loss = model(rows, batch)
        loss.backward()

The keys of a batch are made when a mask is first drawn from them, and serve all sites. They stay until the next batch
of the step, so that what a checkpoint of activations computes again in the backward finds them. A `Dropout` that is
called twice for a batch draws the same mask twice; two masks are two modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.errors import ConfigError, FreeScaleError
from freescale.kernels import SequenceLayout
from freescale.kernels.dropout import (
    Masked,
    dropout,
    key_of_step,
    masked,
    padded_keys,
    sample_keys,
    token_keys,
)

Rows = Literal["tokens", "padded", "samples"]


class Dropout(nn.Module):
    """Sets a share p of its input to zero in training and divides the rest by 1 - p.

    Args:
        p: the share, 0 <= p < 1.
        rows: what the first dimension of the input is: "tokens" of a jagged batch [T, ...], "padded" sequences
            [B, longest, ...], or "samples" [B, ...]. Tokens fall alike padded or not.
        site: number of the place in the model; a `Recommender` gives one to each of its own.

    Examples:
        >>> drop = Dropout(0.1)                  # anywhere in an encoder or a head
        >>> y = drop(x)                          # [T, D]
    """

    def __init__(self, p: float = 0.5, *, rows: Rows = "tokens", site: int | None = None) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError("dropout is a share of what goes through it", got=p, allowed="0 <= p < 1")
        if rows not in get_args(Rows):
            raise ConfigError("unknown rows of a Dropout", got=rows, allowed=", ".join(get_args(Rows)))
        self.p, self.rows, self.site = p, rows, site

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """The same shape and type as x.

        Args:
            x: what falls.
            keys: int64, one a row of x; those of the current batch unless given.
        """
        mask = self.mask(x.shape, keys)
        if mask is None:
            return x
        return dropout(x.flatten(0, 1) if self.rows == "padded" else x, mask).view(x.shape)

    def mask(self, shape: torch.Size, keys: Tensor | None = None) -> Masked | None:
        """What would be drawn for an input of this shape, for kernels that drop on their way; None: nothing."""
        if not self.training or self.p == 0:
            return None
        keys = _keys_of_batch(self.rows) if keys is None else keys
        if shape[: keys.dim()] != keys.shape:
            raise FreeScaleError(
                "dropout got other rows than those of the current batch",
                got=f"an input {tuple(shape)} for {tuple(keys.shape)} {self.rows}",
                next_step='say what its first dimension is: Dropout(p, rows="tokens", "padded" or "samples")',
            )
        if self.site is None:
            raise FreeScaleError(
                "dropout does not know where in a model it stands",
                next_step="put the module into a Recommender, or give it a number: Dropout(p, site=0)",
            )
        return masked(keys.flatten(), p=self.p, site=self.site)

    def extra_repr(self) -> str:
        """What a printed model says of it."""
        return f"p={self.p}, rows={self.rows}, site={self.site}"


def number_sites(model: nn.Module) -> None:
    """Give every Dropout of a model its number, in the order of its modules."""
    found = (module for module in model.modules() if isinstance(module, Dropout))
    for number, module in enumerate(found):
        module.site = number


def drawn_by_rank(model: nn.Module) -> list[str]:
    """One sentence where modules of a model draw torch's own masks, which follow the rank instead of the sample."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    names = [
        name
        for name, each in model.named_modules()
        if (isinstance(each, kinds) and each.p > 0)
        or (isinstance(each, nn.MultiheadAttention) and each.dropout > 0)
        or (isinstance(each, nn.RNNBase) and each.dropout > 0 and each.num_layers > 1)
    ]
    if not names:
        return []
    return [
        f"torch's dropout in {', '.join(names)} draws masks by rank: the curve depends on the number of ranks and on "
        "micro-batches; freescale.Dropout does not"
    ]


class _BatchKeys:
    """The keys of one batch, made when they are first asked for.

    Args:
        step: the step it belongs to.
        samples: [B] what names each sample; None where the batch does not tell.
        layout: where they stand.
    """

    def __init__(self, step: _Step, samples: Tensor | None, layout: SequenceLayout) -> None:
        self._step, self._samples, self._layout = step, samples, layout

    @cached_property
    def tokens(self) -> Tensor:
        return token_keys(self._key, self._named, self._layout)

    @cached_property
    def padded(self) -> Tensor:
        return padded_keys(self._key, self._named, self._layout.longest)

    @cached_property
    def samples(self) -> Tensor:
        return sample_keys(self._key, self._named)

    @property
    def _key(self) -> Tensor:
        return self._step.key(self._named.device)

    @property
    def _named(self) -> Tensor:
        if self._samples is None:
            raise FreeScaleError(
                "dropout cannot tell the samples of this batch apart",
                got='a batch without samples["row"]',
                next_step="give it one number a sample that no rank can change: batch.with_samples(row=...)",
            )
        return self._samples


class _Step:
    """The step under way: its key, and the batch that goes through the model or went through it last."""

    def __init__(self, key: Tensor | int) -> None:
        self._key = key
        self.batch: _BatchKeys | None = None
        self.depth = 0

    def key(self, device: torch.device) -> Tensor:
        """[1] the key where a batch is; filled in there, as a copy would wait for the device."""
        if isinstance(self._key, int):
            return torch.full((1,), self._key, dtype=torch.int64, device=device)
        return self._key


_step: ContextVar[_Step | None] = ContextVar("freescale_dropout_step", default=None)


@contextmanager
def dropout_step(key: Tensor | int) -> Iterator[None]:
    """Everything inside belongs to one training step.

    Args:
        key: of the step. As a tensor, [1] int64 on the model's device, it is read where it lies: work that was recorded
            draws other masks when it is filled with another key.
    """
    step = _Step(key)
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)
        # It knows the step, too: both, and all tensors of a batch, would stay until Python looks for such circles.
        step.batch = None


@contextmanager
def dropout_batch(batch: SequenceBatch, layout: SequenceLayout) -> Iterator[None]:
    """What goes through the model is this batch; samples are told apart by their rows in the data set."""
    step = _step.get()
    if step is None:
        yield
        return
    before = step.batch
    step.batch = _BatchKeys(step, batch.samples.get("row"), layout)
    step.depth += 1
    try:
        yield
    finally:
        step.depth -= 1
        if step.depth:
            step.batch = before


@contextmanager
def dropout_keys(*, seed: int, step: int, batch: SequenceBatch | None = None) -> Iterator[None]:
    """Tells every Dropout inside which masks to draw, for forward and backward of one training step.

    Args:
        seed: of the run.
        step: number of the step.
        batch: whose samples["row"] name its samples; not needed where a `Recommender` is called, which tells its own.
    """
    with dropout_step(key_of_step(seed, step)):
        if batch is None:
            yield
            return
        with dropout_batch(batch, SequenceLayout(batch.offsets, device=batch.device)):
            yield


def keys_of_tokens(module: Dropout, index: Tensor) -> Tensor | None:
    """Keys of some tokens of the current batch, for a part of a model that is given only those; None: nothing falls."""
    if not module.training or module.p == 0:
        return None
    return _keys_of_batch("tokens").index_select(0, index)


def _keys_of_batch(rows: Rows) -> Tensor:
    step = _step.get()
    if step is None or step.batch is None:
        raise FreeScaleError(
            "dropout in training must know which samples it is given, and in which step",
            next_step="call the model inside `with freescale.dropout_keys(seed=, step=, batch=):`, "
            "pass keys, or call model.eval() first",
        )
    keys: Tensor = getattr(step.batch, rows)
    return keys
