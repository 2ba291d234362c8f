"""Options of a kind, filled in by name: what a kind does not know is refused, never dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

from freescale.errors import ConfigError, nearest
from freescale.registry import find


def option_names(family: str, name: str) -> tuple[str, ...]:
    """What the kind of this name can be told."""
    options = find(family, name).options
    return () if options is None else tuple(field.name for field in dataclasses.fields(options) if field.init)


def fill_options(family: str, name: str, values: dict[str, Any]) -> Any:
    """The kind's options dataclass with these values; None where it has no options.

    Raises:
        ConfigError: it does not know one of them, or misses one that has no default.
    """
    options, known = find(family, name).options, option_names(family, name)
    for each in values:
        if each not in known:
            close = nearest(each, known)
            raise ConfigError(
                f"{family} {name!r} has no option {each!r}",
                got=f"{each}={values[each]!r}",
                allowed=", ".join(known) or "none",
                next_step=f"did you mean {close!r}?" if close else None,
            )
    if options is None:
        return None
    missing = [field.name for field in dataclasses.fields(options) if _is_missing(field, values)]
    if missing:
        raise ConfigError(f"{family} {name!r} needs {', '.join(missing)}", allowed=", ".join(known))
    return options(**values)


def _is_missing(field: dataclasses.Field[Any], values: dict[str, Any]) -> bool:
    defaults = (field.default, field.default_factory)
    return field.init and field.name not in values and defaults == (dataclasses.MISSING, dataclasses.MISSING)
