"""From what YAML or a command line gives to the type a key has; ValueError says what is allowed."""

from __future__ import annotations

import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from freescale import registry
from freescale.errors import nearest
from freescale.recipe.reading.keys import allowed_names


@dataclass(frozen=True)
class Typed:
    """A value from the command line, as it was typed and as YAML reads it."""

    text: str
    value: Any


def checked(value: Any, hint: Any, item: dataclasses.Field[Any]) -> Any:
    """A value of a key as its type, within its range.

    Raises:
        ValueError: with what is allowed.
    """
    family = item.metadata.get("family")
    if family is not None:
        return _one_of(value.value if isinstance(value, Typed) else value, allowed_names(item), family=family)
    if isinstance(value, Typed):
        # A folder called 2024-05-06 or 007 keeps its name.
        is_number = isinstance(value.value, int | float | datetime.date) and not isinstance(value.value, bool)
        value = value.text if hint is str and is_number else value.value
    converted = _convert(value, hint)
    _check_range(converted, item.metadata)
    return converted


def type_name(hint: Any, item: dataclasses.Field[Any] | None = None) -> str:
    """A type in words, for tables of keys."""
    if item is not None and item.metadata.get("family") is not None:
        return " | ".join(allowed_names(item))
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " | ".join(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if arg is type(None) else type_name(arg) for arg in typing.get_args(hint))
    if origin is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    return hint.__name__


def _convert(value: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(value, inner)
    if origin is Literal:
        # YAML reads true and false as truth values; beside other words they are words.
        words = typing.get_args(hint)
        word = str(value).lower() if isinstance(value, bool) else value
        # And on and off, too.
        switch = {True: "on", False: "off"}
        if isinstance(value, bool) and switch[value] in words:
            word = switch[value]
        return _one_of(word, words)
    if origin is tuple:
        items = _listed(value)
        return tuple(_convert(item, typing.get_args(hint)[0]) for item in items)
    return _convert_scalar(value, hint)


def _listed(value: Any) -> list[Any]:
    """A list as it is; one from a command line, 10,50,200, is text to YAML."""
    if isinstance(value, str) and "," in value:
        return [yaml.safe_load(part) for part in value.split(",")]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _one_of(value: Any, allowed: typing.Sequence[str], *, family: str | None = None) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    close = None if str(value).startswith(registry.PYTHON) else _meant(str(value), allowed)
    if family and str(value).startswith(registry.PYTHON):
        raise ValueError(f"got {value!r}; {registry.meant(family, str(value))}")
    hint = f" (did you mean {close}?)" if close else f"; {registry.OUTSIDE}" if family else ""
    raise ValueError(f"allowed: {', '.join(allowed)}; got {value!r}{hint}")


def _meant(word: str, allowed: typing.Sequence[str]) -> str | None:
    """The allowed word that was meant: a gpu is one letter from cpu, and none."""
    if word.lower() == "gpu" and "cuda" in allowed:
        return "cuda"
    return nearest(word, allowed)


def _convert_scalar(value: Any, hint: type) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and not isinstance(value, bool):
        # YAML reads 1e-3 as text; people write it all the time.
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    if hint is str and isinstance(value, datetime.date):
        return value.isoformat()
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    raise ValueError(f"must be {names[hint]}, got {value!r}")


def _check_range(value: Any, limits: Mapping[str, Any]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    lowest, highest = limits.get("at_least"), limits.get("at_most")
    if lowest is not None and value < lowest:
        raise ValueError(f"must be at least {lowest}, got {value}")
    if highest is not None and value > highest:
        raise ValueError(f"must be at most {highest}, got {value}")
