"""Files of exports and chains are read or called damaged, whatever is in them; mistakes in own models are neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale import registry
from freescale.errors import CheckpointError
from freescale.exports.chains.chain import Publisher, load_version
from freescale.exports.opened_export import load_export
from tests.effort import examples
from tests.exports.test_chain import _version
from tests.exports.test_export import export, make_parts, rewrite_manifest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("whole")
    publisher = Publisher(parent / "chain")
    for seed in (1, 2, 4):
        publisher.publish(_version(seed, text=True), {"step": seed})
    return {"export": export(parent / "export", make_parts()), "chain": parent / "chain"}


def _cut(data: bytes, at: int, width: int, value: int) -> bytes:
    return data[:at]


def _overwritten(data: bytes, at: int, width: int, value: int) -> bytes:
    return data[:at] + bytes([value]) * min(width, len(data) - at) + data[at + width :]


@pytest.mark.parametrize(("kind", "load"), [("export", load_export), ("chain", load_version)])
@examples(60, 2000)
@given(
    st.integers(0, 20),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 64),
    st.sampled_from([0, 1, 0xC0, 0xFF]) | st.integers(0, 255),
    st.sampled_from([_cut, _overwritten, _overwritten]),
)
def test_files_of_any_bytes_are_read_or_called_damaged(
    folders: dict[str, Path],
    kind: str,
    load: Callable[[Path], object],
    which: int,
    at: float,
    width: int,
    value: int,
    harm: Callable[..., bytes],
) -> None:
    files = sorted(path for path in folders[kind].rglob("*") if path.is_file())
    file = files[which % len(files)]
    whole = file.read_bytes()
    file.write_bytes(harm(whole, int(at * len(whole)), width, value))
    try:
        with suppress(CheckpointError):
            load(folders[kind])
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("key", ["seq", "parent", "fingerprint", "files", "manifest"])
@pytest.mark.parametrize("value", [None, "none"], ids=["gone", "text"])
def test_a_delta_that_does_not_say_what_it_is_is_called_damaged(
    folders: dict[str, Path], key: str, value: str | None
) -> None:
    """Before: an error of Python for what stands outside its files."""
    file = folders["chain"] / "delta-00000001" / "delta.json"
    whole = file.read_text()
    said = json.loads(whole)
    said.pop(key)
    file.write_text(json.dumps(said | ({} if value is None else {key: value})))
    try:
        with pytest.raises(CheckpointError, match="delta-00000001 is missing, damaged"):
            load_version(folders["chain"])
    finally:
        file.write_text(whole)


@pytest.mark.parametrize(
    "wrong", [{"kind": 3}, {"dim": -1}, {"dim": "wide"}, {"layers": None}, {}], ids=lambda wrong: str(wrong)
)
def test_a_manifest_that_describes_no_model_is_called_unreadable(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    folder = export(tmp_path / "out", make_parts())
    shape = {"kind": "hstu", "dim": 6, "layers": 2, "heads": 2, "max_length": 5, "options": {}}
    rewrite_manifest(folder, encoder=shape | wrong if wrong else None)
    with pytest.raises(CheckpointError, match="not a readable FreeScale export"):
        load_export(folder)


@pytest.mark.parametrize(
    "mistake",
    [KeyError("hidden"), TypeError("too many"), ValueError("odd"), AttributeError("typo")],
    ids=repr,
)
def test_a_mistake_in_somebodys_own_encoder_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Exception
) -> None:
    def broken(*shape: Any) -> Any:
        raise mistake

    folder = export(tmp_path / "out", make_parts())
    monkeypatch.setattr(registry, "_kinds", dict(registry._kinds))
    registry.register("encoder", "of my own")(broken)
    shape = {"kind": "of my own", "dim": 6, "layers": 2, "heads": 2, "max_length": 5}
    rewrite_manifest(folder, encoder=shape)
    with pytest.raises(type(mistake)) as caught:
        load_export(folder)
    assert caught.value is mistake
