"""The way from a messy pair of files to a data set with features, run as docs/features.md has it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from freescale.data import prepare
from freescale.errors import ConfigError
from tests.test_readme import BLOCK, ROOT, clone, run

__all__ = ["clone"]  # a fixture

PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def read_files(folder: Path) -> None:
    """What the example has written is what the page shows the first lines of, and its schema."""
    for name in ("plays.csv", "songs.csv", "listeners.jsonl"):
        first, *others = (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        shown = re.search(rf"```text\n({re.escape(first)}.*?)```", PAGE, re.DOTALL)
        assert shown is not None, name
        assert "".join((first, *others)).startswith(shown[1])
    assert f"```yaml\n{(folder / 'songs.yaml').read_text(encoding='utf-8')}```" in PAGE


def run_page(page: str, folder: Path, python: str) -> list[str]:
    """What the marked blocks print, from the beginning."""
    for made in ("data", "runs", "export"):
        shutil.rmtree(folder / made, ignore_errors=True)
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    said = []
    for language, text in BLOCK.findall(page):
        result = run(language, text, folder, python)
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        said.append(result.stdout)
    return said


def test_the_page_runs_as_it_stands(clone: Path, python: str) -> None:
    _, *said = run_page(PAGE, clone, python)
    read_files(clone)
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


@pytest.mark.slow
def test_what_the_page_has_trained_is_served(clone: Path, python: str) -> None:
    *_, exported, served = run_page(PAGE.replace("<!-- slow test -->", "<!-- test -->"), clone, python)
    needs = re.search(r"^recommend\(history.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    assert needs is not None
    assert needs[0] in exported
    assert served == ""


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
