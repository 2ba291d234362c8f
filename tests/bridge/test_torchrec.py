"""The same model in TorchRec's DistributedModelParallel and through the bridge, on two gloo ranks: the same tables."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from freescale.app.run.opened_run import open_run
from freescale.app.run.torchrec_tables import export_torchrec, import_torchrec
from freescale.app.run.train_run import train_run
from freescale.bridge import (
    BridgedCollection,
    KeyedFeatures,
    KJTBalancer,
    RowFolder,
    RowsById,
    as_saved,
    choose_tables,
    names_of_table,
    read_rows,
    require_torchrec,
    save_tensors,
)
from freescale.bridge.written_tables import place_ids
from freescale.embedding import RowwiseAdagrad
from freescale.errors import DataError
from freescale.recipe import load_config
from tests.bridge.in_torchrec import EPS, LR, fill, keyed, local_tables, sharded
from tests.bridge.test_keyed_balance import PerSample, batch_of
from tests.bridge.their_model import CONFIGS, KEYS, ROWS, STEPS, TheirModel, features, first_rows
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, Recorder

pytestmark = pytest.mark.extras


def in_torchrec(rank):
    model = sharded(TheirModel)
    fill(model, first_rows())
    dense = [param for name, param in model.named_parameters() if "mix" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    seconds = []
    for step in range(STEPS):
        batch = features(step, rank, keyed)
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    rows, sums = local_tables(model)
    return rows, sums, [param.detach().clone() for param in dense], sorted(seconds)[STEPS // 2]


def through_the_bridge(rank):
    from torchrec.sparse.jagged_tensor import JaggedTensor

    require_torchrec()
    collection = BridgedCollection(
        CONFIGS,
        optimizer=RowwiseAdagrad(eps=EPS),
        group=dist.group.WORLD,
        jagged=lambda values, lengths: JaggedTensor(values=values, lengths=lengths),
    )
    collection.load_tables(first_rows())
    model = TheirModel(collection)
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.1)
    seconds = []

    batches = (features(step, rank, keyed) for step in range(STEPS))
    with collection.pipeline(batches, kjt_of=lambda batch: batch) as pipe:
        start = time.perf_counter()
        for ready in pipe:
            optimizer.zero_grad()
            model(ready.batch).backward()
            for param in model.mix.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 2
            optimizer.step()
            pipe.update(ready, lr=LR)
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    tables = {name: collection.embedding.tables[name] for name in ROWS}
    rows = {name: table.weight.clone() for name, table in tables.items()}
    sums = {name: table.state["square_sum"][:, 0].clone() for name, table in tables.items()}
    return rows, sums, [param.detach() for param in model.mix.parameters()], sorted(seconds)[STEPS // 2]


def test_tables_and_dense_weights_are_those_of_torchrec():
    pytest.importorskip("torchrec")
    theirs, ours = run_on_ranks(in_torchrec, 2, timeout=200), run_on_ranks(through_the_bridge, 2, timeout=200)
    for rank in range(2):
        for part in (0, 1):
            for name, values in theirs[rank][part].items():
                torch.testing.assert_close(ours[rank][part][name], values, rtol=0, atol=1e-6)
        for mine, other in zip(ours[rank][2], theirs[rank][2], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    print(f"median step: TorchRec {1000 * theirs[0][3]:.2f} ms, bridge {1000 * ours[0][3]:.2f} ms")  # noqa: T201


def saved_by_torchrec(rank, folder):
    """Some steps there, then a checkpoint as its users write one."""
    import torch.distributed.checkpoint as dcp

    model = sharded(TheirModel)
    fill(model, first_rows())
    for step in range(3):
        model(features(step, rank, keyed)).backward()
    dcp.save({"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    return local_tables(model)


def loaded_by_torchrec(rank, folder):
    """The same back, and one step more."""
    import torch.distributed.checkpoint as dcp

    model = sharded(TheirModel)
    tables = {name: value for name, value in model.state_dict().items() if "embeddings" in name}
    state = {"model": tables, "optim": {"state": model.fused_optimizer.state_dict()["state"]}}
    dcp.load(state, checkpoint_id=folder)
    before = local_tables(model)
    model(features(7, rank, keyed)).backward()
    return before, local_tables(model)


def passed_on(rank, theirs, ours):
    """Loaded by our tables on other ranks, saved again, and one step more on the same samples."""
    tables = BridgedCollection(
        CONFIGS, optimizer=RowwiseAdagrad(eps=EPS), group=dist.group.WORLD, divide=False
    )
    tables.load_checkpoint(theirs)
    tables.save_checkpoint(ours, names={name: f"tables.embeddings.{name}.weight" for name in ROWS})
    before = tables.whole_tables()
    model = TheirModel(tables)
    if rank < 2:
        (model(features(7, rank, KeyedFeatures)) / 2).backward()
    else:
        model(
            KeyedFeatures(KEYS, torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
        ).backward()
    tables.step(lr=LR)
    return before, tables.whole_tables()


def joined(ranks, part, name):
    return torch.cat([rank[part][name] for rank in ranks])


def test_tables_of_torchrec_on_two_ranks_go_to_ours_on_three_and_back_bit_for_bit(tmp_path):
    pytest.importorskip("torchrec")
    saved = run_on_ranks(saved_by_torchrec, 2, tmp_path / "theirs", timeout=200)
    (ours, after), *_ = run_on_ranks(passed_on, 3, tmp_path / "theirs", tmp_path / "ours", timeout=200)
    back = run_on_ranks(loaded_by_torchrec, 2, tmp_path / "ours", timeout=200)
    for name in ROWS:
        for part, word in enumerate(("weight", "momentum1")):
            wanted = joined(saved, part, name)
            assert torch.equal(ours[name][word], wanted), (name, word)
            assert torch.equal(joined([rank[0] for rank in back], part, name), wanted), (name, word)
            theirs = joined([rank[1] for rank in back], part, name)
            assert not torch.equal(theirs, wanted)
            torch.testing.assert_close(after[name][word], theirs, rtol=0, atol=1e-6)


def test_the_import_reads_what_torchrec_has_saved(tmp_path):
    pytest.importorskip("torchrec")
    saved = run_on_ranks(saved_by_torchrec, 2, tmp_path / "theirs", timeout=200)
    lines = import_torchrec(tmp_path / "theirs", tmp_path / "rows")
    assert [line.partition(":")[0] for line in lines] == ["item", "user"]
    rows = RowFolder.open(tmp_path / "rows")
    for name in ROWS:
        assert torch.equal(rows.rows(name).weight, joined(saved, 0, name))
        assert torch.equal(rows.rows(name).square_sum[:, 0], joined(saved, 1, name))


@pytest.mark.parametrize("num_buckets", [1, 4])
def test_torchrec_finds_our_ids_where_we_put_them(num_buckets):
    pytest.importorskip("torchrec")
    drawn = torch.Generator().manual_seed(num_buckets)
    ids = torch.randint(-(2**62), 2**62, (150,), generator=drawn).unique()
    at = place_ids(ids, num_rows=256, num_buckets=num_buckets)  # raises where TorchRec looks elsewhere
    assert len(at.unique()) == len(ids)
    with pytest.raises(DataError, match=r"ids find no row in a table of 128"):
        place_ids(ids, num_rows=128, num_buckets=num_buckets)
    with pytest.raises(DataError, match="id -1 cannot be kept"):
        place_ids(torch.tensor([-1]), num_rows=128)


def test_zero_collision_tables_go_out_and_in_by_id(tmp_path):
    pytest.importorskip("torchrec")
    ids = torch.tensor(sorted({*range(-20, -1), 5, 2**40, 2**61}))
    rows = RowsById(
        ids=ids,
        weight=torch.randn(len(ids), 4),
        square_sum=torch.rand(len(ids), 1),
        seen=torch.arange(len(ids)),
    )
    names = names_of_table("item", "ec._embedding_module.embeddings.item.weight", collision="ec.mc")
    save_tensors(tmp_path / "out", as_saved(names, rows, num_rows=64, num_buckets=2))
    back = read_rows(tmp_path / "out", choose_tables(tmp_path / "out", {})["item"])
    for part in ("ids", "weight", "square_sum", "seen"):
        assert torch.equal(getattr(back, part), getattr(rows, part)), part
    assert (back.num_rows, back.num_buckets) == (64, 2)


def test_a_zero_collision_run_is_exported_with_its_ids(tmp_path):
    pytest.importorskip("torchrec")
    recipe = [
        *SMALL,
        "embedding.id_map=zero_collision",
        "embedding.optimizer=rowwise_adagrad",
        "run.steps=3",
        "run.eval_every=0",
        f"run.out={tmp_path / 'run'}",
    ]
    train_run(load_config(None, recipe), resume="never", open_terminal=lambda total: Recorder())
    weight = "ec._embedding_module.embeddings.item.weight"
    export_torchrec(
        tmp_path / "run", tmp_path / "out", names={"item": weight}, collision={"item": "ec.mc"}, buckets=4
    )
    back = read_rows(tmp_path / "out", choose_tables(tmp_path / "out", {})["item"])
    _, run, _ = open_run(tmp_path / "run", device="cpu")
    table = run.state.embedding.tables["item"]
    ids, rows = run.state.id_maps["item"].residents()
    assert len(ids) > 50
    assert torch.equal(back.ids, ids)
    assert torch.equal(back.weight, table.weight[rows])
    assert torch.equal(back.square_sum, table.state["square_sum"][rows])


def trained_rows():
    """Sums as in tables that have learnt: from 0 the first update makes much of how a sum was rounded."""
    return {
        name: {"weight": parts["weight"], "momentum1": torch.full_like(parts["momentum1"], 0.01)}
        for name, parts in first_rows().items()
    }


def balanced_in_torchrec(rank):
    """TorchRec's own tables, on samples that have moved between the ranks."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = sharded(PerSample)
    fill(model, trained_rows())
    dense = [param for name, param in model.named_parameters() if "mix" in name]
    optimizer = torch.optim.SGD(dense, lr=0.01)
    batches = (batch_of(step, list(range(4 * rank, 4 * rank + 4))) for step in range(12))
    ready_batches = KJTBalancer(
        batches,
        group=dist.new_group(backend="gloo"),
        kjt_of=lambda batch: keyed(KEYS, batch.kjt.values(), batch.kjt.lengths()),
        dense_of=lambda batch: {"who": batch.who},
        weigh=["seen", "wanted"],
    )
    moved = 0.0
    for ready in ready_batches:
        assert isinstance(ready.kjt, KeyedJaggedTensor)
        optimizer.zero_grad()
        (model(ready.kjt)[: ready.num_samples].sum() * ready.scale).backward()
        optimizer.step()
        moved += ready.moved
    return (*local_tables(model), [param.detach().clone() for param in dense], moved)


def test_a_balanced_torchrec_learns_what_one_rank_learns_from_the_same_samples():
    pytest.importorskip("torchrec")
    results = run_on_ranks(balanced_in_torchrec, 2, timeout=200)
    tables = BridgedCollection(CONFIGS, optimizer=RowwiseAdagrad(eps=EPS), group=None)
    tables.load_tables(trained_rows())
    model = PerSample(tables)
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        (model(batch_of(step, list(range(8))).kjt).sum() / 8).backward()
        optimizer.step()
        tables.step(lr=LR)
    assert results[0][3] > 0
    for name, parts in tables.whole_tables().items():
        assert (parts["weight"] - trained_rows()[name]["weight"]).abs().max() > 1e-2
        for part, word in enumerate(("weight", "momentum1")):
            torch.testing.assert_close(joined(results, part, name), parts[word], rtol=0, atol=1e-6)
    for mine, other in zip(model.mix.parameters(), results[0][2], strict=True):
        torch.testing.assert_close(mine.detach(), other, rtol=0, atol=1e-6)
