"""Texts of items: read from titles, kept in the data folder, refused where they do not fit."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.data.preparing.preparation import prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.item_texts import TEXTS_FILE, item_numbers, load_texts, read_raw_texts
from freescale.data.stored.manifest import WORD_FILES
from freescale.data.words.id_words import read_words
from freescale.errors import DataError

RATINGS = "1::5::4::10\n1::7::3::20\n1::9::1::30\n2::7::3::10\n2::9::3::20\n2::5::3::30\n"
MOVIES = "5::The Café (1990)::Drama|War\n9::Small: A Story::\n44::Unseen (2001)::Comedy\n"


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_movielens_titles_in_either_encoding(tmp_path, encoding):
    texts = read_raw_texts(write(tmp_path / "movies.dat", MOVIES, encoding))
    assert texts == {"5": "The Café (1990)\nDrama|War", "9": "Small: A Story", "44": "Unseen (2001)\nComedy"}


@pytest.mark.parametrize(
    "text",
    [
        'movieId,title,genres\n5,"The Café, again",Drama\n9,Small,\n',
        "title\titem_id\tgenres\nThe Café, again\t5\tDrama\nSmall\t9\t\n",
        "item_id:token\ttitle:token_seq\tclass:token_seq\n5\tThe Café, again\tDrama\n9\tSmall\t\n",
    ],
    ids=["csv", "tsv", "recbole"],
)
def test_tables_with_a_header(tmp_path, text):
    assert read_raw_texts(write(tmp_path / "items.txt", text)) == {
        "5": "The Café, again\nDrama",
        "9": "Small",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no table of texts"),
        ("title,genres\na,b\n", "no table of texts"),
        ("item\n5\n", "no table of texts"),
        ("item,title\n5,a,b\n", "line 2: 3 fields"),
        ("5::a\n\n5::b\n", "line 3: the item stands twice"),
        ("item,title\n", "holds no texts"),
    ],
)
def test_bad_texts_are_refused_with_their_place(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_raw_texts(write(tmp_path / "t.csv", text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_raw_texts(tmp_path / "nowhere.dat")


def prepared(tmp_path, movies=MOVIES):
    ratings, titles = write(tmp_path / "ratings.dat", RATINGS), write(tmp_path / "movies.dat", movies)
    return prepare(ratings, tmp_path / "out", texts=titles)


def test_prepare_keeps_a_text_for_every_item_of_the_data_and_no_other(tmp_path):
    summary = prepared(tmp_path)
    assert summary.num_texts == 2
    table = pq.read_table(tmp_path / "out" / TEXTS_FILE)
    assert table["item"].to_pylist() == [5, 7, 9]
    assert table["text"].to_pylist() == ["The Café (1990)\nDrama|War", "", "Small: A Story"]
    ids = ParquetSource(tmp_path / "out").items.ids
    assert load_texts(tmp_path / "out" / TEXTS_FILE, ids) == table["text"].to_pylist()


def test_texts_of_items_with_another_kind_of_id_stop_prepare(tmp_path):
    with pytest.raises(DataError, match=r"(?s)another kind of id.*'?B001.*int64 ids") as caught:
        prepared(tmp_path, "5::a::b\nB001::a::b\n")
    assert "movies.dat" in str(caught.value)


def test_texts_of_items_that_are_words(tmp_path):
    ratings = write(tmp_path / "r.csv", "user,item\n" + "".join(f"u1,{x}\n" for x in ("B1", "007", "日本")))
    titles = write(tmp_path / "t.csv", "item,title\n日本,Japan\n007,Bond\n7,nobody\n")
    assert prepare(ratings, tmp_path / "out", texts=titles).num_texts == 2
    ids = ParquetSource(tmp_path / "out").items.ids
    words = read_words(tmp_path / "out" / WORD_FILES["item"], ids).to_pylist()
    texts = load_texts(tmp_path / "out" / TEXTS_FILE, ids)
    assert dict(zip(words, texts)) == {"B1": "", "007": "Bond", "日本": "Japan"}


def test_texts_of_other_items_stop_prepare_and_leave_nothing(tmp_path):
    with pytest.raises(DataError, match="no text belongs") as caught:
        prepared(tmp_path, "100::a::b\n")
    assert "100" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_without_texts_nothing_is_kept(tmp_path):
    summary = prepare(write(tmp_path / "ratings.dat", RATINGS), tmp_path / "out")
    assert summary.num_texts is None
    assert not (tmp_path / "out" / TEXTS_FILE).exists()


def test_the_command_says_how_many_items_have_texts(tmp_path):
    ratings, titles = write(tmp_path / "ratings.dat", RATINGS), write(tmp_path / "movies.dat", MOVIES)
    result = CliRunner().invoke(app, ["prepare", str(ratings), str(tmp_path / "out"), "--texts", str(titles)])
    assert result.exit_code == 0
    assert "2 of 3 items have texts" in result.output


def test_texts_are_found_by_item_whatever_their_order(tmp_path):
    pq.write_table(pa.table({"item": [9, 5, 70], "text": ["nine", "five", "other"]}), tmp_path / "t.parquet")
    assert load_texts(tmp_path / "t.parquet", np.array([5, 9])) == ["five", "nine"]


def test_missing_damaged_and_incomplete_files_are_refused(tmp_path):
    ids = np.array([5, 9])
    with pytest.raises(DataError, match=r"--texts FILE"):
        load_texts(tmp_path / "nowhere.parquet", ids)
    with pytest.raises(DataError, match="cannot be read"):
        load_texts(write(tmp_path / "bad.parquet", "x"), ids)
    pq.write_table(pa.table({"item": [5, 9]}), tmp_path / "no_text.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        load_texts(tmp_path / "no_text.parquet", ids)
    pq.write_table(pa.table({"item": [5], "text": ["five"]}), tmp_path / "short.parquet")
    with pytest.raises(DataError, match="1 of 2 items, such as"):
        load_texts(tmp_path / "short.parquet", ids)
    pq.write_table(pa.table({"item": [5, 9], "text": ["five", None]}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match="null"):
        load_texts(tmp_path / "null.parquet", ids)


def test_numbers_of_items_are_their_places_in_the_catalogue():
    catalog = np.array([3, 8, 20])
    assert item_numbers(catalog, np.array([20, 3, 3])).tolist() == [2, 0, 0]
    assert item_numbers(catalog, np.zeros(0, np.int64)).tolist() == []
    for unknown in (2, 9, 21):
        with pytest.raises(DataError, match="not in the catalogue"):
            item_numbers(catalog, np.array([3, unknown]))
    with pytest.raises(DataError, match="not in the catalogue"):
        item_numbers(np.zeros(0, np.int64), np.array([3]))
