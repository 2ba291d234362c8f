"""Options of a kind, from what a recipe or an exported manifest holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from freescale.errors import ConfigError, nearest
from freescale.registry import Kind


def options_of(kind: Kind, given: object = None) -> Any:
    """The kind's options dataclass, filled from a mapping; an instance of it is taken as it is.

    Raises:
        ConfigError: a key it does not have, one it must have, or options of another kind.
    """
    if kind.options is not None and isinstance(given, kind.options):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"{kind.family} {kind.name!r} has other options",
            got=f"{given!r}",
            allowed="a mapping" if kind.options is None else f"a mapping or {kind.options.__name__}",
        )
    values: dict[str, Any] = dict(given or {})
    fields = () if kind.options is None else dataclasses.fields(kind.options)
    known = [field.name for field in fields]
    _refuse_unknown(kind, values, known)
    if kind.options is None:
        return None
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{kind.family} {kind.name!r} needs its option {missing[0]!r}", got=f"{values}")
    # JSON knows no tuples, and what is frozen holds no lists.
    return kind.options(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def _refuse_unknown(kind: Kind, values: Mapping[str, Any], known: list[str]) -> None:
    for name in values:
        if name not in known:
            close = nearest(name, known)
            raise ConfigError(
                f"{kind.family} {kind.name!r} has no option {name!r}",
                allowed=", ".join(known) or "none",
                next_step=f"did you mean {close!r}?" if close else None,
            )
