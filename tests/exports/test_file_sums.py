"""Files of exports are what their manifest says, are for whom the umask says, and tell what refuses them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.errors import CheckpointError
from freescale.exports.chain_model import ChainModel
from freescale.exports.chains.chain import Publisher, load_version
from freescale.exports.chains.version import Version, read_version
from freescale.exports.opened_export import load_export
from tests.effort import examples
from tests.exports.test_chain import _rows, _version
from tests.exports.test_export import export, make_parts, rewrite_manifest
from tests.other_user import as_other_user, only_root

AGAIN = "freescale export"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("whole") / "out", make_parts())


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


@examples(30, 500)
@given(st.sampled_from(["model.safetensors", "items.parquet"]), st.floats(0, 1, exclude_max=True))
def test_eight_other_bytes_anywhere_are_refused_by_the_name_of_the_file(
    whole: Path, name: str, at: float
) -> None:
    """Before: most of them were other scores, without a word."""
    file, data = whole / name, (whole / name).read_bytes()
    begin = int(at * (len(data) - 8))
    try:
        file.write_bytes(data[:begin] + bytes(b ^ 0x55 for b in data[begin : begin + 8]) + data[begin + 8 :])
        with pytest.raises(
            CheckpointError, match=f"not a readable(.|\n)*{name} is not as it was(.|\n)*{AGAIN}"
        ):
            load_export(whole)
        with pytest.raises(ValueError, match=f"{name} is not as it was written"):
            read_version(whole)
    finally:
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "items.parquet"])
def test_a_file_of_another_training_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    parts = make_parts(seed=6)
    parts["embedding"].tables["item"].weight.add_(1)
    other = export(tmp_path / "other", parts)
    shutil.copy(other / name, folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not as it was written"):
        load_export(folder)


def test_an_export_from_before_check_sums_is_read_as_before(folder: Path) -> None:
    wanted = load_export(folder).recommend([3, 14], times=[1, 2], k=3)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest.pop("files")) == ["items.parquet", "model.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert load_export(folder).recommend([3, 14], times=[1, 2], k=3) == wanted


def test_a_base_is_an_export_that_is_checked_and_check_sums_are_no_part_of_a_version(
    folder: Path, tmp_path: Path
) -> None:
    version = read_version(folder)
    publisher = Publisher(tmp_path / "chain")
    publisher.publish(version, {"step": 0})
    base = tmp_path / "chain" / "base-00000000"
    asked: dict[str, Any] = {"history": [3, 14], "times": [1, 2], "k": 3}
    wanted = load_export(folder).recommend(**asked)
    assert load_export(base).recommend(**asked) == ChainModel(tmp_path / "chain").recommend(**asked) == wanted
    assert (
        load_version(tmp_path / "chain")[1].fingerprint
        == read_version(base).fingerprint
        == version.fingerprint
    )
    data = (base / "items.parquet").read_bytes()
    (base / "items.parquet").write_bytes(data[:40] + b"\0" * 8 + data[48:])
    for path in (base, tmp_path / "chain"):
        with pytest.raises(CheckpointError, match=r"items\.parquet is not as it was written"):
            load_export(path)


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: int) -> None:
    export(tmp_path / "out", make_parts())
    publisher = Publisher(tmp_path / "chain")
    for seed in (1, 2, 3):
        plain = _version(seed, text=True)
        rows = {"shop": _rows(seed, "ids")}
        version = Version(plain.manifest, plain.dense, plain.ids, plain.vectors, plain.words, rows)
        publisher.publish(version, {"step": seed})
        if seed == 2:
            publisher.compact()
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in found} == {".json", ".parquet", ".safetensors"}
    assert {path.name for path in found} >= {"rows-shop.safetensors", "rows.safetensors", "model.safetensors"}
    assert {oct(path.stat().st_mode & 0o777) for path in found} == {oct(0o666 & ~umask)}


@only_root
@pytest.mark.parametrize("umask", [0o022], indirect=True, ids=oct)
@pytest.mark.parametrize("summed", [True, False], ids=["with check sums", "from before"])
@pytest.mark.parametrize("name", ["model.safetensors", "items.parquet"])
def test_a_file_that_may_not_be_read_is_told_as_that(umask: int, name: str, summed: bool) -> None:
    """Before: "No such file or directory" of weights that are there."""

    def told() -> tuple[str, str]:
        try:
            load_export(folder)
        except Exception as error:
            return type(error).__name__, str(error)
        return "read", ""

    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        Path(parent).chmod(0o755)
        folder = export(Path(parent) / "out", make_parts())
        if not summed:
            rewrite_manifest(folder, files={})
        assert as_other_user(told) == ("read", "")
        (folder / name).chmod(0o600)
        kind, text = as_other_user(told)
        assert kind == "PermissionError"
        assert f"out/{name}" in text


@pytest.fixture
def room() -> Iterator[int]:
    """Files of at most so many bytes: what a full disk is to those who write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield 1024
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_weights_that_find_no_room_are_the_error_of_any_file_and_leave_nothing(
    tmp_path: Path, room: int
) -> None:
    """Before: a SafetensorError, which the command line showed with its traceback."""
    with pytest.raises(OSError, match=r"File too large: .*model\.safetensors"):
        export(tmp_path / "out", make_parts())
    assert list(tmp_path.iterdir()) == []


def test_a_chain_that_finds_no_room_stays_as_it_was_and_goes_on(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "chain")
    publisher.publish(_version(1), {"step": 1})
    before, most = sorted((tmp_path / "chain").rglob("*")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, most[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*rows\.safetensors"):
            publisher.publish(_version(2), {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert sorted((tmp_path / "chain").rglob("*")) == before
    publisher.publish(_version(2), {"step": 2})
    assert load_version(tmp_path / "chain")[1].fingerprint == _version(2).fingerprint


@pytest.mark.parametrize("file", ["items.parquet", "manifest.json"])
def test_no_room_for_other_files_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        *(("freescale.exports.export._write_items", full) if "items" in file else (Path, "write_text", full))
    )
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.tmp"):
        export(tmp_path / "out", make_parts())
    assert list(tmp_path.iterdir()) == []


def test_an_export_of_another_version_says_which_and_which_are_read(folder: Path, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "chain")
    version = read_version(folder)
    rewrite_manifest(folder, version=99, freescale="7.0")
    later = Version({**version.manifest, "version": 99}, version.dense, version.ids, version.vectors)
    publisher.publish(later, {"step": 0})
    for path in (folder, tmp_path / "chain"):
        with pytest.raises(CheckpointError, match=r"got: .*version 99(.|\n)*allowed: version 1, 2, 3 or 4"):
            load_export(path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 1}, "there is no 'normalize' where one is needed"),
        ({"version": 3}, "its manifest is of version 3 and does not hold"),
        ({"format": "other"}, "of the format 'other', not 'freescale-export'"),
        ({"layers": 1}, "its weights are not those of the model.*: Unexpected key"),
        ({"dim": 8}, "its weights are not those of the model.*: size mismatch for"),
    ],
)
def test_what_is_wrong_with_an_export_is_a_sentence(folder: Path, changes: dict[str, Any], why: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    shape = manifest["encoder"]
    shape |= {name: changes.pop(name) for name in list(changes) if name in shape}
    if changes.get("version") == 1:
        manifest.pop("head")
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(CheckpointError, match=why):
        load_export(folder)
