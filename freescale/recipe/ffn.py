"""The feed-forward part of a layer: none, dense, or experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale.recipe.reading.keys import changed, key

if TYPE_CHECKING:
    from freescale.comm.traffic import ExpertExchange, Gate
    from freescale.comm.world import Ranks
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class FfnSection:
    """The feed-forward part of a layer; HSTU has none of its own."""

    kind: Literal["none", "dense", "moe"] = key("none", "none, one for all tokens, or experts (section moe)")
    hidden: int | None = key(
        None, "width between its two products, of one expert for moe; null: 4 times model.dim", at_least=1
    )
    activation: Literal["swiglu", "silu", "relu2"] = key(
        "swiglu", "SiLU(gate) * up, SiLU, or ReLU squared; swiglu has a third product"
    )


@dataclass(frozen=True, kw_only=True)
class MoeSection:
    """Experts, where ffn.kind=moe: many feed-forward parts, of which a token uses a few."""

    experts: int = key(8, "experts a layer", at_least=1, at_most=65_536)
    top_k: int = key(2, "experts a token goes to", at_least=1)
    shared: int = key(0, "experts every token uses besides, as one dense part", at_least=0)
    score: Literal["softmax", "sigmoid"] = key("softmax", "over the experts, or for each alone")
    renormalize: bool = key(True, "divide the weights of a token's experts by their sum")
    scale: float = key(1.0, "multiplies the weights", at_least=0)
    bias_rate: float = key(
        0.05,
        "how fast selection biases move towards even load, in spreads of the logits a step; 0: off",
        at_least=0,
    )
    aux_loss: float = key(0.0, "coefficient of the balance loss", at_least=0)
    z_loss: float = key(0.0, "coefficient of the mean squared logsumexp of the router", at_least=0)
    forced: bool = key(False, "deal tokens out in turn instead of choosing (for benchmarks; learns nothing)")
    save: Literal["preact", "input", "all"] = key(
        "preact", "kept for the backward: input and pre-activation, input alone, or everything", free=True
    )
    backend: Literal["auto", "reference", "eager", "grouped", "triton"] = key(
        "auto", "how experts are computed", free=True
    )
    parallel: bool = key(False, "spread the experts over the ranks; tokens travel to them", free=True)


def problems(config: Config) -> list[str]:
    """Keys of the feed-forward part that do nothing, or cannot work."""
    options, moe = config.ffn, config.moe
    found = [f"moe.{name}: only for ffn.kind=moe" for name in changed(moe) if options.kind != "moe"]
    if options.kind == "none":
        return found
    if config.model.kind == "sasrec":
        found.append("ffn.kind: model.kind=sasrec has a feed-forward part of its own")
    if config.model.ffn_dim is not None:
        found.append("model.ffn_dim: ffn.kind puts another part in its place; set ffn.hidden")
    if options.kind == "moe" and moe.top_k > moe.experts:
        found.append(f"moe.top_k: at most moe.experts = {moe.experts}, got {moe.top_k}")
    if options.kind == "moe" and moe.top_k == 1 and moe.renormalize:
        found.append(
            "moe.renormalize: with moe.top_k=1 every weight would be 1 and the router could not learn; set it false"
        )
    return found


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
        name: value for name, value in dataclasses.asdict(moe).items() if name not in ("experts", "parallel")
    }
    return {**dense, "num_experts": moe.experts, **others}


def build_expert_exchange(config: Config, ranks: Ranks, gate: Gate) -> ExpertExchange | None:
    """How tokens travel to experts on other ranks; None where every rank holds all experts."""
    if config.ffn.kind != "moe" or not config.moe.parallel or ranks.group is None:
        return None
    from freescale.comm.traffic import ExpertExchange
    from freescale.recipe.comm import channel

    return ExpertExchange(channel(config, ranks, device=ranks.device), gate=gate)
