"""A whole schema from its words: each feature read, then all of them together; every problem is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from freescale.data.schema.feature import STRUCTURAL, Feature, Schema, usual_place
from freescale.data.schema.parsing import read_feature
from freescale.errors import ConfigError, nearest
from freescale.strict_yaml import StrictLoader

SECTION = "features"
_SHAPE = "a schema is a YAML file with a section `features`: docs/features.md"

# What a data set is built from must be what it is.
_MUST_BE = {
    "item": ("event", "id", "{of: event, is: id}: what a sequence is made of"),
    "user": ("user", "id", "{of: user, is: id}: whose sequence it is"),
    "time": ("event", "time", "{of: event, is: time}: what orders the events"),
}


def read_schema(given: Mapping[Any, Any], problems: list[str], *, path: str = SECTION) -> Schema:
    """The schema of these words; what is wrong is added to the problems, and left out of the schema.

    Args:
        given: name -> words of a feature.
        problems: where those found are added, each beginning with its dotted path.
        path: what the paths begin with.
    """
    read = {
        str(name): read_feature(name, words, problems, path=f"{path}.{name}") for name, words in given.items()
    }
    words_of = {str(name): words for name, words in given.items()}
    if "item" not in read:
        read = {"item": Feature(name="item", of="event", kind="id"), **read}
    good = {name: feature for name, feature in read.items() if feature is not None}
    for name, feature in list(good.items()):
        found = _problems_of_part(feature) or _problems_of_cross(feature, read)
        problems += [f"{path}.{name}{text}" for text in found]
        if not found and feature.cross:
            said = "as" in words_of[name]
            good[name] = _with_owner(feature, good, problems, path=f"{path}.{name}", said=said)
    # Members of a cross are looked at even where something else is wrong with it.
    for name in [name for name, feature in read.items() if feature is None]:
        problems += [f"{path}.{name}{text}" for text in _problems_of_cross(_bare(name, words_of[name]), read)]
    problems += [f"{path}.{text}" for text in _problems_of_tables(good)]
    return Schema(good)


def _bare(name: str, words: Any) -> Feature:
    """A cross of which only the members are known."""
    members = words.get("cross") if isinstance(words, Mapping) else None
    named = tuple(each for each in members if isinstance(each, str)) if isinstance(members, list) else ()
    return Feature(name=name, of="event", kind="id", cross=named)


def checked_schema(given: Mapping[Any, Any], *, where: str) -> Schema:
    """The schema of these words, or one error with all problems."""
    problems: list[str] = []
    schema = read_schema(given, problems)
    refuse(problems, where=where)
    return schema


def load_schema(path: Path) -> Schema:
    """The schema of a YAML file: its section `features`; a recipe may be that file."""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.load(text, StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the schema cannot be read", got=f"{path}: {error}", next_step=_SHAPE) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("the schema is not valid YAML", got=f"{path}: {error}", next_step=_SHAPE) from None
    sections = list(values) if isinstance(values, dict) else []
    if SECTION not in sections or not isinstance(values[SECTION], dict):
        close = nearest(SECTION, [str(name) for name in sections])
        raise ConfigError(
            f"{path} has no section {SECTION}",
            got=", ".join(map(str, sections)) or repr(values),
            allowed=f"{SECTION}: {{genre: {{of: item, is: id}}, ...}}",
            next_step=f"did you write {close!r} for {SECTION}?" if close and close != SECTION else None,
        )
    return checked_schema(values[SECTION], where=str(path))


def schema_from(given: Schema | Mapping[str, Any] | str | Path | None) -> Schema | None:
    """A schema however it is given: read already, as words by name, or as a file; None where there is none."""
    if given is None or isinstance(given, Schema):
        return given or None
    if isinstance(given, Mapping):
        return checked_schema(given, where="the schema")
    return load_schema(Path(given))


def refuse(problems: list[str], *, where: str) -> None:
    """One error with all problems, if there are any."""
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(
            f"{count} in the features of {where}:\n  - " + "\n  - ".join(problems),
            next_step="docs/features.md explains every word",
        )


def _problems_of_part(feature: Feature) -> list[str]:
    """What a data set is built from must be what it is."""
    if feature.name in STRUCTURAL:
        owner, kind, allowed = _MUST_BE[feature.name]
        wrong = (feature.of, feature.kind) != (owner, kind) or feature.cross or feature.values
        if wrong or feature.outcome:
            return [f": must be {allowed}; call another feature otherwise"]
        if feature.table is not None:
            return [f".table: its rows are in table {feature.name}; let others say table: {feature.name}"]
        return (
            [".as: a time goes into no token"] if feature.kind == "time" and feature.place != "join" else []
        )
    if feature.of == "event" and feature.kind == "time":
        return [": events have one time, and it is called time"]
    return []


def _problems_of_cross(cross: Feature, every: Mapping[str, Feature | None]) -> list[str]:
    found = []
    for name in cross.cross:
        member = every.get(name)
        if name not in every:
            close = nearest(name, [each for each in every if each != cross.name])
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(every)}"
            found.append(f".cross: there is no feature {name!r}; {hint}")
        elif name == cross.name or (member is not None and member.cross):
            found.append(f".cross: {name} is a cross itself; name its members instead")
        elif member is None:
            continue  # its own problems are told
        elif member.outcome:
            found.append(f".cross: {name} is an outcome, which a candidate does not have")
        elif not member.is_id:
            remedy = "; with edges it is one" if member.kind == "number" else ""
            found.append(f".cross: {name} is a {member.kind}, not an id{remedy}")
        elif member.kind == "ids":
            found.append(f".cross: {name} has several values; a cross needs one of each member")
    return found


def _with_owner(
    cross: Feature, good: Mapping[str, Feature], problems: list[str], *, path: str, said: bool
) -> Feature:
    """A cross of users alone is of the user; with an item or event in it of the event, or in front of the request."""
    if cross.place == "after":
        problems.append(f"{path}.as: a cross goes as: join, front; got after")
    members = [good[name] for name in cross.cross if name in good]
    if not members or any(member.of != "user" for member in members):
        # A history has one front, and every event another value: what stands there is the candidate's.
        return replace(cross, of="request") if cross.place == "front" and members else cross
    return replace(cross, of="user", place=cross.place if said else usual_place("user"))


def _problems_of_tables(features: Mapping[str, Feature]) -> list[str]:
    """Two features that share rows must say the same of them."""
    found: list[str] = []
    first: dict[tuple[str, str], Feature] = {}
    closed: dict[str, Feature] = {}
    for feature in features.values():
        table = feature.table_name
        if table is None:
            continue
        for word in ("rows", "map", "dim"):
            said = getattr(feature, word)
            before = first.get((table, word))
            if said is not None and before is not None and getattr(before, word) != said:
                found.append(
                    f"{feature.name}.{word}: table {table} has one {word}, and {before.name} says "
                    f"{getattr(before, word)}; got {said}"
                )
            elif said is not None:
                first.setdefault((table, word), feature)
        other = closed.setdefault(table, feature)
        if (other.values, other.edges, bool(other.cross)) != (
            feature.values,
            feature.edges,
            bool(feature.cross),
        ):
            found.append(
                f"{feature.name}.table: it cannot share the rows of {other.name}, whose ids mean something else "
                "(other values or edges, or a cross)"
            )
    return found
