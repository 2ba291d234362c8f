"""The same model of the parts that recipes name, without its tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlrmv4_parts.inputs import CONTEXT, CROSSES, Inputs, offsets_of
from dlrmv4_parts.reference import HIDDEN, JUDGED
from freescale.data import FIRST, SLOT, SequenceBatch, checked_schema, parse_tasks
from freescale.kernels import SequenceLayout
from freescale.model import STU, ContextTokens, ItemTowers, Recommender, TasksHead


def our_model(
    *,
    dim: int,
    heads: int,
    layers: int,
    short: bool,
    length: int = 1,
    time_buckets: int = 2048,
    dropout: float = 0.0,
) -> Recommender:
    """The model of the recipes, without its tables."""
    words: dict[str, Any] = {
        "item": {"of": "event", "is": "id"},
        "time": {"of": "event", "is": "time"},
        "artist": {"of": "item", "is": "id"},
        "album": {"of": "item", "is": "id"},
        "action": {"of": "event", "is": "bits", "names": ["listened", "liked", "skipped"], "outcome": True},
        "user": {"of": "user", "is": "id"},
        "hour": {"of": "event", "is": "id", "values": [str(hour) for hour in range(24)]},
        "organic": {"of": "event", "is": "id", "values": ["no", "yes"]},
    }
    words |= {name: {"cross": name.split("_x_"), "rows": 50, "as": "front"} for name in CROSSES}
    schema = checked_schema(words, where="the comparison")
    widths = dict.fromkeys(schema.tables, dim)
    return Recommender(
        encoder=STU(
            dim=dim,
            heads=heads,
            layers=layers,
            length=length,
            front=8,
            time_buckets=time_buckets,
            short=short,
            dropout=dropout,
            input_dropout=2 * dropout,
        ),
        head=TasksHead(
            dim=dim,
            tasks=parse_tasks(["listened = listened > 0 weight 0.2"]),
            towers="product",
            hidden=JUDGED,
        ),
        items=ItemTowers(
            [schema[name] for name in ("item", "artist", "album")],
            widths=widths,
            dim=dim,
            hidden=HIDDEN,
            judged=JUDGED,
        ),
        tokens=ContextTokens(
            [schema[name] for name in ("action", *CONTEXT)], widths=widths, dim=dim, hidden=HIDDEN
        ),
    )


class Ours:
    """The same of the parts that recipes name."""

    def __init__(self, *, dim: int, heads: int, layers: int, short: bool) -> None:
        # Their plain path takes the width for the number of time buckets; their kernels do not.
        self.model = our_model(dim=dim, heads=heads, layers=layers, short=short, time_buckets=dim - 1)

    def __call__(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """Predictions and loss."""
        ends = given.lengths.cumsum(0)
        index = torch.cat(
            [
                torch.cat([part, target[None]])
                for part, target in zip(given.item.split(given.lengths.tolist()), given.target)
            ]
        )
        candidate = ends + torch.arange(len(ends))
        total = len(index)
        is_event = torch.ones(total, dtype=torch.bool).index_fill(0, candidate, False)

        def spread(events: Tensor, candidates: Tensor) -> Tensor:
            out = torch.empty(total, dtype=events.dtype)
            out[is_event], out[candidate] = events, candidates
            return out

        asked = given.time[ends - 1]
        time = spread(given.time, asked)
        batch = SequenceBatch(
            offsets=offsets_of(given.lengths + 1),
            tokens={
                "item_index": index,
                "time": time,
                "target_time": torch.repeat_interleave(asked, given.lengths + 1),
                "action": spread(given.action, torch.zeros_like(given.target)),
                "label_listened": spread(torch.zeros(len(given.item)), given.label.float()),
            },
            samples={
                "row": torch.arange(len(ends)),
                **{name + SLOT: given.context[name] + FIRST for name in CONTEXT},
            },
            items={
                "item" + SLOT: torch.arange(len(given.artist_of)) + FIRST,
                "artist" + SLOT: given.artist_of + FIRST,
                "album" + SLOT: given.album_of + FIRST,
            },
            targets=torch.ones(len(ends), dtype=torch.int64),
        )
        longest = int(given.lengths.max()) + 1 + len(CONTEXT)
        for layer in self.model.encoder.layers:  # theirs is scaled by the longest sequence of the batch
            layer.scale = 1 / longest
        assert self.model.items is not None
        vectors = self.model.items(batch.items, given.rows)
        tables = {name: given.rows[name] for name in CONTEXT}
        layout = SequenceLayout(batch.offsets, device=torch.device("cpu"))
        states, vectors = self.model.encode(vectors, batch, layout, tables)
        head = self.model.head
        logits = head.logits(states, vectors[index[candidate]])
        return torch.sigmoid(logits[:, 0]), head.loss(states, vectors, batch, layout)
