"""Where item vectors come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from freescale.recipe.reading.keys import changed, key

if TYPE_CHECKING:
    import torch

    from freescale.comm.world import Ranks
    from freescale.data import SequenceSource
    from freescale.embedding import IdMap, ShardedEmbedding
    from freescale.model import Recommender
    from freescale.recipe.config import Config
    from freescale.train import ContentInput, ItemEncoder, TextInput


@dataclass(frozen=True, kw_only=True)
class ItemsSection:
    """Where item vectors come from."""

    kind: Literal["ids", "content", "text"] = key(
        "ids", "rows of a table, projected content vectors, or a trained encoder of texts"
    )
    file: str | None = key(
        None,
        "content: vectors (.npy), text: texts (.parquet); null: content.npy, texts.parquet in data.path",
        free=True,
    )
    add_ids: bool = key(True, "content, text: add the item's row of the table to its vector")
    vocabulary: Literal["words", "bytes"] = key("words", "text: what a text is cut into")
    min_count: int = key(1, "text: words of fewer texts count as unknown", at_least=1)
    max_tokens: int = key(64, "text: pieces kept of a text, its end included", at_least=2)
    dim: int = key(64, "text: width of the text encoder", at_least=2)
    layers: int = key(2, "text: layers of the text encoder", at_least=1)
    heads: int = key(2, "text: its attention heads", at_least=1)
    dropout: float = key(0.0, "text: dropout inside the text encoder", at_least=0, at_most=0.95)
    chunk: int = key(
        8192, "items encoded at once; more are computed again in the backward", at_least=1, free=True
    )


_OF_TEXT = ("vocabulary", "min_count", "max_tokens", "dim", "layers", "heads", "dropout")
_OF_BOTH = ("file", "add_ids", "chunk")


def problems(config: Config) -> list[str]:
    """Keys of item encoders that do nothing, or do not fit each other."""
    options = config.items
    unused = {"ids": (*_OF_BOTH, *_OF_TEXT), "content": _OF_TEXT, "text": ()}[options.kind]
    found = [
        f"items.{name}: only for items.kind={'text' if name in _OF_TEXT else 'content or text'}"
        for name in unused
        if changed(options, name)
    ]
    if options.kind == "text" and (options.dim % options.heads or options.dim // options.heads % 2):
        found.append(
            f"items.heads: items.dim / items.heads must be an even whole number, got {options.heads}"
        )
    if options.kind != "ids" and not options.add_ids and changed(config.embedding):
        found.append("embedding: without items.add_ids there is no table to set up")
    return found


def item_content(config: Config, source: SequenceSource) -> ContentInput | TextInput | None:
    """What is known of items, besides their ids."""
    from pathlib import Path

    import numpy as np

    from freescale.data import (
        CONTENT_FILE,
        TEXTS_FILE,
        ContentFile,
        NumberedTexts,
        ParquetSource,
        TemporalSource,
        Vocabulary,
        load_texts,
    )
    from freescale.errors import ConfigError
    from freescale.train import ContentInput, TextInput

    options, ids = config.items, source.items.ids
    if options.kind == "ids":
        return None
    whole = source.inner if isinstance(source, TemporalSource) else source
    folder = whole.path if isinstance(whole, ParquetSource) else None
    if options.file is None and folder is None:
        raise ConfigError(
            f"items.kind={options.kind} needs to know the items",
            got=f"{source.name} has ids only",
            next_step="set items.file, or train on a prepared folder that has the file",
        )
    usual = CONTENT_FILE if options.kind == "content" else TEXTS_FILE
    path = Path(options.file) if options.file is not None else Path(str(folder)) / usual
    if options.kind == "content":
        all_ids = whole.items.ids
        rows = None if whole is source else np.searchsorted(all_ids, ids)
        return ContentInput(ContentFile(path, num_items=len(all_ids), rows=rows))
    texts = load_texts(path, ids)
    words = options.vocabulary == "words"
    vocabulary = Vocabulary.of_words(texts, min_count=options.min_count) if words else Vocabulary.of_bytes()
    return TextInput(NumberedTexts.of(texts, vocabulary, max_tokens=options.max_tokens))


def digest_content(content: ContentInput | TextInput | None) -> str:
    """What stands for what is known of items; "" where nothing is."""
    from freescale.train import ContentInput

    if content is None:
        return ""
    return content.file.digest if isinstance(content, ContentInput) else f"texts:{content.texts.checksum:08x}"


def build_item_module(config: Config, content: ContentInput | TextInput | None) -> torch.nn.Module | None:
    """What computes item vectors, if anything does."""
    from freescale.model import ContentProjection, TextEncoder
    from freescale.train import ContentInput, TextInput

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
    from freescale.recipe.tokens import shared_work
    from freescale.train import EncodedItems, IdItems

    rows = IdItems(embedding=embedding, id_map=id_map, device=ranks.device)
    if content is None:
        return rows
    assert model.items is not None
    return EncodedItems(
        model.items,
        content,
        items=source.items.ids,
        work=shared_work(config, ranks, len(source.items.ids)),
        rows=rows if config.items.add_ids else None,
        device=ranks.device,
        # A projection costs less than sending its result.
        alone=config.items.kind == "content",
        chunk=config.items.chunk,
    )
