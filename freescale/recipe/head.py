"""What the model is trained to predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freescale.recipe.keys import extra_keys, key, section_options

if TYPE_CHECKING:
    from freescale.data import SequenceSource
    from freescale.model import Head
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """What the model is trained to predict."""

    kind: str = key("retrieval", "next item by sampled softmax, or actions as labels", family="head")
    num_negatives: int = key(128, "negatives drawn for each sample", at_least=1)
    temperature: float = key(0.05, "divides the logits of the sampled softmax", at_least=1e-4)
    normalize: bool = key(True, "l2-normalise user and item vectors")
    label_thresholds: tuple[float, ...] = key(
        (3.5,), "ranking: one binary task a threshold, label = action > threshold"
    )
    extra: Mapping[str, Any] = extra_keys()


def problems(config: Config) -> list[str]:
    """A ranking head without tasks."""
    if config.head.kind == "ranking" and not config.head.label_thresholds:
        return ["head.label_thresholds: a ranking head needs at least one"]
    return []


def build_head(config: Config, source: SequenceSource) -> Head:
    """What the model is trained to predict."""
    from freescale.model import check_columns, make_head

    kind = config.head.kind
    head = make_head(kind, dim=config.model.dim, options=section_options(config.head, "head"))
    check_columns(head, source.features, kind=kind, data=source.name)
    return head
