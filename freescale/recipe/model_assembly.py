"""From a recipe to the model and where its item vectors come from; `assembly` puts the rest of a run around it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from freescale.comm import Transport
from freescale.comm.traffic import ExpertExchange, Gate, open_channel, open_cpu_channel
from freescale.comm.transports import TracedTransport
from freescale.comm.world import Ranks
from freescale.data import (
    CONTENT_FILE,
    TEXTS_FILE,
    ContentFile,
    NumberedTexts,
    ParquetSource,
    SegmentRule,
    SequenceSource,
    Vocabulary,
    load_texts,
)
from freescale.embedding import IdMap, ShardedCompute, ShardedEmbedding
from freescale.errors import ConfigError
from freescale.model import (
    ContentProjection,
    RankingHead,
    Recommender,
    RetrievalHead,
    TextEncoder,
    make_encoder,
)
from freescale.recipe.load import Config
from freescale.train import ContentInput, EncodedItems, IdItems, ItemEncoder, TextInput


def encoder_shape(config: Config, source: SequenceSource) -> dict[str, Any]:
    """What `make_encoder` needs; also what an exported model keeps."""
    options = config.model
    has_time = "time" in source.features and config.data.use_time
    return {
        "kind": options.kind,
        "dim": options.dim,
        "layers": options.layers,
        "heads": options.heads,
        "max_length": config.data.max_length,
        "position_bias": options.position_bias,
        "time_bias": options.kind == "hstu" and options.time_bias and has_time,
        "segments": None if config.segments.recent is None else dataclasses.asdict(config.segments),
        "kv_heads": options.kv_heads,
        "ffn_dim": options.ffn_dim,
        "rope_base": options.rope_base,
        "ffn": ffn_shape(config),
    }


def ffn_shape(config: Config) -> dict[str, Any] | None:
    """What `make_ffn` needs for the feed-forward part of a layer; None where there is none."""
    options, moe = config.ffn, config.moe
    if options.kind == "none":
        return None
    hidden = options.hidden or 4 * config.model.dim
    dense = {"kind": options.kind, "hidden": hidden, "activation": options.activation}
    if options.kind == "dense":
        return dense
    others = {
        key: value for key, value in dataclasses.asdict(moe).items() if key not in ("experts", "parallel")
    }
    return {**dense, "num_experts": moe.experts, **others}


def segment_rule(config: Config) -> SegmentRule | None:
    """How histories are cut, where they are."""
    options = config.segments
    if options.recent is None:
        return None
    return SegmentRule(recent=options.recent, length=options.length, summaries=options.summaries)


def build_model(
    config: Config,
    source: SequenceSource,
    *,
    experts: ExpertExchange | None = None,
    content: ContentInput | TextInput | None = None,
) -> Recommender:
    """The dense part, with initial weights that depend on the seed alone; `experts` spreads experts over the ranks."""
    torch.manual_seed(config.run.seed)
    encoder = make_encoder(**encoder_shape(config, source), dropout=config.model.dropout, dispatch=experts)
    model = Recommender(
        encoder=encoder, head=build_head(config, source), items=build_item_module(config, content)
    )
    return model.double() if config.model.dtype == "float64" else model


def build_optimizer(config: Config, model: Recommender, device: torch.device) -> torch.optim.Optimizer:
    """AdamW for the dense part; on a GPU one kernel moves all parameters, for starting many takes the time."""
    optim = config.optim
    return torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        weight_decay=optim.weight_decay,
        fused=True if device.type == "cuda" else None,
    )


def build_expert_exchange(config: Config, ranks: Ranks, gate: Gate) -> ExpertExchange | None:
    """How tokens travel to experts on other ranks; None where every rank holds all experts."""
    if config.ffn.kind != "moe" or not config.moe.parallel or ranks.group is None:
        return None
    channel = open_channel(
        ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
    )
    return ExpertExchange(TracedTransport(channel), gate=gate)


def build_head(config: Config, source: SequenceSource) -> torch.nn.Module:
    """What the model is trained to predict."""
    options = config.head
    if options.kind == "retrieval":
        return RetrievalHead(temperature=options.temperature, normalize=options.normalize)
    if "action" not in source.features:
        raise ConfigError(
            "head.kind=ranking needs actions (ratings, clicks, ...) in the data",
            got=f"{source.name} has {', '.join(source.features)}",
            next_step="prepare the data with an action column, or use head.kind=retrieval",
        )
    return RankingHead(dim=config.model.dim, thresholds=options.label_thresholds)


def item_content(config: Config, source: SequenceSource) -> ContentInput | TextInput | None:
    """What is known of items, besides their ids."""
    options, ids = config.items, source.items.ids
    if options.kind == "ids":
        return None
    folder = source.path if isinstance(source, ParquetSource) else None
    if options.file is None and folder is None:
        raise ConfigError(
            f"items.kind={options.kind} needs to know the items",
            got=f"{source.name} has ids only",
            next_step="set items.file, or train on a prepared folder that has the file",
        )
    usual = CONTENT_FILE if options.kind == "content" else TEXTS_FILE
    path = Path(options.file) if options.file is not None else Path(str(folder)) / usual
    if options.kind == "content":
        return ContentInput(ContentFile(path, num_items=len(ids)))
    texts = load_texts(path, ids)
    words = options.vocabulary == "words"
    vocabulary = Vocabulary.of_words(texts, min_count=options.min_count) if words else Vocabulary.of_bytes()
    return TextInput(NumberedTexts.of(texts, vocabulary, max_tokens=options.max_tokens))


def build_item_module(config: Config, content: ContentInput | TextInput | None) -> torch.nn.Module | None:
    """What computes item vectors, if anything does."""
    if isinstance(content, ContentInput):
        return ContentProjection(width=content.file.width, dim=config.model.dim)
    if isinstance(content, TextInput):
        return TextEncoder(
            vocabulary_size=content.texts.vocabulary_size,
            dim=config.model.dim,
            width=config.items.dim,
            layers=config.items.layers,
            heads=config.items.heads,
            dropout=config.items.dropout,
        )
    return None


def build_item_encoder(
    config: Config,
    source: SequenceSource,
    ranks: Ranks,
    *,
    model: Recommender,
    content: ContentInput | TextInput | None,
    embedding: ShardedEmbedding,
    id_map: IdMap,
) -> ItemEncoder:
    """Where item vectors come from."""
    rows = IdItems(embedding=embedding, id_map=id_map, device=ranks.device)
    if content is None:
        return rows
    assert model.items is not None
    ways: dict[str, Transport] = {}
    if ranks.group is not None:
        options: dict[str, Any] = {"kind": config.comm.transport, "timeout_s": ranks.timeout_s}
        numbers = TracedTransport(open_cpu_channel(ranks.group, device=ranks.device, **options))
        on_cpu = ranks.device.type == "cpu"
        vectors = (
            numbers if on_cpu else TracedTransport(open_channel(ranks.group, device=ranks.device, **options))
        )
        ways = {"numbers": numbers, "vectors": vectors}
    return EncodedItems(
        model.items,
        content,
        items=source.items.ids,
        work=ShardedCompute(len(source.items.ids), **ways),
        rows=rows if config.items.add_ids else None,
        device=ranks.device,
        # A projection costs less than sending its result.
        alone=config.items.kind == "content",
        chunk=config.items.chunk,
    )
