"""What a model with features computes, said once more with dicts and loops: the reference of test_feature_model.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.data.schema.feature import Feature
from freescale.kernels import SequenceLayout
from freescale.model import FeatureJoin, Recommender
from freescale.train.run import Run
from tests.data.feature_reference import NONE, bucket, cross_id
from tests.feature_source import DictSource

STRUCTURAL = ("user", "item", "time")


class Rows:
    """(table, id) -> its row as a leaf; ids that share a row share the leaf."""

    def __init__(self, run: Run) -> None:
        self._maps = run.state.id_maps
        self.before = {name: table.weight.clone() for name, table in run.state.embedding.tables.items()}
        self.leaves: dict[tuple[str, int], Tensor] = {}

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        table, ident = key
        row = int(self._maps[table].rows(torch.tensor([ident]))[0])
        if (table, row) not in self.leaves:
            self.leaves[table, row] = self.before[table][row].clone().requires_grad_()
        return self.leaves[table, row]


class PlainModel:
    """One sample, one event, one feature at a time; the encoder alone is that of the model, given one sequence.

    Args:
        model: whose weights are read, before they change.
        rows: of all tables.
        how: features are put together.
        source: the data.
        reads_user: whether ids of users are a feature.
    """

    def __init__(
        self, model: Recommender, rows: Rows, *, how: str, source: DictSource, reads_user: bool
    ) -> None:  # fmt: skip
        self.weights = dict(model.named_parameters())
        self.model, self.rows, self.how, self.source = model, rows, how, source
        assert isinstance(model.items, FeatureJoin)
        self.schema, self.dim = source.schema, model.items.dim
        of = {each.name: each for each in self.schema}
        self.of_items = [of["item"], *(each for each in self.schema if each.of == "item")]
        left_out = STRUCTURAL if not reads_user else ("item", "time")
        tokens = [each for each in self.schema if each.of in ("event", "user") and each.name not in left_out]
        self.joined_events = [each for each in tokens if each.of == "event" and each.place == "join"]
        self.joined_users = [each for each in tokens if each.of == "user" and each.place == "join"]
        self.front = [each for each in tokens if each.of == "user" and each.place == "front"]
        self.after = [each for each in tokens if each.of == "event" and each.place == "after"]

    # Raw values.

    def raw(self, feature: Feature, *, user: int, event: dict[str, Any] | None, item: int | None) -> Any:
        """What the data says of a feature: an id or None, a list of ids, a number, a vector, bits."""
        if feature.name == "item":
            return item
        if feature.name == "user":
            return user
        if feature.cross:
            members = []
            for name in feature.cross:
                member = self.schema[name]
                value = self.raw(member, user=user, event=event, item=item)
                members.append(
                    bucket(value, list(member.edges)) if member.edges else NONE if value is None else value
                )
            crossed = cross_id(feature.name, members)
            return None if crossed == NONE else crossed
        owner: dict[str, Any]
        if feature.of == "item":
            assert item is not None
            owner = self.source._items[item]
        else:
            owner = self.source._users[user] if feature.of == "user" else event or {}
        return owner[feature.name]

    # Vectors.

    def row(self, feature: Feature, ident: int, prefix: str) -> Tensor:
        """The row of an id, as wide as the model."""
        row = self.rows[feature.table_name or "", ident]
        projection = self.weights.get(f"{prefix}.projection.of_{feature.name}.weight")
        return row if projection is None else projection @ row

    def numbers(self, feature: Feature, value: Any) -> list[float]:
        """A feature without rows as numbers: its values, and whether they are missing."""
        if feature.kind == "bits":
            return [float(value >> n & 1) for n in range(len(feature.names))]
        if feature.kind == "vector":
            return [0.0] * (feature.width or 1) + [1.0] if value is None else [*value, 0.0]
        if value is None:
            return [0.0, 1.0]
        # Batches hold numbers in single precision.
        x = np.array([value], dtype=np.float32)
        if feature.scale == "log":
            x = np.sign(x) * np.log1p(np.abs(x))
        elif feature.scale == "standard":
            known = self.source.statistics[feature.name]
            x = ((x.astype(np.float64) - known["mean"]) / known["std"]).astype(np.float32)
        return [float(x[0]), 0.0]

    def join(self, features: list[Feature], values: dict[str, Any], prefix: str, how: str) -> Tensor:
        """The vector of some features."""
        parts, inputs = [], []
        for feature in features:
            value = values[feature.name]
            if feature.edges:
                value = None if value is None else bucket(value, list(feature.edges))
            if not feature.is_id:
                inputs += self.numbers(feature, value)
                continue
            idents = value if feature.kind == "ids" else [] if value is None else [value]
            if idents:
                found = [self.row(feature, ident, prefix) for ident in idents]
                parts.append(sum(found[1:], found[0]) / len(found))
            else:
                parts.append(self.weights[f"{prefix}.none.of_{feature.name}"])
        if inputs:
            weights = self.weights[f"{prefix}.numbers"]
            assert len(weights) == len(inputs)
            parts.append(
                sum((x * vector for x, vector in zip(inputs, weights)), torch.zeros(self.dim).double())
            )
        if how == "sum":
            return sum(parts[1:], parts[0])
        hidden = (
            self.weights[f"{prefix}.mlp.0.weight"] @ torch.cat(parts) + self.weights[f"{prefix}.mlp.0.bias"]
        )
        hidden = hidden / (1 + torch.exp(-hidden))
        return self.weights[f"{prefix}.mlp.2.weight"] @ hidden + self.weights[f"{prefix}.mlp.2.bias"]

    def item_vector(self, item: int) -> Tensor:
        """From its row and from what is known of it."""
        values = {each.name: self.raw(each, user=0, event=None, item=item) for each in self.of_items}
        return self.join(self.of_items, values, "items", self.how)

    def of_event(self, features: list[Feature], user: int, event: dict[str, Any]) -> dict[str, Any]:
        return {each.name: self.raw(each, user=user, event=event, item=event["item"]) for each in features}

    def event_vector(self, user: int, event: dict[str, Any]) -> Tensor:
        """Of its item, and of what is joined to it."""
        vector = self.item_vector(event["item"])
        if self.joined_events:
            values = self.of_event(self.joined_events, user, event)
            vector = vector + self.join(self.joined_events, values, "tokens.events", self.how)
        if self.joined_users:
            values = self.of_event(self.joined_users, user, event)
            vector = vector + self.join(self.joined_users, values, "tokens.users", self.how)
        return vector

    def sequence(self, user: int, events: list[dict[str, Any]]) -> tuple[list[Tensor], list[int], list[int]]:
        """Tokens of a history, the event each belongs to, and the last token of each event."""
        tokens, belongs, last = [], [], []
        kinds = self.weights.get("tokens.kind")
        for n, feature in enumerate(self.front):
            values = self.of_event([feature], user, events[0])
            tokens.append(self.join([feature], values, f"tokens.front.{n}", "sum") + kinds[n])
            belongs.append(0)
        for number, event in enumerate(events):
            tokens.append(self.event_vector(user, event))
            belongs.append(number)
            for n, feature in enumerate(self.after):
                values = self.of_event([feature], user, event)
                vector = self.join([feature], values, f"tokens.after.{n}", "sum")
                tokens.append(vector + kinds[len(self.front) + n])
                belongs.append(number)
            last.append(len(tokens) - 1)
        return tokens, belongs, last

    def states(self, user: int, events: list[dict[str, Any]], times: list[int]) -> list[Tensor]:
        """One an event; `times` of the events and of the one that comes next."""
        tokens, belongs, last = self.sequence(user, events)
        offsets = torch.tensor([0, len(tokens)])
        batch = SequenceBatch(
            offsets,
            tokens={
                "time": torch.tensor([times[n] for n in belongs]),
                "target_time": torch.tensor([times[n + 1] for n in belongs]),
            },
            samples={"row": torch.tensor([0])},
        )
        states = self.model.encoder(torch.stack(tokens), batch, SequenceLayout(offsets, device="cpu"))
        return [states[n] for n in last]

    def loss(self, user: int, events: list[dict[str, Any]], negatives: list[int]) -> Tensor:
        """Sum over events of -log softmax(the next item against negatives)."""
        inputs, total = events[:-1], torch.zeros((), dtype=torch.float64)
        head: Any = self.model.head
        states = self.states(user, inputs, [event["time"] for event in events])
        for state, following in zip(states, events[1:]):
            target = following["item"]
            against = [target, *(item for item in negatives if item != target)]
            scores = [self.score(state, item) / head.temperature for item in against]
            total = total - scores[0] + torch.logsumexp(torch.stack(scores), 0)
        return total

    def score(self, state: Tensor, item: int) -> Tensor:
        vector = self.item_vector(item)
        return state @ vector / (length(state) * length(vector))


def length(vector: Tensor) -> Tensor:
    return torch.sqrt((vector * vector).sum())


def is_close(one: Tensor, other: Tensor, *, what: str) -> None:
    scale = max(1.0, float(other.abs().max()) if other.numel() else 1.0)
    apart = float((one - other).abs().max()) if other.numel() else 0.0
    assert math.isfinite(apart), what
    assert apart <= 1e-9 * scale, f"{what}: {apart}"
