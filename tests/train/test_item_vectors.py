"""Encoded items: what a model gets, what goes back, and that nothing is encoded twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.world.ranks import Ranks
from freescale.data.batches.examples import Examples
from freescale.embedding import SGD, HashMap
from freescale.embedding.sharded_compute import ShardedCompute
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import DataError
from freescale.exports.export import write_export
from freescale.exports.opened_export import load_export
from freescale.model.encoders.hstu import HSTU
from freescale.model.heads import RankingHead, RetrievalHead
from freescale.model.recommender import Recommender
from freescale.pipeline import ReadyBatch, ids_of, look_up
from freescale.train.item_vectors import EncodedItems, IdItems
from freescale.train.quality.evaluate import Evaluator
from tests.list_source import ListSource
from tests.ranks import run_on_ranks

DIM, CPU = 4, torch.device("cpu")
HISTORIES = [[3, 90, 14, 3, 25], [61, 7, 12, 3], [14, 25, 90, 7, 61, 12], [7, 3, 500, 14]]


class Squares(nn.Module):
    """Item number n -> [n, n^2, 1, -n] * weight; counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.4, DIM, dtype=torch.float64))
        self.seen: list[int] = []

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        self.seen += numbers.tolist()
        x = numbers.double()
        return torch.stack([x, x**2, torch.ones_like(x), -x], dim=1) * self.weight


class Numbers:
    """The number of an item is all that is known of it."""

    def of(self, numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
        return numbers


def make_items(
    *, add_ids=True, alone=False, chunk=100, ranks=None, num_rows=5
) -> tuple[EncodedItems, Squares]:
    ways = {}
    group = None if ranks is None else ranks.group
    if group is not None:
        ways = {"numbers": CollectiveTransport(group), "vectors": CollectiveTransport(group)}
    source = ListSource(HISTORIES)
    spec = TableSpec(
        name="item", num_rows=num_rows, dim=DIM, optimizer=SGD(), dtype=torch.float64, init_std=1.0
    )
    rows = IdItems(embedding=ShardedEmbedding([spec], group=group), id_map=HashMap(num_rows), device=CPU)
    module = Squares()
    items = EncodedItems(
        module,
        Numbers(),
        items=source.items.ids,
        work=ShardedCompute(len(source.items.ids), **ways),
        rows=rows if add_ids else None,
        device=CPU,
        alone=alone,
        chunk=chunk,
    )
    return items, module


def make_batch(rows=(0, 1, 2, 3)):
    examples = Examples(source=ListSource(HISTORIES), split="test", num_negatives=6, seed=1)
    return examples.batch(list(rows), step=3)


def make_ready(items: EncodedItems, rows=(0, 1, 2, 3)) -> ReadyBatch:
    batch, table = make_batch(rows), items._table
    embedding = table.embedding if table else ShardedEmbedding([])
    lookup, indexed = look_up(batch, embedding, table.id_map if table else HashMap(1), CPU)
    return ReadyBatch(SimpleNamespace(step=0), indexed, lookup, loaded=batch)


def placed_ids(batch) -> torch.Tensor:
    slots = [
        batch.tokens["item_index"],
        batch.tokens["target_index"],
        batch.samples["negative_index"].flatten(),
    ]
    return torch.cat(slots)


@pytest.mark.parametrize("add_ids", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("chunk", [2, 100])
def test_vectors_and_gradients_are_those_of_one_graph(add_ids, alone, chunk):
    """Against plain autograd over every occurrence: encode, add the row, weigh, sum."""
    items, module = make_items(add_ids=add_ids, alone=alone, chunk=chunk)
    ready = make_ready(items)
    got = items.encode(ready)
    occurrences = got.rows[placed_ids(got.batch)]
    weight = torch.randn(occurrences.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Two micro-batches: gradients add up in the leaf before they go back.
    for part in (slice(None, 9), slice(9, None)):
        (got.rows[placed_ids(got.batch)][part] * weight[part]).sum().backward()
    got.send_back()

    ids = torch.cat(ids_of(ready.loaded))
    numbers = torch.from_numpy(np.searchsorted(ListSource(HISTORIES).items.ids, ids.numpy()))
    truth = Squares()
    table = items._table.embedding.tables["item"].weight.clone().requires_grad_() if add_ids else None
    wanted = truth(numbers)
    if table is not None:
        wanted = wanted + table[items._table.id_map.rows(ids)]
    torch.testing.assert_close(occurrences, wanted)
    (wanted * weight).sum().backward()
    torch.testing.assert_close(module.weight.grad, truth.weight.grad)
    if table is not None:
        torch.testing.assert_close(ready.lookup.rows.grad, table.grad[ready.lookup.unique])


def test_an_item_is_encoded_once_a_step():
    items, module = make_items()
    ready = make_ready(items)
    items.encode(ready)
    ids = torch.cat(ids_of(ready.loaded)).tolist()
    assert len(set(ids)) < len(ids)
    assert len(module.seen) == len(set(ids))


def encode_share(rank: int) -> Any:
    ranks = Ranks(rank, 2, CPU, group=dist.group.WORLD)
    items, module = make_items(ranks=ranks)
    ready = make_ready(items, rows=[(0, 1), (2, 3)][rank])
    got = items.encode(ready)
    got.rows.square().sum().backward()
    got.send_back()
    return module.seen, module.weight.grad, torch.cat(ids_of(ready.loaded)).tolist()


def test_an_item_of_the_global_batch_is_encoded_once_by_one_rank():
    results = run_on_ranks(encode_share, 2)
    encoded = [number for seen, _, _ in results for number in seen]
    ids = ListSource(HISTORIES).items.ids
    everything = {item for _, _, items in results for item in items}
    assert sorted(ids[n] for n in encoded) == sorted(everything)
    assert set(results[0][2]) & set(results[1][2])
    # What the ranks' gradients add up to is what each rank encoding its own would give.
    alone = []
    for rows in ((0, 1), (2, 3)):
        items, module = make_items(alone=True)
        got = items.encode(make_ready(items, rows))
        got.rows.square().sum().backward()
        got.send_back()
        alone.append(module.weight.grad)
    torch.testing.assert_close(sum(grad for _, grad, _ in results), sum(alone))


def test_nothing_to_learn_from_gives_gradients_of_zero():
    items, module = make_items()
    ready = make_ready(items)
    items.encode(ready).send_back()
    assert (module.weight.grad == 0).all()
    assert (ready.lookup.rows.grad == 0).all()


def make_evaluator(ranks, **options) -> Evaluator:
    torch.manual_seed(2)
    items, module = make_items(ranks=ranks, **options)
    model = Recommender(encoder=HSTU(dim=DIM, layers=1, max_length=6), head=RetrievalHead(), items=module)
    return Evaluator(model=model.double(), items=items, ranks=ranks, batch=2, item_chunk=3)


def evaluate_on(rank: int, num_ranks: int, add_ids: bool) -> Any:
    group = dist.group.WORLD if num_ranks > 1 else None
    control = dist.new_group(backend="gloo") if num_ranks > 1 else None
    ranks = Ranks(rank, num_ranks, CPU, group=group, control=control)
    evaluator = make_evaluator(ranks, add_ids=add_ids)
    metrics = evaluator.run(Examples(source=ListSource(HISTORIES), split="test", max_length=6))
    return metrics, evaluator.model.items.seen


@pytest.mark.parametrize("add_ids", [False, True])
def test_evaluation_encodes_every_item_once_over_all_ranks(add_ids):
    num_items = len(ListSource(HISTORIES).items.ids)
    wanted, seen = evaluate_on(0, 1, add_ids)
    assert sorted(seen) == list(range(num_items))
    results = run_on_ranks(evaluate_on, 2, 2, add_ids)
    assert sorted(number for _, share in results for number in share) == list(range(num_items))
    for metrics, _ in results:
        assert metrics == pytest.approx(wanted, abs=1e-12)


def test_evaluation_ranks_by_the_vectors_of_training():
    ranks = Ranks(0, 1, CPU)
    evaluator = make_evaluator(ranks)
    source = ListSource(HISTORIES)
    catalog = source.items.ids
    with torch.no_grad():
        table = evaluator.items._table
        rows = table.embedding.tables["item"].weight[table.id_map.rows(torch.from_numpy(catalog))]
        vectors = Squares()(torch.arange(len(catalog))) + rows
        catalogue = evaluator.items.catalogue(catalog, chunk=4)
        parts = list(catalogue.parts())
    assert torch.cat([numbers for numbers, _ in parts]).tolist() == list(range(len(catalog)))
    torch.testing.assert_close(torch.cat([part for _, part in parts]), vectors)
    with pytest.raises(DataError, match="other items than those that are encoded"):
        evaluator.items.catalogue(catalog[:-1], chunk=4)
    batch = make_batch()
    looked_up = catalogue.look_up(batch)
    found, placed = looked_up.rows, looked_up.batch
    numbers = np.searchsorted(catalog, torch.cat(ids_of(batch)).numpy())
    torch.testing.assert_close(found[placed_ids(placed)], vectors[torch.from_numpy(numbers)])


def test_a_ranking_head_is_evaluated_with_encoded_items():
    ranks = Ranks(0, 1, CPU)
    items, module = make_items()
    model = Recommender(
        encoder=HSTU(dim=DIM, layers=1, max_length=6),
        head=RankingHead(dim=DIM, thresholds=(10.0,)),
        items=module,
    )
    evaluator = Evaluator(model=model.double(), items=items, ranks=ranks, batch=2)
    assert (
        evaluator.run(Examples(source=ListSource(HISTORIES), split="test", max_length=6))["auc"] is not None
    )


def test_an_export_serves_the_vectors_and_leaves_the_encoder_behind(tmp_path):
    ranks = Ranks(0, 1, CPU)
    evaluator = make_evaluator(ranks)
    shape = {"kind": "hstu", "dim": DIM, "layers": 1, "heads": 1, "max_length": 6}
    catalog = ListSource(HISTORIES).items.ids
    out = write_export(
        tmp_path / "out",
        model=evaluator.model,
        items=evaluator.items,
        catalog=catalog,
        encoder={**shape, "position_bias": True, "time_bias": False},
        facts={},
    )
    served = load_export(out)
    wanted = torch.cat([part for _, part in evaluator.items.catalogue(catalog, chunk=100).parts()])
    torch.testing.assert_close(served.vectors.double(), wanted, rtol=1e-6, atol=1e-6)
    assert not any("items" in name for name in served.model.state_dict())
    assert len(served.recommend([3, 90], k=3)) == 3
