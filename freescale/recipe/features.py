"""What is known of events, items and users, and how it is used: the words of a schema, feature by feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freescale.recipe.keys import extra_keys, nested_entries

if TYPE_CHECKING:
    from freescale.data import BatchFeatures, Schema, SequenceSource
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class FeaturesSection:
    """Features by name, each with its words; empty: all that the data set holds. docs/features.md explains them."""

    extra: Mapping[str, Any] = extra_keys()

    @classmethod
    def from_entries(cls, given: Mapping[str, Any], problems: list[str]) -> FeaturesSection:
        """The section with these entries, NAME or NAME.WORD; what is wrong with them is noted."""
        from freescale.data import read_schema

        entries = nested_entries("features", given, problems)
        if entries:
            read_schema(entries, problems)
        return cls(extra=entries)

    @staticmethod
    def describe() -> Iterator[tuple[str, str, str, str]]:
        """The words of a feature, as other keys are listed."""
        from freescale.data import SCHEMA_WORDS

        for word, (kind, meaning) in SCHEMA_WORDS.items():
            yield f"features.NAME.{word}", kind, "null", meaning


def problems(config: Config) -> list[str]:
    """Nothing that has not been said when the section was read."""
    return []


def run_schema(config: Config, source: SequenceSource) -> Schema:
    """The features of a run: those the recipe names, or all that the data set holds."""
    from freescale.data import choose_features, refuse_problems, schema_of

    found: list[str] = []
    schema = choose_features(schema_of(source), config.features.extra, found)
    refuse_problems(found, where=f"the recipe, for the data set {source.name}")
    return schema


def build_features(config: Config, source: SequenceSource) -> BatchFeatures | None:
    """What makes the features of batches; None where there is nothing but items, times and actions."""
    from freescale.data import BatchFeatures, legacy_schema

    schema = run_schema(config, source)
    if schema.words() == legacy_schema(source.features).words():
        return None
    return BatchFeatures(source, schema)
