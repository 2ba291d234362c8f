"""What no training at all would reach: the most popular items, and the user's own items again.

Both are judged by the rule and the cutoffs of the model. All work grows with the events, not with users times items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from freescale.data import Examples, IntArray
from freescale.jagged import find_sorted
from freescale.model import CUTOFFS, NEVER, RankingQuality
from freescale.train.quality.evaluate import asked_users
from freescale.train.quality.full_ranking import FULL, Asked, Rule

Rank = Callable[[Asked, IntArray], IntArray]
"""(who is asked, their rows) -> the rank of each one's target."""

_CPU = torch.device("cpu")


def popularity_quality(
    examples: Examples,
    *,
    rule: Rule = FULL,
    cutoffs: Sequence[int] = CUTOFFS,
    batch: int = 4096,
    max_users: int | None = None,
) -> dict[str, float]:
    """Metrics of recommending the most frequent items of the training part to everybody.

    All users share one order of the items. So the rank of a target is its place in that order, less the hidden items
    that stand before it.
    """
    counts = examples.source.items.train_counts
    place = np.empty(len(counts), dtype=np.int64)
    place[np.argsort(-counts, kind="stable")] = np.arange(len(place))

    def rank(asked: Asked, rows: IntArray) -> IntArray:
        target = place[asked.target.numpy()]
        if asked.among is not None:
            user, item = asked.among.user.numpy(), asked.among.item.numpy()
            return np.bincount(user[place[item] < target[user]], minlength=len(rows))
        # Histories may hold an item twice; it stands before the target once.
        hidden = np.unique(asked.hidden.user.numpy() * len(place) + place[asked.hidden.item.numpy()])
        user, hidden_place = np.divmod(hidden, len(place))
        return target - np.bincount(user[hidden_place < target[user]], minlength=len(rows))

    return _quality(rank, examples, rule, cutoffs, batch=batch, max_users=max_users)


def repeat_quality(
    examples: Examples,
    *,
    rule: Rule,
    cutoffs: Sequence[int] = CUTOFFS,
    batch: int = 4096,
    max_users: int | None = None,
) -> dict[str, float]:
    """Metrics of recommending a user's own items again, the last one first.

    The rank of a target is the number of other items the user met since; one that is new to the user is not
    recommended at all. Where seen items are filtered nothing is left to recommend.
    """
    num_items = len(examples.source.items.ids)

    def rank(asked: Asked, rows: IntArray) -> IntArray:
        offsets, seen = examples.seen(rows)
        user = np.repeat(np.arange(len(rows)), np.diff(offsets))
        keys = user * num_items + np.searchsorted(examples.source.items.ids, seen)
        # Of each item of a history its last event: the first one from behind.
        keys, behind = np.unique(keys[::-1], return_index=True)
        last = len(user) - 1 - behind
        target = np.arange(len(rows)) * num_items + asked.target.numpy()
        found, repeated = find_sorted(keys, target)
        owner = keys // num_items
        since = last > last[found][owner]
        if asked.among is not None:
            since &= np.isin(keys, asked.among.user.numpy() * num_items + asked.among.item.numpy())
        count = np.bincount(owner[since], minlength=len(rows))
        return np.where(repeated, count, NEVER)

    return _quality(rank, examples, rule, cutoffs, batch=batch, max_users=max_users)


def _quality(
    rank: Rank, examples: Examples, rule: Rule, cutoffs: Sequence[int], *, batch: int, max_users: int | None
) -> dict[str, float]:
    """The metrics of an order of items, over the users a model is asked for."""
    users, missed = asked_users(examples, max_users)
    quality = RankingQuality(cutoffs)
    quality.update(torch.full((missed,), NEVER))
    for start in range(0, len(users), batch):
        rows = users[start : start + batch]
        no_vectors = torch.empty(len(rows), 0)
        asked = Asked.of(examples, rows, examples.batch(rows), no_vectors, _CPU, rule)
        ranks = torch.from_numpy(rank(asked, rows))
        quality.update(torch.where(asked.never, NEVER, ranks))
    return quality.values()
