"""What is known of items in words: read from titles and categories, kept beside the histories as one text an item.

    texts.parquet    item (int64, ascending), text (string); a row for every item of the catalogue

A text is all fields of an item, one a line. Items without any have an empty text: they are still items.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.columns.ids import IdKind, OtherIdsError, read_ids
from freescale.data.excerpt import excerpt
from freescale.data.source import IntArray
from freescale.data.stored.manifest import ITEMS_FILE
from freescale.errors import DataError
from freescale.jagged import find_sorted

TEXTS_FILE = "texts.parquet"

_ITEM_NAMES = ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin", "id")


def write_texts(folder: Path, texts: Mapping[str, str], *, name: str, kind: IdKind = "int64") -> int:
    """Keep the texts of the items of a data set in its folder; returns how many have one.

    Args:
        folder: holds items.parquet.
        texts: item, as it is written -> text; items that the data set does not know are left out.
        name: where they come from, for messages.
        kind: of the ids of items.
    """
    by_id = dict(zip(_ids_of(list(texts), kind, name), texts.values()))
    items: IntArray = pq.read_table(folder / ITEMS_FILE, columns=["item"])["item"].to_numpy()
    known = sum(item in by_id for item in items.tolist())
    if not known:
        raise DataError(
            "no text belongs to an item of the data set",
            got=f"{name} names items such as {', '.join(map(str, list(texts)[:3]))}; "
            f"the data has {', '.join(map(str, items[:3].tolist()))}",
            next_step="give the texts of the same items, under the same ids",
        )
    column = pa.array([by_id.get(item, "") for item in items.tolist()], type=pa.string())
    pq.write_table(pa.table({"item": items, "text": column}), folder / TEXTS_FILE, compression="zstd")
    return known


def load_texts(path: Path, items: IntArray) -> list[str]:
    """The text of each of these items, from a file of the form of `texts.parquet`."""
    try:
        table = pq.read_table(path, use_threads=False, partitioning=None)
        ids, texts = table["item"].to_numpy(), table["text"].to_pylist()
    except FileNotFoundError:
        raise DataError(
            "the data set has no texts of its items",
            got=f"{path} does not exist",
            next_step="`freescale prepare INPUT OUT_DIR --texts FILE` keeps them, or set items.file",
        ) from None
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(
            "the texts of the items cannot be read",
            got=f"{path}: {excerpt(str(error), 200)}",
            allowed="Parquet with the columns item and text",
        ) from error
    place = dict(zip(ids.tolist(), range(len(ids))))
    missing = [item for item in items.tolist() if item not in place]
    if missing or None in texts:
        raise DataError(
            "some items have no text",
            got=f"{path}: {len(missing)} of {len(items)} items, such as {missing[:3]}"
            if missing
            else f"{path}: a text is null",
            allowed="a row for every item of the data; its text may be empty",
        )
    return [texts[place[item]] for item in items.tolist()]


def read_raw_texts(path: Path) -> dict[str, str]:
    """Item -> text of a file of titles: `item::title::genres`, or a table with a header (CSV, TSV, RecBole's .item)."""
    try:
        lines = _decoded(path.read_bytes()).splitlines()
    except OSError as error:
        raise DataError("the texts cannot be read", got=f"{path}: {error.strerror}") from error
    rows = _rows_by_colons(lines) if lines and "::" in lines[0] else _rows_by_header(path, lines)
    texts: dict[str, str] = {}
    for number, item, fields in rows:
        if item in texts:
            raise DataError(f"{path}, line {number}: the item stands twice", got=item)
        texts[item] = "\n".join(field.strip() for field in fields if field.strip())
    if not texts:
        raise DataError("the file holds no texts", got=path)
    return texts


def _ids_of(items: list[str], kind: IdKind, name: str) -> list[int]:
    """The ids that the data set has for items as they are written in a file of texts."""
    try:
        return read_ids("item", pa.array(items, type=pa.string()), kind)["item"].tolist()
    except (OtherIdsError, ValueError) as error:
        bad = error.value if isinstance(error, OtherIdsError) else "an empty one"
        raise DataError(
            f"{name} names an item by another kind of id than the data",
            got=excerpt(bad),
            allowed=f"{kind} ids, as in the data",
        ) from error


def _decoded(data: bytes) -> str:
    """UTF-8, or Latin-1 where it is not (MovieLens-1M)."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _rows_by_colons(lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            item, *fields = line.split("::")
            yield number, item.strip(), fields


def _rows_by_header(path: Path, lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Every column but that of the item is text, in the order of the columns."""
    separator = max((",", "\t", ";", "|"), key=lines[0].count) if lines else ","
    reader = csv.reader(lines, delimiter=separator)
    # RecBole writes "item_id:token"; what follows the colon is a type.
    header = [name.split(":")[0] for name in next(reader, [])]
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]
    column = next((plain.index(name) for name in _ITEM_NAMES if name in plain), None)
    if column is None or len(header) < 2:
        raise DataError(
            f"{path} is no table of texts",
            got=f"first line {excerpt(lines[0]) if lines else ''!r}",
            allowed="item::title::genres, or a header with a column item (item_id, movieId, ...) and columns of text",
        )
    for row in reader:
        if row:
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(row)} fields",
                    allowed=f"{len(header)} as in the header",
                )
            yield reader.line_num, row[column].strip(), [f for n, f in enumerate(row) if n != column]


def item_numbers(items: IntArray, ids: IntArray) -> IntArray:
    """The number in the catalogue (ascending ids) of each item; one that is not in it is refused."""
    numbers, known = find_sorted(items, ids)
    if not known.all():
        raise DataError("an item is not in the catalogue", got=int(ids[~known][0]))
    return numbers
