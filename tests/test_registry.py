"""Kinds: registered where they are defined, found by name, refused with the nearest one."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys

import pytest

from freescale import registry
from freescale.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_kinds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    size: int = 3


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_kind_that_ships_registers_itself_under_the_name_of_its_file(family):
    shipped = registry.names(family)
    assert shipped
    for name in shipped:
        kind = registry.find(family, name)
        assert (kind.family, kind.name, kind.ships) == (family, name, True)
        assert kind.make is not None


def test_a_kind_from_outside_is_found_and_listed_after_those_that_ship():
    @registry.register("encoder", "mine", options=Options)
    class Mine:
        pass

    kind = registry.find("encoder", "mine")
    assert kind.make is Mine
    assert kind.options is Options
    assert not kind.ships
    assert registry.names("encoder")[-1] == "mine"


def test_an_unknown_name_gets_the_nearest_one_and_the_list():
    with pytest.raises(ConfigError) as caught:
        registry.find("encoder", "hstuu", key="model.kind")
    assert "model.kind: there is no encoder 'hstuu'" in str(caught.value)
    assert "did you mean 'hstu'?" in str(caught.value)
    with pytest.raises(ConfigError, match="--plugin MODULE"):
        registry.find("encoder", "zzzzzz")
    with pytest.raises(ConfigError, match="did you mean 'encoder'"):
        registry.names("encoders")


def test_a_name_is_given_once():
    registry.register("head", "once")(type("A", (), {"__module__": "first"}))
    registry.register("head", "once")(
        type("A", (), {"__module__": "first"})
    )  # the same module, imported again
    with pytest.raises(ConfigError, match="already"):
        registry.register("head", "once")(type("B", (), {"__module__": "second"}))
    with pytest.raises(ConfigError, match="ships with freescale"):
        registry.register("encoder", "hstu")(type("B", (), {"__module__": "second"}))


def test_options_are_a_dataclass():
    with pytest.raises(ConfigError, match="must be a dataclass"):
        registry.register("encoder", "mine", options=dict)


def test_a_plugin_is_a_module_that_python_can_import(tmp_path, monkeypatch):
    (tmp_path / "my_kinds.py").write_text(
        "from freescale import register\n@register('mask', 'from_a_plugin')\ndef make(options): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_plugin("my_kinds")
    assert "from_a_plugin" in registry.names("mask")
    with pytest.raises(ConfigError, match="--plugin my_kindz: there is no such module"):
        registry.load_plugin("my_kindz")


def test_a_plugin_that_misses_a_module_of_its_own_says_which(tmp_path, monkeypatch):
    (tmp_path / "broken_kinds.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"ModuleNotFoundError: .*no_such_package_at_all.*broken_kinds\.py:1"
    ):
        registry.load_plugin("broken_kinds")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nraise ValueError('no')", "ValueError: no .*failing_kinds.py:2"),
        ("def f(:", "SyntaxError.*:1"),
    ],
)
def test_a_plugin_that_fails_says_where(text, said, tmp_path, monkeypatch):
    (tmp_path / "failing_kinds.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"--plugin failing_kinds: it cannot be imported\n.*{said}"):
        registry.load_plugin("failing_kinds")


def test_a_plugin_is_named_without_its_ending():
    with pytest.raises(ConfigError, match=r"without its ending: --plugin my_kindz$"):
        registry.load_plugin("my_kindz.py")


def test_an_entry_point_is_imported_only_if_it_is_named(monkeypatch):
    loaded = []

    class Point:
        def load(self):
            loaded.append("colour")

    monkeypatch.setattr(
        registry.importlib.metadata,
        "entry_points",
        lambda group, name: [Point()] if (group, name) == ("freescale.kinds", "colour") else [],
    )
    registry.names("encoder")
    assert not loaded
    registry.load_plugin("colour")
    assert loaded == ["colour"]


def test_knowing_the_names_imports_nothing():
    code = "import sys\nfrom freescale import registry\n"
    code += "[registry.names(f) for f in registry.FAMILIES]\nprint('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"


def test_families_are_folders_of_the_package():
    for folder in registry.FAMILIES.values():
        assert importlib.import_module(folder).__path__
