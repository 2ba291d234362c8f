"""Features from messy files to batches, against a reference of dicts and loops."""

from __future__ import annotations

import csv
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import BatchFeatures, Examples, ParquetSource, TemporalSource, prepare
from tests.data.feature_reference import NONE, bucket, cross_id, id_of, scaled, single, sorted_histories
from tests.effort import examples

EDGES = [-1.0, 0.7, 30.0]
NAMES = ["view", "like", "skip"]
COUNTRIES = ["de", "NA", "us"]
SCHEMA: dict[str, Any] = {
    "user": {"of": "user", "is": "id"},
    "place": {"of": "event", "is": "id"},
    "tags": {"of": "event", "is": "ids", "table": "artist"},
    "watched": {"of": "event", "is": "number", "scale": "standard", "outcome": True},
    "long": {"of": "event", "is": "number", "edges": EDGES, "column": "watched", "outcome": True},
    "action": {"of": "event", "is": "bits", "names": NAMES, "outcome": True},
    "artist": {"of": "item", "is": "id"},
    "genres": {"of": "item", "is": "ids", "width": 3},
    "price": {"of": "item", "is": "number", "scale": "log"},
    "year": {"of": "item", "is": "number", "scale": "standard"},
    "cover": {"of": "item", "is": "vector", "width": 2},
    "country": {"of": "user", "is": "id", "values": COUNTRIES},
    "age": {"of": "user", "is": "number"},
    "taste": {"cross": ["user", "artist"], "rows": 1000},
    "spot": {"cross": ["item", "place", "country"], "rows": 1000},
    "home": {"cross": ["country", "user"], "rows": 1000},
}

NUMBER = st.none() | st.floats(-1e6, 1e6, width=32) | st.sampled_from(EDGES)
FORMATS = ("csv", "jsonl", "parquet")


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Events, items and users, with holes; ids are numbers or words, table by table."""
    text = {table: draw(st.booleans()) for table in ("user", "item", "artist", "place", "genres")}

    def ident(table: str, most: int = 6) -> st.SearchStrategy[Any]:
        words = st.integers(0, most).map(lambda n: f"{table[0]}-{n}" * (1 + n % 3))
        return words if text[table] else st.integers(-2, most)

    events = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "user": ident("user", 3),
                    "item": ident("item"),
                    "time": st.integers(1_600_000_000, 1_600_000_050),
                    "place": st.none() | ident("place"),
                    "tags": st.lists(ident("artist"), max_size=3),
                    "watched": NUMBER,
                    "action": st.sets(st.sampled_from(NAMES)).map(sorted),
                }
            ),
            min_size=12,
            max_size=40,
        )
    )
    item = st.fixed_dictionaries(
        {
            "artist": st.none() | ident("artist"),
            "genres": st.lists(ident("genres"), max_size=5),
            "price": NUMBER,
            "year": NUMBER,
            "cover": st.none() | st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=2),
        }
    )
    user = st.fixed_dictionaries({"country": st.none() | st.sampled_from(COUNTRIES), "age": NUMBER})
    items = [{"item": each, **draw(item)} for each in {event["item"]: 0 for event in events}]
    users = [{"user": each, **draw(user)} for each in {event["user"]: 0 for event in events}]
    formats = {name: draw(st.sampled_from(FORMATS)) for name in ("events", "items", "users")}
    # A word must be among the first to be seen: a column without any is one of numbers.
    return {"text": text, "events": events, "items": items, "users": users, "formats": formats}


def write_rows(path: Path, rows: list[dict[str, Any]], form: str) -> Path:
    path = path.with_suffix("." + form)
    if form == "jsonl":
        # What the first lines do not have is no column; later ones may leave out what is missing.
        kept = [{k: v for k, v in row.items() if v is not None or not n} for n, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(rows[0])
            writer.writerows([[_cell(row[name]) for name in rows[0]] for row in rows])
    return path


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    return "|".join(map(repr, value)).replace("'", "") if isinstance(value, list) else str(value)


def as_text(given: dict[str, Any]) -> dict[str, bool]:
    """Which tables have words in the end: a table without a single value is one of numbers."""
    values: dict[str, list[Any]] = {
        "user": [event["user"] for event in given["events"]],
        "item": [event["item"] for event in given["events"]],
        "place": [event["place"] for event in given["events"]],
        "artist": [tag for event in given["events"] for tag in event["tags"]]
        + [item["artist"] for item in given["items"]],
        "genres": [genre for item in given["items"] for genre in item["genres"]],
    }
    return {table: any(isinstance(value, str) for value in values[table]) for table in values}


@examples(12, 400)
@given(inputs(), st.sampled_from(["train", "valid", "test"]), st.sampled_from([0.02, 64]))
def test_batches_hold_what_the_reference_says(given: dict[str, Any], split: Any, memory_mb: float) -> None:
    histories = sorted_histories(given["events"], 3)
    if not histories or max(map(len, histories.values())) < 4:
        return
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: write_rows(Path(folder) / name, given[name], given["formats"][name])
            for name in ("events", "items", "users")
        }
        prepare(
            files["events"],
            Path(folder) / "out",
            schema=SCHEMA,
            items=files["items"],
            users=files["users"],
            memory_mb=memory_mb,
        )
        source = ParquetSource(Path(folder) / "out")
        features = BatchFeatures(source, source.schema)
        whole = Examples(source=source, split=split, max_length=5, features=features)
        rows = np.flatnonzero(whole.lengths() > 0)
        batch = whole.batch(rows)
        found = {name: values.numpy() for name, values in {**batch.tokens, **batch.samples}.items()}
        for prefix, index in (("", "item_index"), ("target_", "target_index")):
            of_items = {name: values[batch.tokens[index]].numpy() for name, values in batch.items.items()}
            found |= {prefix + name: values for name, values in of_items.items()}
        users = source.read(rows).users
    expected = reference(given, histories, as_text(given), split, users.tolist())
    assert set(expected) <= set(found)
    assert not [name for name in found if name.startswith("target_") and name[7:].split(".")[0] in OUTCOMES]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], np.array(values), rtol=1e-5, atol=1e-6, err_msg=name)


OUTCOMES = [name for name, words in SCHEMA.items() if words.get("outcome")]
HELD_BACK = {"train": 2, "valid": 1, "test": 0}


def reference(
    given: dict[str, Any], histories: dict[Any, Any], text: dict[str, bool], split: str, order: list[int]
) -> dict[str, list[Any]]:
    """The batch, name by name."""
    by_id = {id_of(user, text=text["user"]): user for user in histories}
    items = {item["item"]: item for item in given["items"]}
    users = {user["user"]: user for user in given["users"]}
    train = [event for theirs in histories.values() for event in theirs[:-2]]
    trained = {event["item"] for event in train}
    known = {
        "watched": [event["watched"] for event in train if event["watched"] is not None],
        "year": [items[item]["year"] for item in trained if items[item]["year"] is not None],
    }
    most = {
        "tags": max([1, *(len(event["tags"]) for theirs in histories.values() for event in theirs)]),
        "genres": max([1, *(min(3, len(items[e["item"]]["genres"])) for h in histories.values() for e in h)]),
    }
    out: dict[str, list[Any]] = {}

    def put(name: str, value: Any) -> None:
        out.setdefault(name, []).append(value)

    def number(prefix: str, name: str, value: float | None) -> None:
        scale = SCHEMA[name].get("scale", "none")
        shown, missing = scaled(value, scale, known.get(name, []))
        put(prefix + name, shown)
        put(f"{prefix}{name}.none", missing)

    def describe(prefix: str, event: dict[str, Any]) -> None:
        item, user = items[event["item"]], users[event["user"]]
        ids = {
            "user": id_of(event["user"], text=text["user"]),
            "item": id_of(event["item"], text=text["item"]),
            "place": id_of(event["place"], text=text["place"]),
            "artist": id_of(item["artist"], text=text["artist"]),
            "country": NONE if user["country"] is None else COUNTRIES.index(user["country"]),
        }
        outcome = "label_" if prefix else ""
        put(prefix + "place", ids["place"])
        put(prefix + "artist", ids["artist"])
        for name, values, table in (
            ("tags", event["tags"], "artist"),
            ("genres", item["genres"][:3], "genres"),
        ):
            padded = [id_of(value, text=text[table]) for value in values] + [NONE] * (
                most[name] - len(values)
            )
            put(prefix + name, padded)
        number(outcome, "watched", event["watched"])
        put(outcome + "long", bucket(event["watched"], EDGES))
        put(outcome + "action", sum(2 ** NAMES.index(name) for name in event["action"]))
        number(prefix, "price", item["price"])
        number(prefix, "year", item["year"])
        put(prefix + "cover", [0.0, 0.0] if item["cover"] is None else [single(x) for x in item["cover"]])
        put(prefix + "cover.none", item["cover"] is None)
        put(prefix + "taste", cross_id("taste", [ids["user"], ids["artist"]]))
        put(prefix + "spot", cross_id("spot", [ids["item"], ids["place"], ids["country"]]))

    for raw in order:
        user = by_id[raw]
        theirs = histories[user][: len(histories[user]) - HELD_BACK[split]]
        for event, following in list(itertools.pairwise(theirs))[-5:]:
            describe("", event)
            describe("target_", following)
        country = users[user]["country"]
        put("user", raw)
        put("country", NONE if country is None else COUNTRIES.index(country))
        number("", "age", users[user]["age"])
        put("home", cross_id("home", [NONE if country is None else COUNTRIES.index(country), raw]))
    return out


@pytest.mark.parametrize("memory_mb", [0.02, 1])
def test_files_are_the_same_whatever_the_memory(tmp_path: Path, memory_mb: float) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "user": int(rng.integers(20)),
            "item": f"i{rng.integers(30)}",
            "time": int(rng.integers(1000)),
            "watched": float(rng.normal()),
            "tags": [f"t{n}" for n in rng.integers(9, size=rng.integers(4))],
        }
        for _ in range(500)
    ]
    schema = {
        "watched": {"of": "event", "is": "number", "scale": "standard", "outcome": True},
        "tags": {"of": "event", "is": "ids"},
    }
    source = write_rows(tmp_path / "e", rows, "csv")
    for name, memory in (("a", memory_mb), ("b", 512)):
        prepare(source, tmp_path / name, schema=schema, memory_mb=memory, name="x")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        *("dataset.json", "items.parquet", "lengths.npy", "shard-00000.parquet"),
        *("words-item.parquet", "words-tags.parquet"),
    ]
    for name in files:
        one, other = tmp_path / "a" / name, tmp_path / "b" / name
        if name.startswith("words"):  # the same words, in other row groups
            assert pq.read_table(one).equals(pq.read_table(other))
        else:
            assert one.read_bytes() == other.read_bytes(), name


def test_a_temporal_split_scales_by_what_came_before(tmp_path: Path) -> None:
    rows = [
        {"user": user, "item": n % 4, "time": n, "watched": float(n * (1 + user))}
        for user in range(3)
        for n in range(10)
    ]
    schema = {"watched": {"of": "event", "is": "number", "scale": "standard", "outcome": True}}
    prepare(write_rows(tmp_path / "e", rows, "parquet"), tmp_path / "out", schema=schema)
    source = ParquetSource(tmp_path / "out")
    split = TemporalSource(source, valid_from="6", test_from="8")
    early = [row["watched"] for row in rows if row["time"] < 6]
    assert split.statistics["watched"]["mean"] == pytest.approx(np.mean(early))
    assert split.statistics["watched"]["std"] == pytest.approx(np.std(early))
    assert source.statistics["watched"]["mean"] == pytest.approx(
        np.mean([row["watched"] for row in rows if row["time"] < 8])
    )
    batch = Examples(source=split, features=BatchFeatures(split, split.schema)).batch([1])
    expected = (np.array([0.0, 2, 4, 6, 8]) - np.mean(early)) / np.std(early)
    np.testing.assert_allclose(batch.tokens["watched"].numpy(), expected, rtol=1e-5)
