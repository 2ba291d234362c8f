"""What the communication thread does is on the timeline, and what ranks agree on is waiting, not host time."""

from __future__ import annotations

from pathlib import Path

from freescale.trace.spans import Span
from freescale.trace.stages import record_into
from freescale.train.loop import train
from tests.ranks import run_on_ranks
from tests.small_run import make_run

RECIPE = (
    *("embedding.id_map=zero_collision", "embedding.rows=128", "embedding.eviction=lru"),
    *("run.steps=42", "run.eval_every=42", "pipeline.decide_every=30"),
)
BESIDE = {"map ids", "exchange ids", "split into OL and NOL", "fetch NOL rows", "send NOL gradients"}


def recorded(rank: int, folder: str) -> list[Span]:
    run, _ = make_run(RECIPE, folder)
    recorder = run.accounts.recorder
    assert recorder is not None
    seen: list[Span] = []
    keep = recorder.add
    recorder.add = lambda span: (seen.append(span), keep(span))[1]  # type: ignore[method-assign]
    train(run, resume_from=None)
    record_into(None)
    return seen


def test_both_threads_of_every_rank_are_recorded(tmp_path: Path) -> None:
    for spans in run_on_ranks(recorded, 2, str(tmp_path)):
        channels: dict[str, set[str]] = {}
        for span in spans:
            channels.setdefault(span.lane, set()).add(span.name)
        assert channels["communication"] >= BESIDE
        assert channels["main"] >= {"fetch OL rows", "send OL gradients"}
        asking = [span for span in spans if span.name == "map ids" and span.arrival is not None]
        assert asking, "ids travel to their owners on a connection that is watched"
        agreed = [span for span in spans if span.name == "agree on the way"]
        assert len(agreed) == 2
        assert all(span.kind == "wait" and span.arrival is not None for span in agreed)
