"""A schema is strict: every mistake is told, all at once, with the nearest right word."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import Feature, checked_schema, choose_features, legacy_schema, load_schema, read_schema
from freescale.data.schema.vocabulary import WORDS
from freescale.errors import ConfigError, DataError
from tests.effort import examples

FULL = {
    "user": {"of": "user", "is": "id", "map": "zero_collision", "rows": 1000},
    "item": {"of": "event", "is": "id"},
    "time": {"of": "event", "is": "time"},
    "artist": {"of": "item", "is": "id"},
    "genres": {"of": "item", "is": "ids", "width": 4},
    "price": {"of": "item", "is": "number", "scale": "log"},
    "cover": {"of": "item", "is": "vector", "width": 64},
    "action": {"of": "event", "is": "bits", "names": ["listen", "like"], "outcome": True},
    "watched": {"of": "event", "is": "number", "edges": [3, 10, 30], "outcome": True, "as": "after"},
    "country": {"of": "user", "is": "id", "values": ["de", "fr"]},
    "last_item": {"of": "event", "is": "id", "table": "item", "column": "previous"},
    "taste": {"cross": ["user", "artist"], "rows": 100},
    "home": {"cross": ["user", "country"], "rows": 50, "as": "join"},
}


def problems_of(given: object) -> list[str]:
    found: list[str] = []
    read_schema(given, found)
    return found


def test_features_that_are_looked_up_say_in_which_table() -> None:
    schema = checked_schema(FULL, where="test")
    assert [schema[name].lookup_table for name in ("last_item", "taste", "watched")] == [
        "item",
        "taste",
        "watched",
    ]
    with pytest.raises(DataError, match="'price' is looked up in no table"):
        _ = schema["price"].lookup_table


def test_all_words_are_understood_and_written_back() -> None:
    schema = checked_schema(FULL, where="test")
    assert [each.name for each in schema] == list(FULL)
    assert schema["taste"].of == "event"
    assert (schema["home"].of, schema["home"].place) == ("user", "join")
    assert (schema["country"].place, schema["price"].place) == ("front", "join")
    assert [each.name for each in schema.outcomes] == ["action", "watched"]
    assert schema.tables["item"].features == ("item", "last_item")
    assert (schema.tables["user"].rows, schema.tables["user"].map) == (1000, "zero_collision")
    assert schema.tables["watched"].num_values == 4
    assert "price" not in schema.tables
    assert checked_schema(schema.words(), where="again") == schema


def test_items_are_always_there() -> None:
    assert list(checked_schema({"hour": {"of": "event", "is": "id"}}, where="x").features) == ["item", "hour"]


MISTAKES = {
    "maker": (
        {"of": "itm", "is": "id"},
        "maker.of: allowed: event, item, user, request; got 'itm' (did you mean item?)",
    ),
    "kind": (
        {"of": "item", "is": "idd"},
        "kind.is: allowed: id, ids, number, vector, bits, time; got 'idd' (did you mean id?)",
    ),
    "word": ({"of": "item", "is": "id", "tabel": "item"}, "word: unknown word 'tabel'; did you mean table?"),
    "cover": ({"of": "item", "is": "vector"}, "cover.width: vector needs it"),
    "device": ({"of": "request", "is": "id", "as": "front"}, "device.as: a feature of request goes as: join"),
    "taste": ({"cross": ["user", "artists"]}, "taste.rows: a cross needs them"),
    "daily": (
        {"cross": ["user", "price"], "rows": 9},
        "daily.cross: price is a number, not an id; with edges it is one",
    ),
    "seen": (
        {"cross": ["user", "liked"], "rows": 9},
        "seen.cross: liked is an outcome, which a candidate does not have",
    ),
    "who": (
        {"cross": ["user", "artsit"], "rows": 9},
        "who.cross: there is no feature 'artsit'; did you mean artist?",
    ),
    "land": ({"of": "user", "is": "id", "values": ["de"], "rows": 3}, "land.rows: does not go with values"),
    "steps": ({"of": "event", "is": "number", "edges": [3, 1]}, "steps.edges: must rise"),
    "twice": (
        {"of": "event", "is": "id", "table": "artist", "dim": 8},
        "twice.dim: table artist has one dim, and artist says 16; got 8",
    ),
    "mapped": (
        {"of": "event", "is": "id", "table": "artist", "map": "hash"},
        "mapped.map: table artist has one map",
    ),
    "known": ({"of": "item", "is": "number", "outcome": True}, "known.outcome: only events have outcomes"),
    "here": (
        {"of": "user", "is": "id", "as": "after"},
        "here.as: a feature of user goes as: join, front; got after",
    ),
    "target_x": ({"of": "event", "is": "id"}, "target_x: batches use this name themselves"),
    "item_index": ({"of": "event", "is": "id"}, "item_index: batches use this name themselves"),
    "no": (
        {"of": "user", "is": "id", "values": [False, "se"]},
        "no.values: YAML reads one of the values as false",
    ),
    "flags": ({"of": "event", "is": "bits"}, "flags.names: bits needs it"),
    "size": (
        {"of": "event", "is": "number", "rows": 4},
        "size.rows: a number has no rows in a table; with edges it has",
    ),
    "both": (
        {"of": "event", "is": "number", "edges": [1], "scale": "log"},
        "both.scale: does not go with edges",
    ),
    "text": ("id", "text: a feature is a mapping of words"),
    "scaled": (
        {"of": "event", "is": "number", "scale": "standart"},
        "scaled.scale: allowed: none, log, standard; got 'standart' (did you mean standard?)",
    ),
    "when": ({"of": "event", "is": "time"}, "when: events have one time, and it is called time"),
    "nothing": ({}, "nothing.of: missing; allowed: event, item, user, request"),
}
GOOD = {
    "user": {"of": "user", "is": "id"},
    "artist": {"of": "item", "is": "id", "dim": 16, "map": "direct"},
    "price": {"of": "item", "is": "number"},
    "liked": {"of": "event", "is": "bits", "names": ["like"], "outcome": True},
}


def test_every_mistake_is_told_at_once_with_the_nearest_word() -> None:
    with pytest.raises(ConfigError) as caught:
        checked_schema({**GOOD, **{name: words for name, (words, _) in MISTAKES.items()}}, where="x.yaml")
    told = str(caught.value)
    for _, message in MISTAKES.values():
        assert f"- features.{message}" in told
    assert f"{told.count('  - ')} problems in the features of x.yaml" in told


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_is_one_message(name: str) -> None:
    words, message = MISTAKES[name]
    found = problems_of({**GOOD, name: words})
    assert len(found) == (2 if name in ("nothing", "taste") else 1), found
    assert any(each.startswith(f"features.{message}") for each in found)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("item", {"of": "item", "is": "id"}, "must be {of: event, is: id}"),
        ("user", {"of": "event", "is": "id"}, "must be {of: user, is: id}"),
        ("time", {"of": "event", "is": "number"}, "must be {of: event, is: time}"),
        ("item", {"of": "event", "is": "id", "table": "x"}, "its rows are in table item"),
    ],
)
def test_what_a_data_set_is_built_from_is_what_it_is(name: str, words: dict, message: str) -> None:
    assert message in problems_of({name: words})[0]


def test_rows_cannot_be_shared_by_other_numbers() -> None:
    given = {
        "a": {"of": "user", "is": "id", "values": ["x", "y"]},
        "b": {"of": "event", "is": "id", "table": "a"},
    }
    assert "it cannot share the rows of a" in problems_of(given)[0]


def test_a_file_without_the_section_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("feature:\n  a: {of: item, is: id}\n")
    with pytest.raises(ConfigError, match="did you write 'feature' for features"):
        load_schema(path)
    path.write_text("features:\n  a: {of: item, is: id}\n  a: {of: item, is: id}\n")
    with pytest.raises(ConfigError, match="given twice"):
        load_schema(path)
    path.write_text("model: {dim: 3}\nfeatures:\n  a: {of: item, is: id}\n")
    assert list(load_schema(path).features) == ["item", "a"]


def test_a_recipe_chooses_among_what_is_stored() -> None:
    stored = checked_schema(FULL, where="x")
    found: list[str] = []
    assert choose_features(stored, {}, found) == stored
    chosen = choose_features(
        stored,
        {
            "price": {"of": "item", "is": "number", "edges": [1, 2]},
            "artist": {"of": "item", "is": "id", "dim": 8},
            "x": {"cross": ["user", "artist"], "rows": 5},
            "user": {"of": "user", "is": "id"},
        },
        found,
    )
    assert found == []
    assert set(chosen.features) == {"item", "time", "user", "price", "artist", "x"}
    assert (chosen["price"].edges, chosen["artist"].dim) == ((1.0, 2.0), 8)


def test_a_recipe_cannot_change_what_is_stored() -> None:
    found: list[str] = []
    asked = {
        "artist": {"of": "user", "is": "id"},
        "pricee": {"of": "item", "is": "number"},
        "action": {"of": "event", "is": "bits", "names": ["listen", "like"]},
        "country": {"of": "user", "is": "id", "values": ["de"]},
    }
    choose_features(checked_schema(FULL, where="x"), asked, found)
    assert [text.split(":")[0] for text in found] == [
        "features.artist.of",
        "features.pricee",
        "features.action.outcome",
        "features.country.values",
    ]
    assert "did you mean price?" in found[1]


def test_without_a_schema_there_are_items_times_and_actions() -> None:
    assert list(legacy_schema(("item", "action")).features) == ["item", "action"]
    assert legacy_schema(("item", "action"))["action"] == Feature(
        name="action", of="event", kind="number", outcome=True
    )


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@examples(60, 1000)
@given(
    st.dictionaries(
        st.sampled_from(["item", "user", "a", "b", "c", "", "é"]),
        st.dictionaries(
            st.sampled_from([*WORDS, "junk"]),
            JUNK | st.sampled_from(["event", "item", "user", "id", "ids", "number", "a", ["a", "b"], 7]),
            max_size=5,
        )
        | JUNK,
        max_size=5,
    )
)
def test_any_words_give_a_schema_or_problems_and_nothing_else(words: dict) -> None:
    found: list[str] = []
    schema = read_schema(words, found)
    assert all(text.startswith("features.") for text in found)
    if not found:
        assert checked_schema(schema.words(), where="again") == schema


def test_a_cross_in_front_with_an_item_in_it_is_of_the_request():
    made = checked_schema(
        {
            "user": {"of": "user", "is": "id"},
            "artist": {"of": "item", "is": "id"},
            "ahead": {"cross": ["user", "artist"], "rows": 9, "as": "front"},
            "joined": {"cross": ["user", "artist"], "rows": 9},
        },
        where="x",
    )
    assert (made["ahead"].of, made["ahead"].place) == ("request", "front")
    assert (made["joined"].of, made["joined"].place) == ("event", "join")
    assert checked_schema(made.words(), where="x") == made
