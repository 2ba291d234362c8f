"""What a request says, as the model looks at it: events by number, times, features; nothing is computed here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import FeatureRequest, IntArray, ItemId, ItemNames, SequenceBatch
from freescale.errors import DataError
from freescale.exports.requests.asked_values import check_list
from freescale.exports.requests.recommendations import whole_seconds
from freescale.exports.served.served_features import ServedFeatures
from freescale.exports.served.served_tables import SharedRows
from freescale.model import ContextTokens, FeatureTokens

Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True)
class RequestReader:
    """Reads requests for recommendations and for scores alike; refuses what the model cannot look at.

    Args:
        manifest: of the export.
        items: ids of the items.
        names: the user's own ids of these.
        features: those of events and users; None where the model looks at none.
        shared: rows of items without one of their own, where the export has any.
        inputs: what puts features into the sequences of the model, if anything does.
    """

    manifest: Mapping[str, Any]
    items: IntArray
    names: ItemNames
    features: ServedFeatures | None
    shared: SharedRows | None
    inputs: FeatureTokens | ContextTokens | None

    @property
    def max_events(self) -> int:
        """Events the model has learnt to look at; some have tokens of their own for what is known of them."""
        most, tokens = int(self.manifest["encoder"]["max_length"]), self.inputs
        return most if tokens is None else tokens.rule.events(most)

    def index_of(self, history: Sequence[ItemId]) -> tuple[Flags, Tensor]:
        """Which events of a history count, and the places of their items in `vectors`."""
        check_list("history", history)
        known, index = self.names.find(history)
        if self.shared is None or known.all():
            return known, torch.from_numpy(index)
        share, row = self.shared.find(self.names.ids_of(history))
        place = len(self.items) + row
        place[torch.from_numpy(known)] = torch.from_numpy(index)
        counts = known | share
        return counts, place[torch.from_numpy(counts)]

    def tokens(
        self,
        index: Tensor,
        known: Flags,
        times: Sequence[int] | None,
        request_time: int | None,
        *,
        limit: int | None,
    ) -> dict[str, Tensor]:
        """The features of a history's known events, the latest of them."""
        tokens = {"item_index": index}
        if self.manifest["encoder"]["time_bias"]:
            if times is None:
                raise DataError(
                    "this model was trained with time stamps",
                    next_step="pass times=[...]: seconds since 1970 of each event of the history",
                )
            check_list("times", times, "seconds")
            if len(times) != len(known):
                raise DataError(
                    "every event needs its time stamp", got=f"{len(known)} events, {len(times)} times"
                )
            moments = whole_seconds(times)
            _check_order(moments)
            stamps = torch.from_numpy(moments[known])
            asked_at = int(stamps[-1] if request_time is None else whole_seconds([request_time])[0])
            if len(stamps) and asked_at < int(stamps[-1]):
                warnings.warn(
                    f"request_time {asked_at} is before the last event, {int(stamps[-1])}: the model has learnt from "
                    "requests behind their histories alone, and takes it for a request right then",
                    stacklevel=4,
                )
            tokens |= {"time": stamps, "target_time": torch.cat([stamps[1:], torch.tensor([asked_at])])}
        elif times is not None:
            warnings.warn(
                "times are not used: this model was trained without a time bias (model.time_bias=false)",
                stacklevel=3,
            )
        return {name: values if limit is None else values[-limit:] for name, values in tokens.items()}

    def features_said(
        self,
        given: Mapping[str, Any],
        known: Flags,
        limit: int | None,
        *,
        who: str,
    ) -> FeatureRequest:
        """Features of a request, checked as far as names and numbers of values go."""
        kept = np.flatnonzero(known)
        said = FeatureRequest(given, len(known), kept if limit is None else kept[-limit:], who)
        if self.features is not None:
            self.features.reader.check(said)
        elif given:
            raise DataError(
                f"{who}this model looks at no features of events and users",
                got=", ".join(given),
                next_step="leave them out; features of items are in their vectors already",
            )
        return said

    def with_features(
        self, batch: SequenceBatch, said: Sequence[FeatureRequest], device: torch.device
    ) -> tuple[SequenceBatch, Mapping[str, Tensor]]:
        """The batch with the features of its requests, and the rows of tables that they have."""
        if self.features is None:
            return batch, {}
        items = self.items[batch.tokens["item_index"].numpy()]
        return self.features.look_up(batch, said, items, device)


def _check_order(moments: IntArray) -> None:
    """A history goes from its first event to its last, as in training; newest first it would be read backwards."""
    falls = np.flatnonzero(moments[1:] < moments[:-1])
    if len(falls):
        at = int(falls[0])
        raise DataError(
            "times must not fall: a history goes from its first event to its last",
            got=f"{moments[at]} and then {moments[at + 1]}, events {at} and {at + 1}",
            next_step="sort history and times by time, the earliest first",
        )
