"""Features in a service: what a request says in its own words scores as evaluation scores the same user."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from freescale.app.commands.run import export
from freescale.app.run.opened_run import export_run, open_run
from freescale.data import prepare
from freescale.data.schema.reading import checked_schema
from freescale.data.sources._synthetic_features import COUNTRIES
from freescale.errors import DataError
from freescale.exports.opened_export import load_export
from freescale.recipe import load_config
from freescale.train.loop import train
from tests.small_run import SMALL, make_run

TINY = ("synthetic.users=40", "synthetic.items=60", "data.max_length=6", "model.dim=8", "optim.lr=0.05")
TINY += ("run.steps=5", "run.eval_every=5", "embedding.lr=0.05", "data.global_batch=8")
NAMES = ("view", "like", "share")
# Where things go besides the usual: users joined, outcomes behind their events, numbers in buckets.
PLACES = (
    "features.item.of=event", "features.item.is=id",
    "features.user.of=user", "features.user.is=id", "features.user.map=direct", "features.user.rows=41",
    "features.user.as=join",
    "features.country.of=user", "features.country.is=id", "features.country.values=[de,fr,in,us]",
    "features.action.of=event", "features.action.is=bits", "features.action.names=[view,like,share]",
    "features.action.outcome=true", "features.action.as=after",
    "features.watched.of=event", "features.watched.is=number", "features.watched.edges=[8,40]",
    "features.watched.outcome=true", "features.watched.as=after",
    "features.price.of=item", "features.price.is=number", "features.price.edges=[1,5,20]",
    "features.pair.cross=[user,item]", "features.pair.rows=50",
    "features.level.cross=[price,country]", "features.level.rows=30", "features.level.dim=3",
)  # fmt: skip
RECIPES = {
    "usual places, zero collision": (
        "synthetic.features=true", "tables.user.map=zero_collision", "tables.user.rows=32", "tables.user.dim=5",
        "tables.home.dim=4",
    ),
    "join, after, mlp, direct, hash": ("synthetic.features=true", "tokens.join=mlp", *PLACES),
    "sasrec, temporal": (
        "synthetic.features=true", "model.kind=sasrec", "data.split=temporal",
        "data.valid_from=0.7", "data.test_from=0.9",
    ),
}  # fmt: skip


def trained(folder: Path, recipe: tuple[str, ...]) -> Path:
    """A run folder with a checkpoint in it."""
    recipe = (*TINY, *recipe)
    run, _ = make_run(recipe, folder)
    train(run)
    config = load_config(None, [*SMALL, *recipe, f"run.out={folder}"])
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


@torch.no_grad()
def evaluated(folder: Path) -> tuple[Any, np.ndarray, np.ndarray]:
    """The examples of the test, the rows that are asked, and the score of every item for each."""
    _, run, _ = open_run(folder, device="cpu")
    evaluator, examples = run.evaluation.evaluator, run.evaluation.test
    evaluator.model.eval()
    rows = np.flatnonzero(examples.lengths() > 0)[:12]
    ids = examples.source.items.ids
    catalogue = evaluator.items.catalogue(ids, chunk=1 << 16)
    states = evaluator._last_states(catalogue.look_up(examples.batch(rows)))
    head: Any = evaluator.model.head
    scores = np.full((len(rows), len(ids)), np.nan)
    for numbers, vectors in catalogue.parts():
        scores[:, numbers.numpy()] = (head.queries(states) @ head.candidates(vectors).T).numpy()
    return examples, rows, scores


def requests_of(examples: Any, rows: np.ndarray, names: set[str]) -> list[dict[str, Any]]:
    """What users of the embedded data would be asked for, in plain words."""
    histories = examples.part(rows)
    said = []
    for n, (first, last) in enumerate(zip(histories.offsets[:-1], histories.offsets[1:])):
        events = {name: column[first : last - 1].tolist() for name, column in histories.columns.items()}
        words = {
            "user": int(histories.users[n]),
            "country": COUNTRIES[histories.user_columns["country"][n]],
            "hour": [str(hour) for hour in events["hour"]],
            "watched": [None if np.isnan(each) else each for each in events["watched"]],
            "action": [
                [name for bit, name in enumerate(NAMES) if each >> bit & 1] for each in events["action"]
            ],
        }
        said.append(
            {
                "history": events["item"],
                "times": events["time"],
                "request_time": int(histories.columns["time"][last - 1]),
                "features": {name: words[name] for name in names},
            }
        )
    return said


def scores_of(model: Any, answer: list[tuple[Any, float]]) -> np.ndarray:
    place = {model.names[n]: n for n in range(len(model.items))}
    scores = np.full(len(place), np.nan)
    for item, score in answer:
        scores[place[item]] = score
    return scores


def together(asked: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The requests as one batch, features by name."""
    batch = {name: [each[name] for each in asked] for name in names}
    features = {name: [each["features"][name] for each in asked] for name in asked[0]["features"]}
    return {**batch, "features": features}


@pytest.mark.parametrize("case", RECIPES)
def test_requests_score_as_evaluation_does(tmp_path: Path, case: str) -> None:
    run = trained(tmp_path / "run", RECIPES[case])
    model = load_export(export_run(run, tmp_path / "out"))
    examples, rows, expected = evaluated(run)
    asked = requests_of(examples, rows, {line.split(":")[0] for line in model.needs})
    use = ["history"] if "sasrec" in case else ["history", "times", "request_time"]
    options: Any = {"k": len(model.items), "filter_seen": False}
    for each, scores in zip(asked, expected):
        alone = model.recommend(**{name: each[name] for name in (*use, "features")}, **options)
        np.testing.assert_allclose(scores_of(model, alone), scores, rtol=0, atol=1e-6)
    by_name = together(asked, use)
    by_user = {**by_name, "features": [each["features"] for each in asked]}
    for given in (by_name, by_user):
        answers = model.recommend(**given, **options)
        np.testing.assert_allclose(
            np.stack([scores_of(model, answer) for answer in answers]), expected, rtol=0, atol=1e-6
        )


def test_a_cache_knows_the_features_of_its_events(tmp_path: Path) -> None:
    joined = (
        "features.hour.of=event",
        "features.hour.is=id",
        f"features.hour.values={[*map(str, range(24))]}",
    )
    joined += ("features.watched.of=event", "features.watched.is=number", "features.watched.outcome=true")
    # With one layer summaries would be the same whatever they sum up.
    segments = ("segments.recent=2", "segments.length=2", "segments.summaries=1", "model.layers=2")
    run = trained(tmp_path / "run", ("synthetic.features=true", *joined, *segments))
    model = load_export(export_run(run, tmp_path / "out"))
    history, times = model.items[:6].tolist(), list(range(100, 700, 100))
    features = {"hour": [1, 2, None, 4, 5, 6], "watched": [3.0, None, 5, 6, 7, 8]}

    def part(first: int, last: int) -> Any:
        some = {name: values[first:last] for name, values in features.items()}
        return {"history": history[first:last], "times": times[first:last], "features": some}

    options: Any = {"k": len(model.items), "filter_seen": False, "request_time": 700}
    whole = model.recommend(**part(0, 6), **options)
    cache = model.compress(**part(0, 4), next_time=times[4])
    answer = model.recommend(**part(4, 6), cache=cache, **options)
    assert dict(answer) == pytest.approx(dict(whole), rel=1e-4, abs=1e-5)
    other = model.compress(**{**part(0, 4), "features": {"hour": None, "watched": None}}, next_time=times[4])
    assert dict(model.recommend(**part(4, 6), cache=other, **options)) != pytest.approx(dict(whole), abs=1e-5)


SCHEMA: dict[str, Any] = {
    "user": {"of": "user", "is": "id", "map": "zero_collision", "rows": 64},
    "place": {"of": "event", "is": "id", "dim": 3},
    "tags": {"of": "event", "is": "ids", "map": "zero_collision", "rows": 32, "width": 2},
    "spent": {"of": "event", "is": "number", "scale": "log"},
    "did": {"of": "event", "is": "bits", "names": ["play", "skip"], "outcome": True},
    "mood": {"of": "event", "is": "id", "map": "hash", "rows": 7, "table": "moods", "as": "after"},
    "artist": {"of": "item", "is": "id"},
    "taste": {"of": "user", "is": "vector", "width": 2},
    "age": {"of": "user", "is": "number", "scale": "standard", "as": "join"},
    "fan": {"cross": ["user", "artist"], "rows": 40},
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], Path]:
    """A run over data whose ids are words with holes: its folder, the users as they stand in the input, the export."""
    folder = tmp_path_factory.mktemp("words")
    rng = random.Random(4)

    def some(value: Any) -> Any:
        return None if rng.random() < 0.25 else value

    events, users = [], []
    for user in range(24):
        about = {"user": f"u{user}", "age": some(20 + user), "taste": some([user / 10, -1.0])}
        lines = [
            {
                "user": f"u{user}", "item": f"i{rng.randrange(15)}", "time": 1000 * n + 5,
                "place": some(f"p{rng.randrange(4)}"), "spent": some(rng.randrange(90)),
                "tags": [f"t{rng.randrange(6)}" for _ in range(rng.randrange(4))],
                "did": [name for name in ("play", "skip") if rng.random() < 0.5],
                "mood": some(rng.randrange(30)),
            }
            for n in range(5 + user % 5)
        ]  # fmt: skip
        users.append({**about, "events": lines})
        events += lines
    side = [{"user": each["user"], "age": each["age"], "taste": each["taste"]} for each in users]
    items = [{"item": f"i{n}", "artist": some(f"a{n % 4}")} for n in range(15)]
    for name, lines in (("events", events), ("users", side), ("items", items)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    prepare(
        folder / "events.jsonl",
        folder / "data",
        schema=checked_schema(SCHEMA, where="the test"),
        items=folder / "items.jsonl",
        users=folder / "users.jsonl",
    )
    run = trained(folder / "run", (f"data.path={folder / 'data'}",))
    return run, users, export_run(run, folder / "out")


def request_of(user: dict[str, Any]) -> dict[str, Any]:
    """All events of a user but the last, as the input has them."""
    known = user["events"][:-1]
    of_events = {name: [each[name] for each in known] for name in ("place", "tags", "spent", "did", "mood")}
    return {
        "history": [each["item"] for each in known],
        "times": [each["time"] for each in known],
        "request_time": user["events"][-1]["time"],
        "features": {**of_events, **{name: user[name] for name in ("user", "age", "taste")}},
    }


def test_words_lists_vectors_and_holes_score_as_evaluation_does(words: Any) -> None:
    run, users, out = words
    model = load_export(out)
    examples, rows, expected = evaluated(run)
    names = examples.source.item_names(examples.source.items.ids)
    by_user = {user["user"]: user for user in users}
    own = examples.source.find_words("user", examples.source.read(rows).users).to_pylist()
    options: Any = {"k": len(model.items), "filter_seen": False}
    for name, scores in zip(own, expected):
        answer = dict(model.recommend(**request_of(by_user[name]), **options))
        found = [answer[names[n]] for n in range(len(names))]
        np.testing.assert_allclose(found, scores, rtol=0, atol=1e-6)
    # All of them make a difference, as the model is.
    request = request_of(
        next(by_user[name] for name in own if by_user[name]["age"] and by_user[name]["taste"])
    )
    base = scores_of(model, model.recommend(**request, **options))
    for name in request["features"]:
        other = {**request, "features": {**request["features"], name: None}}
        moved = np.abs(scores_of(model, model.recommend(**other, **options)) - base).max()
        assert moved > 1e-5, name


def test_ids_that_are_new_are_none_or_share_rows(words: Any) -> None:
    _, users, out = words
    model = load_export(out)
    request = request_of(users[0])
    size = len(request["history"])
    options: Any = {"k": len(model.items), "filter_seen": False}

    def scores(**changed: Any) -> np.ndarray:
        given = {**request, "features": {**request["features"], **changed}}
        return scores_of(model, model.recommend(**given, **options))

    # Direct: as if there were none, in a list as if it were not in it.
    np.testing.assert_array_equal(scores(place=["new"] * size), scores(place=[None] * size))
    np.testing.assert_array_equal(scores(place=["new"] * size), scores(place=None))
    # Zero collision: a row that new ids share, which is not "none".
    shared = scores(tags=[["new"]] * size)
    assert np.abs(shared - scores(tags=None)).max() > 1e-6
    assert model.features is not None
    table = model.features.tables["tags"]
    new = torch.arange(1000, 1500)
    assert bool((table.rows(new) >= len(table._ids)).all())
    assert int(table.rows(new).max()) < len(table.vectors)
    # Hash: one of the rows.
    assert np.isfinite(scores(mood=[10**12 + n for n in range(size)])).all()


def test_what_a_table_keeps_of_an_id_is_what_training_looks_up(words: Any) -> None:
    run, _, out = words
    _, opened, _ = open_run(run, device="cpu")
    model = load_export(out)
    assert model.features is not None
    for name, table in model.features.tables.items():
        file = pq.read_table(out / f"table-{name}.parquet")
        by_id = "id" in file.column_names
        known = torch.tensor(file.column("id").drop_null().to_pylist() if by_id else range(5))
        ids = known if name == "place" else torch.cat([known, torch.arange(-50, 50)])
        rows = opened.state.id_maps[name].rows(ids)
        trained_rows = opened.state.embedding.tables[name].gather(rows)
        torch.testing.assert_close(table.vectors[table.rows(ids)], trained_rows, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"place": ...}, "the model needs a feature that the request lacks: place"),
        ({"place": ..., "age": ...}, "the model needs features that the request lacks: place, age"),
        ({"plac": "x"}, "the model asks for no feature 'plac'"),
        ({"plac": "x"}, "next:    leave it out"),
        ({"plac": "x", "place": ...}, "did you mean place?"),
        ({"artist": "a1"}, "features of items are in their vectors already"),
        ({"place": ["p1"]}, "place needs one value for every event of the history"),
        ({"age": "old"}, "the age cannot be used"),
        ({"age": [3]}, "the age cannot be used"),
        ({"did": [[], [], [], [], ["play"], ["jump"], [], []]}, "the did cannot be used"),
        ({"mood": ["sad"] * 8}, "a whole number, as in the training data"),
        ({"taste": [1.0]}, "2 finite numbers"),
    ],
)
def test_wrong_requests_are_refused_by_name(words: Any, changed: dict[str, Any], says: str) -> None:
    _, users, out = words
    model = load_export(out)
    request = request_of(next(user for user in users if len(user["events"]) == 9))
    given = {**request["features"], **changed}
    request["features"] = {name: value for name, value in given.items() if value is not ...}
    with pytest.raises(DataError) as error:
        model.recommend(**request)
    assert says in str(error.value)
    several = {**{name: [value] for name, value in request.items()}}
    with pytest.raises(DataError, match="user 0 of the batch: "):
        model.recommend(**several)


def test_what_a_batch_is_given_must_fit_its_users(words: Any) -> None:
    _, users, out = words
    model = load_export(out)
    batch = together([request_of(user) for user in users[:2]], ["history", "times"])
    assert len(model.recommend(**batch)) == 2
    # A text of two letters is not a value for each of two users.
    for name, value in (("user", "u1"), ("age", 3), ("age", [3])):
        with pytest.raises(DataError, match=f"{name} must be one for each user"):
            model.recommend(**{**batch, "features": {**batch["features"], name: value}})
    with pytest.raises(DataError, match="features must be one for each user"):
        model.recommend(**{**batch, "features": [{}]})
    with pytest.raises(DataError, match="features are given by name"):
        model.recommend(**{**batch, "features": ["u1", "u2"]})


def test_a_closed_list_has_no_row_for_what_is_new(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", ("synthetic.features=true",))
    model = load_export(export_run(run, tmp_path / "out"))
    request: Any = {"history": model.items[:3].tolist(), "times": [1, 2, 3]}
    known = {
        "country": "de",
        "hour": [0, "1", None],
        "watched": [1.0, 2, None],
        "action": ["like", ["view"], None],
    }
    none, new = (
        model.recommend(**request, features={**known, "country": country, "hour": hour})
        for country, hour in ((None, [None, 1, None]), ("xx", [99, 1, None]))
    )
    assert none == new
    assert none != model.recommend(**request, features=known)
    file = pq.read_table(tmp_path / "out" / "table-country.parquet")
    assert file.column("word").to_pylist() == list(COUNTRIES)


def test_models_without_features_are_written_as_before(tmp_path: Path) -> None:
    for name, recipe in {
        "plain": (),
        # Features of items alone are in the vectors: requests are what they were.
        "items": ("synthetic.features=true", "features.price.of=item", "features.price.is=number"),
    }.items():
        run = trained(tmp_path / name, recipe)
        out = export_run(run, tmp_path / f"{name}-out")
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["version"] == 2
        assert "features" not in manifest
        assert {file.name for file in out.iterdir()} == {
            "model.safetensors",
            "items.parquet",
            "manifest.json",
        }
        assert pq.read_schema(out / "items.parquet").names == ["item", "vector"]
        model = load_export(out)
        assert model.needs == []
        request: Any = {"history": model.items[:3].tolist(), "times": [1, 2, 3]}
        assert len(model.recommend(**request, k=3)) == 3
        with pytest.raises(DataError, match="looks at no features of events and users"):
            model.recommend(**request, features={"price": 3.0})


def test_the_command_says_what_a_request_needs(words: Any, capsys: Any, tmp_path: Path) -> None:
    run, _, _ = words
    export(run, tmp_path / "out")
    said = capsys.readouterr().out
    assert "table-place.parquet" in said
    assert "recommend(history, features={...}) needs:" in said
    for line in (
        "user: of the user, an id",
        "tags: of every event, ids",
        "did: of every event, some of play, skip, known after it",
        "taste: of the user, 2 numbers",
    ):
        assert f"  {line}\n" in said
    assert "artist" not in said
