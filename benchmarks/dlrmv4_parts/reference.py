"""The reference's model, run as it is from a checkout, without its tables."""

from __future__ import annotations

import sys
import types

import torch
from torch import Tensor

from dlrmv4_parts.inputs import CONTEXT, Inputs, offsets_of

HIDDEN, JUDGED = 256, 512
"""Fixed in the reference, whatever the width."""


def stand_ins() -> list[str]:
    """Make the reference's modules importable without torchrec and fbgemm_gpu; what was stood in for."""
    made = []
    try:
        import torchrec  # noqa: F401
    except ImportError:
        made.append("torchrec: classes that are imported and not used here")
        names = {
            "torchrec": ["KeyedJaggedTensor"],
            "torchrec.modules": [],
            "torchrec.modules.embedding_configs": ["EmbeddingConfig"],
            "torchrec.modules.embedding_modules": ["EmbeddingCollection"],
        }
        for name, classes in names.items():
            module = types.ModuleType(name)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            sys.modules[name] = module
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        made.append("fbgemm: asynchronous_complete_cumsum, jagged_to_padded_dense, dense_to_jagged")
        torch.ops.fbgemm = types.SimpleNamespace(  # type: ignore[assignment]
            asynchronous_complete_cumsum=offsets_of,
            jagged_to_padded_dense=_padded,
            dense_to_jagged=_jagged,
        )
    return made


def _places(offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(sequence, place) of every token that fits."""
    lengths = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    place = torch.arange(len(owner), device=offsets.device) - offsets[:-1][owner]
    return owner, place


def _padded(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    owner, place = _places(offsets[0], max_lengths[0])
    out = values.new_full((len(offsets[0]) - 1, max_lengths[0], *values.shape[1:]), padding_value)
    fits = place < max_lengths[0]
    return out.index_put((owner[fits], place[fits]), values[: len(owner)][fits])


def _jagged(
    dense: Tensor, x_offsets: list[Tensor], total_L: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    owner, place = _places(x_offsets[0], dense.shape[1])
    return dense[owner, place], x_offsets


class Theirs:
    """The reference's model without its tables."""

    def __init__(
        self, *, dim: int, heads: int, layers: int, dropout: float = 0.0, bf16: bool = False
    ) -> None:
        from generative_recommenders.common import HammerKernel
        from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig, SequenceEmbedding
        from generative_recommenders.modules.multitask_module import MultitaskTaskType, TaskConfig

        self._embedding = SequenceEmbedding
        self.model = DlrmHSTU(
            DlrmHSTUConfig(
                max_seq_len=8192,
                max_num_candidates=1,
                hstu_num_heads=heads,
                hstu_attn_linear_dim=dim // heads,
                hstu_attn_qk_dim=dim // heads,
                hstu_attn_num_layers=layers,
                hstu_embedding_table_dim=dim,
                hstu_preprocessor_hidden_dim=HIDDEN,
                hstu_transducer_embedding_dim=dim,
                hstu_input_dropout_ratio=2 * dropout,
                hstu_linear_dropout_rate=dropout,
                contextual_feature_to_max_length=dict.fromkeys(CONTEXT, 1),
                contextual_feature_to_min_uih_length=dict.fromkeys(CONTEXT, 0),
                candidates_weight_feature_name="item_action_weight",
                candidates_watchtime_feature_name="item_dummy_watchtime",
                candidates_querytime_feature_name="item_query_time",
                multitask_configs=[TaskConfig("listen_plus", 1, MultitaskTaskType.BINARY_CLASSIFICATION)],
                user_embedding_feature_names=[*CONTEXT, "item_id", "artist_id", "album_id"],
                item_embedding_feature_names=["candidate_id", "candidate_artist_id", "candidate_album_id"],
                uih_post_id_feature_name="item_id",
                uih_action_time_feature_name="action_timestamp",
                uih_weight_feature_name="action_weight",
                merge_uih_candidate_feature_mapping=[
                    ("item_id", "candidate_id"),
                    ("artist_id", "candidate_artist_id"),
                    ("album_id", "candidate_album_id"),
                    ("action_weight", "item_action_weight"),
                    ("action_timestamp", "item_query_time"),
                    ("dummy_watch_time", "item_dummy_watchtime"),
                ],
                action_weights=[1, 2, 4],
            ),
            embedding_tables={},
            is_inference=False,
            is_dense=True,
            bf16_training=bf16,
        )
        self.model.set_hammer_kernel(HammerKernel.PYTORCH)
        self.model.train()

    def __call__(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """Predictions and loss."""
        index = {
            "item": given.item,
            "artist": given.artist_of[given.item],
            "album": given.album_of[given.item],
        }
        asked = {
            "item": given.target,
            "artist": given.artist_of[given.target],
            "album": given.album_of[given.target],
        } | given.context
        return self.of_rows(
            given,
            {name: given.rows[name][places] for name, places in index.items()},
            {name: given.rows[name][places] for name, places in asked.items()},
        )

    def of_rows(
        self, given: Inputs, events: dict[str, Tensor], asked: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same where the row of every event, and of every candidate and context, is given."""
        batch, ones = len(given.lengths), torch.ones_like(given.lengths)
        found = {f"{name}_id": self._embedding(given.lengths, rows) for name, rows in events.items()}
        names = {"item": "candidate_id", "artist": "candidate_artist_id", "album": "candidate_album_id"}
        found |= {names.get(name, name): self._embedding(ones, rows) for name, rows in asked.items()}
        payload = {
            "action_weight": given.action,
            "item_action_weight": given.label,
            "action_timestamp": given.time,
            "item_query_time": given.time[given.lengths.cumsum(0) - 1],
            "dummy_watch_time": torch.zeros_like(given.action),
            "item_dummy_watchtime": given.label.new_ones(batch),
            "uih_offsets": offsets_of(given.lengths),
            "candidate_offsets": offsets_of(ones),
        }
        out = self.model.main_forward(found, payload, int(given.lengths.max()), given.lengths, 1, ones)
        return out[3][0], out[2]["listen_plus"]
