"""The protocol of encoders, and what every encoder is made from; a kind of encoder is one file (`encoders/`).

    @register("encoder", "mine", options=MyOptions)          # a frozen dataclass, or none
    def make_mine(shape: EncoderShape, options: MyOptions) -> MyEncoder: ...

Beyond being called, an encoder may have what makes more possible:

    from_rows(rows, item_index, batch, layout) -> (states, rows)     gathers item vectors itself, see `Recommender`
    encode(vectors, view) -> states                                  works in any pass (`views/`): segments, caches
    compresses = True                                                histories can be kept as token caches
    takes_pads = True                                                pads behind the last sequence change nothing, and
                                                                     no state is NaN: steps can be replayed
    calls_layers = True                                              a forward calls its `layers` one after the other,
                                                                     and nobody else reads their weights: they can be
                                                                     updated as the forward reaches them

What is registered may have `uses_time = True`: then it gets `shape.time_bias`, and is served with times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import MaskKind, SequenceLayout
from freescale.model.parts.moe import Dispatch
from freescale.registry import Kind

if TYPE_CHECKING:
    from freescale.model.compression.segmented import SegmentedEncoder


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """What an encoder may want to know; each kind takes what it has a use for.

    Args:
        dim: width of item vectors and states.
        layers: number of layers.
        heads: attention heads.
        max_length: longest sequence, in tokens.
        dropout: on the input and inside layers.
        position_bias: relative position bias.
        time_bias: relative time bias; batches then carry "time" and "target_time".
        ffn: the feed-forward part of a layer, as `make_ffn` takes it; the kind's own unless given.
        dispatch: where its experts live.
        kv_heads: heads of keys and values; as many as `heads` unless given.
        ffn_dim: width inside the kind's own feed-forward part; it decides unless given.
        rope_base: how slowly the slowest pair of a head turns, where positions are rotations.
        front: tokens in front of every history.
        mask: what tokens see of what came before; an encoder that takes it keeps it as `mask`.
    """

    dim: int
    layers: int
    heads: int = 1
    max_length: int = 200
    dropout: float = 0.0
    position_bias: bool = True
    time_bias: bool = False
    ffn: Mapping[str, Any] | None = None
    dispatch: Dispatch | None = None
    kv_heads: int | None = None
    ffn_dim: int | None = None
    rope_base: float = 10_000.0
    front: int = 0
    mask: MaskKind | None = None


class Encoder(Protocol):
    """Turns the item vectors of a jagged batch into one state a token; an `nn.Module` where it has weights."""

    def __call__(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State [T, D] of every token, which has seen its own sequence up to itself and nothing else."""


def compresses(encoder: object) -> TypeGuard[SegmentedEncoder]:
    """Whether histories can be kept as token caches and read back: what a `Compressor` asks of an encoder."""
    return bool(getattr(encoder, "compresses", False))


def takes_pads(part: object) -> bool:
    """Whether an encoder or a head can be given padded batches, whose pads have no loss and no gradient.

    A subclass that computes otherwise does not inherit the promise.
    """
    for each in type(part).__mro__:
        if "takes_pads" in vars(each):
            return bool(getattr(part, "takes_pads", False))
        if vars(each).keys() & {"forward", "loss", "encode", "from_rows"}:
            return False
    return bool(getattr(part, "takes_pads", False))


def uses_time(kind: Kind) -> bool:
    """Whether encoders of a kind look at times, where the data has them and the recipe wants it."""
    return bool(getattr(kind.make, "uses_time", False))
