"""Config: a whole recipe, one section a subject. Each subject's file holds its section, its checks and its build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from freescale.recipe import (
    balance,
    comm,
    data,
    embedding,
    eval,
    features,
    ffn,
    head,
    items,
    model,
    optim,
    pipeline,
    requests,
    run,
    segments,
    tables,
    tokens,
)
from freescale.recipe.balance import BalanceSection
from freescale.recipe.comm import CommSection
from freescale.recipe.data import DataSection, SyntheticSection
from freescale.recipe.embedding import EmbeddingSection
from freescale.recipe.eval import EvalSection
from freescale.recipe.features import FeaturesSection
from freescale.recipe.ffn import FfnSection, MoeSection
from freescale.recipe.head import HeadSection
from freescale.recipe.items import ItemsSection
from freescale.recipe.model import ModelSection
from freescale.recipe.optim import OptimSection
from freescale.recipe.pipeline import PipelineSection
from freescale.recipe.reading.keys import as_yaml, own_fields
from freescale.recipe.run import RunSection
from freescale.recipe.segments import SegmentsSection
from freescale.recipe.tables import TablesSection
from freescale.recipe.tokens import TokensSection
from freescale.recipe.trace import TraceSection

SUBJECTS = (
    *(run, data, features, model, ffn, segments, items, head, requests, embedding, tables, tokens),
    *(optim, eval, balance, pipeline, comm),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe. Every key has a default: `Config()` trains HSTU on the embedded data."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    synthetic: SyntheticSection = field(default_factory=SyntheticSection)
    features: FeaturesSection = field(default_factory=FeaturesSection)
    model: ModelSection = field(default_factory=ModelSection)
    ffn: FfnSection = field(default_factory=FfnSection)
    moe: MoeSection = field(default_factory=MoeSection)
    segments: SegmentsSection = field(default_factory=SegmentsSection)
    items: ItemsSection = field(default_factory=ItemsSection)
    head: HeadSection = field(default_factory=HeadSection)
    embedding: EmbeddingSection = field(default_factory=EmbeddingSection)
    tables: TablesSection = field(default_factory=TablesSection)
    tokens: TokensSection = field(default_factory=TokensSection)
    optim: OptimSection = field(default_factory=OptimSection)
    eval: EvalSection = field(default_factory=EvalSection)
    balance: BalanceSection = field(default_factory=BalanceSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    comm: CommSection = field(default_factory=CommSection)
    trace: TraceSection = field(default_factory=TraceSection)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every key by section, options of kinds among them; as a checkpoint keeps the recipe."""
        return {
            name: {
                **{key: getattr(section, key) for key in own_fields(section)},
                **getattr(section, "extra", {}),
            }
            for name, section in vars(self).items()
        }

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_config` reads back to an equal object."""
        plain = {
            section: {key: as_yaml(value) for key, value in keys.items()}
            for section, keys in self.as_dict().items()
        }
        return yaml.safe_dump(plain, sort_keys=False)


def problems_of(config: Config) -> list[str]:
    """Problems that only show when several keys are seen together, subject by subject."""
    return [problem for subject in SUBJECTS for problem in subject.problems(config)]
