"""The table of recipe keys in the documentation is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from freescale import registry

SCRIPT = Path(__file__).parents[1] / "docs" / "make_keys.py"


def test_keys_page_is_current(monkeypatch) -> None:
    # Other tests of this process may have registered kinds of their own.
    shipped = {key: kind for key, kind in registry._kinds.items() if kind.ships}
    monkeypatch.setattr(registry, "_kinds", shipped)
    spec = importlib.util.spec_from_file_location("make_keys", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    make_keys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_keys)
    written = make_keys.OUT.read_text(encoding="utf-8")
    assert written == make_keys.page(), "run `python docs/make_keys.py`"
