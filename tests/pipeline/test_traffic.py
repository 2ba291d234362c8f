"""What a step moved: table by table, and as numbers that are added up over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding import SGD
from freescale.embedding.sharding.plan import TableSpec
from freescale.pipeline import TableTraffic, Traffic, busiest_owner
from freescale.pipeline.prioritized.pipeline import PrioritizedPipeline
from freescale.train import train
from tests.effort import examples
from tests.pipeline.two_paths import channels_of, make_embedding
from tests.ranks import run_on_ranks
from tests.small_run import make_run

COUNT = st.integers(0, 10**9)
TABLE = st.builds(TableTraffic, COUNT, COUNT, COUNT, COUNT, COUNT)
NAMES = ("item", "artist", "country")


@examples(30, 300)
@given(ranks=st.lists(st.dictionaries(st.sampled_from(NAMES), TABLE), min_size=1, max_size=3))
def test_numbers_of_ranks_add_up_to_those_of_the_step(ranks: list[dict[str, TableTraffic]]) -> None:
    moved = [Traffic(1.5, 0.5, dict(tables)) for tables in ranks]
    sums = [sum(values) for values in zip(*(each.values(NAMES) for each in moved))]
    step = Traffic.from_values(sums, NAMES)
    assert (step.exposed_ms, step.split_ms) == (1.5 * len(ranks), 0.5 * len(ranks))
    for name in NAMES:
        wanted = sum(each[name].exposed_bytes for each in ranks if name in each)
        assert step.tables[name].exposed_bytes == wanted
    assert (step.exposed_bytes, step.parked_rows) == (step.total.exposed_bytes, step.total.parked_rows)
    assert step.total.unique_rows == sum(table.unique_rows for each in ranks for table in each.values())


def test_a_rank_that_moved_nothing_has_as_many_numbers() -> None:
    assert Traffic().values(NAMES) == [0.0] * 17
    assert Traffic().total == TableTraffic()


def _train(rank: int, folder: str, prioritized: str) -> list[dict[str, Any]]:
    keys = ("synthetic.features=true", "run.steps=4", "run.eval_every=0", "data.global_batch=8")
    run, recorder = make_run((*keys, "tables.hour.replicate_below_mb=1", prioritized), folder)
    train(run, resume_from=None)
    return recorder.of("step")


def test_the_log_says_what_every_table_moved(tmp_path: Path) -> None:
    for way in ("true", "false"):
        steps = run_on_ranks(_train, 2, str(tmp_path / way), f"pipeline.prioritized={way}")[0]
        assert len(steps) == 4
        for event in steps:
            tables = event["tables"]
            # Hours are held by both ranks: nothing of them travels.
            assert set(tables) == {"item", "country", "genre", "home"}
            for kind in ("exposed_bytes", "hidden_bytes"):
                assert sum(table[kind] for table in tables.values()) == event[kind]
            assert all(table["rows"] > 0 for table in tables.values())
        assert (sum(event["hidden_bytes"] for event in steps) > 0) == (way == "true")


def _serve(rank: int, prioritized: bool) -> list[float]:
    """Bytes that a step makes this rank serve: all ask rank 0 for five rows, rank 2 asks rank 1 for two."""
    spec = TableSpec(name="item", num_rows=30, dim=3, optimizer=SGD())
    asked = torch.tensor([0, 1, 1, 2, 3, 4, *([10, 11, 10] if rank == 2 else [])])
    served = []
    with PrioritizedPipeline(
        [asked] * 3,
        embedding=make_embedding([spec]),
        rows_of=lambda rows: {"item": rows},
        prioritized=lambda step: prioritized,
        channels=channels_of(sockets=True),
    ) as pipeline:
        for ready in pipeline:
            ready.vectors["item"].sum().backward()
            pipeline.update(ready, lr=0.1)
            served.append(ready.traffic.served_bytes)
    return served


@pytest.mark.parametrize("prioritized", [False, True])
def test_the_busiest_owner_is_known(prioritized: bool) -> None:
    by_rank = run_on_ranks(_serve, 3, prioritized)
    assert by_rank == [[rows * 3 * 4] * 3 for rows in (10, 2, 0)]
    assert busiest_owner([steps[0] for steps in by_rank]) == 2.5
    assert busiest_owner([0.0, 0.0]) == 1.0
