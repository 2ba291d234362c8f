"""Checkpoints as TorchRec writes them, without TorchRec: its names and forms, over torch.distributed.checkpoint."""

from __future__ import annotations

import importlib.metadata
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.bridge import (
    BridgedCollection,
    RowFolder,
    RowsById,
    fill_table,
    names_of_table,
    rows_by_id,
)
from freescale.bridge.dcp_files import read_metadata, save_tensors
from freescale.bridge.saved_tables import choose_tables, find_tables, read_rows
from freescale.bridge.written_tables import as_saved
from freescale.embedding import (
    SGD,
    DirectMap,
    HashMap,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedIdMap,
    TableSpec,
)
from freescale.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError, FreeScaleError
from freescale.kernels.id_table import make_layout
from tests.bridge.their_model import CONFIGS, DIM, ROWS, Config, first_rows
from tests.ranks import run_on_ranks

WEIGHTS = {name: f"ec.embeddings.{name}.weight" for name in ROWS}


def group():
    return dist.group.WORLD if dist.is_initialized() else None


def collection():
    return BridgedCollection(CONFIGS, optimizer=RowwiseAdagrad(), group=group())


def trained_rows():
    rows = first_rows()
    for name, parts in rows.items():
        parts["momentum1"] = torch.rand(ROWS[name])
    return rows


def write(rank, folder):
    made = collection()
    made.load_tables(trained_rows_of(folder))
    made.save_checkpoint(folder / "theirs", names=WEIGHTS)


def trained_rows_of(folder):
    return torch.load(folder / "rows.pt", weights_only=True)


def read(rank, folder):
    made = collection()
    made.load_checkpoint(folder / "theirs")
    return made.whole_tables()


def test_tables_written_by_three_ranks_are_read_by_two_and_by_one_bit_for_bit(tmp_path):
    rows = trained_rows()
    torch.save(rows, tmp_path / "rows.pt")
    run_on_ranks(write, 3, tmp_path)
    for back in (*run_on_ranks(read, 2, tmp_path), read(0, tmp_path)):
        for name, parts in rows.items():
            for part, values in parts.items():
                assert torch.equal(values, back[name][part]), (name, part)


def test_the_metadata_of_a_checkpoint_runs_nothing(tmp_path):
    class Planted:
        def __reduce__(self):
            return (print, ("run",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DamagedCheckpointError, match=r"builtins\.print has no business"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of torch"):
        read_metadata(tmp_path / "nowhere")


def test_tables_are_found_by_the_ends_of_their_names():
    names = [
        "model.ec.embeddings.item.weight",
        "model.dense.weight",
        "model.mc._managed_collision_modules.item._hash_zch_identities",
        "model.mc._managed_collision_modules.item._hash_zch_bucket",
        "optim.state.ec.embeddings.item.weight.item.momentum1",
        "ebc.embedding_bags.user.weight",
    ]
    found = find_tables(names)
    assert sorted(found) == ["item", "user"]
    assert found["item"].momentum == names[4]
    assert found["item"].identities == names[2]
    assert (found["user"].momentum, found["user"].identities) == (None, None)
    with pytest.raises(CheckpointError, match="two tables of the checkpoint are called 'item'"):
        find_tables([*names, "model.other.embeddings.item.weight"])


def test_a_table_that_is_not_there_is_refused_by_name(tmp_path):
    save_tensors(tmp_path / "one", {"model.ec.embeddings.item.weight": torch.ones(4, 2)})
    with pytest.raises(CheckpointError, match=r"no tensor 'ec.embeddings.itme.weight'(.|\n)*did you mean"):
        choose_tables(tmp_path / "one", {"item": "ec.embeddings.itme.weight"})
    with pytest.raises(CheckpointError, match="has no table 'user'"):
        BridgedCollection(CONFIGS, optimizer=SGD()).load_checkpoint(tmp_path / "one")
    with pytest.raises(CheckpointError, match="not empty"):
        save_tensors(tmp_path / "one", {})
    save_tensors(tmp_path / "none", {"dense": torch.ones(3)})
    with pytest.raises(CheckpointError, match="no table that looks like one"):
        choose_tables(tmp_path / "none", {})


def test_a_table_of_another_shape_or_without_sums_is_refused(tmp_path):
    tensors = {f"model.{WEIGHTS[name]}": torch.ones(ROWS[name], DIM) for name in ROWS}
    save_tensors(tmp_path / "no_sums", tensors)
    with pytest.raises(CheckpointError, match="no sums of row-wise Adagrad"):
        collection().load_checkpoint(tmp_path / "no_sums")
    made = collection()
    made.load_checkpoint(tmp_path / "no_sums", state=False)
    assert torch.equal(made.whole_tables()["user"]["weight"], torch.ones(ROWS["user"], DIM))
    tensors[f"model.{WEIGHTS['user']}"] = torch.ones(ROWS["user"] + 1, DIM)
    save_tensors(tmp_path / "larger", tensors)
    with pytest.raises(CheckpointError, match="another shape"):
        collection().load_checkpoint(tmp_path / "larger", state=False)


def zero_collision(num_rows=96, *, optimizer=None, **options):
    layout = make_layout(num_rows, num_buckets=4, max_probe=16)
    spec = TableSpec(
        name="item",
        num_rows=layout.num_rows,
        dim=3,
        optimizer=optimizer or RowwiseAdagrad(),
        row_group=layout.bucket_rows,
    )
    embedding = ShardedEmbedding([spec], group=group())
    return embedding, ShardedIdMap(embedding, "item", max_probe=16, **options)


def some_rows(ids, *, seen=None):
    ids = torch.tensor(sorted(ids))
    drawn = torch.Generator().manual_seed(4)
    weight = torch.randn(len(ids), 3, generator=drawn)
    return RowsById(ids=ids, weight=weight, square_sum=torch.rand(len(ids), 1, generator=drawn), seen=seen)


IDS = [-5, 0, 3, 17, 2**40, 2**62, *range(100, 130)]


def filled(rank, admit_after=1):
    embedding, id_map = zero_collision(admit_after=admit_after)
    fill_table(embedding, "item", id_map, some_rows(IDS), admit_after=admit_after)
    rows = id_map.rows(torch.tensor(sorted(IDS)))
    found = embedding.lookup("item", rows)
    state = {name: whole(value) for name, value in embedding.state_dict().items()}
    return rows, found.vectors(), state, {n: whole(v) for n, v in id_map.state_dict().items() if n != "clock"}


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


@pytest.mark.parametrize("admit_after", [1, 2])
def test_ids_have_their_own_rows_on_any_number_of_ranks(admit_after):
    wanted = some_rows(IDS)
    alone = filled(0, admit_after)
    assert torch.equal(alone[1], wanted.weight)
    sums = alone[2]["item.square_sum"].reshape(-1, 1)[alone[0]]
    assert torch.equal(sums, wanted.square_sum)
    for other in run_on_ranks(filled, 3, admit_after):
        assert torch.equal(other[0], alone[0])
        assert torch.equal(other[1], alone[1])
        for part in (2, 3):
            assert all(torch.equal(value, other[part][name]) for name, value in alone[part].items())


def test_ids_that_find_no_row_are_named():
    embedding, id_map = zero_collision(64)
    with pytest.raises(
        DataError, match=r"of 90 ids find no row(.|\n)*got: +\d+, \d+(.|\n)*raise embedding\.rows"
    ):
        fill_table(embedding, "item", id_map, some_rows(range(90)))


def test_those_seen_last_stay_longest():
    from freescale.bridge import start_rows
    from freescale.embedding import make_eviction

    embedding, id_map = zero_collision(96, eviction=make_eviction("lru"))
    seen = torch.arange(len(IDS)).flip(0)
    before, start_rows._BATCH = start_rows._BATCH, 1
    try:
        fill_table(embedding, "item", id_map, some_rows(IDS, seen=seen))
    finally:
        start_rows._BATCH = before
    ids, rows = id_map.residents()
    score = id_map.map.state_dict()["score"].flatten()[rows]
    assert torch.equal(score.argsort(), torch.arange(len(ids)).flip(0))


def formula(id_map, optimizer=None):
    spec = TableSpec(name="item", num_rows=id_map.num_rows, dim=3, optimizer=optimizer or RowwiseAdagrad())
    return ShardedEmbedding([spec])


def test_a_row_that_is_the_id_goes_in_and_out_bit_for_bit():
    id_map = DirectMap(50)
    rows = some_rows(range(50))
    embedding = formula(id_map)
    fill_table(embedding, "item", id_map, rows)
    back = rows_by_id(embedding, "item", id_map)
    assert torch.equal(back.ids, rows.ids)
    assert torch.equal(back.weight, rows.weight)
    assert torch.equal(back.square_sum, rows.square_sum)


def test_what_a_table_cannot_keep_is_refused():
    rows = some_rows(range(50))
    with pytest.raises(ConfigError, match="share rows"):
        fill_table(formula(HashMap(60)), "item", HashMap(60), rows)
    with pytest.raises(ConfigError, match="sums of row-wise Adagrad"):
        fill_table(formula(DirectMap(50), SGD()), "item", DirectMap(50), rows)
    wide = RowsById(ids=torch.arange(2), weight=torch.ones(2, 5))
    with pytest.raises(DataError, match="another width"):
        fill_table(formula(DirectMap(50)), "item", DirectMap(50), wide)
    with pytest.raises(DataError, match="outside the table"):
        fill_table(formula(DirectMap(40)), "item", DirectMap(40), rows)
    with pytest.raises(ConfigError, match="belong to several ids"):
        rows_by_id(formula(HashMap(60)), "item", HashMap(60))


@settings(max_examples=8)
@given(st.lists(st.integers(0, 39), unique=True, min_size=1, max_size=30))
def test_rows_by_number_are_what_they_were(tmp_path_factory, ids):
    rows = some_rows(ids)
    names = names_of_table("item", "ec.embeddings.item.weight")
    folder = tmp_path_factory.mktemp("saved") / "one"
    save_tensors(folder, as_saved(names, rows, num_rows=40))
    back = read_rows(folder, choose_tables(folder, {})["item"])
    assert torch.equal(back.weight[rows.ids], rows.weight)
    assert torch.equal(back.square_sum[rows.ids], rows.square_sum)
    rest = torch.ones(40, dtype=torch.bool)
    rest[rows.ids] = False
    assert not back.weight[rest].any()


def test_identities_say_whose_rows_are_whose(tmp_path):
    identities = torch.tensor([[7], [-1], [-9], [2**50], [-1]])
    weight = torch.arange(10.0).view(5, 2)
    modules = "model.mc._managed_collision_modules.item"
    save_tensors(
        tmp_path / "one",
        {
            "model.ec.embeddings.item.weight": weight,
            "optim.state.ec.embeddings.item.weight.item.momentum1": torch.arange(5.0),
            f"{modules}._hash_zch_identities": identities,
            f"{modules}._hash_zch_metadata": torch.tensor([[30], [-1], [10], [20], [-1]], dtype=torch.int32),
            f"{modules}._hash_zch_bucket": torch.tensor([[5]]),
        },
    )
    rows = read_rows(tmp_path / "one", choose_tables(tmp_path / "one", {})["item"])
    assert rows.ids.tolist() == [-9, 7, 2**50]
    assert torch.equal(rows.weight, weight[[2, 0, 3]])
    assert rows.square_sum.flatten().tolist() == [2, 0, 3]
    assert rows.seen.tolist() == [10, 30, 20]
    assert (rows.num_rows, rows.num_buckets) == (5, 5)
    bridged = BridgedCollection([Config("item", 5, 2, ["seen"])], optimizer=RowwiseAdagrad())
    with pytest.raises(CheckpointError, match=r"rows of .* have owners"):
        bridged.load_checkpoint(tmp_path / "one")


def test_a_folder_that_has_lost_a_file_is_refused(tmp_path):
    from freescale.bridge import write_row_folder

    path = write_row_folder(tmp_path / "rows", {"item": some_rows(IDS)}, origin={}, details={})
    opened = RowFolder.open(path)
    assert opened.tables["item"]["rows"] == len(IDS)
    assert torch.equal(opened.rows("item").weight, some_rows(IDS).weight)
    (path / "item.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not whole(.|\n)*import them again"):
        RowFolder.open(path)
    with pytest.raises(CheckpointError, match="no rows to start from"):
        RowFolder.open(tmp_path)


def test_dcp_itself_reads_what_is_written(tmp_path):
    rows = some_rows(range(6))
    names = names_of_table("item", "ec.embeddings.item.weight")
    save_tensors(tmp_path / "out", as_saved(names, rows, num_rows=6))
    state = {"model": {"ec.embeddings.item.weight": torch.zeros(6, 3)}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["model"]["ec.embeddings.item.weight"], rows.weight)


def test_identities_cannot_be_written_without_torchrec(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    names = names_of_table("item", "ec.embeddings.item.weight", collision="mc")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(FreeScaleError, match=r"needs TorchRec, which is not installed(.|\n)*1\.9\.2"):
        as_saved(names, some_rows(range(6)), num_rows=16)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.0")
    with pytest.raises(FreeScaleError, match=r"not been tried with this TorchRec(.|\n)*1\.0\.0"):
        as_saved(names, some_rows(range(6)), num_rows=16)


def test_rows_that_are_no_numbers_are_refused_without_owners():
    names = names_of_table("item", "ec.embeddings.item.weight")
    with pytest.raises(DataError, match=r"no numbers of rows(.|\n)*-5(.|\n)*--collision"):
        as_saved(names, some_rows(IDS), num_rows=16)


def rows_of_a_part(rank):
    embedding = ShardedEmbedding(
        [TableSpec(name="item", num_rows=40, dim=3, optimizer=RowwiseAdagrad())],
        group=group(),
        replicate_below_mb=0,
    )
    with pytest.raises(ConfigError, match="spread over several processes") as caught:
        rows_by_id(embedding, "item", DirectMap(40))
    return str(caught.value)


def test_a_part_of_a_table_is_not_taken_for_the_whole():
    assert "20 of 40 rows here" in run_on_ranks(rows_of_a_part, 2)[0]
