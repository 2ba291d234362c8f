"""The quickstart's way from a messy file to a recommendation, run as it stands."""

from __future__ import annotations

import datetime
import random
import re
import uuid
from pathlib import Path

from tests.test_readme import BLOCK, ROOT, clone, run

__all__ = ["clone"]  # a fixture


def write_clicks(path: Path) -> None:
    """What the page shows the first lines of."""
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


def test_four_commands_lead_to_a_recommendation(clone: Path, python: str) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    write_clicks(clone / "clicks.csv")
    shown = re.search(r"^visitor;sku.*?(?=^```)", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert (clone / "clicks.csv").read_text(encoding="utf-8-sig").startswith(shown[0])
    said = []
    for language, text in BLOCK.findall(page):
        result = run(language, text, clone, python)
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        said.append(result.stdout)
    assert "400 users, 120 items, 6,798 events" in said[0]
    assert "skipped 5 bad lines" in said[0]
    for line in ("time: created_at (dates; from 2026-03-01 to 2026-03-29)", "ignored: page"):
        assert line in said[0]
        assert line in page
    assert re.match(r"\[\('B00\d{7}', [\d.-]+\), ", said[-1])
