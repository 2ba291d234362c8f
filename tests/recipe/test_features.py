"""Sections features and tables of a recipe: strict, all mistakes at once, and one table where two say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from freescale.app.run.resume_choice import check_same_recipe
from freescale.data import SyntheticSource
from freescale.errors import ConfigError
from freescale.recipe import (
    Config,
    build_examples,
    build_features,
    build_source,
    describe_keys,
    load_config,
    run_schema,
    table_options,
)

RECIPE = """
model: {dim: 32}
features:
  user: {of: user, is: id}
  country: {of: user, is: id, values: [de, fr, in, us]}
  genre: {of: item, is: id, dim: 8}
  genres: {of: item, is: ids, table: genre}
  price: {of: item, is: number, edges: [1, 10]}
  mine: {cross: [user, genre], rows: 500}
tables:
  genre: {map: hash, rows: 64, optimizer: sgd, lr: 0.5}
  user: {map: zero_collision, eviction: lru, rows: 5000}
  item: {dim: 16}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def problems(recipe: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


def test_a_recipe_with_features_is_read_and_written_back(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RECIPE), ["tables.item.dim=24", "features.genre.rows=64"])
    assert config.tables.extra["item"] == {"dim": 24}
    assert config.features.extra["genre"] == {"of": "item", "is": "id", "dim": 8, "rows": 64}
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert config.as_dict()["tables"]["genre"]["optimizer"] == "sgd"


def test_ten_mistakes_are_ten_messages(tmp_path: Path) -> None:
    text = """
features:
  artist: {of: itm, is: id}
  cover: {of: item, is: vectr, width: 4}
  price: {of: item, is: number, scal: log}
  mood: {of: event, is: bits}
  device: {of: request, is: id, as: after}
  taste: {cross: [user, genre], rows: 9}
  user: {of: user, is: id}
  genre: {of: item, is: number}
  land: {of: user, is: id, values: [a, b], rows: 2}
  fast: {of: event, is: number, edges: [2, 1]}
tables:
  user: {dmi: 4}
  fast: {lr: much}
model: {dims: 4}
"""
    told = problems(write(tmp_path, text))
    for words in (
        "features.artist.of: allowed: event, item, user, request; got 'itm' (did you mean item?)",
        "features.cover.is: allowed: id, ids, number, vector, bits, time; got 'vectr' (did you mean vector?)",
        "features.price: unknown word 'scal'; did you mean scale?",
        "features.mood.names: bits needs it",
        "features.device.as: a feature of request goes as: join; got after",
        "features.taste.cross: genre is a number, not an id; with edges it is one",
        "features.land.rows: does not go with values",
        "features.fast.edges: must rise",
        "tables.user.dmi: unknown word; did you mean dim?",
        "tables.fast.lr: must be a finite number, got 'much'",
        "model.dims: unknown key; did you mean model.dim?",
    ):
        assert f"  - {words}" in told
    assert told.startswith("11 problems in ")


def test_tables_must_be_those_of_features(tmp_path: Path) -> None:
    text = """
features:
  genre: {of: item, is: id, map: hash}
  land: {of: user, is: id, values: [a, b]}
tables:
  gener: {dim: 4}
  genre: {map: direct}
  land: {rows: 3}
"""
    told = problems(write(tmp_path, text))
    assert "tables.gener: no feature has rows in it; did you mean genre?" in told
    assert "tables.genre.map: a feature of it says hash, got direct; leave one out" in told
    assert "tables.land.rows: its ids are a closed list" in told
    alone = "features:\n  genre: {of: item, is: id, map: hash}\n"
    assert "tables.genre.rows: required with map: hash" in problems(write(tmp_path, alone))


def test_embedding_holds_the_defaults_of_tables(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RECIPE), ["synthetic.features=true", "embedding.lr=0.25"])
    source = build_source(config)
    tables = table_options(config, run_schema(config, source))
    assert list(tables) == ["item", "user", "country", "genre", "price", "mine"]
    sections = {name: table.section for name, table in tables.items()}
    assert {name: table.dim for name, table in tables.items()} == {
        **dict.fromkeys(("user", "country", "price", "mine"), 32),
        "item": 16,
        "genre": 8,
    }
    assert {name: (each.id_map, each.rows) for name, each in sections.items()} == {
        "item": ("direct", None),
        "user": ("zero_collision", 5000),
        "country": ("direct", 4),
        "genre": ("hash", 64),
        "price": ("direct", 3),
        "mine": ("hash", 500),
    }
    assert (sections["genre"].optimizer, sections["genre"].lr, sections["user"].lr) == ("sgd", 0.5, 0.25)
    assert tables["genre"].features == ("genre", "genres")


def test_batches_of_a_recipe_hold_what_it_names(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RECIPE), ["synthetic.features=true", "synthetic.users=50"])
    source = build_source(config)
    batch = build_examples(config, source, "train", negatives=False).batch([0, 1, 2])
    assert {"item", "genre", "genres", "price"} == set(batch.items)
    assert {"mine", "target_mine"} <= set(batch.tokens)
    assert {"user", "country"} <= set(batch.samples)
    assert not {"watched", "hour", "genre", "price"} & set(batch.tokens)
    assert int(batch.items["price"].max()) <= 2


def test_without_features_batches_are_what_they_were() -> None:
    config = load_config(None, ["synthetic.users=50"])
    source = build_source(config)
    assert build_features(config, source) is None
    batch = build_examples(config, source, "train", negatives=False).batch([0, 1, 2])
    assert set(batch.tokens) == {"item", "target", "time", "target_time"}
    assert set(batch.samples) == {"row"}


def test_features_that_the_data_lacks_are_refused() -> None:
    config = load_config(None, ["features.artist={of: item, is: id}"])
    with pytest.raises(ConfigError, match=r"features\.artist: the data set does not hold it"):
        build_features(config, SyntheticSource(num_users=20))


def test_words_are_listed_among_the_keys() -> None:
    rows = {row[0]: row for row in describe_keys()}
    assert rows["features.NAME.is"][1] == "id | ids | number | vector | bits | time"
    assert rows["tables.NAME.dim"][1] == "int | null"
    assert "tables.NAME.map" in rows
    assert "tables.NAME.id_map" not in rows
    assert Config().features.extra == {}


def test_a_run_goes_on_with_the_features_it_began_with() -> None:
    there = load_config(None, ["features.genre={of: item, is: id}", "tables.genre.dim=8"])
    path = Path("runs/x/checkpoints/step-1")
    for other in ([], ["features.genre={of: item, is: id}", "tables.genre.dim=16"]):
        with pytest.raises(ConfigError, match="holds a run with another recipe"):
            check_same_recipe(path, there.as_dict(), load_config(None, other))
    check_same_recipe(path, there.as_dict(), there)
    before = {name: keys for name, keys in Config().as_dict().items() if name not in ("features", "tables")}
    check_same_recipe(path, before, Config())
