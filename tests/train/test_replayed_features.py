"""Replayed steps with features compute the batch that lies in memory, and nothing of the one they were made with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freescale.train.loop import take_steps
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.replayed_runs import replay_steps
from tests.small_run import full_tensors, make_run

EVERY = (
    "synthetic.features=true", "synthetic.sigma=0.4", "tables.item.dim=10", "tables.genre.dim=5",
    "tables.genre.optimizer=sgd", "tables.genre.lr=0.05", "tables.home.dim=7",
    "tables.home.optimizer=rowwise_adagrad", "tables.user.map=hash", "tables.user.rows=128",
    "tables.user.dim=6", "run.eval_every=0", "run.steps=14", "model.dtype=float64", "optim.clip_norm=0.5",
)  # fmt: skip
"""Users and their countries in front, lists, numbers, bits, a cross; several widths and rules of update."""
PLACES = (
    "synthetic.features=true", "synthetic.sigma=0.4", "features.item.of=event", "features.item.is=id",
    "features.country.of=user", "features.country.is=id", "features.country.values=[de,fr,in,us]",
    "features.country.as=join", "features.watched.of=event", "features.watched.is=number",
    "features.watched.as=after", "features.watched.outcome=true", "features.genres.of=item",
    "features.genres.is=ids", "run.eval_every=0", "run.steps=14", "model.dtype=float64",
)  # fmt: skip


def trained(rank: int, keys: tuple[str, ...], replayed: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        replay_steps(patch, replayed=replayed)
        run, heard = make_run(keys)
        with run.open_schedule(0) as schedule:
            take_steps(run, schedule)
        steps = heard.of("step")
        return {
            "losses": [step["loss"] for step in steps],
            "captured": steps[-1]["captured"] if steps else None,
            "story": run.train_step.capture_story(),
            "later": run.train_step.postponed_mb(),
            "tensors": full_tensors(run),
        }


@pytest.mark.parametrize(
    ("num_ranks", "keys"),
    [
        (1, (*EVERY, "data.workers=1", "tokens.join=mlp")),
        (1, (*PLACES, "optim.accumulate=2", "pipeline.ahead=true")),
        slow(1, (*EVERY, "run.steps=50")),
        (2, (*EVERY, "data.workers=1")),
        slow(2, (*EVERY, "run.steps=24")),
        slow(2, (*PLACES, "run.steps=24", "data.workers=2", "pipeline.prioritized=false")),
        slow(2, (*PLACES, "run.steps=24", "pipeline.prioritized=false")),
    ],
    ids=[
        *("processes, mlp", "join and after, parts", "one rank", "processes, two ranks", "two ranks"),
        *("processes, two ranks, plain", "two ranks, plain"),
    ],
)
def test_a_replay_computes_the_batch_in_memory(num_ranks: int, keys: tuple[str, ...]) -> None:
    results = []
    for replayed in (True, False):
        if num_ranks == 1:
            results.append(trained(0, keys, replayed))
        else:
            results.append(run_on_ranks(trained, num_ranks, keys, replayed, timeout=110)[0])
    ours, usual = results
    assert ours["captured"] > 0.6, ours["story"]
    assert usual["captured"] == 0
    assert ours["losses"] == usual["losses"]
    assert np.isfinite(ours["losses"]).all()
    for name, value in usual["tensors"].items():
        assert np.array_equal(ours["tensors"][name], value), name


def test_a_replay_that_leaves_gradients_of_weights_for_later_has_the_bits_of_one_replay() -> None:
    keys = (*EVERY, "pipeline.prioritized=true", "pipeline.decide_every=null", "balance.refit_every=null")
    split, usual, plain = (
        run_on_ranks(trained, 2, (*keys, f"pipeline.postpone={postpone}"), replayed, timeout=110)[0]
        for postpone, replayed in (("on", True), ("on", False), ("off", True))
    )
    assert split["captured"] > 0.6, split["story"]
    assert split["later"] > 0
    assert plain["later"] == 0
    for other in (usual, plain):
        assert split["losses"] == other["losses"]
        for name, value in other["tensors"].items():
            assert np.array_equal(split["tensors"][name], value), name


@pytest.mark.parametrize("prioritized", ["true", "false"])
def test_processes_change_nothing_on_two_ranks(prioritized: str) -> None:
    """What they write for a rank is what it would have read, found and padded itself, rows on their way included."""
    keys = (
        *EVERY,
        f"pipeline.prioritized={prioritized}",
        "balance.refit_every=4",
        "pipeline.decide_every=null",
    )
    here, apart = (
        run_on_ranks(trained, 2, (*keys, f"data.workers={workers}"), True, timeout=110)[0]
        for workers in (0, 2)
    )
    assert apart["captured"] > 0.6, apart["story"]
    assert here["losses"] == pytest.approx(apart["losses"], rel=1e-12)


def test_a_step_that_reads_what_the_host_knew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof above can fail: this loss counts the tokens of the batch it was recorded with."""
    from tests.replayed_runs import PlainSoftmax

    honest = PlainSoftmax.loss

    def baked(self: Any, states: Any, rows: Any, batch: Any, layout: Any) -> torch.Tensor:
        return honest(self, states, rows, batch, layout) * (1 + layout.num_real * 1e-6)

    monkeypatch.setattr(PlainSoftmax, "loss", baked)
    ours, usual = (trained(0, (*EVERY, "run.steps=8"), replayed) for replayed in (True, False))
    assert ours["losses"] != usual["losses"]
