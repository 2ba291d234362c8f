"""The way from a messy pair of files to a data set with features, run as docs/features.md has it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from freescale.data import prepare
from freescale.errors import ConfigError
from tests.test_readme import BLOCK, ROOT, clone, run

__all__ = ["clone"]  # a fixture

PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def write_files(folder: Path) -> None:
    """What the page shows some lines of."""
    rng = random.Random(2)
    rows = []
    for user in range(60):
        for n in range(20):
            actions = "|".join(name for name in ("play", "like", "skip") if rng.random() < 0.4)
            seconds = "" if rng.random() < 0.1 else str(rng.randrange(3, 300))
            rows.append(
                f"u{user};s{rng.randrange(40)};2026-03-01T{n:02d}:{rng.randrange(60):02d}:00;{actions};{seconds}"
            )
    (folder / "plays.csv").write_text("hoerer;song;zeit;was;sekunden\n" + "\n".join(rows) + "\n")
    songs = [
        f"s{n},{rng.choice(['Nina', 'Otto', ''])},{rng.choice(['jazz|soul', '', 'rock'])},{rng.choice(['1.29', 'N/A'])}"
        for n in range(40)
    ]
    (folder / "songs.csv").write_text("id,artist,genres,price\n" + "\n".join(songs) + "\n")
    users = [
        {"user": f"u{n}", "country": rng.choice(["de", "fr", "NA"]), "age": rng.choice([31, None])}
        for n in range(60)
    ]
    (folder / "listeners.jsonl").write_text("".join(json.dumps(user) + "\n" for user in users))
    for name in ("plays.csv", "songs.csv", "listeners.jsonl"):
        text = (folder / name).read_text()
        assert f"```text\n{text[: text.index(chr(10)) + 1]}" in PAGE
    schema = re.search(r"```yaml\n(features:\n  user:.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert schema is not None
    (folder / "songs.yaml").write_text(schema[1])


def test_the_page_runs_as_it_stands(clone: Path, python: str) -> None:
    write_files(clone)
    said = []
    for language, text in BLOCK.findall(PAGE):
        result = run(language, text, clone, python)
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        said.append(result.stdout)
    shown = re.search(r"^data/plays: .*?(?=^  \.\.\.)", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert said[0].startswith(shown[0])
    told = re.search(r"^            features .*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    assert told is not None
    assert told[0] in said[1]
    assert "Training finished" in said[1]
    assert "torch.Size([" in said[2]
    assert "'target_taste'" in said[2]
    assert "target_watched" not in said[2]


def test_the_mistakes_of_the_page_are_those(tmp_path: Path) -> None:
    schema = {
        "user": {"of": "user", "is": "id"},
        "artist": {"of": "itm", "is": "id"},
        "price": {"of": "item", "is": "number", "scal": "log"},
        "taste": {"cross": ["user", "artst"]},
    }
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path / "x.csv", tmp_path / "out", schema=schema)
    told = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert len(told) == 4
    assert all(line in PAGE for line in told)
