"""The table of recipe keys in the documentation is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "make_keys.py"


@pytest.mark.usefixtures("own_kinds")
def test_keys_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_keys", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    make_keys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_keys)
    written = make_keys.OUT.read_text(encoding="utf-8")
    assert written == make_keys.page(), "run `python docs/make_keys.py`"
