"""Steps of models with features recorded as CUDA graphs: the bits of the same steps computed as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_capture_on_gpu import check_bits_of_replays, make_run, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Ids, lists, numbers, bits and a cross; tables of several widths and rules; users and their countries in front.
EVERY = (
    "synthetic.features=true", "tables.item.dim=10", "tables.genre.dim=5",
    "tables.genre.optimizer=sgd", "tables.genre.lr=0.05", "tables.home.dim=7",
    "tables.home.optimizer=rowwise_adagrad", "tables.user.map=hash", "tables.user.rows=128", "tables.user.dim=6",
)  # fmt: skip
# Joined to all events of a user, and behind each event.
PLACES = (
    "synthetic.features=true", "features.item.of=event", "features.item.is=id",
    "features.country.of=user", "features.country.is=id", "features.country.values=[de,fr,in,us]",
    "features.country.as=join",
    "features.action.of=event", "features.action.is=bits", "features.action.names=[view,like,share]",
    "features.action.outcome=true", "features.action.as=after",
    "features.genres.of=item", "features.genres.is=ids",
    "features.price.of=item", "features.price.is=number", "features.price.edges=[1.0,5.0,20.0]",
)  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        (*EVERY, "model.dtype=bfloat16", "model.heads=2", "model.dropout=0.2"),
        (*EVERY, "tokens.join=mlp", "optim.accumulate=2", "optim.clip_norm=0.5"),
        (*PLACES, "optim.clip_norm=0.5"),
    ],
    ids=["every kind", "mlp, parts", "join and after"],
)
def test_replayed_steps_leave_the_bits_of_usual_ones(tmp_path: Path, keys: tuple[str, ...]) -> None:
    check_bits_of_replays(tmp_path, *keys)


def test_replayed_steps_follow_those_of_batches_without_padding(tmp_path: Path) -> None:
    keys = (*EVERY, "run.steps=20")
    _, steps = trained(tmp_path / "replayed", *keys)
    _, others = trained(tmp_path / "plain", *keys, "run.capture=off")
    assert steps[-1]["captured"] > 0.5
    assert [each["loss"] for each in steps] == pytest.approx([each["loss"] for each in others], rel=1e-3)


def test_unwritten_memory_changes_nothing(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", *EVERY)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what nobody has written with NaN
    try:
        poisoned, steps = trained(tmp_path / "poisoned", *EVERY)
    finally:
        torch.use_deterministic_algorithms(False)
    assert steps[-1]["captured"] > 0.8
    assert all(torch.equal(plain[name], poisoned[name]) for name in plain)


def test_a_step_is_one_replay_whatever_the_number_of_tables(tmp_path: Path) -> None:
    """Nothing is looked up or updated beside it: the host starts one copy and one graph."""
    run, _ = make_run(tmp_path, "run.steps=30", *EVERY)
    with run.open_schedule(0) as schedule:
        for ready in schedule:
            assert not ready.lookups
            run.train_step.run(ready, schedule)
    story = run.train_step.capture_story()
    assert run.train_step.padded.compute.recordings.replays > 20, story
