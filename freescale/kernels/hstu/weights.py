"""What layers are given: their weights, and what attention needs to know of a batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from freescale.kernels.attention import AttentionMask, SequenceLayout


class LayerWeights(NamedTuple):
    """The weights of an HSTU layer: u, v, q, k side by side, its output, and the tables of its bias."""

    uvqk: Tensor
    output: Tensor
    output_bias: Tensor
    position_bias: Tensor | None
    time_bias: Tensor | None


class STUWeights(NamedTuple):
    """The weights of a layer.

    Args:
        norm: [D] of the norm of states.
        norm_bias: [D].
        uvqk: [D, 4 D] u, v, q, k side by side.
        uvqk_bias: [4 D].
        gate: [D] of the norm of attended values.
        gate_bias: [D].
        output: [D, 3 D].
    """

    norm: Tensor
    norm_bias: Tensor
    uvqk: Tensor
    uvqk_bias: Tensor
    gate: Tensor
    gate_bias: Tensor
    output: Tensor


class WholeBatch(NamedTuple):
    """What attention over whole sequences needs to know of a batch; times only with a time bias.

    A mask from outside has no kernels: `View.fusable_batch` gives no such batch then, and the layer runs by its parts.
    """

    layout: SequenceLayout
    mask: AttentionMask | None
    query_time: Tensor | None
    key_time: Tensor | None
