"""Recipes whose features do not go together with the rest of them: one clear message each."""

from __future__ import annotations

from pathlib import Path

import pytest

from freescale import load_export
from freescale.app.run.run_summary import features_in_words
from freescale.errors import ConfigError, DataError, FreeScaleError
from freescale.exports.export import write_export
from freescale.recipe import build_features, build_run, encoder_shape, load_config
from freescale.train.log.events import Progress
from tests.feature_source import DictSource
from tests.item_files import write_made_up_content, write_made_up_texts
from tests.small_run import SMALL, Recorder, make_run, these_ranks, train_small

ITEM = {item: {"genre": item % 2} for item in range(4)}
EVENTS = {user: [{"item": n % 4, "time": n, "shop": 10 * n} for n in range(6)] for user in (1, 2)}


def refused(*overrides: str) -> str:
    with pytest.raises(FreeScaleError) as caught:
        make_run(["synthetic.features=true", *overrides])
    return str(caught.value)


def test_segments_do_not_go_with_tokens_in_front_or_behind() -> None:
    told = refused("segments.recent=8", "segments.length=4")
    assert told.startswith("segments.recent does not go with features that have tokens of their own")
    assert "got:     country" in told
    assert "say as: join for them, or leave segments.recent out" in told
    joined = "features.country={of: user, is: id, values: [de, fr, in, us], as: join}"
    make_run(["synthetic.features=true", "segments.recent=8", "segments.length=4", joined])


def test_a_window_does_not_go_with_tokens_in_front() -> None:
    told = refused("model.mask=window", "model.window=4")
    assert told.startswith("model.mask=window does not go with features in front")
    assert "got:     country" in told
    assert "say as: join for them" in told
    joined = "features.country={of: user, is: id, values: [de, fr, in, us], as: join}"
    make_run(["synthetic.features=true", "model.mask=window", "model.window=4", joined])


@pytest.mark.parametrize("kind", ["text", "content"])
def test_vectors_of_items_are_made_by_one(kind: str, tmp_path: Path) -> None:
    write, name = (write_made_up_texts, "x.parquet") if kind == "text" else (write_made_up_content, "x.npy")
    path = write(tmp_path / name, 150)
    told = refused(f"items.kind={kind}", f"items.file={path}")
    assert told.startswith(
        f"items.kind={kind} makes item vectors by itself, and does not go with features yet"
    )
    assert "genre, genres, price" in told
    assert "set items.kind=ids" in told


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"shop": {"of": "event", "is": "id"}}, "shop"),
        ({"user": {"of": "user", "is": "id", "dim": 4}}, "user"),
    ],
)
def test_ids_that_nobody_has_counted_need_rows(words: dict[str, dict[str, object]], name: str) -> None:
    source = DictSource(words, EVENTS, ITEM, {1: {}, 2: {}})
    config = load_config(None, SMALL)
    with pytest.raises(ConfigError) as caught:
        build_run(config, source, these_ranks(), Progress([Recorder()]))
    told = str(caught.value)
    assert told.startswith(
        f"tables.{name}.rows: how many different ids there are is not known before training"
    )
    assert f"tables.{name}.rows=100000 tables.{name}.map=hash, or map=zero_collision" in told
    enough = load_config(None, [*SMALL, f"tables.{name}.rows=50", f"tables.{name}.map=hash"])
    build_run(enough, source, these_ranks(), Progress([Recorder()]))


def test_tables_that_no_feature_of_the_data_has_are_refused() -> None:
    told = refused(
        "tables.gener.dim=4", "tables.hour.rows=9", "tables.home.map=direct", "tables.genre.map=hash"
    )
    assert "tables.gener: no feature has rows in it; did you mean genre?" in told
    assert "tables.hour.rows: its ids are a closed list" in told
    assert "2 problems with tables" in told


def test_ids_of_users_need_no_rows_where_nobody_reads_them() -> None:
    told = refused("embedding.id_map=hash", "embedding.rows=50")
    assert told == "1 problem with tables:\n  - tables.genre.rows: required with map: hash"
    make_run(["synthetic.features=true", "embedding.id_map=hash", "embedding.rows=50", "tables.genre.rows=9"])


def test_loader_processes_hand_over_features_of_items() -> None:
    recipe = ["synthetic.features=true", "run.steps=2", "run.eval_every=0", "synthetic.users=40"]
    losses = [train_small([*recipe, f"data.workers={workers}"])["losses"] for workers in (0, 1)]
    assert losses[0] == losses[1]


def test_the_summary_says_what_is_read_and_what_is_not() -> None:
    words = {
        "user": {"of": "user", "is": "id"},
        "genre": {"of": "item", "is": "id"},
        "released": {"of": "item", "is": "time"},
        "shop": {"of": "event", "is": "id", "rows": 90, "map": "hash"},
    }
    items = {item: {"genre": 1, "released": 10**9 + item} for item in range(4)}
    source = DictSource(words, EVENTS, items, {1: {}, 2: {}})
    config = load_config(None, SMALL)
    features = build_features(config, source)
    assert features is not None
    assert features_in_words(config, features) == (
        "genre in the vectors of items; shop joined to events; released not read (a time); "
        "ids of users not read (tables.user.rows makes them a feature)"
    )
    build_run(config, source, these_ranks(), Progress([Recorder()]))
    also = load_config(None, [*SMALL, "tables.user.rows=50", "tables.user.map=hash"])
    assert "user in front" in features_in_words(also, features)


def test_features_of_items_are_exported_and_others_are_refused(tmp_path: Path) -> None:
    source = DictSource({"genre": {"of": "item", "is": "id", "dim": 3}}, EVENTS, ITEM, {1: {}, 2: {}})
    config = load_config(None, [*SMALL, "data.use_time=false"])
    run = build_run(config, source, these_ranks(), Progress([Recorder()]))
    items = run.train_step._encode_items.__self__  # type: ignore[attr-defined]
    options = {"catalog": source.items.ids, "encoder": encoder_shape(config, source), "facts": {}}
    write_export(tmp_path / "out", model=run.state.model, items=items, **options)
    exported = load_export(tmp_path / "out")
    assert len(exported.recommend([1, 2], k=2)) == 2
    shop = DictSource({"shop": {"of": "event", "is": "id", "rows": 90}}, EVENTS, ITEM, {1: {}, 2: {}})
    other = build_run(config, shop, these_ranks(), Progress([Recorder()]))
    with pytest.raises(DataError, match="reads features of events or users"):
        write_export(tmp_path / "no", model=other.state.model, items=items, **options)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["tables.genre.eviction=lru"], "tables.genre.eviction: only for map zero_collision, got direct"),
        (
            ["tables.genre.map=zero_collision", "tables.genre.rows=64", "tables.genre.guard=1"],
            "tables.genre.guard: pipeline.prioritized has 3 batches under way, got 1",
        ),
        (
            ["tables.genre.map=zero_collision", "tables.genre.rows=64", "tables.genre.ttl=3"],
            "tables.genre.ttl: goes with eviction=ttl, both or none",
        ),
        (["embedding.lr=0", "tables.genre.lr=0.1"], "tables.genre.lr: is told as a multiple of embedding.lr"),
    ],
)
def test_what_a_table_is_told_must_do_something(keys: list[str], told: str) -> None:
    assert told in refused(*keys)
