"""What a pass lets its tokens see. Encoders ask a `View` for positions and attention, and never know which pass it is.

    BatchView     whole sequences of a jagged batch, under a mask or none      training, evaluation
    CachedView    new tokens behind keys and values kept from an earlier pass  serving (cached_view.py)

An encoder that keeps to this works in all of them:

    def encode(self, vectors_TD, view):
        x = <vectors, and view.positions where they are wanted>
        for number, layer in enumerate(self.layers):
            q, k, v = <projections of x, [T, heads, width] each; k and v may have fewer heads>
            attended = view.softmax(q, k, v, layer=number, scale=...)      # or view.silu
            x = <x and attended>
        return x
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import (
    MaskKind,
    MaskRule,
    SequenceLayout,
    WholeBatch,
    hstu_attention,
    softmax_attention,
)
from freescale.kernels.attention import for_every_head, kernels_know
from freescale.kernels.runtime import to_device

KeepKeys = Callable[[int, Tensor, Tensor], None]


class View(Protocol):
    """Positions of the tokens of a pass, and attention between them; two kinds of it."""

    @property
    def positions(self) -> Tensor:
        """[T] position of each token in its own sequence, counted from the sequence's first token."""

    @property
    def real_tokens(self) -> Tensor | None:
        """[1] on the device, how many tokens are real where there are pads behind them; None where there are none."""

    def fusable_batch(self, *, time: bool) -> WholeBatch | None:
        """The batch, for layers that are computed as one function, with times or without.

        None where keys and values must be seen on their way, or fused layers do not know the mask.
        """

    def silu(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THV: Tensor,
        *,
        layer: int,
        scale: float,
        position_bias: Tensor | None = None,
        time_bias: Tensor | None = None,
    ) -> Tensor:
        """Scale * SiLU(q k^T + bias) v over what each token sees, [T, heads, width of v].

        Args:
            q_THD: queries.
            k_THD: keys, as many heads or a divisor of it.
            v_THV: values, as many heads as the keys.
            layer: number of the layer, so that its keys and values can be told from those of others.
            scale: multiplies the weights.
            position_bias: a weight for each distance in positions.
            time_bias: a weight for each bucket of time between query and key.
        """

    def softmax(self, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, *, layer: int, scale: float) -> Tensor:
        """Values weighted by the softmax of scale * q k^T over what each token sees; arguments as in `silu`."""


class ViewEncoder(Protocol):
    """Turns the item vectors of a pass into one state a token."""

    def encode(self, vectors_TD: Tensor, view: View) -> Tensor:
        """State [T, D] of every token; the state of a token has seen what the view shows it, and nothing else."""


def masked_view(batch: SequenceBatch, layout: SequenceLayout, kind: MaskKind | None) -> BatchView:
    """What encoders see of a batch in training and evaluation, under the mask that `kind` makes for it.

    Raises:
        ConfigError: the mask shows later tokens, among them those to be predicted.
    """
    mask = None if kind is None else kind.for_batch(batch.tokens, layout)
    if mask is not None and mask.looks_ahead:
        raise ConfigError(
            "model.mask must not look ahead: a model that predicts the next event would read it there",
            got=f"{type(mask).__name__} with looks_ahead",
            next_step="set looks_ahead = False; what comes later is then hidden",
        )
    return BatchView(batch, layout, mask=mask)


class BatchView:
    """All tokens of a jagged batch, each seeing what came before it in its own sequence.

    Args:
        batch: carries "time" and "target_time" where encoders use time.
        layout: the batch's layout; its kernels are shared by all layers.
        mask: hides more than what comes later.
        keep: given the keys and values of every layer as they pass, before heads are repeated.
    """

    def __init__(
        self,
        batch: SequenceBatch,
        layout: SequenceLayout,
        *,
        mask: MaskRule | None = None,
        keep: KeepKeys | None = None,
    ) -> None:
        self._batch, self._layout, self._mask, self._keep = batch, layout, mask, keep

    @property
    def positions(self) -> Tensor:
        """[T] position of each token in its own sequence."""
        return self._layout.positions

    @property
    def real_tokens(self) -> Tensor | None:
        """[1] how many tokens are real, where the batch is padded."""
        return self._layout.device_offsets[-1:] if self._layout.padded else None

    @property
    def ends(self) -> Tensor:
        """[T] position of what comes next in each token's own sequence."""
        return self._of_sequences(self._layout.lengths)

    @property
    def has_times(self) -> bool:
        """Whether the batch says when things happened."""
        return "time" in self._batch.tokens

    @property
    def times(self) -> Tensor:
        """[T] when each token happened."""
        return self._batch.tokens["time"]

    @property
    def request_times(self) -> Tensor:
        """[T] when the request comes that each token's own sequence ends with."""
        last = self._of_sequences(np.maximum(self._layout.offsets.numpy()[1:] - 1, 0))
        return self._batch.tokens["target_time"].index_select(0, last)

    def _of_sequences(self, values: npt.NDArray[np.int64]) -> Tensor:
        """[T] for each token the value of its sequence; spread out where they are wanted, not on the host."""
        layout = self._layout
        (own,) = to_device(np.asarray(values, np.int64), device=layout.device)
        lengths = layout.device_offsets.diff()
        return own.repeat_interleave(lengths, output_size=int(layout.offsets[-1]))

    def fusable_batch(self, *, time: bool) -> WholeBatch | None:
        """The batch, unless somebody keeps keys and values or brings a mask that only the parts can ask."""
        if self._keep is not None or not kernels_know(self._mask):
            return None
        query_time, key_time = self._times() if time else (None, None)
        return WholeBatch(self._layout, self._mask, query_time, key_time)

    def _times(self) -> tuple[Tensor, Tensor]:
        """Of queries and keys. The request comes when the next event happens, so that is the query's time."""
        return self._batch.tokens["target_time"], self._batch.tokens["time"]

    def silu(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THV: Tensor,
        *,
        layer: int,
        scale: float,
        position_bias: Tensor | None = None,
        time_bias: Tensor | None = None,
    ) -> Tensor:
        """Scale * SiLU(q k^T + bias) v."""
        options: dict[str, Any] = {"position_bias": position_bias}
        if time_bias is not None:
            query_time, key_time = self._times()
            options |= {"time_bias": time_bias, "query_time": query_time, "key_time": key_time}
        return hstu_attention(
            *self._heads(layer, q_THD, k_THD, v_THV),
            self._batch.offsets,
            scale=scale,
            mask=self._mask,
            layout=self._layout,
            **options,
        )

    def softmax(self, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, *, layer: int, scale: float) -> Tensor:
        """Values weighted by the softmax of scale * q k^T."""
        if self._keep is not None:
            self._keep(layer, k_THD, v_THV)
        return softmax_attention(
            q_THD,
            k_THD,  # the kernels share heads themselves
            v_THV,
            self._batch.offsets,
            scale=scale,
            mask=self._mask,
            layout=self._layout,
        )

    def _heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._keep is not None:
            self._keep(layer, k, v)
        return q, for_every_head(k, q.shape[-2]), for_every_head(v, q.shape[-2])
