"""Pairs of messy files: what is taken, what is refused and in which words, and what digests notice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data import (
    NONE,
    BatchFeatures,
    ColumnNames,
    Examples,
    ParquetSource,
    differences,
    digest_data,
    prepare,
    schema_of,
)
from freescale.errors import ConfigError, DataError

EVENTS = """uid;sku;ts;event;secs;shop
u1;a;2024-01-01;view|like;3.5;Ulm
u1;b;2024-01-02;view;;Bonn
u1;c;2024-01-03;skip;12;
u1;a;2024-01-04;like;0.5;Ulm
u2;b;2024-01-01;;7;Köln
u2;c;2024-01-02;view;8;Ulm
u2;a;2024-01-03;view;9;Ulm
"""
ITEMS = """id,artist,genres,price,cover
a,X,rock | pop,1.5,"[1, 2]"
b,Y,,N/A,3 4
c,X,"['jazz', 'rock']",100,
"""
ITEM_FEATURES = ("artist", "genres", "price", "cover")
USERS = '{"user": "u1", "country": "de", "age": 30}\n{"user": "u2", "country": "NA", "age": null}\n'
SCHEMA: dict[str, Any] = {
    "item": {"of": "event", "is": "id", "column": "sku"},
    "user": {"of": "user", "is": "id", "column": "uid"},
    "time": {"of": "event", "is": "time", "column": "ts"},
    "event": {"of": "event", "is": "bits", "names": ["view", "like", "skip"], "outcome": True},
    "secs": {"of": "event", "is": "number", "outcome": True},
    "shop": {"of": "event", "is": "id"},
    "artist": {"of": "item", "is": "id"},
    "genres": {"of": "item", "is": "ids"},
    "price": {"of": "item", "is": "number", "scale": "log"},
    "cover": {"of": "item", "is": "vector", "width": 2},
    "country": {"of": "user", "is": "id", "values": ["de", "NA"]},
    "age": {"of": "user", "is": "number"},
}


def made(
    tmp_path: Path, *, events: str = EVENTS, items: str = ITEMS, users: str = USERS, **options: Any
) -> Any:
    files = {"e.csv": events, "i.csv": items, "u.jsonl": users}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    options = {"schema": SCHEMA, "items": tmp_path / "i.csv", "users": tmp_path / "u.jsonl", **options}
    return prepare(tmp_path / "e.csv", tmp_path / "out", overwrite=True, **options)


def refused(tmp_path: Path, **options: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        made(tmp_path, **options)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_a_messy_pair_becomes_one_data_set(tmp_path: Path) -> None:
    summary = made(tmp_path)
    source = ParquetSource(tmp_path / "out")
    histories = source.read([0, 1])
    first = 0 if histories.user_columns["country"][0] == 0 else 1
    assert source.features == ("item", "time")
    theirs = slice(*histories.offsets[[first, first + 1]])
    assert histories.columns["event"][theirs].tolist() == [3, 1, 4, 2]
    np.testing.assert_array_equal(histories.columns["secs"][theirs], np.float32([3.5, np.nan, 12, 0.5]))
    shop = histories.columns["shop"][theirs]
    assert source.feature_words("shop", shop[[0, 1, 3]]) == ["Ulm", "Bonn", "Ulm"]
    assert shop[2] == NONE
    assert histories.user_columns["country"][[first, 1 - first]].tolist() == [0, 1]
    np.testing.assert_array_equal(histories.user_columns["age"][[first, 1 - first]], [30, np.nan])
    names = source.item_names(source.items.ids)
    order = np.argsort([names[n] for n in range(3)])
    items = source.item_features().take(order, ["artist", "genres", "price", "cover"])
    assert source.feature_words("artist", items["artist"]) == ["X", "Y", "X"]
    words = [
        [] if row[0] == NONE else source.feature_words("genres", row[row != NONE]) for row in items["genres"]
    ]
    assert words == [["rock", "pop"], [], ["jazz", "rock"]]
    np.testing.assert_array_equal(items["price"], np.float32([1.5, np.nan, 100]))
    np.testing.assert_array_equal(items["cover"], np.float32([[1, 2], [3, 4], [np.nan, np.nan]]))
    assert "secs: secs (event, number)" in summary.taken
    assert "  price: price (item, number)" in summary.taken
    assert source.table_ids == {
        "item": "text",
        "user": "text",
        "shop": "text",
        "artist": "text",
        "genres": "text",
    }


def test_what_a_candidate_sees_holds_no_outcome(tmp_path: Path) -> None:
    made(tmp_path)
    source = ParquetSource(tmp_path / "out")
    features = BatchFeatures(source, source.schema)
    batch = Examples(source=source, split="test", features=features).batch([0, 1])
    outcomes = {"event", "secs"}
    assert {"label_event", "label_secs", "label_secs.none", "event", "secs"} <= set(batch.tokens)
    seen = features.candidate_names()
    assert set(seen) <= set(batch.tokens)
    assert not [
        name
        for name in batch.tokens
        if name.removeprefix("target_").split(".")[0] in outcomes and name.startswith("target_")
    ]
    changed = EVENTS.replace("like;0.5;Ulm", "skip;77;Ulm").replace("view;9;Ulm", ";;Ulm")
    assert changed != EVENTS
    made(tmp_path, events=changed)
    other = ParquetSource(tmp_path / "out")
    again = Examples(source=other, split="test", features=BatchFeatures(other, other.schema)).batch([0, 1])
    for name, values in batch.tokens.items():
        if not name.startswith("label_"):
            assert values.equal(again.tokens[name]), name
    assert not batch.tokens["label_event"].equal(again.tokens["label_event"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"events": EVENTS.replace(";12;", ";viele;")},
            ["e.csv, line 4: the secs cannot be used", "a finite number"],
        ),
        (
            {"events": EVENTS.replace("skip", "buy")},
            ["line 4: the event cannot be used", "some of view, like, skip"],
        ),
        ({"users": USERS.replace('"de"', '"fr"')}, ["u.jsonl, line 1: the country cannot", "one of de, NA"]),
        ({"items": ITEMS.replace("3 4", "3 4 5")}, ["i.csv, line 3: the cover cannot", "2 finite numbers"]),
        ({"items": ITEMS.replace(",1.5,", ",inf,")}, ["i.csv, line 2: the price cannot be used"]),
        (
            {"items": ITEMS.replace("c,X", "d,X")},
            ["Events have items that their files lack", "i.csv lacks: 1, such as 'c'"],
        ),
        ({"users": USERS.splitlines()[0]}, ["Events have users that", "u.jsonl lacks: 1, such as 'u2'"]),
        ({"items": ITEMS + "a,Z,,,\n"}, ["the same item twice", "first in row 4"]),
        (
            {"items": ITEMS.replace("artist", "artists").replace("price", "preis")},
            [
                "no column for the artist and no column for the price",
                "features.artist.column (did you mean 'artists'?)",
            ],
        ),
        (
            {"events": EVENTS.replace("secs", "sec").replace("ts", "when")},
            ["no column for the time and no column for the secs", "did you mean 'sec'"],
        ),
        (
            {"items": None},
            ["artist, genres, price, cover: of item, and there is no file of items (`--items FILE`)"],
        ),
        ({"schema": None}, ["there is no schema (`--schema FILE`)"]),
        (
            {"schema": {"hour": {"of": "event", "is": "id"}}},
            ["no feature is of item", "no feature is of user"],
        ),
        ({"lacking": "skip"}, ["lacking is neither", "stop, none"]),
        ({"items": ""}, ["i.csv is empty", "the file of items (`--items`)"]),
        ({"items": "id,artist,genres,price,cover\n"}, ["i.csv has no items, at most a header", "`--items`"]),
        ({"users": ""}, ["u.jsonl is empty", "the file of users (`--users`)"]),
        (
            {"items": ITEMS.replace("id,", "kennung,")},
            [
                "no column for the item",
                "parentasin, id)",
                "call the column of the ids as the events do (sku), or id",
            ],
        ),
        (
            {"items": ITEMS.split("\n", 1)[1]},
            ["i.csv has no column for the item", "`--item-columns item,...`"],
        ),
        (
            {"items": ITEMS.replace("id,", "kennung,"), "item_header": ["item", *ITEM_FEATURES]},
            ["i.csv has a header, and the names", "leave `--item-columns` out"],
        ),
        ({"items": "a,X,,1,\n", "item_header": ["item", "_"]}, ["i.csv: `--item-columns` names 2 fields"]),
        (
            {"events": EVENTS.replace("\n", ";1\n").replace("shop;1", "shop;secs")},
            ["several columns named 'secs': which is the secs?"],
        ),
        (
            {"schema": {**SCHEMA, "device": {"of": "request", "is": "id", "as": "front"}}},
            ["device.as: a feature of request goes as: join; got front"],
        ),
        (
            {
                "schema": {**SCHEMA, "shop": {"of": "event", "is": "id", "map": "direct", "rows": 3}},
                "events": EVENTS.replace("Ulm", "2").replace("Bonn", "3").replace("Köln", "0"),
            },
            ["line 3: the shop cannot", "0 to 2: with map: direct"],
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(tmp_path: Path, change: dict, told: list[str]) -> None:
    if "items" in change and change["items"] is None:
        (tmp_path / "e.csv").write_text(EVENTS, encoding="utf-8")
        with pytest.raises(DataError) as caught:
            prepare(
                tmp_path / "e.csv",
                tmp_path / "out",
                schema={n: w for n, w in SCHEMA.items() if w["of"] != "user"},
            )
        message = str(caught.value)
    else:
        message = refused(tmp_path, **change)
    for words in told:
        assert words in message


def test_all_files_that_are_missing_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(EVENTS, encoding="utf-8")
    sides = {"items": tmp_path / "x.csv", "users": tmp_path / "y.csv"}
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / "e.csv", tmp_path / "out", schema=SCHEMA, **sides)
    for name, path in sides.items():
        assert f"--{name} {path}: there is no such file" in str(caught.value)


def test_bad_lines_of_features_are_skipped_and_counted(tmp_path: Path) -> None:
    events = EVENTS.replace(";12;", ";viele;") + "u1;b;2024-01-05;view;1;\n"
    items = ITEMS + "a,Z,,,\nd,X,,cheap,\n"
    summary = made(tmp_path, events=events, items=items, bad_lines="skip")
    assert summary.num_skipped == 1
    assert summary.num_events == 7
    assert "  1 rows of a item that was there already left out" in summary.taken
    assert "  skipped 1 bad line" in summary.taken


def test_lacking_rows_may_be_missing_values(tmp_path: Path) -> None:
    summary = made(tmp_path, items="\n".join(ITEMS.splitlines()[:3]) + "\n", lacking="none")
    source = ParquetSource(tmp_path / "out")
    names = source.item_names(source.items.ids)
    (place,) = [n for n in range(3) if names[n] == "c"]
    found = source.item_features().take(np.array([place]), ["artist", "genres", "price", "cover"])
    assert found["artist"].tolist() == [NONE]
    assert (found["genres"] == NONE).all()
    assert np.isnan(found["price"]).all()
    assert np.isnan(found["cover"]).all()
    assert any("i.csv lacks: 1, such as 'c': their features are missing" in line for line in summary.taken)


def test_items_without_events_are_counted_or_kept(tmp_path: Path) -> None:
    items = ITEMS + 'zz,Y,jazz,7,"[5, 6]"\nnew,Z,folk,8,\n'
    left = made(tmp_path, items=items)
    assert left.num_items == 3
    wanted = "items of i.csv without an event: 2, left out (`--new-items keep` keeps them)"
    assert wanted in left.taken
    kept = made(tmp_path, items=items, new_items="keep")
    assert kept.num_items == 5
    assert "items of i.csv without an event: 2, kept, to be recommended by their features" in kept.taken
    source = ParquetSource(tmp_path / "out")
    names = list(source.item_names(source.items.ids))
    assert sorted(names) == ["a", "b", "c", "new", "zz"]
    assert (np.diff(source.items.ids) > 0).all()
    by_name = dict(zip(names, source.items.counts.tolist()))
    assert by_name == {"a": 3, "b": 2, "c": 2, "zz": 0, "new": 0}
    found = source.item_features().take(np.array([names.index("zz")]), ["price", "cover"])
    assert found["price"].tolist() == [7.0]
    assert found["cover"].tolist() == [[5.0, 6.0]]
    with pytest.raises(DataError, match="new_items is neither"):
        made(tmp_path, new_items="all")


def test_long_lists_are_cut_and_told(tmp_path: Path) -> None:
    schema = {**SCHEMA, "genres": {"of": "item", "is": "ids", "width": 1}}
    summary = made(tmp_path, schema=schema)
    assert "  genres: genres (item, ids; 2 longer lists cut at 1, see width)" in summary.taken
    assert ParquetSource(tmp_path / "out").item_features().take(np.arange(3), ["genres"])["genres"].shape == (
        3,
        1,
    )


def test_files_without_headers_are_named_by_hand(tmp_path: Path) -> None:
    (tmp_path / "r.dat").write_text("1::10::5::100\n1::11::3::101\n1::12::4::102\n1::10::4::103\n")
    (tmp_path / "m.dat").write_bytes(b"10::Caf\xe9 (1995)::Drama|Comedy\n11::B::Drama\n12::C::\n")
    schema = {
        "genres": {"of": "item", "is": "ids"},
        "action": {"of": "event", "is": "number", "outcome": True},
    }
    with pytest.raises(DataError, match="--item-columns item"):
        prepare(tmp_path / "r.dat", tmp_path / "out", schema=schema, items=tmp_path / "m.dat")
    header = ["item", "title", "genres"]
    prepare(tmp_path / "r.dat", tmp_path / "out", schema=schema, items=tmp_path / "m.dat", item_header=header)
    source = ParquetSource(tmp_path / "out")
    found = source.item_features().take(np.arange(3), ["genres"])["genres"]
    assert source.feature_words("genres", found[0]) == ["Drama", "Comedy"]
    assert (found[2] == NONE).all()
    assert source.features == ("item", "time", "action")
    batch = Examples(source=source, split="test", features=BatchFeatures(source, source.schema)).batch([0])
    assert batch.tokens["action"].tolist() == [5, 3, 4]
    assert batch.tokens["label_action"].tolist() == batch.tokens["target_action"].tolist() == [3, 4, 4]


def test_recbole_files_have_blanks_between_values(tmp_path: Path) -> None:
    (tmp_path / "x.inter").write_text(
        "user_id:token\titem_id:token\ttimestamp:float\n" + "".join(f"1\t{n}\t{n}\n" for n in (1, 2, 3, 1))
    )
    (tmp_path / "x.item").write_text("item_id:token\tclass:token_seq\n1\tA B\n2\tB\n3\t\n")
    schema = {"class": {"of": "item", "is": "ids"}}
    prepare(tmp_path / "x.inter", tmp_path / "out", schema=schema, items=tmp_path / "x.item")
    source = ParquetSource(tmp_path / "out")
    found = source.item_features().take(np.arange(3), ["class"])["class"]
    assert source.feature_words("class", found[0]) == ["A", "B"]


def test_formats_without_columns_have_no_features(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("1 2 3 4 5\n2 3 4\n")
    with pytest.raises(DataError, match="has no features"):
        prepare(tmp_path / "s.txt", tmp_path / "out", schema={"hour": {"of": "event", "is": "id"}})


def test_ids_that_share_rows_are_of_one_kind(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user,item,time,last\n1,5,1,\n1,6,2,5\n1,7,3,x\n1,5,4,7\n")
    prepare(
        tmp_path / "e.csv", tmp_path / "out", schema={"last": {"of": "event", "is": "id", "table": "item"}}
    )
    source = ParquetSource(tmp_path / "out")
    columns = source.read([0]).columns
    assert source.id_kinds["item"] == "text"
    assert columns["last"].tolist()[0] == NONE
    assert columns["last"][1] == columns["item"][0]
    assert source.feature_words("item", columns["last"][1:]) == ["5", "x", "7"]
    assert [source.item_names(columns["item"])[n] for n in range(4)] == ["5", "6", "7", "5"]


def test_digests_notice_features_words_and_schema(tmp_path: Path) -> None:
    made(tmp_path)
    one = digest_data(ParquetSource(tmp_path / "out"))
    changes = {
        "shard-00000.parquet": {"users": USERS.replace("30", "31")},
        "the features in items.parquet": {"items": ITEMS.replace("100", "101")},
        "words-genres.parquet": {"items": ITEMS.replace("jazz", "folk")},
        "the schema of its features": {
            "schema": {**SCHEMA, "secs": {**SCHEMA["secs"], "scale": "log"}},
        },
    }
    for part, change in changes.items():
        made(tmp_path, **change)
        other = digest_data(ParquetSource(tmp_path / "out"))
        told = " ".join(differences(one, other, where=("here", "there")))
        assert part in told or (part in other.parts and one.parts[part] != other.parts[part]), part
        assert one.fingerprint != other.fingerprint
    made(tmp_path)
    assert digest_data(ParquetSource(tmp_path / "out")) == one


def test_exchanged_features_of_items_are_noticed(tmp_path: Path) -> None:
    made(tmp_path, items=ITEMS.replace("100", "101"))
    shutil.copy(tmp_path / "out" / "items.parquet", tmp_path / "kept.parquet")
    made(tmp_path)
    shutil.copy(tmp_path / "kept.parquet", tmp_path / "out" / "items.parquet")
    with pytest.raises(DataError, match="does not hold the features of items"):
        ParquetSource(tmp_path / "out").item_features()


def test_a_data_set_without_a_schema_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user,item,time,rating\n1,5,1,3\n1,6,2,4\n1,7,3,5\n")
    prepare(tmp_path / "e.csv", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert manifest["version"] == 1
    assert not {"schema", "statistics", "words", "item_features"} & set(manifest)
    assert pq.read_schema(tmp_path / "out" / "items.parquet").names == ["item", "count", "train_count"]
    source = ParquetSource(tmp_path / "out")
    assert list(schema_of(source).features) == ["item", "time", "action"]
    assert schema_of(source)["action"].outcome
    assert digest_data(source).schema == ""


def test_a_manifest_of_version_2_needs_its_schema(tmp_path: Path) -> None:
    made(tmp_path)
    file = tmp_path / "out" / "dataset.json"
    manifest = json.loads(file.read_text())
    for change, told in (
        ({"schema": None}, "'schema' is None"),
        ({"schema": {"item": {"of": "event", "is": "idd"}}}, "did you mean id"),
        ({"cross_hash": "other"}, "which this version does not know"),
        ({"version": 3}, "version 1 or 2"),
    ):
        file.write_text(json.dumps({**manifest, **change}))
        with pytest.raises(DataError, match=told):
            ParquetSource(tmp_path / "out")


def test_features_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user,item,time,rating\n1,5,1,3\n1,6,2,4\n1,7,3,5\n")
    prepare(tmp_path / "e.csv", tmp_path / "out")
    made(tmp_path / "out")
    source, rich = ParquetSource(tmp_path / "out"), ParquetSource(tmp_path / "out" / "out")
    with pytest.raises(DataError, match="has no such features"):
        BatchFeatures(source, rich.schema)
    scaled = schema_of(source).with_feature(
        rich.schema["secs"].__class__(
            name="action", of="event", kind="number", scale="standard", outcome=True
        )
    )
    with pytest.raises(DataError, match="does not know mean and deviation"):
        BatchFeatures(source, scaled)


def test_users_a_row_have_lists_of_their_features(tmp_path: Path) -> None:
    rows = [
        {
            "user": 1,
            "item": [3, 4, 5],
            "time": [1, 2, 3],
            "tags": [["a"], [], ["b", "a"]],
            "w": [1.0, None, 3.0],
        },
        {"user": 2, "item": [4, 5, 3], "time": [3, 2, 1], "tags": [[], ["c"], None], "w": [4.0, 5.0, 6.0]},
    ]
    schema = {"tags": {"of": "event", "is": "ids"}, "w": {"of": "event", "is": "number"}}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "e.parquet")
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("e.parquet", "e.jsonl"):
        prepare(tmp_path / name, tmp_path / "out", schema=schema, overwrite=True)
        source = ParquetSource(tmp_path / "out")
        columns = source.read([0, 1]).columns
        assert columns["item"].tolist() == [3, 4, 5, 3, 5, 4]
        np.testing.assert_array_equal(columns["w"], np.float32([1, np.nan, 3, 6, 5, 4]))
        words = [source.feature_words("tags", row[row != NONE]) for row in columns["tags"]]
        assert words == [["a"], [], ["b", "a"], [], ["c"], []]


def test_folders_may_be_features(tmp_path: Path) -> None:
    for shop in ("ulm", "bonn"):
        (tmp_path / "in" / f"shop={shop}").mkdir(parents=True)
        lines = "user,item,time\n" + "".join(f"1,{n},{n + len(shop)}\n" for n in range(3))
        (tmp_path / "in" / f"shop={shop}" / "x.csv").write_text(lines)
    prepare(
        tmp_path / "in",
        tmp_path / "out",
        schema={"shop": {"of": "event", "is": "id", "values": ["bonn", "ulm"]}},
    )
    assert ParquetSource(tmp_path / "out").read([0]).columns["shop"].tolist() == [1, 0, 1, 0, 1, 0]


def test_items_may_have_times_that_are_never_missing(tmp_path: Path) -> None:
    schema = {**SCHEMA, "released": {"of": "item", "is": "time"}}
    dates = ["released", "2001-02-03", "1999-01-01", "2020-05-06"]
    items = "\n".join(f"{line},{date}" for line, date in zip(ITEMS.splitlines(), dates)) + "\n"
    made(tmp_path, schema=schema, items=items)
    found = ParquetSource(tmp_path / "out").item_features().take(np.arange(3), ["released"])["released"]
    assert sorted(found.tolist()) == [915148800, 981158400, 1588723200]
    shutil.rmtree(tmp_path / "out")
    assert "i.csv, line 3: the released is missing" in refused(
        tmp_path, schema=schema, items=items.replace("1999-01-01", "")
    )
    assert "A time cannot be missing" in refused(
        tmp_path, schema=schema, items="\n".join(items.splitlines()[:3]) + "\n", lacking="none"
    )


def test_an_action_that_the_schema_does_not_name_is_refused(tmp_path: Path) -> None:
    assert "The schema names no action" in refused(tmp_path, columns=ColumnNames(action="event"))
    schema = {name: words for name, words in SCHEMA.items() if name != "event"}
    schema["action"] = {"of": "event", "is": "bits", "names": ["view", "like", "skip"], "outcome": True}
    made(tmp_path, schema=schema, columns=ColumnNames(action="event"))
    assert sorted(ParquetSource(tmp_path / "out").read([0, 1]).columns["action"].tolist()) == [
        0,
        1,
        1,
        1,
        2,
        3,
        4,
    ]


def test_direct_rows_must_do_for_all_words(tmp_path: Path) -> None:
    few = {**SCHEMA, "shop": {"of": "event", "is": "id", "map": "direct", "rows": 2}}
    assert "shop: 3 different words, rows is 2" in refused(tmp_path, schema=few)
    made(tmp_path, schema={**SCHEMA, "shop": {"of": "event", "is": "id", "map": "direct", "rows": 3}})


def test_statistics_that_are_gone_are_noticed(tmp_path: Path) -> None:
    made(tmp_path)
    file = tmp_path / "out" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "statistics": {}}))
    with pytest.raises(DataError, match="do not tell the longest list of genres"):
        ParquetSource(tmp_path / "out")
