"""Attention over jagged sequences: layouts, masks, and the ways to compute it."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.attention.api import check_bias, hstu_attention, softmax_attention
    from freescale.kernels.attention.cached import (
        CachedPlan,
        KeyValueBuffer,
        block_for,
        cached_attention,
        can_fuse_cached,
        tile_table,
    )
    from freescale.kernels.attention.candidates import (
        CandidatePlan,
        bias_width,
        candidate_attention,
        candidate_block,
        candidate_splits,
        candidate_tiles,
    )
    from freescale.kernels.attention.inputs import check_tokens
    from freescale.kernels.attention.layout import SequenceLayout
    from freescale.kernels.attention.mask import AttentionMask, Pieces, kernels_know
    from freescale.kernels.attention.mask_kind import MaskKind, make_mask_kind
    from freescale.kernels.attention.mask_rule import Attributes, MaskRule
    from freescale.kernels.attention.pads import clear_pads, token_room
    from freescale.kernels.attention.plan.fills import ListFiller
    from freescale.kernels.attention.plan.room import BIAS_ROWS, LayoutRoom, pair_blocks
    from freescale.kernels.attention.plan.schedule import is_long
    from freescale.kernels.attention.plan.wishes import LayoutWishes
    from freescale.kernels.attention.reference import (
        NUM_TIME_BUCKETS,
        for_every_head,
        time_bucket,
    )
    from freescale.kernels.attention.triton.bias_gradients import keeps_scores, most_kept_blocks
    from freescale.kernels.attention.triton.fused_attention import MAX_WIDTH, FusedAttention, tiles_for
    from freescale.kernels.attention.triton.launch import last_dense
else:
    __getattr__, __dir__ = open_door(__name__)
