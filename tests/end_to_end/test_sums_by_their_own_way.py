"""`comm.sums`: dense gradients travel another way than rows, with the same bits; what cannot carry them is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from freescale.app.run.run_summary import describe
from freescale.errors import FreeScaleError
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, full_tensors, make_run, these_ranks, train

KEYS = ("comm.transport=local", "balance.refit_every=null", "pipeline.decide_every=null", "run.steps=12")
WAYS = {
    "under the backward": (),
    "postponed": ("pipeline.postpone=on",),
    "clipped, in parts": ("optim.clip_norm=0.1", "optim.accumulate=2"),
}


def train_by(rank: int, keys: tuple[str, ...], folder: Path) -> list[str | None]:
    """The same steps with sums by sockets, as rows, and by shared memory; what carried them."""
    losses, tensors, by = [], [], []
    for sums in ("local", "host_staged"):
        run, recorder = make_run([*KEYS, f"comm.sums={sums}", *keys], folder / sums)
        carrier = run.train_step.sums_by
        by.append(None if carrier is None else carrier.name)
        train(run)
        losses.append([event["loss"] for event in recorder.of("step")])
        tensors.append(full_tensors(run))
    assert losses[0] == losses[1]
    for name, values in tensors[0].items():
        np.testing.assert_array_equal(values, tensors[1][name], err_msg=name)
    return by


@pytest.mark.parametrize(
    "how", ["clipped, in parts", *(slow(how) for how in WAYS if how != "clipped, in parts")]
)
def test_sums_have_the_same_bits_by_a_way_of_their_own(how: str, tmp_path: Path) -> None:
    assert run_on_ranks(train_by, 3, WAYS[how], tmp_path, timeout=100) == [["local", "host_staged"]] * 3


def refused(rank: int, folder: Path) -> str:
    with pytest.raises(FreeScaleError) as caught:
        make_run(["comm.sums=copy_engine"], folder)
    return str(caught.value)


def test_what_cannot_carry_them_is_refused_by_the_name_of_the_key(tmp_path: Path) -> None:
    for text in run_on_ranks(refused, 2, tmp_path, timeout=60):
        assert "comm.sums=copy_engine cannot be used here" in text
        assert "comm.sums=auto" in text


def said_of(rank: int, folder: Path) -> list[object]:
    """What the head of a run says of sums, which go as rows do or are told to go another way."""
    said = []
    for sums in ("auto", "host_staged"):
        config = load_config(None, [*SMALL, f"comm.sums={sums}", f"run.out={folder}"])
        source = build_source(config)
        run = build_run(config, source, these_ranks(), Progress([]))
        said.append(describe(run, config, source)["run"].get("dense gradients by"))
    return said


def test_the_head_of_a_run_says_by_what_they_travel(tmp_path: Path) -> None:
    for auto, named in run_on_ranks(said_of, 2, tmp_path, timeout=60):
        assert auto is None
        assert str(named).startswith("host_staged (")
        assert "as the recipe says" in str(named)
