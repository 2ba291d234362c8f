"""What is known of events, items and users, and how it is used: the words of a schema, feature by feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freescale.recipe.reading.keys import extra_keys, nested_entries

if TYPE_CHECKING:
    from freescale.data import BatchFeatures, Feature, Schema, SequenceSource, TaskRule, TokenRule
    from freescale.pipeline import Domain, IdColumn
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
    """What makes the features of batches; None where items are all that a model looks at."""
    from freescale.data import BatchFeatures, legacy_schema

    schema = run_schema(config, source)
    width = config.tables.extra.get("item", {}).get("dim") or schema["item"].dim or config.model.dim
    known = legacy_schema(source.features)
    plain = all(each.name in known and each == known[each.name] for each in schema if each.name != "user")
    if plain and width == config.model.dim and not uses_user(config, schema):
        return None
    unread: frozenset[str] = frozenset()
    if config.tokens.join == "towers":
        read = {each.name for each in token_features(config, schema)}
        unread = frozenset(each.name for each in schema.columns() if each.name not in read)
    return BatchFeatures(source, schema, left_out=unread)


def uses_user(config: Config, schema: Schema) -> bool:
    """Ids of users are a feature where the schema or the recipe says something of their table."""
    user = schema.features.get("user")
    return user is not None and bool(user.rows or user.map or user.dim or "user" in config.tables.extra)


def token_features(config: Config, schema: Schema) -> list[Feature]:
    """Features that go into the sequences: those of events and users, and of requests where there are candidates."""
    left_out = {"item", "time"} if uses_user(config, schema) else {"item", "time", "user"}
    owners = ("event", "user", "request") if config.head.kind == "tasks" else ("event", "user")
    found = [
        each for each in schema if each.of in owners and each.name not in left_out and each.kind != "time"
    ]
    if config.tokens.join != "towers":
        return found
    # What crosses in front are made of has no token of its own there, and labels have none anywhere.
    members = {name for each in schema.crosses for name in each.cross}
    labels = {task.column for task in _tasks(config)}
    return [
        each
        for each in found
        if each.place == "front"
        or (each.name not in members and (each.kind == "bits" or each.name not in labels))
    ]


def _tasks(config: Config) -> tuple[TaskRule, ...]:
    from freescale.data import parse_tasks
    from freescale.recipe.requests import request_options

    options = request_options(config)
    return () if options is None else parse_tasks(options.tasks)


def item_features(schema: Schema) -> list[Feature]:
    """Features that make the vectors of items: their ids, and what is known of them."""
    return [each for each in schema if each.name == "item" or (each.of == "item" and each.kind != "time")]


def token_rule(config: Config, features: BatchFeatures | None) -> TokenRule | None:
    """How many tokens a history becomes, where features have tokens of their own."""
    from freescale.data import TokenRule

    if features is None:
        return None
    places = [each.place for each in token_features(config, features.schema)]
    rule = TokenRule(places.count("front"), places.count("after"))
    return rule if rule.front or rule.after else None


def check_features(config: Config, features: BatchFeatures) -> None:
    """Refuse what does not go together."""
    from freescale.errors import ConfigError
    from freescale.recipe.requests import request_options

    options = request_options(config)
    asked = [each.name for each in token_features(config, features.schema) if each.of == "request"]
    if options is not None and options.late and asked:
        raise ConfigError(
            "head.late=true: candidates outside the attention do not hear what is said of their request",
            got=", ".join(asked),
            next_step="set head.late=false, or name the features to read without them in the section features",
        )
    fronts = [each.name for each in features.schema if each.cross and each.of == "request"]
    if fronts and (options is None or options.late or not options.one_candidate):
        raise ConfigError(
            "a cross with an item or an event in it stands in front only where a request has one candidate",
            got=", ".join(fronts),
            next_step="say as: join for it, or head.kind=tasks with head.candidates=1 or head.anchors",
        )
    rule = token_rule(config, features)
    placed = [each for each in token_features(config, features.schema) if each.place != "join"]
    front = [each.name for each in placed if each.place == "front"]
    if front and config.model.mask == "window":
        raise ConfigError(
            "model.mask=window does not go with features in front: later events would not see them",
            got=", ".join(front),
            next_step="say as: join for them, which adds them to every event, or leave model.mask out",
        )
    if rule is not None and config.segments.recent is not None:
        raise ConfigError(
            "segments.recent does not go with features that have tokens of their own",
            got=", ".join(each.name for each in placed),
            next_step="say as: join for them, or leave segments.recent out",
        )
    if config.items.kind != "ids":
        read = [each.name for each in features.schema if each.name not in ("item", "time", "user")]
        raise ConfigError(
            f"items.kind={config.items.kind} makes item vectors by itself, and does not go with features yet",
            got=", ".join(read) or f"tables.item.dim other than model.dim = {config.model.dim}",
            next_step="set items.kind=ids, or name the item alone in the section features: "
            "features.item={of: event, is: id}",
        )


def id_columns(config: Config, schema: Schema) -> list[IdColumn]:
    """Features that have rows, and where batches have their ids."""
    from freescale.pipeline import IdColumn

    items = item_features(schema) if config.items.kind == "ids" else []
    domains: dict[str, Domain] = {
        **{"event": "tokens", "request": "tokens", "user": "samples", "item": "items"},
    }
    return [
        IdColumn(
            each.name,
            "items" if each.name == "item" else "samples" if each.place == "front" else domains[each.of],
            each.table_name,
            several=each.kind == "ids",
        )
        for each in [*items, *token_features(config, schema)]
        if each.table_name is not None
    ]
