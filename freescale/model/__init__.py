"""Encoders, heads, item encoders, compression, experts. Knows nothing of ranks."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.model.compression.compressor import Compressor
    from freescale.model.compression.token_cache import TokenCache
    from freescale.model.encoder import Encoder, EncoderShape, compresses, takes_pads, uses_time
    from freescale.model.encoders import HSTU, STU, Decoder, SASRec
    from freescale.model.head import (
        Head,
        HeadMetrics,
        LastEvents,
        MergedMetrics,
        Needs,
        RequestMetrics,
        RetrievingHead,
        check_columns,
        export_facts,
        make_head,
        own_metrics,
        retrieves,
        scores_candidates,
    )
    from freescale.model.heads import RetrievalHead, TasksHead, TasksOptions, target_index
    from freescale.model.inputs.context_tokens import ContextTokens
    from freescale.model.inputs.feature_join import FeatureJoin
    from freescale.model.inputs.feature_tokens import FeatureTokens
    from freescale.model.inputs.item_encoders import ContentProjection, TextEncoder
    from freescale.model.inputs.item_towers import ItemTowers
    from freescale.model.parts.blocks import RelativeBias
    from freescale.model.parts.dropout import Dropout, drawn_by_rank, dropout_keys, dropout_step
    from freescale.model.parts.moe import MoE, moe_layers
    from freescale.model.parts.router import EXTRAS, nan_error
    from freescale.model.quality.metrics import CUTOFFS, FULL_RANKING, NEVER, RankingQuality, full_ranking
    from freescale.model.quality.task_quality import AcrossRanks, TaskQuality
    from freescale.model.recommender import Recommender, is_ours, make_encoder
    from freescale.model.serving.candidate_graph import CandidateGraph
    from freescale.model.serving.history_cache import HistoryCache, candidate_states, extend_caches
    from freescale.model.serving.history_store import HistoryStore
    from freescale.model.serving.request_graph import RequestGraph
else:
    __getattr__, __dir__ = open_door(__name__)
