"""Kinds: what a recipe can name. Each registers where it is defined, in this package or outside it.

    @register("encoder", "gru4rec", options=GruOptions)       # a frozen dataclass: its fields are keys of the recipe
    class GRU4Rec(nn.Module): ...

A kind that ships is one file in the folder of its family, called as the kind is: it is imported when somebody names
it, so knowing the names costs nothing. A kind from outside is registered by importing its module, which only the
person who types can ask for (`--plugin MODULE`): recipes, checkpoints, exports and data hold names, never code.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from freescale.errors import ConfigError, FreeScaleError, nearest

T = TypeVar("T")

# The folder of each family: a file in it is a kind of its name. Files that begin with "_" are no kinds.
FAMILIES = {
    "encoder": "freescale.model.encoders",
    "head": "freescale.model.heads",
    "mask": "freescale.kernels.attention.masks",
    "optimizer": "freescale.embedding.optimizers",
    "id_map": "freescale.embedding.id_maps",
    "transport": "freescale.comm.transports.kinds",
    "source": "freescale.data.sources",
    "origin": "freescale.data.log.origins",
    "format": "freescale.data.formats",
    "balancer": "freescale.balance.balancers",
    "claim": "freescale.prove.claims",
}
ENTRY_POINTS = "freescale.kinds"
OUTSIDE = "a kind of your own is registered by --plugin MODULE"
PYTHON = "python:"
"""What names of objects begin with that a program gave to a `Trainer`: no recipe can make such an object again."""


@dataclass(frozen=True)
class Kind:
    """One thing a recipe can name.

    Args:
        family: what it is a kind of, e.g. "encoder".
        name: what a recipe calls it.
        make: builds it; what it is called with is said by the protocol of its family.
        options: a frozen dataclass whose fields are further keys of the recipe; None where it has none.
        ships: whether it is part of this package.
    """

    family: str
    name: str
    make: Any
    options: type | None
    ships: bool


_kinds: dict[tuple[str, str], Kind] = {}


def register(family: str, name: str, *, options: type | None = None) -> Callable[[T], T]:
    """Let recipes name a class or function; the same name twice is refused unless it is the same module again."""
    _check_family(family)
    if options is not None and not dataclasses.is_dataclass(options):
        raise ConfigError(
            f"options of {family} {name!r} must be a dataclass",
            got=f"{options!r}",
            next_step="@dataclass(frozen=True, kw_only=True) class Options: ...",
        )

    def keep(make: T) -> T:
        module = getattr(make, "__module__", "")
        ships = module.startswith("freescale.")
        if not ships and name in _shipped(family):
            raise ConfigError(
                f"{family} {name!r} ships with freescale", next_step="register yours under another name"
            )
        before = _kinds.get((family, name))
        if before is not None and getattr(before.make, "__module__", "") != module:
            raise ConfigError(
                f"{family} {name!r} is registered already",
                got=f"one from {before.make.__module__}, one from {module}",
                next_step="register yours under another name",
            )
        _kinds[family, name] = Kind(family, name, make, options, ships)
        return make

    return keep


@contextmanager
def offered(kinds: Mapping[str, Callable[..., Any]], *, named: Mapping[str, str]) -> Iterator[None]:
    """Let recipes name objects of this program, inside the block only.

    Args:
        kinds: family -> what makes the object, called as the family's protocol says.
        named: family -> its name, which begins with `PYTHON`.
    """
    keys = {(family, named[family]): make for family, make in kinds.items()}
    before = {key: _kinds[key] for key in keys if key in _kinds}
    _kinds.update(
        {(family, name): Kind(family, name, make, None, False) for (family, name), make in keys.items()}
    )
    try:
        yield
    finally:
        for key in keys:
            del _kinds[key]
        _kinds.update(before)


def option(default: Any = dataclasses.MISSING, *, help: str) -> Any:
    """A field of an options dataclass: its default, if it has one, and what `freescale keys` says of it."""
    return dataclasses.field(default=default, metadata={"help": help})


def find(family: str, name: str, *, key: str | None = None) -> Kind:
    """The kind of this name, imported if it has not been yet.

    Raises:
        ConfigError: there is none; `key` is the recipe key that named it.
    """
    _check_family(family)
    if (family, name) not in _kinds and name in _shipped(family):
        importlib.import_module(f"{FAMILIES[family]}.{name}")
    kind = _kinds.get((family, name))
    if kind is None:
        raise ConfigError(
            f"{key + ': ' if key else ''}there is no {family} {name!r}",
            allowed=", ".join(names(family)),
            next_step=meant(family, name),
        )
    return kind


def registered(family: str, name: str) -> Kind | None:
    """The kind of this name if its module has been imported; imports nothing, so it knows all kinds from outside."""
    return _kinds.get((family, name))


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
    missing = missing_options(kind, values)
    if missing:
        raise ConfigError(f"{kind.family} {kind.name!r} needs its option {missing[0]!r}", got=f"{values}")
    # JSON knows no tuples, and what is frozen holds no lists.
    return kind.options(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def missing_options(kind: Kind, given: Mapping[str, Any]) -> list[str]:
    """Options without a default that were not given."""
    return [
        field.name
        for field in (() if kind.options is None else dataclasses.fields(kind.options))
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]


def _refuse_unknown(kind: Kind, values: Mapping[str, Any], known: list[str]) -> None:
    for name in values:
        if name not in known:
            close = nearest(name, known)
            raise ConfigError(
                f"{kind.family} {kind.name!r} has no option {name!r}",
                allowed=", ".join(known) or "none",
                next_step=f"did you mean {close!r}?" if close else None,
            )


def names(family: str) -> list[str]:
    """What can be named, those that ship first."""
    _check_family(family)
    shipped = _shipped(family)
    return [*shipped, *sorted(name for each, name in _kinds if each == family and name not in shipped)]


def meant(family: str, name: str) -> str:
    """What to do about a name that is not there."""
    if name.startswith(PYTHON):
        made = f"{family}={name.removeprefix(PYTHON)}(...)"
        export = "" if family == "source" else f", an export by load_export(path, {made})"
        return f"an object of a program: open a run by the same Trainer({made}){export}"
    close = nearest(name, names(family))
    return f"did you mean {close!r}?" if close else OUTSIDE


def load_plugin(module: str) -> None:
    """Import what registers kinds: a module, or an installed package's entry point of the group `freescale.kinds`."""
    installed = importlib.metadata.entry_points(group=ENTRY_POINTS, name=module)
    try:
        if installed:
            next(iter(installed)).load()
        else:
            importlib.import_module(module)
    except FreeScaleError:
        raise
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            raise ConfigError(
                f"--plugin {module}: there is no such module", next_step=_module(module)
            ) from None
        raise ConfigError(
            f"--plugin {module}: it cannot be imported",
            got=f"{type(error).__name__}: {error} ({_where(error)})",
            next_step="mend it; FREESCALE_DEBUG=1 shows the whole traceback",
        ) from error


def _module(named: str) -> str:
    """What to name instead of a module that is not there."""
    if named.endswith(".py") and "/" not in named:
        return f"a module is named without its ending: --plugin {named.removesuffix('.py')}"
    return f"name a module that Python can import here (PYTHONPATH), or an entry point of {ENTRY_POINTS}"


def _where(error: Exception) -> str:
    """File and line an import failed at."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def _shipped(family: str) -> list[str]:
    """Names of the files in the family's folder; nothing in it is imported."""
    spec = importlib.util.find_spec(FAMILIES[family])
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return sorted(found.name for found in pkgutil.iter_modules(places) if not found.name.startswith("_"))


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise ConfigError(
            f"there is no family of kinds called {family!r}",
            allowed=", ".join(FAMILIES),
            next_step=f"did you mean {nearest(family, FAMILIES)!r}?" if nearest(family, FAMILIES) else None,
        )
