"""The made-up file of docs/quickstart.md, as nobody cleaned it, written into the folder you are in: clicks.csv.

python examples/clicks.py
"""

from __future__ import annotations

import datetime
import random
import uuid
from pathlib import Path


def write_clicks(path: Path) -> None:
    """400 visitors, 120 products; the same bytes every time."""
    rng = random.Random(4)
    items = [f"B00{rng.randrange(10**7):07d}" for _ in range(120)]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        file.write("visitor;sku;created_at;event;page\r\n")
        for number in range(400):
            who = uuid.UUID(int=rng.getrandbits(128))
            at = datetime.datetime(2026, 3, 1) + datetime.timedelta(minutes=rng.randrange(40000))
            place = rng.randrange(len(items))
            for _ in range(rng.randrange(4, 30)):
                at += datetime.timedelta(seconds=rng.randrange(5, 4000))
                place = (place + rng.choice([1, 1, 1, 2, 7])) % len(items)
                event = rng.choice(["view", "view", "view", "cart", "buy"])
                file.write(f"{who};{items[place]};{at.isoformat()}+02:00;{event};/shop?id={number}\r\n")
            if number % 97 == 5:
                file.write(f"{who};;{at.isoformat()}+02:00;view;/empty\r\n")


if __name__ == "__main__":
    write_clicks(Path("clicks.csv"))
