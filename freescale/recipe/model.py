"""The sequence encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale import registry
from freescale.recipe.ffn import ffn_shape
from freescale.recipe.reading.keys import (
    changed,
    extra_keys,
    key,
    missing_keys,
    options_from_outside,
    section_options,
)

if TYPE_CHECKING:
    from freescale.comm.traffic import ExpertExchange
    from freescale.data import BatchFeatures, SequenceSource
    from freescale.model import Recommender
    from freescale.recipe.config import Config
    from freescale.train import ContentInput, TextInput


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The sequence encoder."""

    kind: str = key("hstu", "encoder", family="encoder")
    dim: int = key(64, "width of item vectors and layers", at_least=2)
    layers: int = key(2, "number of layers", at_least=1)
    heads: int = key(1, "attention heads; dim must be a multiple", at_least=1)
    dropout: float = key(0.2, "dropout inside layers and on the input", at_least=0, at_most=0.95)
    dtype: Literal["float32", "bfloat16", "float64"] = key(
        "float32",
        "float32; bfloat16 = autocast on a GPU, float32 on a CPU; float64 = everything, tables included",
    )
    position_bias: bool = key(True, "HSTU: relative position bias")
    time_bias: bool = key(True, "HSTU: relative time bias, where the data has time stamps")
    kv_heads: int | None = key(
        None, "llama: heads of keys and values, a divisor of heads; null: as many", at_least=1
    )
    ffn_dim: int | None = key(None, "llama: width inside the feed-forward part; null: 8/3 of dim", at_least=1)
    rope_base: float = key(10_000.0, "llama: how slowly the slowest rotary pair turns", at_least=2)
    mask: str = key(
        "causal",
        "what a token sees of what came before it; window: the latest model.window tokens, a key that comes with it",
        family="mask",
    )
    extra: Mapping[str, Any] = extra_keys()


def problems(config: Config) -> list[str]:
    """A mask without its keys, heads that do not divide the width, keys of the decoder that do nothing."""
    options = config.model
    found = []
    if options.mask in registry.names("mask") and changed(options, "mask"):  # looking at it imports torch
        found += missing_keys(registry.find("mask", options.mask), options)
    if options.dim % options.heads:
        found.append(f"model.heads: must divide model.dim = {options.dim}, got {options.heads}")
    if options.kind != "llama":
        unused = set(changed(options, "kv_heads", "ffn_dim", "rope_base"))
        unused -= options_from_outside(options, "encoder")
        return found + [f"model.{name}: only for model.kind=llama" for name in sorted(unused)]
    if options.heads % (options.kv_heads or options.heads):
        found.append(f"model.kv_heads: must divide model.heads = {options.heads}, got {options.kv_heads}")
    if options.dim // options.heads % 2:
        found.append(
            f"model.heads: rotary positions need heads of even width, got {options.dim} / {options.heads}"
        )
    return found


def longest_sequence(config: Config, features: BatchFeatures | None) -> int:
    """Tokens of the longest history; what segments add is not among them."""
    import numpy as np

    from freescale.recipe.features import token_rule

    rule = token_rule(config, features)
    return config.data.max_length if rule is None else int(rule.tokens(np.array([config.data.max_length]))[0])


def encoder_shape(
    config: Config, source: SequenceSource, features: BatchFeatures | None = None
) -> dict[str, Any]:
    """What `make_encoder` needs; also what an exported model keeps."""
    from freescale.model import uses_time
    from freescale.recipe.features import token_rule

    options = config.model
    own, seen = (section_options(options, family) for family in ("encoder", "mask"))
    rule = token_rule(config, features)
    has_time = "time" in source.features and config.data.use_time
    return {
        "kind": options.kind,
        "dim": options.dim,
        "layers": options.layers,
        "heads": options.heads,
        "max_length": longest_sequence(config, features),
        "front": 0 if rule is None else rule.front,
        "position_bias": options.position_bias,
        "time_bias": has_time and options.time_bias and uses_time(registry.find("encoder", options.kind)),
        "segments": None if config.segments.recent is None else dataclasses.asdict(config.segments),
        "kv_heads": options.kv_heads,
        "ffn_dim": options.ffn_dim,
        "rope_base": options.rope_base,
        "ffn": ffn_shape(config),
        "options": None if own is None else dataclasses.asdict(own),
        "mask": None
        if options.mask == "causal"
        else {"name": options.mask, "options": None if seen is None else dataclasses.asdict(seen)},
    }


def build_model(
    config: Config,
    source: SequenceSource,
    *,
    experts: ExpertExchange | None = None,
    content: ContentInput | TextInput | None = None,
    features: BatchFeatures | None = None,
) -> Recommender:
    """The dense part, with initial weights that depend on the seed alone; `experts` spreads experts over the ranks."""
    import torch

    from freescale.model import Recommender, make_encoder
    from freescale.recipe.features import check_features
    from freescale.recipe.head import build_head
    from freescale.recipe.items import build_item_module
    from freescale.recipe.tokens import build_item_join, build_tokens

    torch.manual_seed(config.run.seed)
    encoder = make_encoder(
        **encoder_shape(config, source, features),
        dropout=config.model.dropout,
        dispatch=experts,
    )
    head, items = build_head(config, source), build_item_module(config, content)
    tokens = None
    if features is not None:
        check_features(config, features)
        items = items or build_item_join(config, features)
        tokens = build_tokens(config, features)
    model = Recommender(encoder=encoder, head=head, items=items, tokens=tokens)
    return model.double() if config.model.dtype == "float64" else model
