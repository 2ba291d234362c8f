"""Features of candidates and requests in a service: a log of pages, prepared, trained, exported, and asked in words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.app.run.opened_run import export_run, open_run
from freescale.data import prepare
from freescale.data.schema.reading import checked_schema
from freescale.errors import DataError
from freescale.exports.opened_export import load_export
from freescale.model import target_index
from tests.exports.test_served_features import trained

SCHEMA: dict[str, Any] = {
    "shelf": {"of": "request", "is": "id", "rows": 8},
    "budget": {"of": "request", "is": "number", "scale": "standard"},
    "slot": {"of": "event", "is": "id", "values": ["top", "left", "low"]},
    "liked": {"of": "event", "is": "number", "outcome": True},
    "page": {"of": "event", "is": "id"},
}
READ = ("features.shelf", "features.budget", "features.slot", "features.liked")
RECIPE = (
    "head.kind=tasks", "head.tasks=like = liked > 0,much = number liked where like", "head.by=page",
    "eval.metric=auc/like", "model.dtype=float64", "data.max_length=7", "optim.accumulate=2",
    *(f"features.{name}.{word}={value}" for name in ("shelf", "budget", "slot", "liked")
      for word, value in SCHEMA[name].items() if word != "values"),
    "features.slot.values=[top,left,low]",
)  # fmt: skip


def log_of_pages(path: Path) -> list[dict[str, Any]]:
    """Twelve users, five pages of three items; likes follow the shelf and the slot."""
    draw, rows, page = random.Random(3), [], 0
    for user in range(12):
        for _ in range(5):
            page += 1
            shelf, budget = draw.randrange(4), round(draw.uniform(1, 9), 2)
            for slot in draw.sample(["top", "left", "low"], 3):
                liked = int(slot == "top") * (1 + shelf) if draw.random() < 0.9 else 0
                rows.append(
                    {"user": user, "item": draw.randrange(20), "time": page * 100, "page": page, "shelf": shelf,
                     "budget": budget, "slot": slot, "liked": liked}
                )  # fmt: skip
    path.write_text(
        "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]), encoding="utf-8"
    )
    return rows


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]], torch.Tensor]:
    """The exported model, the test page of every user in words, and what evaluation predicts of it."""
    folder = tmp_path_factory.mktemp("pages")
    rows = log_of_pages(folder / "log.csv")
    prepare(folder / "log.csv", folder / "data", schema=checked_schema(SCHEMA, where="a test"))
    run = trained(folder / "run", (f"data.path={folder / 'data'}", *RECIPE))
    _, opened, _ = open_run(run, device="cpu")
    evaluator, examples = opened.evaluation.evaluator, opened.evaluation.test
    model = evaluator.model.eval()
    batch = examples.batch(range(len(examples.lengths())))
    ready = evaluator.items.catalogue(examples.source.items.ids, chunk=1 << 16).look_up(batch)
    from freescale.kernels import SequenceLayout

    with torch.no_grad():
        states = model.states(ready.rows, ready.batch, SequenceLayout(batch.offsets), ready.tables)
        items = ready.rows[ready.batch.tokens["item_index"][target_index(ready.batch)]]
        logits = model.head.logits(states, items)
    wanted = torch.stack([torch.sigmoid(logits[:, 0]), logits[:, 1]], dim=1)
    requests = []
    for user in range(12):
        own = [row for row in rows if row["user"] == user]
        last = [row for row in own if row["page"] == own[-1]["page"]]
        past = own[: -len(last)]
        requests.append(
            {
                "history": [row["item"] for row in past],
                "candidates": [row["item"] for row in last],
                "times": [row["time"] for row in past],
                "request_time": last[0]["time"],
                "features": {
                    "slot": [row["slot"] for row in past],
                    "liked": [row["liked"] for row in past],
                    "shelf": last[0]["shelf"],
                    "budget": last[0]["budget"],
                },
                "candidate_features": {"slot": [row["slot"] for row in last]},
            }
        )
    return load_export(export_run(run, folder / "out")), requests, wanted


def numbers(scores: Any) -> torch.Tensor:
    return torch.tensor([[one["like"], one["much"]] for one in scores], dtype=torch.float64)


def test_what_is_asked_in_words_scores_as_evaluation_does(asked: Any) -> None:
    model, requests, wanted = asked
    assert any(line.startswith("shelf: of the request") for line in model.needs)
    alone = [numbers(model.score(**request)) for request in requests]
    np.testing.assert_allclose(torch.cat(alone), wanted, rtol=0, atol=1e-6)
    features = {name: [each["features"][name] for each in requests] for name in requests[0]["features"]}
    own = {
        name: [each[name] for each in requests] for name in ("history", "candidates", "times", "request_time")
    }
    shown = [each["candidate_features"] for each in requests]
    together = model.score(**own, features=features, candidate_features=shown)
    np.testing.assert_allclose(torch.cat([numbers(each) for each in together]), wanted, rtol=0, atol=1e-6)


def test_a_cache_and_chunks_change_nothing(asked: Any) -> None:
    model, requests, wanted = asked
    request, want = requests[4], wanted[12:15]
    history, times, said = request["history"][-6:], request["times"][-6:], request["features"]
    events = {name: said[name][-6:] for name in ("slot", "liked")}
    cache = model.remember(history, times=times, features=events)
    latest = {name: values[-1:] for name, values in events.items()}
    rest = {"request_time": request["request_time"], "candidate_features": request["candidate_features"]}
    for chunk in (None, 2):
        got = model.score(
            history[-1:], request["candidates"], times=times[-1:], cache=cache, chunk=chunk,
            features={**said, **latest}, **rest,
        )  # fmt: skip
        np.testing.assert_allclose(numbers(got), want, rtol=0, atol=1e-6)


def test_what_a_request_lacks_is_told(asked: Any) -> None:
    model, requests, _ = asked
    request = requests[0]
    without = {name: value for name, value in request["features"].items() if name != "shelf"}
    with pytest.raises(DataError, match="lacks: shelf"):
        model.score(**{**request, "features": without})
    with pytest.raises(DataError, match="needs to know slot of every candidate"):
        model.score(**{**request, "candidate_features": {}})
    with pytest.raises(DataError, match="slot needs one value for every candidate"):
        model.score(**{**request, "candidate_features": {"slot": ["top"]}})
    with pytest.raises(DataError, match="no such feature"):
        model.score(
            **{**request, "candidate_features": {**request["candidate_features"], "liked": [1, 0, 0]}}
        )
    nothing = {"history": [], "times": [], "candidates": request["candidates"], "request_time": 5}
    said = {"slot": [], "liked": [], "shelf": None, "budget": None}
    scores = model.score(**nothing, features=said, candidate_features={"slot": None})
    assert torch.isfinite(numbers(scores)).all()
