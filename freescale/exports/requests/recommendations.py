"""The best items for a batch of users: what is asked for, and scores into answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import FeatureRequest, IntArray
from freescale.errors import DataError
from freescale.exports.requests.asked_values import check_list
from freescale.model import TokenCache

_SCORES = 1 << 24
_TOKENS = 1 << 16
"""Scores and events handled at once; they bound the memory of a batch of any size."""
_MILLISECONDS = 10**11
"""From here on `prepare` takes a number for milliseconds, too."""


@dataclass(frozen=True)
class Request:
    """One user who is asked for.

    Args:
        tokens: features of the events, those "item_index" names known to the model.
        hidden: numbers of the items not to recommend.
        cache: the history before.
        features: what it says of its events and of the user; looked at where the model looks at any.
    """

    tokens: dict[str, Tensor]
    hidden: Tensor
    cache: TokenCache | None
    features: FeatureRequest

    @property
    def num_tokens(self) -> int:
        """Events of the history."""
        return len(self.tokens["item_index"])


def is_batch(given: Any) -> bool:
    """Whether these are histories of several users, not one history; a text is an id, not a history."""
    first = given[0] if len(given) else 0
    return hasattr(first, "__len__") and not isinstance(first, str | bytes)


def one_each(name: str, given: Any, num_users: int, *, shared: bool) -> Sequence[Any]:
    """A value for every user from what a batch was given: one each, or the same for all where that makes sense."""
    if given is None or shared:
        return [given] * num_users
    check_list(name, given, "one value a user")
    if len(given) != num_users:
        raise DataError(
            f"{name} must be one for each user", got=f"{num_users} histories, {len(given)} {name}"
        )
    return list(given)


def features_each(given: Any, num_users: int, *, alone: bool) -> Sequence[Mapping[str, Any]]:
    """Features for every user: by name one for each, or a list of such by user."""
    if given is None or alone:
        given = [given or {}] * num_users
    elif isinstance(given, Mapping):
        for name, values in given.items():
            if values is not None and (isinstance(values, str | bytes) or not hasattr(values, "__len__")):
                raise DataError(
                    f"{name} must be one for each user",
                    got=f"{num_users} histories, and {values!r}",
                    next_step=f"features={{{name!r}: [...]}} with a value for each",
                )
        by_name = {name: one_each(name, values, num_users, shared=False) for name, values in given.items()}
        return [{name: values[n] for name, values in by_name.items()} for n in range(num_users)]
    given = one_each("features", given, num_users, shared=False)
    for each in given:
        if not isinstance(each, Mapping):
            raise DataError(
                "features are given by name", got=type(each).__name__, next_step="features={'country': 'de'}"
            )
    return given


def whole_seconds(times: Any) -> IntArray:
    """[n] times of a request as they are stored: seconds since 1970, as int64."""
    check_list("times", times, "seconds")
    try:
        given = np.asarray(times)
    except ValueError:
        given = np.empty(0, object)  # lists among numbers
    if given.dtype.kind not in "iuf" or given.ndim != 1 or not np.isfinite(given).all():
        bad = next((one for one in times if not _is_moment(one)), times[0])
        raise DataError(
            "times must be numbers",
            got=f"{bad!r} ({type(bad).__name__})",
            allowed="seconds since 1970 in UTC, such as 1767225600; of a datetime: int(it.timestamp())",
        )
    if len(given) and np.abs(given).max() >= _MILLISECONDS:
        warnings.warn(
            f"times are seconds since 1970, but {np.abs(given).max():.0f} would be thousands of years away: "
            "divide milliseconds by 1000",
            stacklevel=5,
        )
    return given.astype(np.int64)


def _is_moment(one: Any) -> bool:
    number: Any = one if isinstance(one, int | float | np.integer | np.floating) else np.nan
    return bool(abs(number) < 1 << 63)


def in_chunks(requests: Sequence[Request], *, num_items: int) -> Iterator[Sequence[Request]]:
    """Users that are handled together, in their order."""
    most, start, tokens = max(1, _SCORES // num_items), 0, 0
    for n, request in enumerate(requests):
        if n > start and (n - start == most or tokens + request.num_tokens > _TOKENS):
            yield requests[start:n]
            start, tokens = n, 0
        tokens += request.num_tokens
    yield requests[start:]


def hide(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """Scores [U, N] with those of the items not to recommend at -inf; changed in place."""
    sizes = torch.tensor([len(request.hidden) for request in requests])
    user = torch.repeat_interleave(torch.arange(len(requests)), sizes)
    scores[user, torch.cat([request.hidden for request in requests])] = float("-inf")
    return scores


def best(scores: Tensor, k: int) -> list[list[tuple[int, float]]]:
    """The k best numbers of every row with their scores, ties to the smaller number; what is at -inf is left out."""
    k = min(k, scores.shape[1])
    values, numbers = scores.topk(k)
    least = values[:, -1:]
    # Of several items at the k-th score, the ones with the smallest numbers belong to the list.
    tied = ((scores >= least).sum(1) > k) & (least[:, 0] > float("-inf"))
    if tied.any():
        in_order = scores[tied].sort(descending=True, stable=True)
        values[tied], numbers[tied] = in_order.values[:, :k], in_order.indices[:, :k]
    numbers, order = numbers.sort()
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    rows = zip(values.tolist(), numbers.gather(1, order).tolist())
    return [[(item, value) for value, item in zip(*row) if value > float("-inf")] for row in rows]
