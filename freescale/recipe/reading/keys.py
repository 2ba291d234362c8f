"""What a recipe key is: its default, one line of help, its range, and what it may name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from freescale import registry
from freescale.errors import ConfigError


def key(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    free: bool = False,
    family: str | None = None,
    besides: tuple[str, ...] = (),
    elsewhere: tuple[str, ...] = (),
) -> Any:
    """A recipe key: its default, one line of help, its range, and whether it may change within one run.

    Free keys move work or files, never the curve; a resumed run may come with others. A key with a `family` names a
    kind of it (see `registry`), or one of the words `besides`; the options of that kind are keys of the same section,
    but for those that kinds which ship get from `elsewhere` in the recipe.
    """
    names = {"family": family, "besides": besides, "elsewhere": elsewhere}
    limits = {"at_least": at_least, "at_most": at_most}
    return field(default=default, metadata={"help": help, "free": free, **names, **limits})


def extra_keys() -> Any:
    """The place in a section for options of kinds; in a recipe they stand among the other keys of the section."""
    return field(default_factory=dict, metadata={"extra": True})


def nested_entries(section: str, given: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Entries of a section whose keys are names: NAME with its words, then single words as NAME.WORD.

    Args:
        section: for messages.
        given: of a recipe and a command line, as they come.
        problems: where those found are added.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path, value in sorted(given.items(), key=lambda pair: "." in pair[0]):
        name, dot, word = path.partition(".")
        value = getattr(value, "value", value)  # typed on the command line
        if dot:
            entries.setdefault(name, {})[word] = value
        elif isinstance(value, Mapping):
            entries[name] = dict(value)
        elif value is not None:
            problems.append(f"{section}.{name}: must be a mapping of words, got {value!r}")
    return entries


def own_fields(section: Any) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a section or its class, without options of kinds."""
    return {item.name: item for item in dataclasses.fields(section) if "extra" not in item.metadata}


def kind_keys(section: Any) -> Iterator[tuple[str, str]]:
    """(key, family) of the keys that name kinds."""
    for name, item in own_fields(section).items():
        if item.metadata["family"] is not None:
            yield name, item.metadata["family"]


def allowed_names(item: dataclasses.Field[Any]) -> list[str]:
    """What a key with a family may be set to."""
    return [*item.metadata["besides"], *registry.names(item.metadata["family"])]


def changed(section: Any, *names: str) -> list[str]:
    """Those of the keys (all, if none are named) that differ from their defaults."""
    defaults = type(section)()
    return [
        name for name in names or own_fields(section) if getattr(section, name) != getattr(defaults, name)
    ]


def options_from_outside(section: Any, family: str) -> set[str]:
    """Options of the kind that a section names, where it is none of ours: keys of ours may be options of it, too."""
    (name,) = [getattr(section, name) for name, each in kind_keys(section) if each == family]
    kind = registry.registered(family, name)
    if kind is None or kind.ships or kind.options is None:
        return set()
    return {item.name for item in dataclasses.fields(kind.options)}


def section_options(section: Any, family: str, **elsewhere: Any) -> Any:
    """The options of the kind that a section names, as its dataclass; None where the kind has none."""
    (name,) = [name for name, each in kind_keys(section) if each == family]
    return filled_options(registry.find(family, getattr(section, name)), section, **elsewhere)


def filled_options(kind: registry.Kind, section: Any, **elsewhere: Any) -> Any:
    """The options of a kind from a section.

    A field called as a key of the section is that key; the others are further keys, which come with the kind.
    `elsewhere`: fields that other sections of the recipe give.

    Raises:
        ConfigError: the kind needs an option that is not there.
    """
    if kind.options is None:
        return None
    given = _given(section, elsewhere)
    missing = missing_keys(kind, section, **elsewhere)
    if missing:
        name = missing[0].partition(":")[0]
        raise ConfigError(missing[0], next_step=f"give it a value: {name}=VALUE")
    known = {item.name for item in dataclasses.fields(kind.options)}
    return registry.options_of(kind, {name: x for name, x in given.items() if name in known})


def missing_keys(kind: registry.Kind, section: Any, **elsewhere: Any) -> list[str]:
    """What a section must give for its kind and does not; each as a problem."""
    name = type(section).__name__.removesuffix("Section").lower()
    missing = registry.missing_options(kind, _given(section, elsewhere))
    return [f"{name}.{each}: {kind.family} {kind.name!r} needs it" for each in missing]


def _given(section: Any, elsewhere: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: getattr(section, name) for name in own_fields(section) if name not in elsewhere}
    return {**elsewhere, **section.extra, **own}


def as_yaml(value: Any) -> Any:
    """As YAML knows it."""
    return list(value) if isinstance(value, tuple) else value
