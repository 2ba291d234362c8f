"""Attention over jagged sequences and expert MLPs. `reference` is the plain truth; these are what models call."""

from freescale.kernels.attention import hstu_attention, softmax_attention
from freescale.kernels.attention_mask import AttentionMask
from freescale.kernels.hstu_layer import LayerWeights, WholeBatch, can_fuse_layer, fused_layer
from freescale.kernels.hstu_parts import add_product, gate, plain_norm, project_uvqk
from freescale.kernels.input_states import input_states
from freescale.kernels.layout import SequenceLayout
from freescale.kernels.moe import expert_mlp
from freescale.kernels.sampled_softmax import sampled_softmax, unit

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
