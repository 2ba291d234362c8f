"""Read a recipe: strict sections from YAML, changed by `key=value`, all mistakes reported at once."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from freescale import registry
from freescale.errors import ConfigError, nearest
from freescale.recipe.config import Config, problems_of
from freescale.recipe.reading.convert import Typed, checked, type_name
from freescale.recipe.reading.keys import as_yaml, kind_keys, own_fields
from freescale.strict_yaml import StrictLoader


def load_config(
    recipe: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Read a recipe (or start from the defaults), apply `section.key=value` overrides, check everything.

    A recipe is a YAML file, or a mapping of sections as such a file holds it, or of `section.key`.

    Raises:
        ConfigError: lists every unknown key and bad value at once, each with its dotted path.
    """
    values = {} if recipe is None else read_recipe(recipe)
    problems: list[str] = []
    sections = {item.name: item.default_factory for item in dataclasses.fields(Config)}
    flat = dict(_flatten(values, sections, problems))
    flat.update(_parse_overrides(overrides, problems))
    named = dict.fromkeys(path.partition(".")[0] for path in flat)
    problems += [_unknown(name, sections, kind="section") for name in named if name not in sections]
    chosen = {name: _fill(name, make, flat, problems) for name, make in sections.items()}
    if not problems:
        config = Config(**chosen)
        problems = problems_of(config)
    if problems:
        raise ConfigError(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} {_where(recipe, overrides)}:\n  - "
            + "\n  - ".join(problems),
            next_step="`freescale keys` lists every recipe key with its default",
        )
    return config


def read_recipe(recipe: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recipe as it is written: a YAML file, or a mapping of sections or of `section.key`."""
    if not isinstance(recipe, Mapping):
        return _read_yaml(Path(recipe))
    values: dict[str, Any] = {}
    for path, value in recipe.items():
        section, dot, key = path.partition(".")
        if dot and isinstance(values.setdefault(section, {}), dict):
            values[section][key] = value
        elif not dot:
            values[section] = {**value, **values.get(section, {})} if isinstance(value, Mapping) else value
    return values


Described = tuple[str, str, str, str]
"""Dotted key, type, default, help."""


def describe_recipe() -> Iterator[Described]:
    """Every key a recipe can have, each section followed by options of its kinds. Imports kinds, torch with them."""
    options = list(describe_options())
    for section, rows in itertools.groupby(describe_keys(), key=_section):
        yield from rows
        yield from (row for row in options if _section(row) == section)


def _section(row: Described) -> str:
    return row[0].partition(".")[0]


def describe_keys() -> Iterator[Described]:
    """The keys that are there whatever kinds a recipe names, in recipe order."""
    for section in dataclasses.fields(Config):
        make: Any = section.default_factory
        if hasattr(make, "describe"):
            yield from make.describe()
        hints = typing.get_type_hints(make)
        for item in own_fields(make).values():
            named = f"{section.name}.{item.name}", type_name(hints[item.name], item)
            yield *named, _default(item), item.metadata["help"]


def describe_options() -> Iterator[Described]:
    """The same of the keys that come with a kind, of those that ship and of those from outside."""
    for section in dataclasses.fields(Config):
        own = own_fields(section.default_factory)
        for key, family in kind_keys(section.default_factory):
            for name in registry.names(family):
                fields, hints = _option_fields([(own[key], name)])
                for item in fields.values():
                    if item.name not in own:
                        names = f"{section.name}.{item.name}", type_name(hints[item.name])
                        meaning = ": ".join(filter(None, (f"with {section.name}.{key}={name}", _help(item))))
                        yield (*names, _default(item), meaning)


def _help(item: dataclasses.Field[Any]) -> str:
    """What an option says of itself; a kind from outside need not say anything."""
    return str(item.metadata.get("help", ""))


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is dataclasses.MISSING:
        return "" if item.default_factory is dataclasses.MISSING else _yaml(item.default_factory())
    return _yaml(item.default)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(as_yaml(value), default_flow_style=True).splitlines()[0]


def free_keys() -> set[str]:
    """Keys that may differ between two parts of one run."""
    return {f"{section}.{item.name}" for section, item, _ in _all_keys() if item.metadata["free"]}


def _all_keys() -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(section, key, its type), in recipe order."""
    for section in dataclasses.fields(Config):
        hints = typing.get_type_hints(section.default_factory)
        for item in own_fields(section.default_factory).values():
            yield section.name, item, hints[item.name]


def _where(recipe: str | Path | Mapping[str, Any] | None, overrides: Sequence[str]) -> str:
    places = ["the recipe"] if isinstance(recipe, Mapping) else [str(recipe)] if recipe else []
    if overrides:
        places.append("the keys given with it" if recipe else "the overrides")
    return "in " + (" and ".join(places) or "the defaults")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the recipe does not exist", got=path, next_step="`ls recipes/` lists those that ship"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the recipe cannot be read", got=f"{path}: {error}", next_step=_instead_of_a_recipe(path)
        ) from None
    try:
        values = yaml.load(text, StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            "the recipe is not valid YAML", got=f"{path}: {error}", next_step=_instead_of_a_recipe(path)
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "a recipe is a mapping of sections",
            got=f"{path} holds {'text' if isinstance(values, str) else f'a {type(values).__name__}'}",
            next_step=_instead_of_a_recipe(path),
        )
    return values


def _instead_of_a_recipe(path: Path) -> str:
    """What was probably meant by a path that is no recipe: a data set, a run, a file of raw data."""
    if (path / "config.yaml").is_file():
        return f"did you mean {path / 'config.yaml'}?"
    if path.suffix.lower() in (".yaml", ".yml"):
        return "mend the line it names; sections and keys look as in recipes/*.yaml, or in the config.yaml of a run"
    return f"a recipe is a YAML file; did you mean data.path={path}?"


def _flatten(
    values: Mapping[Any, Any], sections: Mapping[str, Any], problems: list[str]
) -> Iterator[tuple[str, Any]]:
    for name, body in values.items():
        if name not in sections:
            problems.append(_unknown(str(name), sections, kind="section"))
        elif not isinstance(body, dict | None):
            problems.append(f"{name}: a section is a mapping of keys, got {body!r}")
        elif body is not None:
            for key, value in body.items():
                yield f"{name}.{key}", value


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for text in overrides:
        path, equals, raw = text.partition("=")
        if not equals or "." not in path:
            problems.append(f"{text!r}: an override looks like section.key=value, e.g. run.steps=200")
            continue
        try:
            yield path.strip(), Typed(raw.strip(), yaml.safe_load(raw) if raw.strip() else "")
        except (yaml.YAMLError, ValueError):
            problems.append(f"{path}: cannot read the value {raw!r}")


def _fill(name: str, make: Any, flat: Mapping[str, Any], problems: list[str]) -> Any:
    """One section with the values given for it; what is wrong with them is noted."""
    given = {path.partition(".")[2]: value for path, value in flat.items() if path.partition(".")[0] == name}
    if hasattr(make, "from_entries"):  # its keys are names that a recipe makes up
        return make.from_entries(given, problems)
    own, hints = own_fields(make), typing.get_type_hints(make)
    values = _checked(name, {key: x for key, x in given.items() if key in own}, own, hints, problems)
    others = {key: x for key, x in given.items() if key not in own}
    if not others:
        return make(**values)
    kinds = [(own[key], values.get(key, own[key].default)) for key, _ in kind_keys(make)]
    more, more_hints = _option_fields(kinds)
    strangers = [f"{name}.{key}" for key, _ in kind_keys(make) if key in given and key not in values]
    for key in others:
        if key not in more:
            known = _unknown(key, {**own, **more}, kind="key", prefix=f"{name}.")
            problems.append(_of_another_kind(name, key, make, strangers) or known)
    options = {key: x for key, x in others.items() if key in more}
    extra = _checked(name, options, more, more_hints, problems)
    return make(**values, extra=extra) if extra else make(**values)


def _of_another_kind(section: str, option: str, make: Any, strangers: Sequence[str]) -> str | None:
    """What to say of an option that belongs, or may belong, to a kind that the section does not name."""
    for key, family in kind_keys(make):
        for name in registry.names(family):
            if option in _option_fields([(own_fields(make)[key], name)])[0]:
                return f"{section}.{option}: only with {section}.{key}={name}"
    return f"{section}.{option}: unknown key, unless it comes with {strangers[0]}" if strangers else None


def _checked(
    section: str,
    given: Mapping[str, Any],
    fields: Mapping[str, dataclasses.Field[Any]],
    hints: Mapping[str, Any],
    problems: list[str],
) -> dict[str, Any]:
    """The values that fit their keys; the others become problems."""
    values = {}
    for key, value in given.items():
        try:
            values[key] = checked(value, hints[key], fields[key])
        except ValueError as error:
            problems.append(f"{section}.{key}: {error}")
    return values


def _option_fields(
    kinds: Iterable[tuple[dataclasses.Field[Any], str]],
) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """Further keys that the kinds of a section bring along, and their types; (key, what it names) of each.

    A kind that ships is imported, which takes torch along, so ask only where it matters.
    """
    fields: dict[str, dataclasses.Field[Any]] = {}
    hints: dict[str, Any] = {}
    for key, name in kinds:
        family = key.metadata["family"]
        kind = registry.find(family, name) if name in registry.names(family) else None
        if kind is not None and kind.options is not None:
            hidden = key.metadata["elsewhere"] if kind.ships else ()
            fields |= {
                item.name: item for item in dataclasses.fields(kind.options) if item.name not in hidden
            }
            hints |= typing.get_type_hints(kind.options)
    return fields, hints


def _unknown(name: str, names: Iterable[str], *, kind: str, prefix: str = "") -> str:
    names = list(names)
    close = nearest(name, names)
    hint = f"did you mean {prefix}{close}?" if close else f"allowed: {', '.join(names)}"
    return f"{prefix}{name}: unknown {kind}; {hint}"
