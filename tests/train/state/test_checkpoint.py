"""Checkpoints: a snapshot, whole or not there, on any number of ranks, without a pickle."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from freescale.embedding import Adam, RowwiseAdagrad
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.embedding.tables.table import EmbeddingTable
from freescale.errors import CheckpointError, DamagedCheckpointError
from freescale.train.state import checkpoint, shard_reader, shards, shared_folder
from freescale.train.state.checkpoint import Checkpoints
from freescale.train.state.saved import load_tensors, read_meta
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks


def make_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    """One tensor of every kind a run has."""
    value = float(value)
    return {
        "float32": torch.full((3, 2), value),
        "float64": torch.full((5,), value, dtype=torch.float64),
        "bfloat16": torch.full((2, 2), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
        "view": torch.full((4, 6), value).T[1:3],
        "parameter": torch.nn.Parameter(torch.full((2,), value)),
        "empty": torch.zeros(0, 3),
    }


def open_alone(folder, **options) -> Checkpoints:
    return Checkpoints(folder, ranks=these_ranks(), **options)


def save_and_wait(checkpoints, step, tensors=None, meta=None, **options):
    checkpoints.save(step, make_tensors(step) if tensors is None else tensors, meta or {}, **options)
    checkpoints.wait()


def names(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def assert_holds(path, value) -> None:
    loaded = make_tensors(-1)
    load_tensors(path, loaded, ranks=these_ranks())
    for name, wanted in make_tensors(value).items():
        assert torch.equal(loaded[name], wanted), name


# Alone: round trip, snapshot, keeping.


def test_what_is_saved_is_loaded_with_its_facts(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 7, meta={"recipe": {"a": [1, 2]}, "best": {}})
    path = checkpoints.latest()
    assert path.name == "step-00000007"
    meta = read_meta(path)
    assert (meta["step"], meta["recipe"], meta["best"]) == (7, {"a": [1, 2]}, {})
    assert meta["torch"] == torch.__version__
    assert_holds(path, 7)


def test_tensors_are_filled_in_place(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1, {"a": torch.arange(6.0)})
    target = torch.zeros(6)
    pointer = target.data_ptr()
    load_tensors(checkpoints.latest(), {"a": target}, ranks=these_ranks())
    assert target.tolist() == [0, 1, 2, 3, 4, 5]
    assert target.data_ptr() == pointer


def test_a_checkpoint_holds_nothing_but_safetensors_and_json(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1, best=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            header_size = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + header_size])


@pytest.fixture
def held_writer(monkeypatch):
    """Shards are not written before the test says so."""
    go, write_shard = threading.Event(), checkpoint.write_shard

    def waits(*args):
        assert go.wait(30)
        return write_shard(*args)

    monkeypatch.setattr(checkpoint, "write_shard", waits)
    yield go
    go.set()


def test_saving_takes_a_snapshot_and_training_may_go_on(tmp_path, held_writer):
    checkpoints = open_alone(tmp_path)
    tensors = make_tensors(1)
    checkpoints.save(1, tensors, {})
    with torch.no_grad():
        for values in tensors.values():
            values.fill_(99)
    assert checkpoints.latest() is None
    held_writer.set()
    checkpoints.wait()
    assert_holds(checkpoints.latest(), 1)


def test_a_second_save_waits_for_the_first(tmp_path, held_writer):
    checkpoints = open_alone(tmp_path)
    checkpoints.save(1, make_tensors(1), {})
    threading.Timer(0.3, held_writer.set).start()
    checkpoints.save(2, make_tensors(2), {})
    assert (tmp_path / "step-00000001").exists()
    checkpoints.wait()
    assert_holds(tmp_path / "step-00000001", 1)
    assert_holds(tmp_path / "step-00000002", 2)


def test_the_latest_are_kept_and_the_best_besides(tmp_path):
    checkpoints = open_alone(tmp_path, keep=2)
    for step in range(1, 7):
        save_and_wait(checkpoints, step, meta={"metrics": {"hr@10": step}}, best=step == 2)
    assert names(tmp_path) == ["best.json", "step-00000002", "step-00000005", "step-00000006"]
    assert checkpoints.best().name == "step-00000002"
    assert checkpoints.latest().name == "step-00000006"
    assert [path.name for path in checkpoints.complete()] == names(tmp_path)[1:]
    save_and_wait(checkpoints, 7, best=True)
    assert names(tmp_path) == ["best.json", "step-00000006", "step-00000007"]
    assert checkpoints.best().name == "step-00000007"


@pytest.mark.parametrize("text", [None, "", "no json", "[]", "{}", '{"step": null}', '{"step": 3}'])
def test_without_a_usable_note_of_the_best_it_is_the_latest(tmp_path, text):
    checkpoints = open_alone(tmp_path)
    assert checkpoints.best() is None
    save_and_wait(checkpoints, 1)
    if text is not None:
        (tmp_path / "best.json").write_text(text)
    assert checkpoints.best().name == "step-00000001"


def test_half_written_checkpoints_of_a_killed_run_are_removed(tmp_path):
    save_and_wait(open_alone(tmp_path), 1)
    (tmp_path / "step-00000002.tmp").mkdir()
    (tmp_path / "step-00000002.tmp" / "shard.safetensors").write_bytes(b"half")
    checkpoints = open_alone(tmp_path)
    assert checkpoints.latest().name == "step-00000001"
    checkpoints.open()
    assert names(tmp_path) == ["step-00000001"]


def test_saving_a_step_again_leaves_it_alone_but_may_mark_it_best(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1)
    save_and_wait(checkpoints, 2)
    save_and_wait(checkpoints, 1, make_tensors(55), best=True)
    assert_holds(tmp_path / "step-00000001", 1)
    assert checkpoints.best().name == "step-00000001"


def test_saving_a_step_again_replaces_a_damaged_one(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1)
    DAMAGES["truncated"](tmp_path / "step-00000001")
    save_and_wait(checkpoints, 1)
    assert names(tmp_path) == ["step-00000001", "step-00000001.bad"]
    assert_holds(tmp_path / "step-00000001", 1)


def test_a_folder_is_only_looked_at_until_a_training_opens_it(tmp_path):
    """`evaluate` and `export` build the same object beside a training that is writing."""
    folder = tmp_path / "checkpoints"
    checkpoints = open_alone(folder)
    assert (checkpoints.latest(), checkpoints.best(), checkpoints.complete()) == (None, None, [])
    assert not folder.exists()
    (folder / "step-00000001.tmp").mkdir(parents=True)
    assert open_alone(folder).best() is None
    assert names(folder) == ["step-00000001.tmp"]


def test_names_reach_the_disk_before_they_are_relied_on(tmp_path, monkeypatch):
    """Every rename is of files that were flushed, and is flushed itself."""
    done, fsync, replace = [], os.fsync, os.replace

    def flush(descriptor):
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def rename(old, new):
        done.append(("rename", Path(old).name, Path(new).name))
        replace(old, new)

    checkpoints = open_alone(tmp_path / "checkpoints")
    checkpoints.open()
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    save_and_wait(checkpoints, 1, best=True)
    staged = "step-00000001.tmp"
    assert done == [
        ("flush", "shard-00000.safetensors"),
        ("flush", "meta.json.new"),
        ("rename", "meta.json.new", "meta.json"),
        ("flush", staged),
        ("rename", staged, "step-00000001"),
        ("flush", "checkpoints"),
        ("flush", "best.json.new"),
        ("rename", "best.json.new", "best.json"),
        ("flush", "checkpoints"),
    ]


# Tables that change while they are saved.


def make_table(num_rows: int = 5000, *, dtype: torch.dtype = torch.float32) -> EmbeddingTable:
    return EmbeddingTable(num_rows, 3, optimizer=Adam(), dtype=dtype)


def table_tensors(table: EmbeddingTable) -> dict[str, torch.Tensor]:
    return {"weight": table.weight, **table.state}


def assert_saved(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    loaded = {name: torch.full_like(values, -1) for name, values in wanted.items()}
    load_tensors(path, loaded, ranks=these_ranks())
    for name, values in wanted.items():
        assert torch.equal(loaded[name], values), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_changed_before_they_are_written_are_saved_as_they_were(tmp_path, held_writer, dtype):
    table, checkpoints = make_table(dtype=dtype), open_alone(tmp_path)
    table.apply(torch.arange(0, 5000, 3), torch.ones(1667, 3), lr=0.1, step=1)
    wanted = {name: values.clone() for name, values in table_tensors(table).items()}
    checkpoints.save(1, table_tensors(table), {}, tables=[table])
    for step, rows in enumerate(([0, 7, 4999], [7, 8], list(range(100, 4000, 7))), start=2):
        table.apply(torch.tensor(rows), torch.ones(len(rows), 3), lr=0.1, step=step)
    table.reset(torch.tensor([8, 9, 3000]), torch.tensor([1, 2, 3]))
    held_writer.set()
    checkpoints.wait()
    assert_saved(tmp_path / "step-00000001", wanted)
    assert table.before_writing is None
    assert not torch.equal(table.weight, wanted["weight"])


def test_steps_may_race_with_the_writer(tmp_path, monkeypatch):
    """Rows change while their blocks, small and cut anywhere, are read: thousands of times."""
    monkeypatch.setattr(shards, "BLOCK", 1000)
    table, checkpoints = make_table(), open_alone(tmp_path)
    for number in range(1, 4):
        wanted = {name: values.clone() for name, values in table_tensors(table).items()}
        checkpoints.save(number, table_tensors(table), {}, tables=[table])
        steps = 0
        while checkpoints.finished() is None:
            steps += 1
            rows = torch.randperm(5000)[:500]
            table.apply(rows, torch.randn(500, 3), lr=0.1, step=steps)
        assert steps > 3
        assert_saved(checkpoints.latest(), wanted)


@pytest.mark.parametrize("refused", [None, "open", "write"])
def test_large_shards_go_past_the_page_cache_where_they_may(tmp_path, monkeypatch, refused):
    """Tables larger than a block, which change meanwhile; and on a file system that wants none of it."""
    open_file, pwrite, direct = os.open, os.pwrite, []

    def opened(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            direct.append(path)
            if refused == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *args, **options)

    def written(descriptor, *args):
        if refused == "write" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, *args)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)
    table, checkpoints = make_table(700_001), open_alone(tmp_path)
    wanted = {name: values.clone() for name, values in table_tensors(table).items()}
    checkpoints.save(1, {**table_tensors(table), "other": torch.arange(7.0)}, {}, tables=[table])
    while checkpoints.finished() is None:
        rows = torch.randint(700_001, (3000,)).unique()
        table.apply(rows, torch.randn(len(rows), 3), lr=0.1, step=1)
    assert len(direct) == 1
    assert_saved(tmp_path / "step-00000001", {**wanted, "other": torch.arange(7.0)})
    with safe_open(shard_of(tmp_path / "step-00000001"), "pt") as file:
        assert torch.equal(file.get_tensor("weight"), wanted["weight"])


def test_memory_for_copies_is_used_again(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1)
    room = checkpoints._staging._room.data_ptr()
    save_and_wait(checkpoints, 2)
    assert checkpoints._staging._room.data_ptr() == room
    assert_holds(tmp_path / "step-00000001", 1)
    assert_holds(tmp_path / "step-00000002", 2)


# Damage.


def shard_of(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def replace(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


DAMAGES = {
    "one bit": lambda path: damage(shard_of(path)),
    "truncated": lambda path: shard_of(path).write_bytes(shard_of(path).read_bytes()[:-10]),
    "shard missing": lambda path: shard_of(path).unlink(),
    "facts missing": lambda path: (path / "meta.json").unlink(),
    "facts empty": lambda path: (path / "meta.json").write_text(""),
    "facts garbled": lambda path: (path / "meta.json").write_bytes(b"\xff\xfe\x00"),
    "facts are a list": lambda path: (path / "meta.json").write_text("[]"),
    "facts of another step": lambda path: replace(path / "meta.json", '"step": 2', '"step": 3'),
    "facts without files": lambda path: (path / "meta.json").write_text('{"format": 1}'),
    "files are a number": lambda path: (path / "meta.json").write_text('{"format": 1, "files": 3}'),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_offered(tmp_path, kind):
    checkpoints = open_alone(tmp_path, keep=3)
    for step in (1, 2, 3):
        save_and_wait(checkpoints, step)
    DAMAGES[kind](tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="step-00000002 is damaged") as caught:
        load_tensors(tmp_path / "step-00000002", make_tensors(), ranks=these_ranks())
    assert f"--resume {tmp_path / 'step-00000001'}" in str(caught.value)
    read_meta(tmp_path / "step-00000001")
    read_meta(tmp_path / "step-00000003")


def test_a_damaged_first_checkpoint_leaves_a_fresh_start(tmp_path):
    save_and_wait(open_alone(tmp_path), 1)
    damage(shard_of(tmp_path / "step-00000001"))
    with pytest.raises(CheckpointError, match="--resume never"):
        load_tensors(tmp_path / "step-00000001", make_tensors(), ranks=these_ranks())


@pytest.mark.parametrize("facts", [{"format": 3, "freescale": "9.9"}, {"format": None, "files": {}}])
def test_another_format_is_refused_as_such(tmp_path, facts):
    path = tmp_path / "step-00000001"
    path.mkdir()
    (path / "meta.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="another format") as caught:
        read_meta(path)
    assert f"format {facts['format']}" in str(caught.value)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1, {"a": torch.zeros(4, 2)})
    for tensors in ({"a": torch.zeros(4, 3)}, {"a": torch.zeros(5, 2)}, {"b": torch.zeros(4, 2)}):
        with pytest.raises(CheckpointError, match="does not fit this model") as caught:
            load_tensors(checkpoints.latest(), tensors, ranks=these_ranks())
        assert "config.yaml" in str(caught.value)


# A disk that is full.


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_removed_while_a_checkpoint_is_written_is_told_as_that(tmp_path, monkeypatch):
    write, folder = checkpoint.write_shard, tmp_path / "checkpoints"
    monkeypatch.setattr("freescale.train.state.shared_folder.PATIENCE_S", 0.1)

    def and_remove(path, *args, **options):
        facts = write(path, *args, **options)
        shutil.rmtree(folder)
        return facts

    monkeypatch.setattr(checkpoint, "write_shard", and_remove)
    with pytest.raises(CheckpointError, match=r"(?s)removed while it was written.*keep run\.out where it is"):
        save_and_wait(Checkpoints(folder, ranks=these_ranks()), 1)


def assert_earlier_checkpoint_is_valid(folder):
    assert names(folder) == ["step-00000001"]
    read_meta(folder / "step-00000001")
    assert_holds(folder / "step-00000001", 1)


@pytest.mark.parametrize("what", ["shards", "facts", "rename"])
def test_a_full_disk_is_told_and_earlier_checkpoints_stay_valid(tmp_path, monkeypatch, what):
    checkpoints = open_alone(tmp_path)
    save_and_wait(checkpoints, 1)
    with monkeypatch.context() as patch:
        if what == "shards":
            patch.setattr(checkpoint, "write_shard", no_space)
        elif what == "facts":
            patch.setattr(checkpoint, "write_durably", no_space)
        else:
            patch.setattr(checkpoint.os, "replace", no_space)
        with pytest.raises(CheckpointError, match="step-00000002 could not be written") as caught:
            save_and_wait(checkpoints, 2)
    assert "No space left on device" in str(caught.value)
    assert "resumes from step-00000001" in str(caught.value)
    assert_earlier_checkpoint_is_valid(tmp_path)
    save_and_wait(checkpoints, 3)
    assert_holds(tmp_path / "step-00000003", 3)


def test_a_failure_in_the_background_is_told_by_the_next_save(tmp_path, monkeypatch):
    checkpoints = open_alone(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_shard", no_space)
        checkpoints.save(1, make_tensors(), {})
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(2, make_tensors(), {})
    checkpoints.wait()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EDQUOT, "free disk space and run"),
        (errno.EROFS, "make run.out writable and run"),
        (errno.EIO, "see to the disk and run"),
    ],
)
def test_what_to_do_follows_from_what_went_wrong(tmp_path, monkeypatch, number, told):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint, "write_shard", refuse)
    with pytest.raises(CheckpointError, match=told):
        save_and_wait(open_alone(tmp_path), 1)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_folder_that_vanishes_is_told_once(tmp_path, monkeypatch, held_writer, when):
    monkeypatch.setattr(shared_folder, "PATIENCE_S", 0.2)
    checkpoints = open_alone(tmp_path / "checkpoints")
    checkpoints.open()
    if when == "during":
        checkpoints.save(1, make_tensors(), {})
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    held_writer.set()
    with pytest.raises(CheckpointError, match="step-00000001 could not be written") as caught:
        checkpoints.save(1, make_tensors(), {})
    assert "keep run.out where it is" in str(caught.value)


# Many ranks.

TABLES = [
    TableSpec(name="large", num_rows=23, dim=3, optimizer=Adam(), dtype=torch.float64),
    TableSpec(name="low", num_rows=9, dim=2, optimizer=RowwiseAdagrad(), dtype=torch.bfloat16),
    TableSpec(name="fewer rows than ranks", num_rows=3, dim=2, optimizer=RowwiseAdagrad()),
    TableSpec(name="replicated", num_rows=2, dim=1, optimizer=RowwiseAdagrad()),
]


def global_values(shape, offset: float) -> torch.Tensor:
    """What a table tensor holds in the test: small whole numbers, exact in every type."""
    size = shape[0] * shape[1]
    return (torch.arange(size, dtype=torch.float64).view(shape) % 100) + offset


def make_state(ranks, *, offset: float) -> tuple[dict[str, torch.Tensor], ShardedEmbedding]:
    """A dense tensor and four tables, filled with global values."""
    embedding = ShardedEmbedding(TABLES, group=ranks.group, replicate_below_mb=20 / 2**20)
    for name, table in embedding.tables.items():
        first, count = embedding.plans[name].block(ranks.rank)
        for values in (table.weight, *table.state.values()):
            shape = (embedding.plans[name].spec.num_rows, values.shape[1])
            values.copy_(global_values(shape, offset)[first : first + count])
    return {"dense": torch.full((3, 2), offset), **embedding.state_dict()}, embedding


def hold_writer_until_changed() -> threading.Event:
    go, write_shard = threading.Event(), checkpoint.write_shard

    def waits(*args):
        assert go.wait(30)
        return write_shard(*args)

    checkpoint.write_shard = waits
    return go


def save_on(rank: int, folder: str) -> None:
    """Save, then change every tensor in place before the writer begins."""
    ranks = these_ranks()
    checkpoints = Checkpoints(folder, ranks=ranks)
    tensors, embedding = make_state(ranks, offset=5)
    if ranks.num_ranks > 1:
        assert [plan.replicated for plan in embedding.plans.values()] == [False, False, False, True]
    go = hold_writer_until_changed()
    checkpoints.save(1, tensors, {"num_ranks": ranks.num_ranks})
    tensors["dense"].fill_(-7)
    for table in embedding.tables.values():
        for values in (table.weight, *table.state.values()):
            values.fill_(-7)
    go.set()
    checkpoints.wait()
    assert checkpoints.latest() is not None


def load_on(rank: int, folder: str) -> int:
    """Load and compare with the global values; the number of tensors compared."""
    ranks = these_ranks()
    path = Checkpoints(folder, ranks=ranks).latest()
    read_meta(path)
    tensors, embedding = make_state(ranks, offset=0)
    load_tensors(path, tensors, ranks=ranks)
    assert (tensors["dense"] == 5).all()
    compared = 1
    for name, table in embedding.tables.items():
        first, count = embedding.plans[name].block(rank)
        for part, values in {"weight": table.weight, **table.state}.items():
            shape = (embedding.plans[name].spec.num_rows, values.shape[1])
            wanted = global_values(shape, 5)[first : first + count].to(values.dtype)
            assert torch.equal(values, wanted), (name, part)
            compared += 1
    return compared


@pytest.mark.parametrize(("num_savers", "loaders"), [(2, (3, 1)), *(slow(n, (4, 2, 3, 1)) for n in (1, 4))])
def test_a_snapshot_of_any_number_of_ranks_loads_on_any_other(tmp_path, num_savers, loaders):
    run_on_ranks(save_on, num_savers, str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert len([path for path in files if path.suffix == ".safetensors"]) == num_savers
    for num_loaders in loaders:
        assert set(run_on_ranks(load_on, num_loaders, str(tmp_path))) == {10}
    assert load_on(0, str(tmp_path)) == 10


def save_in_first_format(rank: int, folder: str) -> None:
    """As torch.distributed.checkpoint wrote it, with one CRC a file."""
    ranks, path = these_ranks(), Path(folder, "step-00000001")
    tensors, _ = make_state(ranks, offset=5)
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))
    if ranks.is_first:
        files = {file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())] for file in path.iterdir()}
        (path / "meta.json").write_text(json.dumps({"format": 1, "step": 1, "files": files}))


def test_the_first_format_loads_on_any_number_of_ranks(tmp_path):
    run_on_ranks(save_in_first_format, 2, str(tmp_path))
    for num_loaders in (3, 1):
        assert set(run_on_ranks(load_on, num_loaders, str(tmp_path))) == {10}
    damage(sorted((tmp_path / "step-00000001").glob("*.safetensors"))[1])
    for message in run_on_ranks(load_damaged, 2, str(tmp_path)):
        assert "step-00000001 is damaged: shard-00002" in message


def load_damaged(rank: int, folder: str) -> str:
    with pytest.raises(DamagedCheckpointError) as caught:
        load_on(rank, folder)
    return str(caught.value)


def count_bytes_read(rank: int, folder: str) -> tuple[int, int]:
    """Bytes this rank reads to load its half of a table, and those the checkpoint has."""
    ranks, read = these_ranks(), []
    shards.BLOCK, read_at = 4096, shard_reader._read_at
    shard_reader._read_at = lambda *args: read.append(read_at(*args)) or read[-1]
    tables = [TableSpec(name="large", num_rows=40_000, dim=8, optimizer=RowwiseAdagrad())]
    embedding = ShardedEmbedding(tables, group=ranks.group, replicate_below_mb=0)
    checkpoints = Checkpoints(folder, ranks=ranks)
    save_and_wait(checkpoints, 1, embedding.state_dict())
    load_tensors(checkpoints.latest(), embedding.state_dict(), ranks=ranks)
    files = read_meta(checkpoints.latest())["files"].values()
    return sum(read), sum(facts["size"] for facts in files)


def test_every_rank_reads_its_own_rows_once(tmp_path):
    told = run_on_ranks(count_bytes_read, 2, str(tmp_path))
    size = told[0][1]
    for read, _ in told:
        assert 0.49 * size < read < 0.51 * size


def save_apart(rank: int, folder: str) -> str:
    """Rank 1 has a folder of its own, under the same name as on rank 0."""
    shared_folder.PATIENCE_S = 0.3
    own = Path(folder, str(rank))
    try:
        save_and_wait(Checkpoints(own / "checkpoints", ranks=these_ranks()), 1)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_folder_that_is_not_shared_is_refused_before_anything_is_saved(tmp_path):
    told = run_on_ranks(save_apart, 2, str(tmp_path))
    assert f"run.out is not shared: rank 1 on {socket.gethostname()} does not see what rank 0" in told[0]
    assert "a file system that all machines share" in told[0]
    assert told[0] == told[1]
    assert names(tmp_path / "0" / "checkpoints") == []


def save_apart_later(rank: int, folder: str) -> str:
    """The folder of rank 1 becomes another one after the run has begun."""
    (Path(folder) / f"{rank}" / "checkpoints" / "step-00000001.tmp").mkdir(parents=True, exist_ok=True)
    checkpoint.check_shared = lambda *args, **options: None
    return save_apart(rank, folder)


def test_a_shard_that_rank_0_does_not_see_is_never_sealed(tmp_path):
    told = run_on_ranks(save_apart_later, 2, str(tmp_path))
    assert "step-00000001 could not be written" in told[0]
    assert "rank 0 does not see the shard that rank 1" in told[0]
    assert told[0] == told[1]
    assert names(tmp_path / "0" / "checkpoints") == []


def fail_on_one_rank(rank: int, folder: str) -> str:
    checkpoints = Checkpoints(folder, ranks=these_ranks())
    save_and_wait(checkpoints, 1)
    checkpoints.wait()
    if rank == 1:
        checkpoint.write_shard = no_space
    with pytest.raises(CheckpointError) as caught:
        save_and_wait(checkpoints, 2)
    return str(caught.value)


def test_a_full_disk_on_one_rank_is_told_on_all(tmp_path):
    for message in run_on_ranks(fail_on_one_rank, 2, str(tmp_path)):
        assert "step-00000002 could not be written" in message
        assert "No space left on device" in message
    assert_earlier_checkpoint_is_valid(tmp_path)


def settle_slowly(rank: int, folder: str) -> list[str | None]:
    checkpoints = Checkpoints(folder, ranks=these_ranks())
    seal = checkpoints._seal

    def slow_seal(*args):
        time.sleep(0.5)
        seal(*args)

    checkpoints._seal = slow_seal
    seen = []
    for step in (1, 2):
        checkpoints.save(step, make_tensors(step), {}, best=True)
        checkpoints.wait()
        seen += [checkpoints.latest().name, checkpoints.best().name]
    # Nobody must begin to write what rank 0 is about to find in its place.
    checkpoints.save(3, make_tensors(3), {})
    checkpoints.save(3, make_tensors(3), {})
    checkpoints.wait()
    return [*seen, checkpoints.latest().name]


def test_all_ranks_see_the_same_checkpoints_once_settled(tmp_path):
    for seen in run_on_ranks(settle_slowly, 2, str(tmp_path)):
        assert seen == ["step-00000001"] * 2 + ["step-00000002"] * 2 + ["step-00000003"]
