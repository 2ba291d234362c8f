"""Runs over padded batches follow the curve of plain ones; a recipe says what is padded, and why not."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch

from freescale.comm.world.ranks import Ranks
from freescale.kernels.attention.triton import bias_gradients
from freescale.model import moe_layers
from freescale.model.parts.moe import AllHere
from freescale.pipeline import PairLimit
from freescale.recipe import assembly, build_run, build_source, load_config
from freescale.recipe.building.capture import _pair_limit, why_not
from freescale.recipe.building.run_tables import RunTables
from freescale.train import loop
from freescale.train.compute.flat_gradients import FlatGradients, rows_of_items
from freescale.train.log.events import Progress
from freescale.train.loop import take_steps
from freescale.train.state.run_state import run_tensors
from tests.padded_runs import padded_capture
from tests.small_run import SMALL, Recorder

CPU = torch.device("cpu")
EXACT = (*SMALL, "run.steps=12", "run.eval_every=0", "model.dtype=float64", "optim.clip_norm=0.5")


def tables_of(run):
    items = run.train_step._encode_items.__self__
    return RunTables(run.state.embedding, dict(run.state.id_maps), getattr(items, "ids", None))


def small_run(tmp_path, *keys):
    config = load_config(None, [*keys, f"run.out={tmp_path}"])
    heard = Recorder()
    run = build_run(config, build_source(config), Ranks(rank=0, num_ranks=1, device=CPU), Progress([heard]))
    return run, config, heard


def trained(tmp_path, *keys):
    run, _, heard = small_run(tmp_path, *keys)
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    return run_tensors(run), heard.of("step")


@pytest.mark.parametrize(
    "keys",
    [
        ("pipeline.ahead=false",),
        ("pipeline.ahead=true", "model.dropout=0.3"),
        ("optim.accumulate=3", "data.workers=1"),
        ("ffn.kind=moe", "moe.aux_loss=0.05", "moe.z_loss=0.01"),
        ("ffn.kind=moe", "model.kind=llama", "optim.accumulate=2", "moe.shared=1"),
    ],
)
def test_padded_batches_follow_the_curve_of_plain_ones(tmp_path, monkeypatch, keys):
    plain, steps = trained(tmp_path / "plain", *EXACT, *keys)
    monkeypatch.setattr(assembly, "build_capture", padded_capture)
    padded, ours = trained(tmp_path / "padded", *EXACT, *keys)
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in steps], rel=1e-12)
    assert [step["grad_norm"] for step in ours] == pytest.approx(
        [step["grad_norm"] for step in steps], rel=1e-11
    )
    assert [step["captured"] for step in ours] == [0.0] * len(ours)
    assert "captured" not in steps[0]
    for name, tensor in plain.items():
        torch.testing.assert_close(padded[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("model.dropout=0", None),
        ("model.dropout=0.1", None),
        ("optim.accumulate=2", None),
        ("model.dtype=float64", "float64"),
        ("model.kind=sasrec", None),
        ("model.kind=llama", None),
        ("ffn.kind=dense", None),
        ("ffn.kind=moe", None),
        ("ffn.kind=moe model.kind=llama", None),
        ("ffn.kind=moe moe.backend=eager", "one by one"),
        ("model.mask=window model.window=8", "model.mask=window"),
        ("embedding.id_map=zero_collision", "learns"),
        ("synthetic.features=true", None),
        ("synthetic.features=true tokens.join=mlp optim.accumulate=2", None),
        ("synthetic.features=true tables.user.map=zero_collision tables.user.rows=128", "learns"),
    ],
)
def test_a_run_that_cannot_be_recorded_has_a_reason(tmp_path, key, reason):
    run, config, _ = small_run(tmp_path, *SMALL, *key.split())
    found = why_not(config, run.state.model, tables_of(run))
    assert found is None if reason is None else reason in found


def test_experts_elsewhere_have_a_reason(tmp_path):
    run, config, _ = small_run(tmp_path, *SMALL, "ffn.kind=moe")

    class Elsewhere(AllHere):
        is_split = True

    for _, layer in moe_layers(run.state.model):
        layer.dispatch = Elsewhere()
    assert "moe.parallel" in why_not(config, run.state.model, tables_of(run))


def test_a_trial_takes_back_what_modules_count(tmp_path):
    run, _, _ = small_run(tmp_path, *SMALL, "ffn.kind=moe")
    model = run.state.model
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = FlatGradients(
        model,
        own,
        precision=nullcontext,
        vectors_of=rows_of_items,
        postpone_bytes=None,
        piece_bytes=None,
        late=None,
    )
    ((_, layer),) = moe_layers(model)
    layer.register_buffer("ones", torch.ones(1).expand(5))  # one number in five places: nobody can write it
    x = torch.randn(7, layer.dim)
    layer(x)
    before = layer.router.tally.clone()
    with suppress(RuntimeError), gradients.keeping_buffers():
        layer(x)
        assert not torch.equal(layer.router.tally, before)
        raise RuntimeError("too little memory")
    assert before[: layer.num_experts].sum() == 7 * layer.router.top_k
    assert torch.equal(layer.router.tally, before)


def test_items_made_by_other_modules_have_a_reason(tmp_path):
    run, config, _ = small_run(tmp_path, *SMALL, "synthetic.features=true")
    run.state.model.items = torch.nn.Identity()
    found = why_not(config, run.state.model, tables_of(run))
    assert found == "item vectors are made by towers (tokens.join=towers)"


def test_very_large_batches_are_computed_as_usual(tmp_path):
    run, config, _ = small_run(tmp_path, *SMALL)
    assert why_not(config, run.state.model, tables_of(run), usual_tokens=102_273) is None
    found = why_not(config, run.state.model, tables_of(run), usual_tokens=302_273)
    assert "302,273 tokens" in found


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ("model.kind=hstu", 8_192),
        ("model.kind=sasrec", None),  # has no table of distances
        ("model.kind=sasrec model.dim=512", 8_192),  # heads of 128 keep them all the same
        ("model.kind=hstu model.heads=8", 4_096),
        ("model.kind=hstu model.dtype=float32", 4_096),
    ],
)
def test_score_gradients_bound_the_pairs_of_batches(tmp_path, keys, most):
    """Lists of batches with more have no fixed size: padded, they were slower."""
    small = ("model.heads=4", "model.dim=16", "model.dtype=bfloat16", "data.max_length=512")
    run, config, _ = small_run(tmp_path, *SMALL, *small, *keys.split())
    assert _pair_limit(config, run.state.model) == PairLimit(most, longest=512)


def test_batches_with_room_for_the_pairs_they_have_follow_the_curve_of_plain_ones(tmp_path, monkeypatch):
    keys = (*EXACT, "synthetic.mean_length=150", "synthetic.max_length=600", "data.max_length=600")
    plain, steps = trained(tmp_path / "plain", *keys)
    monkeypatch.setattr(assembly, "build_capture", padded_capture)
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", 120 * 8 * 128**2)
    run, _, _ = small_run(tmp_path / "sizes", *keys)
    with run.open_schedule(0) as schedule:
        assert 0 < schedule._padder._sizes.blocks <= 120
    padded, ours = trained(tmp_path / "padded", *keys)
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in steps], rel=1e-12)
    for name, tensor in plain.items():
        torch.testing.assert_close(padded[name], tensor, rtol=1e-10, atol=1e-12)


def test_ranks_that_replayed_much_less_than_the_first_are_told_of(tmp_path, monkeypatch):
    run, _, heard = small_run(tmp_path, *SMALL)
    stories = [(0.9, "90 of 100"), (0.8, "80 of 100"), (0.1, "10 of 100; not replayed: 90 while ...")]
    monkeypatch.setattr(loop, "gather", lambda own, **options: stories)
    loop.tell_stories(run, 100)
    assert [event["text"] for event in heard.of("notice")][-2:] == [
        "90 of 100",
        "rank 2: 10 of 100; not replayed: 90 while ...",
    ]


def test_capture_is_off_or_by_itself():
    assert load_config(None, []).run.capture == "auto"
    assert load_config(None, ["run.capture=off"]).run.capture == "off"
