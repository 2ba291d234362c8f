"""Messy files that cannot be committed as text: packed, in other encodings, Parquet, folders."""

from __future__ import annotations

import gzip
import shutil
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.messy_cases import START

FOLDER = Path(__file__).parent / "messy"
EVENTS = [(7, 10, 5, 100), (3, 20, 4, 50), (7, 30, 3, 90), (3, 10, 2, 60), (7, 40, 1, 100), (3, 30, 5, 40)]
DAYS = {30: 14, 20: 15, 10: 16, 40: 17}


def messy_file(name: str, folder: Path) -> Path:
    """The file of this name: the committed one, or one made in `folder`."""
    path = folder / name
    if (FOLDER / name).exists():
        shutil.copyfile(FOLDER / name, path)
    elif name.endswith(".parquet"):
        pq.write_table(pa.table(_parquet(name.removesuffix(".parquet"))), path)
    elif name in _FOLDERS:
        _FOLDERS[name](path)
    else:
        path.write_bytes(_bytes(name))
    return path


def _bytes(name: str) -> bytes:
    plain, lines = (FOLDER / "crlf.csv").read_bytes(), (FOLDER / "events.jsonl").read_bytes()
    packed: dict[str, bytes] = {
        "events.jsonl.gz": gzip.compress(lines),
        "events.jsonl.zst": pa.compress(lines, "zstd", asbytes=True),
        "utf16.csv": plain.decode().encode("utf-16"),
        "utf16_without_mark.csv": plain.decode().encode("utf-16-le"),
        "gzip_without_ending.csv": gzip.compress(plain),
        "workbook.csv": b"PK\x03\x04\x14\x00\x06\x00\x08\x00" + bytes(64),
        "pickled.csv": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00]\x94.",
    }
    return packed[name]


def _parquet(name: str) -> dict[str, Any]:
    users, items, actions, times = (list(column) for column in zip(*EVENTS))
    seconds = [START + seconds for seconds in times]
    table: dict[str, Any] = {"user_id": users, "item_id": items, "rating": actions}
    micros = pa.array([second * 10**6 for second in seconds])
    if name == "zoned":
        return table | {"timestamp": micros.cast(pa.timestamp("us", "Europe/Berlin"))}
    if name == "local":
        return table | {
            "timestamp": pa.array([second * 10**9 for second in seconds]).cast(pa.timestamp("ns"))
        }
    if name == "millis":
        return table | {"timestamp": [second * 1000 for second in seconds]}
    if name == "days":
        return table | {"date": [datetime(2023, 11, DAYS[item]).date() for item in items]}
    if name == "texts":
        texts = {key: pa.array(list(map(str, column))) for key, column in table.items()}
        dates = [datetime.fromtimestamp(second, UTC).isoformat() for second in seconds]
        return texts | {"user_id": texts["user_id"].dictionary_encode(), "timestamp": dates}
    if name == "clock":
        return table | {"timestamp": [time(22, 14, second % 60) for second in seconds]}
    if name == "nulls":
        return {
            "user_id": [*users, 7],
            "item_id": [*items, None],
            "rating": [*actions, 1],
            "timestamp": [*seconds, START],
        }
    rows = {user: [n for n, other in enumerate(users) if other == user] for user in dict.fromkeys(users)}
    return {
        "user_id": list(rows),
        "items": [[items[n] for n in of_user] for of_user in rows.values()],
        "ratings": [[actions[n] for n in of_user] for of_user in rows.values()],
        "timestamps": [[seconds[n] for n in of_user] for of_user in rows.values()],
    }


def _hive(folder: Path) -> None:
    for user, item, action, _ in EVENTS:
        inside = folder / f"dt=2023-11-{DAYS[item]}"
        inside.mkdir(parents=True, exist_ok=True)
        table = {"user_id": [user], "item_id": [item], "rating": [action]}
        pq.write_table(pa.table(table), inside / f"part-{user}-{item}.parquet")
    (folder / "_SUCCESS").touch()


def _hive_csv(folder: Path) -> None:
    for number, (user, item, action, seconds) in enumerate(EVENTS):
        inside = folder / "country=de" / f"user_id={user}"
        inside.mkdir(parents=True, exist_ok=True)
        row = f"item_id,rating,timestamp\n{item},{action},{START + seconds}\n"
        (inside / f"part-{number}.csv").write_text(row)


def _two_formats(folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(FOLDER / "crlf.csv", folder / "x.csv")
    pq.write_table(pa.table(_parquet("millis")), folder / "x.parquet")


_FOLDERS = {"hive": _hive, "hive_csv": _hive_csv, "two_formats": _two_formats}
