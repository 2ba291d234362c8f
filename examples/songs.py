"""The made-up files of docs/features.md, written into the folder you are in: plays, songs, listeners and a schema.

python examples/songs.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SCHEMA = """features:
  user:    {of: user, is: id, column: hoerer}
  item:    {of: event, is: id, column: song}
  time:    {of: event, is: time, column: zeit}
  action:  {of: event, is: bits, names: [play, like, skip], column: was, outcome: true}
  watched: {of: event, is: number, column: sekunden, edges: [30, 120], outcome: true}
  artist:  {of: item, is: id}
  genres:  {of: item, is: ids}
  price:   {of: item, is: number, scale: log}
  country: {of: user, is: id, values: [de, fr, NA]}
  age:     {of: user, is: number, scale: standard}
  taste:   {cross: [user, artist], rows: 100000}
"""


def write_files(folder: Path) -> None:
    """plays.csv, songs.csv, listeners.jsonl and songs.yaml; the same bytes every time."""
    rng = random.Random(2)
    plays = ["hoerer;song;zeit;was;sekunden"]
    for user in range(60):
        for hour in range(20):
            actions = "|".join(name for name in ("play", "like", "skip") if rng.random() < 0.4)
            seconds = "" if rng.random() < 0.1 else str(rng.randrange(3, 300))
            song, minute = rng.randrange(40), rng.randrange(60)
            plays.append(f"u{user};s{song};2026-03-01T{hour:02d}:{minute:02d}:00;{actions};{seconds}")
    songs = ["id,artist,genres,price"]
    for song in range(40):
        artist = rng.choice(["Nina", "Otto", ""])
        genres, price = rng.choice(["jazz|soul", "", "rock"]), rng.choice(["1.29", "N/A"])
        songs.append(f"s{song},{artist},{genres},{price}")
    listeners = [
        json.dumps(
            {"user": f"u{user}", "country": rng.choice(["de", "fr", "NA"]), "age": rng.choice([31, None])}
        )
        for user in range(60)
    ]
    for name, lines in (("plays.csv", plays), ("songs.csv", songs), ("listeners.jsonl", listeners)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "songs.yaml").write_text(SCHEMA, encoding="utf-8")


if __name__ == "__main__":
    write_files(Path())
