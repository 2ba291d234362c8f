"""The promise where rows are learnt: who has a row, who lost it and all values are the same on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.app.run.opened_run import evaluate_run, export_run, known_items
from freescale.embedding.ids.id_stats import COUNTS
from freescale.embedding.ids.sharded_id_map import ShardedIdMap
from freescale.exports.opened_export import load_export
from freescale.recipe import load_config
from freescale.train.loop import train
from tests.effort import slow
from tests.small_run import SMALL, make_run, train_small
from tests.test_one_curve import assert_goes_on_with_other_ranks, assert_same_curve, on_ranks

IDS = ("embedding.id_map=zero_collision", "embedding.buckets=8", "model.dtype=float64")
# 150 items in 96 slots, a few of them in a step: ids come and go all the time.
TIGHT = ("embedding.rows=128", "embedding.max_probe=8", "head.num_negatives=2")
TIGHT += ("data.global_batch=6", "run.eval_every=40")


@pytest.mark.parametrize("steps", [20, slow(40)])
@pytest.mark.parametrize(
    ("policy", "num_ranks"),
    [
        slow(("embedding.eviction=lru",), 2),  # on three ranks, then two: below
        slow(("embedding.eviction=lru", "comm.transport=host_staged"), 4),
        (("embedding.eviction=ttl", "embedding.ttl=3", "embedding.optimizer=sgd", "embedding.lr=0.05"), 2),
        (("embedding.eviction=lfu", "embedding.admit_after=2", "embedding.optimizer=rowwise_adagrad"), 2),
        slow(("embedding.admit_after=2", "embedding.admission=exact", "comm.transport=collective"), 3),
    ],
    ids=["lru on 2", "lru on 4", "ttl on 2", "lfu and admission on 2", "no eviction on 3"],
)
def test_ranks_do_not_change_the_curve(policy: tuple[str, ...], num_ranks: int, steps: int) -> None:
    recipe = (*IDS, *TIGHT, *policy, f"run.steps={steps}")
    alone = on_ranks(1, recipe)
    identity = alone["tensors"]["ids.identity"]
    assert len(np.unique(identity)) > 60
    assert_same_curve(on_ranks(num_ranks, recipe), alone)


def test_with_room_for_all_it_learns_as_well_as_one_row_an_id() -> None:
    recipe = ("run.steps=60", "run.eval_every=0", "model.dtype=float64")
    learnt = on_ranks(1, (*recipe, *IDS, "embedding.rows=600"))
    direct = on_ranks(1, recipe)
    assert np.mean(learnt["losses"][-20:]) == pytest.approx(np.mean(direct["losses"][-20:]), rel=0.05)


@pytest.mark.parametrize(("part", "ranks"), [(8, (3, 2)), slow(20, (4, 2, 3, 1))])
def test_a_checkpoint_goes_on_with_other_ranks(tmp_path: Path, part: int, ranks: tuple[int, ...]) -> None:
    recipe = (*IDS, *TIGHT, "embedding.eviction=lru", "run.keep=10", f"run.eval_every={part}")
    alone = on_ranks(1, (*recipe, f"run.steps={len(ranks) * part}"))
    assert_goes_on_with_other_ranks(recipe, tmp_path, alone, part=part, ranks=ranks)


def test_the_numbers_in_the_log_are_true() -> None:
    """Recounted from the batches themselves and from the map as it stands."""
    # One evaluation only: the run ends with the state of its last step, not with that of a better one.
    recipe = (*IDS, *TIGHT, "embedding.eviction=lru", "run.steps=40", "run.checkpoint_every=20")
    run, recorder = make_run(recipe)
    asked: list[int] = []
    evicted: list[int] = []
    ids = run.state.id_maps["item"]
    assert isinstance(ids, ShardedIdMap)
    resolve, assign = ids.rows, ids.map.assign

    def count(batch: torch.Tensor, *, step: int | None = None) -> torch.Tensor:
        if step is not None:
            asked.append(len(batch.unique()))
        return resolve(batch, step=step)

    def note(*args: Any, **options: Any) -> Any:
        done = assign(*args, **options)
        evicted.extend(done.evicted_ids.tolist())
        return done

    ids.rows, ids.map.assign = count, note  # type: ignore[method-assign]
    train(run, resume_from=None)
    steps, pictures = recorder.of("step"), recorder.of("ids")
    assert [event["id_asked"] for event in steps] == asked
    for event in steps:
        shares = ("hits", "inserts", "collisions", "not_admitted")
        assert event["id_asked"] == sum(event[f"id_{name}"] for name in shares)
    for name in COUNTS:
        assert sum(event[f"id_{name}"] for event in steps) == sum(event[name] for event in pictures)
    assert sum(event["evictions"] for event in pictures) == len(evicted) > 0
    residents, _ = ids.residents()
    assert pictures[-1]["occupancy"] == pytest.approx(len(residents) / ids.num_slots)
    assert sum(pictures[-1]["probe_histogram"].values()) == len(residents)
    assert sum(pictures[-1]["age_histogram"].values()) == len(residents)
    told = set(pictures[0]["evicted_ids"]) | set(pictures[1]["evicted_ids"])
    assert told <= set(evicted)
    assert set(evicted) - set(residents.tolist()) <= told


def test_export_holds_the_ids_that_have_rows(tmp_path: Path) -> None:
    recipe = [*IDS, "embedding.rows=128", "embedding.eviction=lru", "run.steps=30", "model.time_bias=false"]
    result = train_small(recipe, tmp_path / "run")
    config = load_config(None, [*SMALL, *recipe, f"run.out={tmp_path / 'run'}"])
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    model = load_export(export_run(tmp_path / "run", tmp_path / "out"))
    identity = result["tensors"]["ids.identity"].ravel()
    table = result["tensors"]["table.item.weight"].reshape(len(identity), -1)
    rows = {int(id_): row for row, id_ in enumerate(identity)}
    assert 60 < len(model.items) < 150
    for item, vector in zip(model.items.tolist(), model.vectors):
        np.testing.assert_allclose(vector.numpy(), table[rows[item]], rtol=1e-6)
    assert len(model.recommend(model.items[:5].tolist(), k=3)) == 3
    metrics = evaluate_run(tmp_path / "run", device="cpu")["metrics"]
    assert metrics == pytest.approx(result["summary"]["test"])


def test_known_items_of_a_formula_are_the_catalogue() -> None:
    run, _ = make_run(())
    np.testing.assert_array_equal(known_items(run), run.evaluation.test.source.items.ids)


def test_events_can_be_read_as_json(tmp_path: Path) -> None:
    run, recorder = make_run((*IDS, "run.steps=2", "run.eval_every=2"))
    train(run, resume_from=None)
    assert json.loads(json.dumps(recorder.of("ids")[0]))["asked"] > 0
