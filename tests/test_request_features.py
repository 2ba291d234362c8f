"""Features of candidates and requests: every one has its say, and what is known only afterwards has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.data import RequestExamples
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.recipe import build_run, load_config
from freescale.train.log.events import Progress
from tests.feature_source import DictSource
from tests.small_run import SMALL, Recorder, these_ranks
from tests.test_feature_leaks import OUTCOMES, histories, schema
from tests.test_feature_model import RECIPE

TASKS = ("head.kind=tasks", "head.tasks=play = action & 1,watched = number watched", "eval.metric=auc/play")
REQUEST = {
    "shelf": {"of": "request", "is": "id", "rows": 5},
    "budget": {"of": "request", "is": "number", "scale": "log"},
    "words": {"of": "request", "is": "ids", "rows": 9},
    "wish": {"cross": ["shelf", "genre"], "rows": 13},
}
CHANGES: dict[str, Any] = {"shelf": 4, "budget": 33.0, "words": [8]}


def events_with_requests() -> dict[int, list[dict[str, Any]]]:
    """Those of the other tests; every three neighbours are one page, which says something of itself."""
    found = histories()
    for events in found.values():
        for n, event in enumerate(events):
            page = n // 3
            event |= {"shelf": page, "budget": 2.0 + page, "words": [page, 1], "page": page}
            event["time"] = 100 * page + n
    return found


def logits(events: dict[int, list[dict[str, Any]]], where: str, *recipe: str) -> tuple[Tensor, Any]:
    """[candidates, tasks] of all training requests, and their batch; weights are drawn, so that everything shows."""
    items = {item: {"genre": item % 2, "price": 1.5 * item} for item in range(4)}
    users = {3: {"country": 0}, 8: {"country": None}}
    words = {**schema(where), **REQUEST, "page": {"of": "event", "is": "number"}}
    source = DictSource(words, events, items, users)
    config = load_config(None, [*SMALL, *RECIPE, "data.max_length=9", *TASKS, *recipe])
    run = build_run(config, source, these_ranks(), Progress([Recorder()]))
    assert run.evaluation.protocol.words("test").endswith("requests")
    model = run.state.model.eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    featured: Any = run.train_step._encode_items.__self__  # type: ignore[attr-defined]
    catalogue = featured.catalogue(source.items.ids, chunk=10)
    options: dict[str, Any] = {
        "by": config.head.extra.get("by"),
        "candidates": config.head.extra.get("candidates", 10),
    }
    options |= {"outcomes": ("action", "watched"), "features": featured.features}
    examples = RequestExamples(source=source, split="train", max_length=9, **options)
    batch = examples.batch(range(len(examples.lengths())))
    ready = catalogue.look_up(batch)
    layout = SequenceLayout(batch.offsets, device="cpu")
    with torch.no_grad():
        states = model.states(ready.rows, ready.batch, layout, ready.tables)
        index = torch.cat([torch.arange(end - k, end) for end, k in zip(batch.offsets[1:], batch.targets)])
        found = model.head.logits(states, ready.rows[ready.batch.tokens["item_index"][index]])
    return found, batch


def same(one: Tensor, other: Tensor) -> list[bool]:
    return [torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("where", ["join", "front", "after"])
def test_outcomes_of_candidates_show_nowhere(where: str) -> None:
    """User 3 has the training pages [0, 1, 2] and [3, 4]; the last two events are held back."""
    recipe = ("head.candidates=3", "head.late=false")
    base, batch = logits(events_with_requests(), where, *recipe)
    assert batch.targets.tolist() == [1, 3, 2]  # the events 1; 2, 3, 4 of the one, 1, 2 of the other
    changed = events_with_requests()
    for event in changed[3][2:5]:
        event.update(OUTCOMES)
    assert same(logits(changed, where, *recipe)[0], base) == [True] * 6
    # An outcome of the history shows.
    changed = events_with_requests()
    changed[3][0].update(OUTCOMES)
    assert same(logits(changed, where, *recipe)[0], base)[:4] == [False] * 4


def test_a_candidate_that_came_later_tells_nothing_but_its_item() -> None:
    """By number: what event 3 says of itself was not known when event 2 was asked for; what 2 says was."""
    base, _ = logits(events_with_requests(), "join", "head.candidates=3")
    for place, wanted in ((3, [True] * 6), (2, [True, False, False, False, True, True])):
        changed = events_with_requests()
        changed[3][place].update({"place": None, "tags": [3], **CHANGES})
        assert same(logits(changed, "join", "head.candidates=3")[0], base) == wanted, place


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_said_of_a_request_reaches_its_candidates_alone(name: str) -> None:
    """By column: user 3 has the page [0, 1, 2] and then [3, 4, 5]; without any history, and with the first page."""
    events = events_with_requests()
    events[3] += [{**events[3][-1], "time": 900 + n, "page": 9 + n} for n in (0,)]
    base, batch = logits(events, "join", "head.by=page")
    assert batch.targets.tolist() == [3, 3]
    changed = {user: [dict(event) for event in every] for user, every in events.items()}
    for event in changed[3][:3]:
        event[name] = CHANGES[name]
    # Of the first page the candidates; not of the second, which has them as history.
    assert same(logits(changed, "join", "head.by=page")[0], base) == [False] * 3 + [True] * 3
    changed = {user: [dict(event) for event in every] for user, every in events.items()}
    changed[3][4][name] = CHANGES[name]  # the first row of a request speaks for it
    assert all(same(logits(changed, "join", "head.by=page")[0], base))
    changed[3][4]["place"] = 2  # while what is said of a candidate is its own
    assert same(logits(changed, "join", "head.by=page")[0], base) == [True] * 4 + [False, True]


def test_features_of_candidates_items_show() -> None:
    base, _ = logits(events_with_requests(), "join", "head.candidates=3")
    changed = events_with_requests()
    changed[3][3]["item"] = 1  # another genre and price
    found = same(logits(changed, "join", "head.candidates=3")[0], base)
    assert found == [True, True, False, True, True, True]


def test_what_late_candidates_cannot_hear_is_refused() -> None:
    with pytest.raises(ConfigError, match="candidates outside the attention"):
        logits(events_with_requests(), "join", "head.candidates=3", "head.late=true")


def test_a_task_that_every_candidate_has_the_same_label_of_is_refused() -> None:
    line = "head.tasks=play = action & 1,any = action >= 0"
    with pytest.raises(
        ConfigError, match=r"head\.tasks: any has the same label for every training candidate"
    ):
        logits(events_with_requests(), "join", "head.candidates=3", line)
