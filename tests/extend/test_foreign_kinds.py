"""An encoder and a head from outside the package are trained, judged, exported and loaded like those that ship."""

from __future__ import annotations

import json
import math
import random
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale import registry
from freescale.comm.world.ranks import Ranks
from freescale.data.batches.examples import Examples
from freescale.embedding import SGD, DirectMap
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import CheckpointError, ConfigError
from freescale.exports.export import write_export
from freescale.exports.opened_export import load_export
from freescale.kernels import SequenceLayout
from freescale.model.head import check_columns, make_head
from freescale.model.quality.metrics import FULL_RANKING, NEVER
from freescale.model.recommender import Recommender, make_encoder
from freescale.train.item_vectors import IdItems
from freescale.train.quality.evaluate import Evaluator
from tests.list_source import ListSource
from tests.ranks import run_on_ranks

PLUGIN = "tests.extend.foreign_kinds"
DIM, MAX_LENGTH = 4, 6
CPU = torch.device("cpu")
SHAPE = {"kind": "fading", "dim": DIM, "layers": 1, "max_length": MAX_LENGTH, "options": {"keep": 0.25}}
SHAPE |= {"position_bias": False, "time_bias": False}
BILINEAR = {"width": 3, "margins": [0.5, 1.0]}


@pytest.fixture(autouse=True)
def _plugin():
    registry.load_plugin(PLUGIN)


def make_source(num_users=17):
    rng = random.Random(4)
    return ListSource([[rng.randint(1, 40) for _ in range(rng.randint(1, 12))] for _ in range(num_users)])


def make_evaluator(head, *, ranks=None):
    ranks = ranks or Ranks(0, 1, CPU)
    torch.manual_seed(3)
    options = BILINEAR if head == "bilinear" else None
    model = Recommender(encoder=make_encoder(**SHAPE), head=make_head(head, dim=DIM, options=options))
    table = TableSpec(name="item", num_rows=50, dim=DIM, optimizer=SGD(), dtype=torch.float64, init_std=1.0)
    embedding = ShardedEmbedding([table], group=ranks.group, replicate_below_mb=0.0)
    items = IdItems(embedding=embedding, id_map=DirectMap(50), device=CPU)
    return Evaluator(model=model.double(), items=items, ranks=ranks, batch=3, item_chunk=7)


def test_a_kind_has_the_options_it_was_asked_for_with():
    assert make_encoder(**SHAPE).keep == 0.25
    assert make_encoder(**{**SHAPE, "options": None}).keep == 0.5
    assert make_head("bilinear", dim=DIM, options=BILINEAR).options.margins == (0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"keeps": 1}, "did you mean 'keep'"), ([0.5], "has other options"), ({"a": 1}, "has no option 'a'")],
)
def test_options_a_kind_does_not_have_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        make_encoder(**{**SHAPE, "options": options})


def test_an_option_without_a_default_is_asked_for():
    with pytest.raises(ConfigError, match="needs its option 'width'"):
        make_head("bilinear", dim=DIM)


def test_segments_are_refused_where_an_encoder_knows_no_views():
    with pytest.raises(ConfigError, match="cannot compress histories"):
        make_encoder(**SHAPE, segments={"recent": 2, "length": 2, "summaries": 1})


def test_a_column_the_data_lacks_is_named():
    head = make_head("next_action", dim=DIM)
    check_columns(head, ("item", "action"), kind="next_action", data="lists")
    with pytest.raises(ConfigError, match=r"head\.kind=next_action needs the column 'action'"):
        check_columns(head, ("item", "time"), kind="next_action", data="lists")


def test_the_loss_of_a_foreign_model_trains_encoder_and_head():
    source = make_source()
    evaluator = make_evaluator("next_action")
    batch = Examples(source=source, split="train", max_length=MAX_LENGTH).batch(range(8))
    rows = torch.randn(50, DIM, dtype=torch.float64, requires_grad=True)
    indexed = batch.with_tokens(item_index=batch.tokens["item"], target_index=batch.tokens["target"])
    evaluator.model(rows, indexed).backward()
    assert all(param.grad.abs().sum() > 0 for param in evaluator.model.parameters())
    assert rows.grad.abs().sum() > 0


def table_of(evaluator):
    """The vector of every item, by its id."""
    return evaluator.items.embedding.tables["item"].weight[evaluator.items.id_map.rows(torch.arange(50))]


def last_state(evaluator, batch):
    table = table_of(evaluator)
    indexed = batch.with_tokens(item_index=batch.tokens["item"])
    return evaluator.model.states(table, indexed, SequenceLayout(batch.offsets))[-1]


def test_full_ranking_and_a_metric_of_its_own_user_by_user():
    source = make_source()
    evaluator = make_evaluator("bilinear")
    examples = Examples(source=source, split="test", max_length=MAX_LENGTH)
    head, table = evaluator.model.head, table_of(evaluator)
    places = []
    with torch.no_grad():
        for row, history in enumerate(source.histories):
            if len(history) < 2:
                continue
            batch = examples.batch([row])
            target = int(batch.tokens["target"][-1])
            scores = head.item(table) @ head.user(last_state(evaluator, batch))
            rivals = {*source.items.ids.tolist()} - {*history[:-1]}
            place = sum(scores[item] > scores[target] for item in rivals)
            places.append(place.item() if target in rivals else NEVER)
    got = evaluator.run(examples)
    assert set(got) == {*head.metric_names}
    assert got["mrr"] == pytest.approx(np.mean([1 / (1 + place) for place in places]))
    assert got["mean_log_rank"] == pytest.approx(-np.mean([math.log1p(place) for place in places]))


def test_a_metric_alone_user_by_user():
    source = make_source()
    evaluator = make_evaluator("next_action")
    examples = Examples(source=source, split="test", max_length=MAX_LENGTH)
    errors = []
    with torch.no_grad():
        for row, history in enumerate(source.histories):
            if len(history) > 1:
                item = table_of(evaluator)[history[-1]]
                state = last_state(evaluator, examples.batch([row]))
                answer = evaluator.model.head.answer(torch.cat([state, item])).item()
                errors.append((answer - history[-1] / 2) ** 2)
    got = evaluator.run(examples)
    assert got == {"minus_rmse": pytest.approx(-math.sqrt(np.mean(errors)))}


def run_both(rank: int = 0, num_ranks: int = 1):
    registry.load_plugin(PLUGIN)
    ranks = Ranks(0, 1, CPU)
    if num_ranks > 1:
        control = dist.new_group(backend="gloo")
        ranks = Ranks(rank, num_ranks, CPU, group=dist.group.WORLD, control=control)
    examples = Examples(source=make_source(), split="test", max_length=MAX_LENGTH)
    return [make_evaluator(head, ranks=ranks).run(examples) for head in ("bilinear", "next_action")]


def test_every_rank_gets_the_metrics_of_one():
    alone = run_both()
    for results in run_on_ranks(run_both, 2, 2):
        for got, wanted in zip(results, alone, strict=True):
            assert got == pytest.approx(wanted, abs=1e-12)


def test_a_head_that_nothing_can_judge_is_refused():
    evaluator = make_evaluator("next_action")
    evaluator.model.head.metrics = None
    with pytest.raises(ConfigError, match="cannot be judged"):
        evaluator.run(Examples(source=make_source(), split="test", max_length=MAX_LENGTH))


def test_a_metric_called_like_one_of_full_ranking_is_refused():
    evaluator = make_evaluator("bilinear")
    metrics = evaluator.model.head.metrics()
    metrics.values = lambda: {"mrr": 1.0}
    evaluator.model.head.metrics = lambda: metrics
    with pytest.raises(ConfigError, match="called like one of full ranking"):
        evaluator.run(Examples(source=make_source(), split="test", max_length=MAX_LENGTH))


def export(folder, head):
    evaluator = make_evaluator(head)
    catalog = make_source().items.ids
    return evaluator, write_export(
        folder, model=evaluator.model, items=evaluator.items, catalog=catalog, encoder=SHAPE, facts={}
    )


def forget(monkeypatch):
    """As in a process that has never imported the plugin."""
    for key in [key for key, kind in registry._kinds.items() if kind.make.__module__ == PLUGIN]:
        monkeypatch.delitem(registry._kinds, key)
    monkeypatch.delitem(sys.modules, PLUGIN)


def test_a_foreign_model_is_exported_and_loaded_back_by_its_plugin(tmp_path, monkeypatch):
    evaluator, folder = export(tmp_path / "out", "bilinear")
    head, table = evaluator.model.head, table_of(evaluator)
    history = make_source().histories[3]
    vectors = table[torch.tensor(history[-MAX_LENGTH:])]
    with torch.no_grad():
        state = sum(0.25**age * vector for age, vector in enumerate(vectors.flip(0)))
        scores = head.item(table) @ head.user(evaluator.model.encoder.mix(state))
    wanted = {item: scores[item].item() for item in make_source().items.ids.tolist()}
    forget(monkeypatch)
    with pytest.raises(CheckpointError, match=r"there is no head 'bilinear'(.|\n)*plugins=\[MODULE\]"):
        load_export(folder)
    with pytest.raises(ConfigError, match="no such module"):
        load_export(folder, plugins=["tests.extend.nothing"])
    served = load_export(folder, plugins=[PLUGIN])
    got = dict(served.recommend(history, k=100, filter_seen=False))
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_the_manifest_keeps_names_and_options(tmp_path):
    _, folder = export(tmp_path / "out", "bilinear")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["head"] == {"name": "bilinear", "options": BILINEAR}
    assert manifest["encoder"]["options"] == {"keep": 0.25}


def test_a_head_that_retrieves_nothing_is_not_exported(tmp_path):
    with pytest.raises(ConfigError, match="only models that retrieve or score"):
        export(tmp_path / "out", "next_action")
    assert list(tmp_path.iterdir()) == []


def test_names_are_listed_with_those_that_ship():
    assert registry.names("encoder")[:3] == ["hstu", "llama", "sasrec"]
    assert registry.names("head")[:2] == ["ranking", "retrieval"]
    assert "fading" in registry.names("encoder")
    assert {"bilinear", "next_action"} <= {*registry.names("head")}
    assert make_head("retrieval", dim=DIM).metric_names == FULL_RANKING
