"""Base and deltas are the full version, bit for bit; what is damaged, missing, doubled or foreign is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding.ids.eviction import make_eviction
from freescale.embedding.ids.zero_collision import ZeroCollisionMap
from freescale.errors import CheckpointError, DataError
from freescale.exports.chains.chain import Publisher, load_version, read_current
from freescale.exports.chains.table_rows import TableRows
from freescale.exports.chains.version import Version, applied, difference, read_version, write_version
from tests.effort import examples, slow
from tests.killed import dies

DIM = 3


def _version(seed: int, *, text: bool = False, ids: list[int] | None = None) -> Version:
    """Some of twenty items; those of an even seed keep the vectors of seed 0."""
    random = np.random.default_rng(seed)
    chosen = (
        np.sort(random.choice(20, random.integers(0, 20), replace=False)) if ids is None else np.array(ids)
    )
    vectors = np.random.default_rng(0).normal(size=(20, DIM)).astype(np.float32)[chosen.astype(int)]
    moved = random.random(len(chosen)) < 0.3
    vectors[moved] = random.normal(size=(int(moved.sum()), DIM))
    if len(vectors) and seed % 3 == 0:
        vectors[0, 0] = -0.0  # equal to 0.0, and other bits
    words = pa.array([f"item {n}" for n in chosen], pa.large_string()) if text else None
    dense = {"layer.weight": torch.from_numpy(random.normal(size=(2, 2)))}
    return Version({"trained_steps": seed}, dense, chosen.astype(np.int64), vectors, words)


def _check(found: Version, wanted: Version) -> None:
    assert found.fingerprint == wanted.fingerprint
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.vectors.tobytes() == wanted.vectors.tobytes()
    assert found.manifest == wanted.manifest
    assert (found.words is None) == (wanted.words is None)
    if wanted.words is not None:
        assert found.words.to_pylist() == wanted.words.to_pylist()
    for name, value in wanted.dense.items():
        assert torch.equal(found.dense[name], value)


@examples(60, 1000)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.booleans())
def test_a_difference_makes_one_version_from_the_other(one: int, other: int, text: bool) -> None:
    old, new = _version(one, text=text), _version(other, text=text)
    delta = difference(old, new)
    _check(applied(old, delta), new)
    kept = set(old.ids.tolist()) & set(new.ids.tolist())
    assert set(delta.deleted.tolist()) == set(old.ids.tolist()) - set(new.ids.tolist())
    for item in kept - set(delta.ids.tolist()):
        mine, theirs = (each.vectors[list(each.ids).index(item)].tobytes() for each in (old, new))
        assert mine == theirs


@pytest.mark.parametrize("text", [False, True])
def test_base_and_deltas_are_the_full_version_at_every_publication(tmp_path: Path, text: bool) -> None:
    publisher = Publisher(tmp_path / "chain")
    for seed in range(12):
        version = _version(seed, text=text)
        publisher.publish(version, {"step": seed})
        _check(load_version(tmp_path / "chain")[1], version)
        folder = tmp_path / f"full-{seed}"
        folder.mkdir()
        write_version(folder, version)
        _check(read_version(folder), version)
        if seed == 6:
            before = read_current(tmp_path / "chain").fingerprint
            assert publisher.compact().fingerprint == before
            assert {path.name for path in (tmp_path / "chain").iterdir()} == {"base-00000006", "current.json"}
            publisher = Publisher(tmp_path / "chain")  # another process goes on
    current = read_current(tmp_path / "chain")
    assert (current.base, current.seq, current.facts) == (6, 11, {"step": 11})


@pytest.mark.parametrize("windows", [12, slow(200)])
@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl", "none"])
def test_ids_that_come_and_go_are_followed_window_by_window(
    tmp_path: Path, policy: str, windows: int
) -> None:
    random = np.random.default_rng(5)
    eviction = make_eviction(policy, ttl=2 if policy == "ttl" else None)
    ids = ZeroCollisionMap(48, max_probe=8, num_buckets=2, eviction=eviction, guard=1)
    table = np.zeros((48, DIM), np.float32)
    publisher = Publisher(tmp_path / "chain")
    whole = sent = gone = 0
    for window in range(windows):
        for _ in range(3):
            asked = torch.from_numpy(np.unique(random.zipf(1.4, 6) % 30 + 5 * window))
            assigned = ids.assign(asked)
            table[assigned.new_rows.numpy()] = 0
            table[assigned.rows.numpy()] += random.normal(size=(len(asked), DIM))
        known, rows = (each.numpy() for each in ids.residents())
        dense = {"weight": torch.from_numpy(random.normal(size=2))}
        version = Version({"trained_steps": window}, dense, known, table[rows])
        before = publisher.version
        publisher.publish(version, {"step": window})
        _check(load_version(tmp_path / "chain")[1], version)
        if before is not None:
            delta = difference(before, version)
            whole, sent, gone = whole + len(known), sent + len(delta.ids), gone + len(delta.deleted)
        if window % 10 == 9:
            publisher.compact()
    assert sent < 0.8 * whole
    assert (gone > 0) == (policy != "none")


def test_rounded_to_8_bits_a_chain_is_smaller_and_is_what_it_says(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    version = Version(
        {"trained_steps": 0},
        {"w": torch.zeros(2)},
        np.arange(300),
        random.normal(size=(300, 64)).astype(np.float32),
    )
    version.vectors[7] = 0
    exact, small = Publisher(tmp_path / "exact"), Publisher(tmp_path / "small", int8=True)
    exact.publish(version, {"step": 0}), small.publish(version, {"step": 0})
    for step in range(1, 4):
        vectors = version.vectors.copy()
        vectors[step : step + 100] += random.normal(size=(100, 64)).astype(np.float32)
        version = Version({"trained_steps": step}, version.dense, version.ids, vectors)
        whole, less = exact.publish(version, {"step": step}), small.publish(version, {"step": step})
        assert less.num_bytes < 0.35 * whole.num_bytes
        assert less.changed == whole.changed == 100  # rows that did not change are rounded to what they were
        if step == 2:
            small = Publisher(tmp_path / "small")  # another process goes on
    found = load_version(tmp_path / "small")[1]
    assert found.fingerprint == read_current(tmp_path / "small").fingerprint
    step_of_row = np.abs(version.vectors).max(1, keepdims=True) / 127
    assert (np.abs(found.vectors - version.vectors) <= 0.501 * step_of_row).all()
    assert (found.vectors[7] == 0).all() == (version.vectors[7] == 0).all()
    assert found.manifest["vectors"] == "int8"
    before = found.fingerprint
    assert Publisher(tmp_path / "small").compact().fingerprint == before
    with pytest.raises(CheckpointError, match="rounded to int8"):
        Publisher(tmp_path / "small", int8=False)
    with pytest.raises(CheckpointError, match="are exact"):
        Publisher(tmp_path / "exact", int8=True)


@examples(40, 500)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from(["ids", "formula"]))
def test_rows_of_tables_of_features_follow(one: int, other: int, kind: str) -> None:
    old, new = (
        Version({}, {}, np.arange(1), np.zeros((1, DIM), np.float32), tables={"shop": _rows(seed, kind)})
        for seed in (one, other)
    )
    delta = difference(old, new)
    made = applied(old, delta)
    _check(made, new)
    assert made.tables["shop"].vectors.tobytes() == new.tables["shop"].vectors.tobytes()
    wrong = Version({}, {}, np.arange(1), np.zeros((1, DIM), np.float32))
    with pytest.raises(DataError, match="other tables"):
        applied(wrong, delta)


def _rows(seed: int, kind: str) -> TableRows:
    """Rows of some ids, and three that are shared."""
    version = _version(seed)
    shared = np.random.default_rng(seed % 3).normal(size=(3, DIM)).astype(np.float32)
    if kind == "formula":
        return TableRows(None, shared)
    return TableRows(version.ids, np.concatenate([version.vectors, shared]))


def test_a_delta_holds_what_has_changed_alone(tmp_path: Path) -> None:
    one = _version(1, ids=list(range(20)))
    vectors = one.vectors.copy()
    vectors[4] += 1
    ids = np.array([n for n in range(20) if n != 9])
    two = Version(one.manifest, one.dense, ids, vectors[ids])
    delta = difference(one, two)
    assert (delta.ids.tolist(), delta.deleted.tolist()) == ([4], [9])


def _published(folder: Path, last: int, first: int = 0) -> Path:
    publisher = Publisher(folder)
    for seed in range(first, last):
        publisher.publish(_version(seed), {"step": seed})
    return folder


def _swap(chain: Path) -> None:
    one, two = chain / "delta-00000001", chain / "delta-00000002"
    one.rename(chain / "x"), two.rename(one), (chain / "x").rename(two)


def _cut(chain: Path) -> None:
    file = chain / "delta-00000002" / "rows.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _flip(chain: Path) -> None:
    file = chain / "delta-00000002" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def _foreign(chain: Path) -> None:
    other = _published(chain.with_name("other"), 6, first=3)
    shutil.rmtree(chain / "delta-00000002")
    shutil.copytree(other / "delta-00000002", chain / "delta-00000002")


def _double(chain: Path) -> None:
    shutil.rmtree(chain / "delta-00000002")
    shutil.copytree(chain / "delta-00000001", chain / "delta-00000002")


def _lose(chain: Path) -> None:
    shutil.rmtree(chain / "delta-00000002")


@pytest.mark.parametrize("harm", [_swap, _cut, _flip, _foreign, _double, _lose])
def test_deltas_that_are_not_those_of_the_chain_are_refused_by_name(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    chain = _published(tmp_path / "chain", 4)
    harm(chain)
    with pytest.raises(CheckpointError, match=r"delta-0000000\d is missing, damaged or of another chain"):
        load_version(chain)


def test_a_base_or_a_pointer_that_was_changed_is_refused(tmp_path: Path) -> None:
    chain = _published(tmp_path / "chain", 2)
    file = chain / "base-00000000" / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"trained_steps": 0', '"trained_steps": 1'))
    with pytest.raises(CheckpointError, match="base-00000000 is missing"):
        load_version(chain)
    file.write_text(text)
    (chain / "current.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"current\.json is missing"):
        load_version(chain)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter").write_text("dear")
    with pytest.raises(CheckpointError, match="not empty and not a chain"):
        Publisher(tmp_path / "other")


@pytest.mark.parametrize("file", ["current.json", "manifest.json", "delta.json"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()], ids=repr)
def test_what_is_no_damage_is_not_told_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: Exception
) -> None:
    chain, read = _published(tmp_path / "chain", 3), Path.read_text

    def read_text(path: Path, *args: str, **options: str) -> str:
        if path.name == file:
            raise error
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(type(error)) as caught:
        load_version(chain)
    assert caught.value is error


def test_a_base_that_cannot_be_served_says_why_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = _published(tmp_path / "chain", 1)
    monkeypatch.setattr("freescale.exports.chains.version.ITEM_COLUMN", "vec")
    with pytest.raises(
        DataError, match=r"crosses of features(.|\n)*next: +`freescale export RUN_DIR OUT_DIR`"
    ):
        load_version(chain)


@pytest.mark.parametrize("what", ["first", "delta", "compact"])
def test_killed_before_any_write_the_chain_is_the_one_before_or_the_one_after(
    tmp_path: Path, what: str
) -> None:
    number, died = 0, True
    while died:
        chain = tmp_path / f"chain-{number}"
        if what != "first":
            _published(chain, 3)

        def act(chain: Path = chain) -> None:
            publisher = Publisher(chain)
            if what == "compact":
                publisher.compact()
            else:
                publisher.publish(_version(7), {"step": 7})

        died = dies(act, chain, at=number)
        if (chain / "current.json").exists():
            _check(load_version(chain)[1], _version(read_current(chain).facts["step"]))
        act()
        last = 2 if what == "compact" else 7
        current, version = load_version(chain)
        _check(version, _version(last))
        assert current.facts["step"] == last
        assert not [path for path in chain.iterdir() if path.name[0] == "." or path.suffix == ".new"]
        number += 1
    assert number > 3
