"""What a request for scores says, and what of it a model with tasks looks at: events, candidates, features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.data import Feature, FeatureRequest, IntArray, ItemId, PoolIndex, PoolRule
from freescale.errors import DataError
from freescale.exports.requests.recommendations import whole_seconds
from freescale.exports.requests.request_reader import Flags, RequestReader
from freescale.model import HistoryCache


class Asked(NamedTuple):
    """One user's request.

    Args:
        history: item ids.
        candidates: item ids.
        times: of the history.
        request_time: when it is asked.
        cache: what is kept of the history before.
        features: of events, the user and the request, by name.
        shown: features of candidates, by name.
        who: what messages begin with.
    """

    history: Sequence[ItemId]
    candidates: Sequence[ItemId]
    times: Sequence[int] | None = None
    request_time: int | None = None
    cache: HistoryCache | None = None
    features: Mapping[str, Any] = MappingProxyType({})
    shown: Mapping[str, Any] = MappingProxyType({})
    who: str = ""


class Events(NamedTuple):
    """What a model looks at of a history.

    Args:
        kept: [events] which of those that were given.
        items: [n] of these, as the model numbers them.
    """

    kept: Flags
    items: Tensor


def pool_rule(manifest: Mapping[str, Any]) -> PoolRule | None:
    """What histories are made of, where they are not simply the last events."""
    said = manifest["head"].get("options") or {} if "head" in manifest else {}
    if said.get("pools") is None:
        return None
    return PoolRule(said["pools"], tuple(said["pool_kinds"]), said["pool_events"], said["pool_window"])


def check_pools(head: Mapping[str, Any], asked: Iterable[Feature]) -> None:
    """Refuse histories of the last of each kind where requests do not tell what is of which kind."""
    rule, told = pool_rule({"head": head}), [each.name for each in asked]
    if rule is not None and rule.column not in told:
        raise DataError(
            f"head.pools={rule.column}: a service finds the last of each kind by a feature that its model reads",
            got=f"features that requests tell: {', '.join(told) or 'none'}",
            next_step=f"train with {rule.column} in the section features, or without head.pools",
        )


def kept_events(reader: RequestReader, asked: Asked, *, limit: int | None) -> Events:
    """The events that count: those the model knows, the latest of them, or the latest of each kind as in training."""
    known, index = reader.index_of(asked.history)
    rule = pool_rule(reader.manifest)
    if rule is None or limit is None or not len(index):
        last = np.flatnonzero(known)[-limit:] if limit is not None else np.flatnonzero(known)
    else:
        last = _of_pools(reader, asked, known, rule, limit)
    kept = np.zeros(len(known), bool)
    kept[last] = True
    return Events(kept, index[torch.from_numpy(kept[known])])


def _of_pools(reader: RequestReader, asked: Asked, known: Flags, rule: PoolRule, limit: int) -> IntArray:
    """Numbers of the last events of each kind; one that the model does not know fills the window, and no pool."""
    assert reader.features is not None  # write_export has refused others
    values, what = (
        reader.features.reader,
        f"{asked.who}{rule.column} needs one value for every event of the history",
    )
    if rule.column not in asked.features:
        raise DataError(
            f"{asked.who}the model looks at the last events of each {rule.column}, which the request does not tell",
            got=", ".join(asked.features) or "no features",
            next_step=f"features={{{rule.column!r}: [...]}}, one value for every event of the history",
        )
    said = listed(asked.features[rule.column], len(known), what)
    kind = values.raw(rule.column, said, len(known))
    # A value that is no kind stands for events that are left out.
    none = next(value for value in range(len(rule.kinds) + 1) if value not in rule.kinds)
    kind = np.where(known, kind, none)
    index = PoolIndex(kind, np.array([0, len(known)]), rule)
    return index.spans(np.array([0]), np.array([len(known)]), most=limit)[0]


def said_of(reader: RequestReader, asked: Asked, events_kept: Events, shown: Flags) -> FeatureRequest:
    """What is said of the events and of the candidates that the model knows, one behind the other.

    A candidate has no outcomes, and an event nothing of the request: None stands there.
    """
    events, num = len(events_kept.kept), len(events_kept.kept) + len(shown)
    kept = np.concatenate([np.flatnonzero(events_kept.kept), events + np.flatnonzero(shown)])
    if reader.features is None:
        return reader.features_said({**asked.features, **asked.shown}, events_kept.kept, None, who=asked.who)
    given: dict[str, Any] = dict(asked.features)
    own = dict(asked.shown)
    alone = reader.features.reader.of_candidates
    strange = [name for name in alone if given.get(name) is not None]
    if strange:
        raise DataError(
            f"{asked.who}the model looks at {strange[0]} of candidates alone, and at no event's",
            got=f"features={{{strange[0]!r}: ...}}",
            next_step=f"candidate_features={{{strange[0]!r}: [...]}}, one value for every candidate",
        )
    given |= dict.fromkeys(alone)
    for name, feature in reader.features.reader.needed.items():
        if not len(shown) and feature.of == "request":
            given.setdefault(name, None)  # nobody asks yet
        if name not in given or feature.of == "user":
            continue
        if feature.of == "request":
            given[name] = [None] * events + [given[name]] * len(shown)
            continue
        before = listed(
            given[name], events, f"{asked.who}{name} needs one value for every event of the history"
        )
        after: list[Any] = [None] * len(shown)
        if not feature.outcome and len(shown):
            if name not in own:
                raise DataError(
                    f"{asked.who}the model needs to know {name} of every candidate",
                    got=", ".join(asked.shown) or "no features of candidates",
                    next_step=f"candidate_features={{{name!r}: [...]}}; None says that there is no value",
                )
            after = listed(
                own.pop(name), len(shown), f"{asked.who}{name} needs one value for every candidate"
            )
        given[name] = before + after
    left = [name for name in own if name in given or name not in reader.features.reader.needed]
    if left and len(shown):
        raise DataError(
            f"{asked.who}candidates have no such feature that this model looks at",
            got=", ".join(left),
            next_step="outcomes are not known yet; those of items are in their vectors; those of the request go into "
            "features=",
        )
    said = FeatureRequest(given, num, kept.astype(np.int64), asked.who)
    reader.features.reader.check(said)
    return said


def listed(value: Any, count: int, what: str) -> list[Any]:
    """One value for each; None stands for none of any."""
    if value is None:
        return [None] * count
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != count:
        got = (
            f"{len(value)} values"
            if hasattr(value, "__len__") and not isinstance(value, str)
            else repr(value)
        )
        raise DataError(what, got=f"{got} for {count}", next_step="None stands for a value that is missing")
    return list(value)


def tokens_of(
    reader: RequestReader, asked: Asked, events: Events, candidates: np.ndarray[Any, np.dtype[np.int64]]
) -> dict[str, Tensor]:
    """Events and candidates of a user."""
    timed = bool(reader.manifest["encoder"]["time_bias"])
    request_time = asked.request_time
    if asked.cache is not None and not len(events.items):
        raise DataError(
            f"{asked.who}a cache holds all but the latest event: give that one with it", got="no event"
        )
    if asked.cache is not None:
        check_length(reader, asked.cache, len(events.items))
    if len(events.items):
        tokens = reader.tokens(events.items, events.kept, asked.times, request_time, limit=None)
    else:
        nothing = torch.zeros(0, dtype=torch.int64)
        tokens = {"item_index": nothing, **({"time": nothing, "target_time": nothing} if timed else {})}
    shown = torch.from_numpy(candidates.astype(np.int64))
    joined = {"item_index": torch.cat([tokens["item_index"], shown])}
    if timed:
        if request_time is None and not len(events.items):
            raise DataError(
                f"{asked.who}a request without history must say when it comes",
                next_step="pass request_time=SECONDS",
            )
        moment = int(tokens["time"][-1] if request_time is None else whole_seconds([request_time])[0])
        at = torch.full((len(shown),), moment)
        joined |= {name: torch.cat([tokens[name], at]) for name in ("time", "target_time")}
    return joined


def check_length(reader: RequestReader, cache: HistoryCache | None, events: int) -> None:
    """Refuse more events than the model has learnt."""
    limit = reader.max_events - 1
    total = events + (0 if cache is None else len(cache))
    if total > limit:
        raise DataError(
            "a history is longer than the model has learnt",
            got=f"{total} events",
            allowed=f"at most {limit}",
            next_step="keep the user's latest events again, without a cache",
        )
