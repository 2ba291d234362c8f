"""Models with features, whatever the schema and the data, against a reference of dicts and loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.recipe import build_run, load_config
from freescale.train.log.events import Progress
from freescale.train.run import Run
from tests.effort import examples
from tests.feature_model import PlainModel, Rows, is_close
from tests.feature_source import DictSource
from tests.small_run import SMALL, Recorder, these_ranks

RECIPE = (
    "model.dtype=float64", "model.dim=4", "model.heads=2", "data.max_length=4", "data.global_batch=8",
    "head.num_negatives=3", "embedding.optimizer=sgd", "embedding.lr=1", "optim.lr=0", "run.steps=1",
)  # fmt: skip
COUNTRIES = 3
NUMBER = st.none() | st.integers(-3, 40).map(lambda n: n / 4)
VECTOR = st.none() | st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=2, max_size=2)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Some features of every owner and kind, each with words of its own."""

    def table(**also: Any) -> dict[str, Any]:
        return {**also, **draw(st.sampled_from([{}, {"dim": 3}, {"dim": 4}]))}

    def number(**also: Any) -> dict[str, Any]:
        ways = [{}, {"scale": "log"}, {"scale": "standard"}, {"edges": [0.5, 3.0]}]
        return {"is": "number", **also, **draw(st.sampled_from(ways))}

    places = {"event": st.sampled_from(["join", "after"]), "user": st.sampled_from(["join", "front"])}
    some: dict[str, Any] = {
        "user": {"of": "user", "is": "id", **draw(st.sampled_from([{}, {"rows": 5, "map": "hash", "dim": 2}]))},
        "artist": {"of": "item", "is": "id", **table()},
        "genres": {"of": "item", "is": "ids", **draw(st.sampled_from([{"table": "artist"}, {"dim": 2}]))},
        "price": number(of="item"),
        "cover": {"of": "item", "is": "vector", "width": 2},
        "flags": {"of": "item", "is": "bits", "names": ["new", "hot"]},
        "place": {"of": "event", "is": "id", **table(rows=4, map="hash"), "as": draw(places["event"])},
        "tags": {"of": "event", "is": "ids", "rows": 9, "map": "direct", "as": draw(places["event"])},
        "watched": {**number(of="event"), "outcome": True, "as": draw(places["event"])},
        "action": {"of": "event", "is": "bits", "names": ["a", "b"], "outcome": True, "as": draw(places["event"])},
        "mood": {"of": "event", "is": "vector", "width": 2, "as": draw(places["event"])},
        "last": {"of": "event", "is": "id", "table": "item"},
        "country": {"of": "user", "is": "id", "values": ["x", "y", "z"], "as": draw(places["user"])},
        "age": {**number(of="user"), "as": draw(places["user"])},
        "taste": {"cross": ["country", "artist"], **table(rows=5)},
        "spot": {"cross": ["item", "place", "user"], **table(rows=6)},
        "home": {"cross": ["country", "user"], **table(rows=3), "as": draw(places["user"])},
    }  # fmt: skip
    chosen = draw(st.sets(st.sampled_from(sorted(some)), min_size=1))
    needed = {member for name in chosen for member in some[name].get("cross", ())} & set(some)
    kept = chosen | needed
    words = {name: each for name, each in some.items() if name in kept}
    for each in words.values():
        if each.get("table", "item") not in {*words, "item"}:
            del each["table"]
    return words


ID = st.none() | st.integers(0, 8)
EVENT = {
    "place": ID, "tags": st.lists(st.integers(0, 8), max_size=3), "watched": NUMBER, "action": st.integers(0, 3),
    "mood": VECTOR, "last": st.none() | st.sampled_from([3, 5, 8, 900]),
}  # fmt: skip
ITEM = {
    "artist": ID, "genres": st.lists(st.integers(0, 5), max_size=3), "price": NUMBER, "cover": VECTOR,
    "flags": st.integers(0, 3),
}  # fmt: skip
USER = {"country": st.none() | st.integers(0, COUNTRIES - 1), "age": NUMBER}


@st.composite
def sources(draw: st.DrawFn) -> DictSource:
    words = draw(schemas())
    items = {item: draw(st.fixed_dictionaries(ITEM)) for item in (3, 5, 8, 900)}
    users = {user: draw(st.fixed_dictionaries(USER)) for user in (2, 7, 40)}
    events = {}
    for user in users:
        own = st.fixed_dictionaries({"item": st.sampled_from(sorted(items)), **EVENT})
        theirs = draw(st.lists(own, min_size=4, max_size=8))
        events[user] = [{**event, "time": 50 * n + n * n} for n, event in enumerate(theirs)]
    return DictSource(words, events, items, users)


def first_step(source: DictSource, overrides: tuple[str, ...]) -> tuple[Run, Rows, list[Any], Any, float]:
    """The run after one step; its rows before, tokens as the model made them, the batch, the loss."""
    config = load_config(None, [*SMALL, *RECIPE, *overrides])
    run = build_run(config, source, these_ranks(), Progress([Recorder()]))
    rows, made = Rows(run), []
    if run.state.model.tokens is not None:
        run.state.model.tokens.register_forward_hook(lambda module, given, told: made.append(told))
    with run.open_schedule(0) as schedule:
        ready = next(iter(schedule))
        result = run.train_step.run(ready, schedule)
        run.state.embedding.wait_for_updates()
    return run, rows, made, ready.batch, result.loss


@examples(10, 400)
@given(
    sources(),
    st.sampled_from(["sum", "mlp"]),
    st.sampled_from(["model.kind=hstu", "model.kind=sasrec", "model.kind=llama"]),
    st.sampled_from(["optim.accumulate=1", "optim.accumulate=2"]),
)
def test_a_step_is_that_of_dicts_and_loops(source: DictSource, how: str, kind: str, parts: str) -> None:
    run, rows, made, batch, loss = first_step(source, (f"tokens.join={how}", kind, parts))
    if run.state.model.items is None:
        return  # nothing but items: a model without features
    user_words = source.schema.features.get("user")
    plain = PlainModel(
        run.state.model, rows, how=how, source=source, reads_user=bool(user_words and user_words.rows)
    )
    model = run.state.model
    ours = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    # The step itself.
    total, sequences, last = torch.zeros((), dtype=torch.float64), [], []
    for n, row in enumerate(batch.samples["row"].tolist()):
        user = source._order[row]
        events = source._events[user][:-2][-5:]
        assert len(events) - 1 == int(batch.lengths[n])
        negatives = batch.samples["negatives"][n].tolist()
        if len(events) > 1:
            total = total + plain.loss(user, events, negatives)
            tokens, _, ends = plain.sequence(user, events[:-1])
            last += [len(sequences) + end for end in ends]
            sequences += tokens
    total = total / batch.num_tokens
    is_close(torch.tensor(loss, dtype=torch.float64), total.detach(), what="loss")

    # Tokens, as the encoder saw them, and whose states the head saw.
    if made:
        seen = torch.cat([each.vectors for each in made])
        is_close(seen.detach(), torch.stack(sequences).detach(), what="tokens")
        lengths = np.cumsum([0, *(len(each.vectors) for each in made)])
        if made[0].states is not None:
            states = torch.cat([each.states + int(start) for each, start in zip(made, lengths)])
            assert states.tolist() == last

    # Gradients: of dense weights as they are, of rows as what a step of SGD with rate 1 has taken off.
    total.backward()
    for name, each in model.named_parameters():
        ours_now = ours[name] if ours[name] is not None else torch.zeros_like(each)
        is_close(ours_now, each.grad if each.grad is not None else torch.zeros_like(each), what=name)
    for name, before in rows.before.items():
        moved = before - run.state.embedding.tables[name].weight
        expected = torch.zeros_like(before)
        for (table, row), leaf in rows.leaves.items():
            if table == name and leaf.grad is not None:
                expected[row] = leaf.grad
        is_close(moved, expected, what=f"table {name}")


def test_a_feature_that_is_always_missing_is_its_learnt_vector() -> None:
    words = {"artist": {"of": "item", "is": "id"}, "genres": {"of": "item", "is": "ids"}}
    items = {item: {"artist": None, "genres": []} for item in (1, 2)}
    events = [{"item": 1 + n % 2, "time": n} for n in range(6)]
    source = DictSource(words, {4: events}, items, {4: {}})
    run, *_, loss = first_step(source, ())
    assert np.isfinite(loss)
    assert {name: table.num_rows for name, table in run.state.embedding.tables.items()} == {
        "item": 3, "artist": 1, "genres": 1,
    }  # fmt: skip
    assert all(run.state.model.items.none[name].grad.abs().sum() > 0 for name in ("of_artist", "of_genres"))  # type: ignore[union-attr]


@examples(6, 200)
@given(sources(), st.sampled_from(["sum", "mlp"]), st.integers(1, 5))
def test_vectors_of_the_catalogue_are_those_of_dicts_and_loops(
    source: DictSource, how: str, chunk: int
) -> None:
    config = load_config(None, [*SMALL, *RECIPE, f"tokens.join={how}"])
    run = build_run(config, source, these_ranks(), Progress([Recorder()]))
    if run.state.model.items is None:
        return
    plain = PlainModel(run.state.model, Rows(run), how=how, source=source, reads_user=False)
    catalogue = run.train_step._encode_items.__self__.catalogue(source.items.ids, chunk=chunk)  # type: ignore[attr-defined]
    found = {}
    for numbers, vectors in catalogue.parts():
        found |= dict(zip(numbers.tolist(), vectors))
    assert sorted(found) == list(range(len(source.items.ids)))
    for number, item in enumerate(source.items.ids.tolist()):
        is_close(found[number], plain.item_vector(item).detach(), what=f"item {item}")
