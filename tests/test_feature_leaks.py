"""Nothing that comes later shows: not in a state, not in a logit, not in the score of a candidate."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.data import Examples, SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.recipe import build_run, load_config
from freescale.train.log.events import Progress
from tests.effort import along_edges
from tests.feature_source import DictSource
from tests.small_run import SMALL, Recorder, these_ranks
from tests.test_feature_model import RECIPE

OUTCOMES = {"watched": 7.25, "long": 1.0, "action": 3, "reply": [2, 4], "felt": [1.0, -2.0]}
"""Of an event, and what they are changed to."""
OTHERS: dict[str, Any] = {"item": 3, "place": 1, "tags": [5]}
SPLITS = ("train", "valid", "test")


def schema(where: str) -> dict[str, Any]:
    """Features of every kind; users in front or joined, outcomes joined or behind their events."""
    of_user = {"of": "user", "as": "join" if where == "join" else "front"}
    outcome = {"of": "event", "outcome": True, "as": "after" if where == "after" else "join"}
    return {
        "user": {"of": "user", "is": "id", "rows": 9, "map": "hash"},
        "genre": {"of": "item", "is": "id"},
        "price": {"of": "item", "is": "number", "scale": "log"},
        "place": {"of": "event", "is": "id", "rows": 4, "as": "after" if where == "after" else "join"},
        "tags": {"of": "event", "is": "ids", "rows": 9},
        "watched": {**outcome, "is": "number", "scale": "log"},
        "long": {**outcome, "is": "number", "edges": [3]},
        "action": {**outcome, "is": "bits", "names": ["play", "like"]},
        "reply": {**outcome, "is": "ids", "rows": 9, "as": "join"},
        "felt": {**outcome, "is": "vector", "width": 2, "as": "join"},
        "country": {**of_user, "is": "id", "values": ["de", "fr"]},
        "taste": {"cross": ["country", "genre"], "rows": 7},
        "spot": {"cross": ["item", "place"], "rows": 11},
    }


def histories() -> dict[int, list[dict[str, Any]]]:
    def event(n: int) -> dict[str, Any]:
        return {
            "item": n % 4, "time": 40 * n + n * n, "place": n % 3 or None, "tags": [n % 5, 7], "watched": n + 0.5,
            "long": float(n), "action": n % 3, "reply": [n % 4], "felt": [0.5 * n, 1.0],
        }  # fmt: skip

    return {3: [event(n) for n in range(7)], 8: [event(n + 2) for n in range(5)]}


def shown(events: dict[int, list[dict[str, Any]]], where: str, *recipe: str) -> dict[str, list[list[Tensor]]]:
    """Of every split and user, for each event his state and the scores of all items behind each other."""
    items = {item: {"genre": item % 2, "price": 1.5 * item} for item in range(4)}
    users = {3: {"country": 0}, 8: {"country": None}}
    source = DictSource(schema(where), events, items, users)
    config = load_config(None, [*SMALL, *RECIPE, "data.max_length=9", *recipe])
    run = build_run(config, source, these_ranks(), Progress([Recorder()]))
    model = run.state.model.eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # much of what features have begins with zeros
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    featured: Any = run.train_step._encode_items.__self__  # type: ignore[attr-defined]
    catalogue = featured.catalogue(source.items.ids, chunk=10)
    vectors = torch.cat([part for _, part in catalogue.parts()])
    found: dict[str, list[list[Tensor]]] = {}
    for split in SPLITS:
        batch = Examples(source=source, split=split, max_length=9, features=featured.features).batch([0, 1])
        ready = catalogue.look_up(batch)
        layout = SequenceLayout(batch.offsets, device="cpu")
        with torch.no_grad():
            states = model.states(ready.rows, ready.batch, layout, ready.tables)
            head: Any = model.head
            scores = head.queries(states) @ head.candidates(vectors).T
        told = torch.cat([states, scores], dim=1)
        found[split] = [list(told[a:b]) for a, b in itertools.pairwise(batch.offsets.tolist())]
    return found


def same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=0, atol=1e-12))


KINDS = ("model.kind=hstu", "model.kind=sasrec", "model.kind=llama")


@pytest.mark.parametrize(
    ("kind", "where", "how"),
    along_edges(
        KINDS,
        ("join", "front", "after"),
        ("sum", "mlp"),
        also=lambda kind, where, how: (where, how) == ("after", "sum"),
    ),
)
def test_the_future_shows_nowhere(kind: str, where: str, how: str) -> None:
    recipe = (kind, f"tokens.join={how}")
    base = shown(histories(), where, *recipe)
    for place in (1, 5):
        later, outcomes = histories(), histories()
        changed = later[3][place]
        changed.update({**OUTCOMES, **OTHERS})  # not its time, which is when it is asked for
        for event in later[3][place + 1 :]:
            event.update({**OUTCOMES, **OTHERS, "time": event["time"] + 1000})
        outcomes[3][place].update(OUTCOMES)
        for name, events in (("later events", later), ("outcomes", outcomes)):
            found = shown(events, where, *recipe)
            for split in SPLITS:
                for n, (ours, theirs) in enumerate(zip(found[split][0], base[split][0], strict=True)):
                    # The state of event n is where event n + 1 is predicted.
                    assert same(ours, theirs) == (n < place), (name, split, place, n)
                assert all(map(same, found[split][1], base[split][1])), "another user"


@pytest.mark.parametrize("name", OUTCOMES)
def test_each_outcome_of_the_target_is_hidden_and_shows_behind_it(name: str) -> None:
    events, base = histories(), shown(histories(), "after")
    assert events[3][5][name] != OUTCOMES[name]
    events[3][5][name] = OUTCOMES[name]
    found = shown(events, "after")
    # Event 5 is the target of validation, and the last one known when tested.
    assert all(map(same, found["valid"][0], base["valid"][0]))
    assert [same(*both) for both in zip(found["test"][0], base["test"][0])] == [True] * 5 + [False]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_known_then_gives_the_states_of_then(kind: str) -> None:
    found = shown(histories(), "after", kind)
    for user in (0, 1):
        for earlier in ("train", "valid"):
            states = found[earlier][user]
            assert all(map(same, states, found["test"][user]))
            assert len(states) < len(found["test"][user])


def test_batches_name_no_outcome_that_a_candidate_may_look_at() -> None:
    items = {item: {"genre": 0, "price": 1.0} for item in range(4)}
    source = DictSource(schema("join"), histories(), items, {3: {"country": 0}, 8: {"country": 1}})
    config = load_config(None, [*SMALL, *RECIPE])
    run = build_run(config, source, these_ranks(), Progress([Recorder()]))
    featured: Any = run.train_step._encode_items.__self__  # type: ignore[attr-defined]
    batch: SequenceBatch = Examples(source=source, split="test", features=featured.features).batch([0])
    assert {f"label_{name}" for name in OUTCOMES} <= set(batch.tokens)
    assert not {f"target_{name}" for name in OUTCOMES} & set(batch.tokens)
    names = featured.features.candidate_names()
    assert not [name for name in names if any(outcome in name for outcome in OUTCOMES)]
    assert batch.items.keys() == {"item", "genre", "price", "price.none"}
