"""Attention over jagged sequences and expert MLPs. `reference` is the plain truth; these are what models call."""

from freescale.kernels.attention.api import hstu_attention, softmax_attention
from freescale.kernels.attention.layout import SequenceLayout
from freescale.kernels.attention.mask import AttentionMask
from freescale.kernels.hstu.input import input_states
from freescale.kernels.hstu.layer import LayerWeights, WholeBatch, can_fuse_layer, fused_layer
from freescale.kernels.hstu.parts import add_product, gate, plain_norm, project_uvqk
from freescale.kernels.hstu.softmax import sampled_softmax, unit
from freescale.kernels.moe.api import expert_mlp

__all__ = [
    "AttentionMask",
    "LayerWeights",
    "SequenceLayout",
    "WholeBatch",
    "add_product",
    "can_fuse_layer",
    "expert_mlp",
    "fused_layer",
    "gate",
    "hstu_attention",
    "input_states",
    "plain_norm",
    "project_uvqk",
    "sampled_softmax",
    "softmax_attention",
    "unit",
]
