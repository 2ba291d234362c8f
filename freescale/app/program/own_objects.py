"""Objects of a program as kinds: inside a block, a recipe can name the encoder, head and source that were given."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from freescale import registry
from freescale.data import ListedHistories, SequenceSource
from freescale.errors import ConfigError
from freescale.model import FULL_RANKING, Needs, retrieves

_KEYS = {"encoder": "model.kind", "head": "head.kind", "source": "data.source"}


class OwnObjects:
    """What a program gave to a `Trainer`, to be had anew as often as a run is built.

    An object is copied each time, so that its first weights stay what they are and a run does not depend on the runs
    before it. A function without arguments is called each time, after torch's seed was set from run.seed.

    Args:
        encoder: an object, a function that makes one, the name of a kind, or None for the recipe's.
        head: the same.
        source: an object, histories as a list of lists, the path of a data set, or None for the recipe's.
    """

    def __init__(self, *, encoder: Any, head: Any, source: Any) -> None:
        self.keys: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._classes: dict[str, type] = {}
        self._fresh: dict[str, Any] = {}
        for family, part in (("encoder", encoder), ("head", head), ("source", _as_source(source))):
            self._take(family, part)
        self.named = {
            family: f"{registry.PYTHON}{kind.__qualname__}" for family, kind in self._classes.items()
        }
        self.keys |= {_KEYS[family]: name for family, name in self.named.items()}
        if "source" in self.named:
            self.keys["data.path"] = self.named["source"]

    def _take(self, family: str, part: Any) -> None:
        if part is None:
            return
        if isinstance(part, str):
            self.keys[_KEYS[family] if family != "source" else "data.path"] = part
            return
        if inspect.isclass(part):
            raise ConfigError(
                f"{family}= takes an object, not a class",
                got=part.__qualname__,
                next_step=f"{family}={part.__qualname__}(...), or a function that makes one: {family}=lambda: ...",
            )
        self._given[family] = part
        self._classes[family] = type(self._made(family))

    def _made(self, family: str) -> Any:
        """One of the objects by itself."""
        part = self._given[family]
        if not _is_function(part):
            return part
        with torch.random.fork_rng(devices=[]):
            return part()

    def first_weights(self) -> dict[str, str]:
        """A digest of the weights that each object was given with: ranks must have made the same ones."""
        found = {}
        for family, part in self._given.items():
            if isinstance(part, nn.Module):
                digest = hashlib.blake2b(digest_size=8)
                for name, value in part.state_dict().items():
                    digest.update(name.encode() + value.detach().double().cpu().numpy().tobytes())
                found[f"first weights of {family} {self.named[family]}"] = digest.hexdigest()
        return found

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Inside, recipes may name the objects."""
        self._fresh = {}
        makers: dict[str, Callable[..., Any]] = {family: self._maker(family) for family in self._given}
        with registry.offered(makers, named=self.named):
            yield

    def _maker(self, family: str) -> Callable[..., Any]:
        def make(*_: Any, **__: Any) -> Any:
            return self._new(family)

        make.made = self._classes[family]  # type: ignore[attr-defined]
        return make

    def _new(self, family: str) -> Any:
        part = self._given[family]
        if family == "source":
            return part if not _is_function(part) else part()
        if _is_function(part):
            made = part()
        else:
            # Encoder and head are copied together: what they share, they share in the copies, too.
            if family not in self._fresh:
                objects = {
                    name: each
                    for name, each in self._given.items()
                    if name != "source" and not _is_function(each)
                }
                self._fresh = copy.deepcopy(objects)
            made = self._fresh.pop(family)
        return _complete(made) if family == "head" else made


def _complete(head: Any) -> Any:
    """A head with what it may leave out."""
    ranks = retrieves(head)
    for name, usual in (("needs", Needs()), ("metric_names", FULL_RANKING if ranks else ())):
        if not hasattr(head, name):
            setattr(head, name, usual)
    return head


def _is_function(part: Any) -> bool:
    """Whether it makes the object instead of being it."""
    return not isinstance(part, nn.Module) and (inspect.isroutine(part) or type(part).__name__ == "partial")


def _as_source(source: Any) -> Any:
    """Histories in lists become a source; a path becomes text, a source without groups gets one."""
    if source is None or isinstance(source, str) or _is_function(source) or inspect.isclass(source):
        return source
    if hasattr(source, "__fspath__"):
        return str(source)
    if isinstance(source, list | tuple | dict):
        return ListedHistories(source)
    return source if hasattr(source, "groups") else _with_groups(source)


def _with_groups(source: SequenceSource) -> SequenceSource:
    """A source that says nothing of which rows are cheap to read together: all of them are."""
    source.groups = np.array([len(source.lengths)])  # type: ignore[misc]
    return source
