"""Batches made ready by a thread: the bits of the path in turn, at most AHEAD early, and no thread left behind."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freescale.balance.sampler import StepPlan
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.embedding import Adam, DirectMap, HashMap
from freescale.embedding.ids.eviction import LRU, TTL
from freescale.embedding.ids.sharded_id_map import ShardedIdMap
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import DataError
from freescale.kernels.id_table.layout import make_layout
from freescale.kernels.rows.api import take
from freescale.pipeline.loading.ahead import AHEAD, Ahead
from freescale.pipeline.loading.loader import PlannedBatch
from freescale.pipeline.schedule import TABLE, PlainSchedule
from freescale.recipe.embedding import EmbeddingSection
from freescale.train.loop import train
from freescale.train.quality.evaluate import Evaluator
from tests.effort import examples, slow
from tests.pipeline.test_learnt_ids import RECIPE as LEARNT
from tests.pipeline.test_learnt_ids import SHORT, trained
from tests.pipeline.test_learnt_ids import assert_same_bits as assert_same_ids
from tests.pipeline.test_schedule import RECIPE, assert_same_bits
from tests.small_run import make_run, train_small

CPU = torch.device("cpu")
NUM_IDS, DIM = 60, 6


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads_ahead() == []


def threads_ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ahead")]


# The iterator alone.


class Source:
    """Numbers; keeps how many were asked for when each was taken, and can break or wait."""

    def __init__(self, count: int, *, broken: int | None = None) -> None:
        self.count, self.broken, self.made = count, broken, 0
        self.threads: set[str] = set()

    def __call__(self) -> int | None:
        self.threads.add(threading.current_thread().name)
        if self.made == self.count:
            return None
        if self.made == self.broken:
            raise DataError("this batch cannot be read")
        self.made += 1
        return self.made - 1


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_batches_come_in_order_and_at_most_a_few_early(count: int) -> None:
    source = Source(count)
    ahead = Ahead(source, device=CPU)
    taken = []
    for number in ahead:
        taken.append(number)
        ahead.wait_until_idle()
        assert source.made == min(count, number + 1 + AHEAD), "as early as allowed, and no earlier"
    assert taken == list(range(count))
    assert list(ahead) == [], "the end stays the end"
    assert source.threads == {"ahead_0"}
    ahead.close()
    ahead.close()


def test_nothing_is_made_past_a_step_whose_state_is_to_be_saved() -> None:
    source, stops = Source(20), {14, 15, 18}
    ahead = Ahead(source, device=CPU, first_step=10, look_past=lambda step: step not in stops)
    for number in ahead:
        ahead.wait_until_idle()
        limit = next((s - 10 for s in sorted(stops) if s >= number + 10), 99)
        assert source.made == min(20, number + 1 + AHEAD, limit + 1)
    assert source.made == 20
    ahead.close()


def test_an_error_comes_out_where_its_batch_is_asked_for_and_nothing_follows_it() -> None:
    source = Source(9, broken=4)
    ahead = Ahead(source, device=CPU)
    taken: list[int] = []
    with pytest.raises(DataError, match="cannot be read") as caught:
        taken.extend(ahead)
    assert taken == [0, 1, 2, 3]
    assert "__call__" in "".join(traceback.format_tb(caught.value.__traceback__)), "where it was raised"
    ahead.wait_until_idle()
    source.broken = None
    assert list(ahead) == []
    assert source.made == 4
    ahead.close()


def test_a_loop_that_is_interrupted_ends_the_thread() -> None:
    def interrupted(step: int) -> bool:
        if step == 3:
            raise KeyboardInterrupt
        return True

    ahead = Ahead(Source(20), device=CPU, look_past=interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(ahead)
    ahead.close()


# The schedule: random batches, every kind of map, tables and state compared.


def make_map(
    kind: str, *, guard: int, slots: int = 48, num_ids: int = NUM_IDS, dim: int = DIM, device: str = "cpu"
) -> tuple[ShardedEmbedding, Any]:
    layout = make_layout(slots, num_buckets=2, max_probe=8)
    learnt = kind not in ("direct", "hash")
    spec = TableSpec(
        name=TABLE,
        num_rows=layout.num_rows if learnt else num_ids,
        row_group=layout.bucket_rows if learnt else 1,
        dim=dim,
        optimizer=Adam(),
        init_std=1.0,
    )
    embedding = ShardedEmbedding([spec], device=device)
    if kind == "direct":
        return embedding, DirectMap(num_ids)
    if kind == "hash":
        return embedding, HashMap(num_ids)
    eviction = {"none": None, "lru": LRU(), "ttl": TTL(1)}[kind]
    return embedding, ShardedIdMap(embedding, TABLE, max_probe=8, eviction=eviction, guard=guard)


def make_batch(
    step: int, lengths: list[int], ids: np.random.Generator, *, window: int = 14, num_ids: int = NUM_IDS
) -> PlannedBatch:
    """Ids of a window that moves on: some come again, others go for good."""
    total = sum(lengths)

    def draw(count: int) -> Tensor:
        return torch.from_numpy((ids.integers(0, window, count) + window // 4 * step) % num_ids)

    batch = SequenceBatch(
        offsets=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
        tokens={"item": draw(total), "target": draw(total)},
        samples={"row": torch.arange(len(lengths)), "negatives": draw(2 * len(lengths)).view(-1, 2)},
    )
    return PlannedBatch(StepPlan(step, 0, np.arange(len(lengths)), 1, total, 1.0, 1.0, "hash"), batch)


def learn(
    batches: list[PlannedBatch],
    embedding: ShardedEmbedding,
    id_map: Any,
    *,
    stops: set[int],
    ahead: bool,
    between: Callable[[PlainSchedule], None] = lambda schedule: None,
) -> list[Tensor]:
    """Everything that is learnt, and, at some steps, everything that a checkpoint would keep."""
    kept: list[Tensor] = []
    with PlainSchedule(
        iter(batches),
        embedding=embedding,
        id_map=id_map,
        device=embedding.device,
        ahead=ahead,
        look_past=lambda step: step not in stops,
    ) as schedule:
        for ready in schedule:
            assert ready.loaded is batches[ready.plan.step].batch
            between(schedule)
            tokens, samples = ready.batch.tokens, ready.batch.samples
            places = [tokens["item_index"], tokens["target_index"], samples["negative_index"].flatten()]
            vectors = take(ready.lookup.rows, torch.cat(places))  # adds gradients up in a fixed order
            weight = torch.cos(torch.arange(len(vectors), device=vectors.device))[:, None]
            loss = (weight * vectors.square() + vectors).sum()
            loss.backward()
            schedule.update(ready, lr=0.1 / (1 + ready.plan.step))
            kept += [loss.detach(), ready.lookup.unique]
            if ready.plan.step in stops or ready.plan.step == len(batches) - 1:
                schedule.flush()
                state = {**embedding.state_dict(), **id_map.state_dict()}
                kept += [values.clone() for _, values in sorted(state.items())]
    return kept


@examples(20, thorough=200)
@given(
    lengths=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["direct", "hash", "none", "lru", "ttl"]),
    guard=st.integers(AHEAD, 4),
    stops=st.sets(st.integers(0, 11), max_size=3),
)
def test_rows_losses_and_saved_state_are_those_of_the_path_in_turn(
    lengths: list[list[int]], seed: int, kind: str, guard: int, stops: set[int]
) -> None:
    draws = np.random.default_rng(seed)
    batches = [make_batch(step, each, draws) for step, each in enumerate(lengths)]
    # The thread is as far ahead as it may be before the rows of a batch change.
    in_turn, ours = (
        learn(batches, *make_map(kind, guard=guard), stops=stops, ahead=way, between=PlainSchedule.flush)
        for way in (False, True)
    )
    assert len(in_turn) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(in_turn, ours))


def test_a_batch_that_cannot_be_mapped_ends_the_loop_at_its_step() -> None:
    embedding, id_map = make_map("direct", guard=3)
    batches = [make_batch(step, [3, 2], np.random.default_rng(step)) for step in range(6)]
    batches[3].batch.tokens["item"][1] = NUM_IDS + 5
    taken: list[int] = []

    def loop() -> None:
        with PlainSchedule(
            iter(batches), embedding=embedding, id_map=id_map, device=CPU, ahead=True
        ) as schedule:
            for ready in schedule:
                taken.append(ready.plan.step)
                schedule.update(ready, lr=0.1)

    with pytest.raises(DataError, match="outside the table"):
        loop()
    assert taken == [0, 1, 2]


# Whole runs.

VARIANTS = {
    "adam": ("embedding.optimizer=adam",),
    "hash, loader process": ("embedding.id_map=hash", "embedding.rows=97", "data.workers=1"),
    "bfloat16 table, one micro-batch": ("embedding.dtype=bfloat16", "optim.accumulate=1"),
    "stops early": (
        "run.patience=1",
        "optim.lr=3.0",
        "embedding.lr=3.0",
        "run.steps=200",
        "run.eval_every=5",
    ),
}
LEARNT_VARIANTS = {
    "lru": ("embedding.eviction=lru",),
    "ttl, smallest guard": (
        *("embedding.eviction=ttl", "embedding.ttl=2", "embedding.guard=2", "pipeline.prioritized=false"),
    ),
    "lfu, admission": ("embedding.eviction=lfu", "embedding.admit_after=2"),
}


@pytest.mark.parametrize("length", [SHORT, slow(())], ids=["short", "whole"])
@pytest.mark.parametrize("variant", [slow("adam"), *list(VARIANTS)[1:]])
def test_a_run_has_the_bits_of_the_run_in_turn(variant: str, length: tuple[str, ...], tmp_path: Path) -> None:
    recipe = (*RECIPE, *length, *VARIANTS[variant])
    in_turn, ours = (
        train_small((*recipe, f"pipeline.ahead={way}"), tmp_path / way) for way in ("false", "true")
    )
    assert_same_bits(in_turn, ours)
    if variant == "stops early":
        assert len(ours["losses"]) < 200


@pytest.mark.parametrize(("length", "stops"), [(SHORT, (6, 12)), slow((), (22, 33))], ids=["short", "whole"])
@pytest.mark.parametrize("variant", [slow("lru"), *list(LEARNT_VARIANTS)[1:]])
def test_learnt_ids_get_the_rows_of_the_run_in_turn(
    variant: str, length: tuple[str, ...], stops: tuple[int, int], tmp_path: Path
) -> None:
    recipe = (*LEARNT, *LEARNT_VARIANTS[variant], *length)
    in_turn, ours = (
        trained((*recipe, f"pipeline.ahead={way}"), str(tmp_path / way)) for way in ("false", "true")
    )
    assert_same_ids(in_turn, ours)
    assert sum(event["evictions"] for event in in_turn["pictures"]) > 20
    # Checkpoints of either path are those of their step: from each of them the other goes on.
    for start, step, way in zip(("true", "false"), stops, ("false", "true")):
        resumed = trained(
            (*recipe, f"pipeline.ahead={way}"),
            str(tmp_path / f"from-{start}"),
            resume_from=tmp_path / start / "checkpoints" / f"step-{step:08d}",
        )
        assert_same_ids(in_turn, resumed, step)


def opens_ahead(recipe: tuple[str, ...], folder: Path) -> bool:
    run, _ = make_run(recipe, folder)
    with run.open_schedule(0) as schedule:
        next(iter(schedule))
        return threads_ahead() != []


def test_a_cpu_works_in_turn_unless_told_and_a_map_without_a_guard_always(tmp_path: Path) -> None:
    learnt = ("embedding.id_map=zero_collision", "pipeline.prioritized=false")
    ahead = "pipeline.ahead=true"
    assert not opens_ahead((), tmp_path)
    assert opens_ahead((ahead,), tmp_path)
    assert opens_ahead((ahead, *learnt, f"embedding.guard={AHEAD}"), tmp_path)
    assert not opens_ahead((ahead, *learnt, f"embedding.guard={AHEAD - 1}"), tmp_path)
    assert EmbeddingSection().guard >= AHEAD


def test_an_evaluation_has_the_data_set_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(("run.steps=9", "run.eval_every=3", "pipeline.ahead=true"), tmp_path)
    source = run.evaluation.valid.source
    read, evaluate = type(source).read, Evaluator.run
    evaluating, crowds = threading.Event(), []

    def watched(self: Any, rows: Any) -> Any:
        """In the thread every batch takes longer than a step, so that an evaluation would overtake it."""
        if threading.current_thread() is not threading.main_thread() and evaluating.wait(0.1):
            crowds.append(len(rows))
        return read(self, rows)

    def evaluated(self: Any, *args: Any, **options: Any) -> Any:
        evaluating.set()
        try:
            return evaluate(self, *args, **options)
        finally:
            evaluating.clear()

    monkeypatch.setattr(type(source), "read", watched)
    monkeypatch.setattr(Evaluator, "run", evaluated)
    train(run, resume_from=None)
    assert crowds == []


def test_a_loader_that_breaks_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recorder = make_run(("run.steps=20", "run.eval_every=50", "pipeline.ahead=true"), tmp_path)
    source, count = run.evaluation.valid.source, iter(range(1000))
    read = type(source).read

    def breaks(self: Any, rows: Any) -> Any:
        if next(count) == 7:
            raise OSError("the disk is gone")
        return read(self, rows)

    monkeypatch.setattr(type(source), "read", breaks)
    with pytest.raises(OSError, match="the disk is gone"):
        train(run, resume_from=None)
    assert [event["step"] for event in recorder.of("step")] == list(range(1, 8))
