"""Pages of the documentation that are made from the code are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import freescale

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("own_kinds")
def test_keys_page_is_current() -> None:
    make_keys = script("make_keys")
    written = make_keys.OUT.read_text(encoding="utf-8")
    assert written == make_keys.page(), "run `python docs/make_keys.py`"


def test_api_pages_are_current_and_show_every_public_name() -> None:
    make_api = script("make_api")
    pages = make_api.pages()
    written = {path.name: path.read_text(encoding="utf-8") for path in make_api.FOLDER.iterdir()}
    assert written == pages, "run `python docs/make_api.py`"
    shown = {name for page in make_api.PAGES.values() for name in page.names}
    assert {f"freescale.{name}" for name in freescale.__all__} <= shown
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"api/{name}" in navigation for name in pages)


def test_the_search_of_the_site_asks_nobody_else() -> None:
    """The offline plugin would load its script from a server of others: from disk without a network no search."""
    words = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (script,) = yaml.safe_load(re.search(r"^extra:\n(?:  .*\n)+", words, re.MULTILINE)[0])["extra"][
        "polyfills"
    ]
    assert "iframe-worker" in script, "or the plugin adds its own"
    assert "https:" not in (ROOT / "docs" / script).read_text(encoding="utf-8")
