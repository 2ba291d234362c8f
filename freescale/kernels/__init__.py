"""Kernels by subject: attention, hstu, moe, rows, id_table, and the runtime below them. Here: what models call.

Each subject has a plain `reference` that says what its kernels must compute.
"""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.attention import (
        AttentionMask,
        LayoutRoom,
        LayoutWishes,
        MaskKind,
        MaskRule,
        SequenceLayout,
        hstu_attention,
        keeps_scores,
        make_mask_kind,
        most_kept_blocks,
        softmax_attention,
    )
    from freescale.kernels.hstu import (
        LayerWeights,
        STUWeights,
        Sum,
        Taken,
        WholeBatch,
        add_product,
        can_fuse_layer,
        can_fuse_stu,
        fused_layer,
        fused_stu_layer,
        fused_stu_targets,
        gate,
        input_states,
        plain_norm,
        project_targets,
        project_uvqk,
        sampled_softmax,
        stu_gate,
        stu_project,
        sum_taken,
        unit,
    )
    from freescale.kernels.moe import expert_mlp
else:
    __getattr__, __dir__ = open_door(__name__)
