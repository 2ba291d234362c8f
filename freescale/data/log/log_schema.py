"""Features in a log: which a schema may name, and the columns that are sealed with every window.

A window never changes, and what is learnt from it must not depend on later ones. So a log keeps what each event says of
itself and of its request. What is known of items and users changes with time and is not kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale.data.log.log_file import LogRules
from freescale.data.preparing.writing.feature_writer import FeatureWriter
from freescale.data.schema.feature import Feature, Schema, legacy_schema, renamed_columns
from freescale.data.schema.reading import checked_schema
from freescale.errors import DataError

_OWNERS = ("event", "request")
_KINDS = ("id", "number", "bits", "time")


def check_schema(schema: Schema | None) -> None:
    """Refuse, all at once, features that a log does not keep."""
    found = [f"features.{each.name}{text}" for each in schema or () for text in _problems(each)]
    if found:
        raise DataError(
            "A log keeps features of events and requests alone:\n  - " + "\n  - ".join(found),
            next_step="leave them out of the schema",
        )


def check_words(table_ids: Mapping[str, str]) -> None:
    """Refuse ids of features that are text: their words would have to be told with every window."""
    words = sorted(
        name for name, kind in table_ids.items() if kind == "text" and name not in ("item", "user")
    )
    if words:
        raise DataError(
            "Ids of features are whole numbers in a log, or of a closed list",
            got=f"words in {', '.join(words)}",
            next_step="name all words in the schema (values: [...]), or write numbers",
        )


def schema_of(rules: LogRules) -> Schema:
    """All features of the events of a log, by the names they have in a window."""
    usual = legacy_schema(rules.features)
    if rules.schema is None:
        return usual
    own = renamed_columns(checked_schema(rules.schema, where="the log"))
    kept = {name: each for name, each in usual.features.items() if name != "action"}
    return Schema({**kept, **own.features})


def columns_of(rules: LogRules) -> tuple[str, ...]:
    """Columns of events that a window stores."""
    more = [each.name for each in schema_of(rules).columns() if each.name not in rules.features]
    return (*rules.features, *more)


def feature_writer(rules: LogRules) -> FeatureWriter | None:
    """What writes the columns of a schema; None where there is none."""
    if rules.schema is None:
        return None
    return FeatureWriter(checked_schema(rules.schema, where="the log"), sides={})


def same_schema(rules: LogRules, schema: Schema | None) -> None:
    """What the first window has decided cannot be asked for otherwise later."""
    if schema is not None and schema.words() != rules.schema:
        raise DataError(
            "This log was made with another schema",
            got=", ".join(each.name for each in schema),
            allowed=", ".join(rules.schema or {}) or "none",
            next_step="leave `--schema` out, or make a new log",
        )


def _problems(feature: Feature) -> list[str]:
    if feature.cross or feature.name in ("user", "item", "time"):
        return []
    found: list[Any] = []
    if feature.of not in _OWNERS:
        found.append(f".of: {feature.of}; what is known of {feature.of}s is not kept in logs")
    if feature.kind not in _KINDS:
        found.append(f".is: {feature.kind}; a log keeps {', '.join(_KINDS)}")
    if feature.scale == "standard":
        found.append(
            ".scale: standard follows from all events, and those of a log are never all there; use log"
        )
    return found
