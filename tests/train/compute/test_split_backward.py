"""Weight gradients after the rows have left: the bits of the plain order, for every model and way to train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from freescale.kernels.runtime import PostponedGradients
from freescale.pipeline.prioritized.adaptive import Switch
from freescale.recipe import assembly
from freescale.train.compute import dense_gradients, padded_step, split_backward
from freescale.train.compute.dense_gradients import FlatSum
from freescale.train.loop import train
from freescale.train.state.saved import read_meta
from tests.effort import slow
from tests.padded_runs import padded_capture
from tests.ranks import run_on_ranks
from tests.small_run import full_tensors, make_run, train_small

POSTPONED, PLAIN = "pipeline.postpone=on", "pipeline.postpone=off"
MODELS = {
    "hstu": ("model.layers=2", "model.time_bias=true", "model.dropout=0.2"),
    "sasrec": ("model.kind=sasrec", "model.layers=2", "model.heads=2", "model.dropout=0.2"),
    "llama": ("model.kind=llama", "model.layers=2", "model.heads=2", "model.kv_heads=1"),
    "experts": ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.top_k=2", "moe.parallel=true"),
}


def both_ways(rank: int, recipe: tuple[str, ...], folder: Path, steps: int) -> None:
    """Runs of these ranks in both orders; fails unless losses and every tensor agree in every bit.

    Two ranks add up as those of two machines do, more as those of one: between machines a ring adds in an order that
    depends on how gradients are cut, which for two is the same.
    """
    dense_gradients.on_one_machine = lambda: dist.get_world_size() > 2
    recipe = (*recipe, f"run.steps={steps}", "run.eval_every=0", "pipeline.decide_every=null")
    ours = train_small((*recipe, POSTPONED), folder / "postponed")
    assert_same_bits(ours, train_small((*recipe, PLAIN), folder / "plain"))


def assert_same_bits(ours: dict[str, Any], plain: dict[str, Any], *, first_step: int = 0) -> None:
    assert ours["losses"] == plain["losses"][first_step:]
    assert ours["tensors"].keys() == plain["tensors"].keys()
    for name, value in plain["tensors"].items():
        np.testing.assert_array_equal(ours["tensors"][name], value, err_msg=name)


@pytest.mark.parametrize("num_ranks", [2, slow(3)])
@pytest.mark.parametrize("model", [each if each == "experts" else slow(each) for each in MODELS])
def test_every_model_learns_the_same_bits(num_ranks: int, model: str, tmp_path: Path) -> None:
    run_on_ranks(both_ways, num_ranks, MODELS[model], tmp_path, 12, timeout=110)


def long_and_resumed(rank: int, recipe: tuple[str, ...], folder: Path) -> None:
    """300 steps in both orders; a run that goes on from the middle of one in the other has their bits, too."""
    dense_gradients.on_one_machine = lambda: dist.get_world_size() > 2
    recipe = (
        *recipe,
        "run.steps=300",
        "run.eval_every=0",
        "pipeline.decide_every=null",
        "balance.refit_every=null",
    )
    recipe = (
        *recipe,
        "run.checkpoint_every=150",
        "run.keep=9",
        "optim.schedule=cosine",
        "optim.warmup_steps=20",
    )
    plain = train_small((*recipe, PLAIN), folder / "plain")
    ours = train_small((*recipe, POSTPONED), folder / "postponed")
    assert len(ours["losses"]) == 300
    assert_same_bits(ours, plain)
    saved = folder / "plain" / "checkpoints" / "step-00000150"
    again = train_small((*recipe, POSTPONED), folder / "again", resume_from=saved)
    assert_same_bits(again, plain, first_step=150)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "change", [(), ("optim.accumulate=2", "optim.clip_norm=0.1")], ids=["", "clipped, in parts"]
)
@pytest.mark.parametrize("model", MODELS)
def test_three_hundred_steps_have_the_same_bits(model: str, change: tuple[str, ...], tmp_path: Path) -> None:
    run_on_ranks(long_and_resumed, 2, (*MODELS[model], *change), tmp_path, timeout=380)


@pytest.mark.parametrize(
    "change",
    [
        slow(
            ("optim.accumulate=3", "optim.schedule=cosine", "optim.warmup_steps=5", "optim.weight_decay=0.01")
        ),
        ("optim.clip_norm=0.1", "pipeline.check=true", "optim.accumulate=3", "optim.weight_decay=0.01"),
        (
            "pipeline.postpone_mb=0.01",
            "embedding.optimizer=rowwise_adagrad",
            "embedding.id_map=zero_collision",
        ),
        slow(("pipeline.postpone_mb=0", "embedding.id_map=zero_collision")),
        ("data.global_batch=2",),
    ],
    ids=[
        "accumulation and schedule",
        "clipping",
        "bounded, learnt ids",
        "nothing kept",
        "empty ranks",
    ],
)
def test_every_way_to_train_gives_the_same_bits(change: tuple[str, ...], tmp_path: Path) -> None:
    run_on_ranks(both_ways, 2, (*MODELS["hstu"], *change), tmp_path, 10, timeout=110)


def padded_both_ways(rank: int, recipe: tuple[str, ...], folder: Path) -> list[int]:
    """The same over padded batches, as they are replayed on a GPU; returns how large the pieces are that travel."""
    assembly.build_capture = padded_capture
    padded_step.bucket_bytes = lambda num_bytes: 4096
    sizes: list[int] = []
    start = FlatSum.start

    def noted(self: FlatSum, values: Any) -> Any:
        sizes.append(len(values))
        return start(self, values)

    FlatSum.start = noted  # type: ignore[method-assign]
    both_ways(rank, recipe, folder, 8)
    return sizes


@pytest.mark.parametrize("model", ["hstu", slow("sasrec"), slow("llama"), "clipped"])
def test_padded_batches_have_the_same_bits_in_either_order(model: str, tmp_path: Path) -> None:
    recipe = (*MODELS["hstu"], "optim.clip_norm=0.1") if model == "clipped" else MODELS[model]
    [sizes, _] = run_on_ranks(padded_both_ways, 2, recipe, tmp_path, timeout=110)
    *pieces, whole = sizes[:-7]
    assert len(pieces) + 1 > 8 * 2, "postponed gradients travel in pieces"
    assert set(sizes[-8:]) == {sum(sizes[: (len(sizes) - 8) // 8])}, "all of them, once a step"
    assert whole == sizes[-1]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("pipeline.postpone=auto", "of one order"),
        ("pipeline.postpone=on optim.accumulate=2", "micro-batches"),
    ],
)
def test_replays_that_cannot_be_split_say_so(keys: str, reason: str) -> None:
    run_on_ranks(says_why_not, 2, keys, reason)


def says_why_not(rank: int, keys: str, reason: str) -> None:
    assembly.build_capture = padded_capture
    run, heard = make_run(("run.steps=1", *keys.split()))
    assert run.train_step.padded is not None
    assert run.train_step.padded.compute.later is None
    assert any("plain order" in said["text"] and reason in said["text"] for said in heard.of("notice"))


def resumed(rank: int, folder: Path) -> None:
    """Both ways in turn: a run that changes its order in the middle goes on in the same bits."""
    recipe = (*MODELS["hstu"], "run.steps=10", "run.eval_every=0", "run.checkpoint_every=4", "run.keep=10")
    plain = train_small((*recipe, PLAIN), folder / "plain")
    train_small((*recipe, POSTPONED), folder / "postponed")
    for step, order in ((4, POSTPONED), (8, PLAIN)):
        saved = folder / "postponed" / "checkpoints" / f"step-{step:08d}"
        again = train_small((*recipe, order), folder / "postponed", resume_from=saved)
        assert_same_bits(again, plain, first_step=step)


def test_a_run_goes_on_in_either_order(tmp_path: Path) -> None:
    run_on_ranks(resumed, 2, tmp_path, timeout=110)


def in_pieces(rank: int, folder: Path) -> tuple[int, int]:
    """Ranks that add up as those of two machines do: pieces leave while other gradients are still computed."""
    split_backward.bucket_bytes = lambda num_bytes: 4096
    started: list[int] = []
    start = FlatSum.start

    def counted(self: FlatSum, values: Any) -> Any:
        assert self.only_starts
        started.append(len(waiting[-1]) if waiting else 0)
        return start(self, values)

    waiting: list[Any] = []
    compute = PostponedGradients.compute

    def watched(self: PostponedGradients, done: Any) -> None:
        left = {id(weight): weight for weight in self.waiting}
        waiting.append(left)

        def told(weight: Any) -> None:
            left.pop(id(weight))
            done(weight)

        compute(self, told)

    FlatSum.start, PostponedGradients.compute = counted, watched  # type: ignore[method-assign]
    both_ways(rank, MODELS["hstu"], folder, 6)
    return len(started), sum(left > 0 for left in started)


def test_sums_leave_piece_by_piece_while_gradients_are_computed(tmp_path: Path) -> None:
    [(pieces, early), _] = run_on_ranks(in_pieces, 2, tmp_path, timeout=110)
    assert pieces >= 6 * 3
    assert 0 < early < pieces


def found_out(rank: int, folder: Path) -> list[dict[str, Any]]:
    """A run that tries everything, half and nothing in turn; fails unless it learns the bits of the plain order."""
    recipe = (*MODELS["hstu"], "run.steps=116", "run.eval_every=0", "run.checkpoint_every=112", "run.keep=9")
    recipe = (*recipe, "balance.refit_every=null")  # who computes what must not follow from times
    ways = ("pipeline.postpone=auto", "pipeline.decide_every=60")
    run, recorder = make_run((*recipe, *ways), folder / "auto")
    with patch.object(Switch, "agree", return_value=None):  # plain rows may be faster here, and hide nothing
        train(run)
    ours = {"losses": [event["loss"] for event in recorder.of("step")], "tensors": full_tensors(run)}
    plain = train_small((*recipe, PLAIN, "pipeline.decide_every=null"), folder / "plain")
    assert_same_bits(ours, plain)
    meta = read_meta(folder / "auto" / "checkpoints" / "step-00000112")
    assert meta["postpone_decisions"][0] == [0, 1.0]
    return recorder.of("postpone")


@pytest.mark.slow
def test_how_much_is_postponed_is_found_out_and_agreed(tmp_path: Path) -> None:
    first, second = run_on_ranks(found_out, 2, tmp_path, timeout=280)
    [decided] = first
    assert decided["step"] == 110
    assert set(decided["ms"]) == {"1", "0.5", "0"}
    assert decided["kept_mb"] > 0
    assert [(each["share"], each["ms"]) for each in second] == [(decided["share"], decided["ms"])]


def kept(rank: int, megabytes: float) -> tuple[int, int, str | None]:
    run, _ = make_run((*MODELS["llama"], POSTPONED, f"pipeline.postpone_mb={megabytes}", "run.steps=2"))
    with run.open_schedule(0) as schedule:
        for ready in schedule:
            run.train_step.run(ready, schedule)
    split = run.train_step._split
    assert split is not None
    return split.postponed.num_postponed, split.postponed.most_kept_bytes, run.train_step.postpone_story()


def test_what_is_kept_has_a_bound() -> None:
    [(unbounded, most, story), _] = run_on_ranks(kept, 2, 64)
    assert story == f"postponed weight gradients kept up to {most / 2**20:,.0f} MiB"
    assert unbounded == 2 * 2 * 4  # two steps of two layers with four products each
    bound = most // 2 / 2**20
    [(bounded, most, story), _] = run_on_ranks(kept, 2, bound)
    without = 1 - bounded / unbounded
    assert story is not None
    assert f"; {without:.0%} were computed at once" in story, "it was asked for, and not done"
    assert f"the {bound:,.0f} MiB they were given (pipeline.postpone_mb)" in story
    assert 0 < bounded < unbounded
    assert most <= bound * 2**20


def kept_of_experts(rank: int, folder: Path) -> set[str]:
    """Names of the weights whose gradients waited."""
    recipe = (*MODELS["experts"], "run.steps=2", "run.eval_every=0", "pipeline.decide_every=null", POSTPONED)
    run, _ = make_run(recipe, folder)
    names = {id(param): name for name, param in run.state.model.named_parameters()}
    seen: set[str] = set()
    compute = PostponedGradients.compute

    def watched(self: PostponedGradients, *done: Any) -> None:
        seen.update(names[id(weight)] for weight in self.waiting)
        compute(self, *done)

    PostponedGradients.compute = watched  # type: ignore[method-assign]
    train(run)
    return seen


def test_products_of_experts_wait_too(tmp_path: Path) -> None:
    for waited in run_on_ranks(kept_of_experts, 2, tmp_path, timeout=110):
        assert any(name.endswith("ffn.w_in") for name in waited)
        assert any(name.endswith("ffn.w_out") for name in waited)
