"""Training on two nodes with ids in two stages: the bits of one, said in the log; a killed rank is named by all."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.app.commands import train_run
from freescale.comm.transports.kinds.two_stage import TwoStageTransport
from freescale.errors import EXIT_PEER
from freescale.recipe import load_config
from tests.comm.world.by_hand import ByHand
from tests.small_run import SMALL

STEPS = 8


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[ByHand]:
    """Four ranks on loopback that are told to be two nodes."""
    ranks = ByHand(tmp_path, LOCAL_WORLD_SIZE="2")
    yield ranks
    ranks.close()


def train_with(ids: str, out: Path, *options: str) -> None:
    torch.set_num_threads(1)
    keys = (f"run.out={out}", f"comm.ids={ids}", "model.dtype=float64", f"run.steps={STEPS}", *options)
    train_run(load_config(None, [*SMALL, *keys]), resume="never", open_terminal=lambda total: None)


def told(out: Path, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == event]


@pytest.mark.parametrize("id_map", ["direct", "zero_collision"])
def test_every_loss_has_the_bits_of_one_stage(two_nodes: ByHand, tmp_path: Path, id_map: str) -> None:
    def work(rank: int) -> None:
        for ids in ("two_stage", "collective"):
            train_with(ids, tmp_path / ids, f"embedding.id_map={id_map}")

    for code, said in [rank.end(100) for rank in two_nodes.all(work, 4)]:
        assert code == 0, said
    one, two = (
        [line["loss"] for line in told(tmp_path / ids, "step")] for ids in ("collective", "two_stage")
    )
    assert len(two) == STEPS
    assert one == two
    notices = [str(line["text"]) for line in told(tmp_path / "two_stage", "notice")]
    assert any(
        text.startswith(
            "ids travel by two_stage (gloo between nodes, unix sockets inside, no SM used): as the"
        )
        for text in notices
    ), notices


def test_a_killed_rank_is_named_by_all(two_nodes: ByHand, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        send, calls = TwoStageTransport.exchange_unsized, itertools.count()

        def die_at_last(*given: Any, **named: Any) -> Any:
            if rank == 3 and next(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(*given, **named)

        TwoStageTransport.exchange_unsized = die_at_last  # type: ignore[method-assign]
        train_with("two_stage", tmp_path / "run")

    *others, killed = (rank.end(60) for rank in two_nodes.all(work, 4))
    assert killed[0] == -signal.SIGKILL
    for code, said in others:
        assert code == EXIT_PEER
        assert "rank 3" in said
        assert "Traceback" not in said
