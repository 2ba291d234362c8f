"""The quickstart's way from a messy file to a recommendation, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_readme import BLOCK, ROOT, clone, run

__all__ = ["clone"]  # a fixture


def test_four_commands_lead_to_a_recommendation(clone: Path, python: str) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    shown = re.search(r"^visitor;sku.*?(?=^```)", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    said = []
    for language, text in BLOCK.findall(page):
        result = run(language, text, clone, python)
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        said.append(result.stdout)
    assert (clone / "clicks.csv").read_text(encoding="utf-8-sig").startswith(shown[0])
    assert "400 users, 120 items, 6,798 events" in said[1]
    assert "skipped 5 bad lines" in said[1]
    for line in ("time: created_at (dates; from 2026-03-01 to 2026-03-29)", "ignored: page"):
        assert line in said[1]
        assert line in page
    assert re.match(r"\[\('B00\d{7}', [\d.-]+\), ", said[-1])
