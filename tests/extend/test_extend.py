"""From OUTSIDE the package, in one file of at most 60 lines each: a new kind of seven families, on the one curve.

Nothing inside freescale/ knows of any of them. Each is imported as `--plugin` does it, named in a recipe, and trained
on one and two ranks: losses and final tensors are the same to rounding, in float64.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freescale import load_export, registry
from freescale.app.run.opened_run import export_run
from freescale.app.run.train_run import train_run
from freescale.data import ParquetSource, prepare
from freescale.errors import CheckpointError, ConfigError
from freescale.recipe import load_config
from tests.effort import quick_first, slow
from tests.small_run import SMALL, Recorder, full_tensors, make_run, train_small
from tests.test_one_curve import assert_same_curve, on_ranks

PLUGINS = Path(__file__).parent / "plugins"
CURVE = ("model.dtype=float64", "run.steps=10", "run.eval_every=5")


@pytest.fixture(autouse=True)
def plugins(monkeypatch, own_kinds):
    """As a folder on PYTHONPATH; what a test registers is gone after it."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    for path in PLUGINS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def one_curve(*recipe: str) -> dict:
    """Train on one and on two ranks; the same curve."""
    alone = on_ranks(1, (*CURVE, *recipe))
    assert_same_curve(on_ranks(2, (*CURVE, *recipe)), alone)
    assert len(alone["losses"]) == 10
    assert all(np.isfinite(alone["losses"]))
    return alone


def test_every_plugin_is_one_short_file():
    files = sorted(PLUGINS.glob("own_*.py"))
    assert len(files) == 7
    for path in files:
        assert len(path.read_text().splitlines()) <= 60, path


def test_an_encoder():
    registry.load_plugin("own_encoder")
    recipe = ("model.kind=gru4rec", "model.gru_layers=2", "model.dropout=0.2")
    trained = one_curve(*recipe)
    assert "model.encoder.gru.weight_ih_l1" in trained["tensors"]
    with pytest.raises(ConfigError, match=r"model\.gru_layer: unknown key; did you mean model\.gru_layers\?"):
        load_config(None, ["model.kind=gru4rec", "model.gru_layer=2"])
    with pytest.raises(ConfigError, match=r"model\.gru_layers: must be a whole number"):
        load_config(None, ["model.kind=gru4rec", "model.gru_layers=two"])
    with pytest.raises(ConfigError, match=r"model\.gru_layers: only with model\.kind=gru4rec"):
        load_config(None, ["model.gru_layers=2"])


def test_a_head_with_its_own_metric_and_export(tmp_path):
    registry.load_plugin("own_head")
    recipe = (
        "head.kind=two_towers",
        "head.tower_width=5",
        "eval.metric=hit_or_near",
        "run.checkpoint_every=5",
    )
    trained = one_curve(*recipe)
    assert {"hit_or_near", "hr@10"} <= set(trained["evals"][-1])
    run, _ = make_run((*CURVE, *recipe), tmp_path / "run")
    from freescale.train import train

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        load_config(None, [*SMALL, *CURVE, *recipe, f"run.out={tmp_path / 'run'}"]).to_yaml()
    )
    train(run, resume_from=None)
    served = load_export(export_run(tmp_path / "run", tmp_path / "export"), plugins=["own_head"])
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    assert manifest["head"] == {"name": "two_towers", "options": {"tower_width": 5}}
    history = [int(item) for item in run.evaluation.test.source.items.ids[:5]]
    answer = served.recommend(history, times=list(range(5)), k=3)
    assert len(answer) == 3
    assert not {item for item, _ in answer} & set(history)


@pytest.mark.parametrize("encoder", ["hstu", slow("sasrec")])
def test_an_attention_mask(encoder):
    registry.load_plugin("own_mask")
    trained = one_curve(f"model.kind={encoder}", "model.mask=dilated", "model.every=4", "model.near=1")
    causal = on_ranks(1, (*CURVE, f"model.kind={encoder}"))
    assert trained["losses"][0] != causal["losses"][0], "the mask hides something"


def test_a_transport():
    registry.load_plugin("own_transport")
    from own_transport import PairsTransport

    assert PairsTransport.name == "pairs"
    pairs, usual = (on_ranks(2, (*CURVE, f"comm.transport={kind}")) for kind in ("pairs", "auto"))
    assert_same_curve(pairs, on_ranks(1, CURVE))
    # Bit for bit what the usual transport gives on as many ranks: sums are made in rank order.
    for name, value in usual["tensors"].items():
        np.testing.assert_array_equal(pairs["tensors"][name], value)


@pytest.mark.parametrize("id_map", [slow("direct"), "zero_collision"])
def test_a_sparse_optimizer(id_map, tmp_path):
    registry.load_plugin("own_optimizer")
    recipe = ("embedding.optimizer=slowing_momentum", "embedding.decay=0.5", f"embedding.id_map={id_map}")
    trained = one_curve(*recipe)
    assert {"table.item.velocity", "table.item.updates"} <= set(trained["tensors"])
    # Killed and resumed: its state is in the checkpoint.
    saved = (*CURVE, *recipe, "run.checkpoint_every=5")
    train_small(saved, tmp_path)
    again = train_small(saved, tmp_path / "b", resume_from=tmp_path / "checkpoints" / "step-00000005")
    for name, value in trained["tensors"].items():
        np.testing.assert_allclose(again["tensors"][name], value, rtol=1e-9, atol=1e-12)


def test_a_raw_format(tmp_path):
    registry.load_plugin("own_format")
    raw = tmp_path / "events.txt"
    histories = {user: [(user * 7 + n * n) % 40 for n in range(4 + user % 9)] for user in range(60)}
    raw.write_text("#arrows\n" + "".join(f"{u}>{' '.join(map(str, h))}\n" for u, h in histories.items()))
    prepare(raw, tmp_path / "data", format="arrows", min_events=3)
    source = ParquetSource(tmp_path / "data")
    assert len(source.lengths) == 60
    one_curve(f"data.path={tmp_path / 'data'}")


def test_an_id_map():
    registry.load_plugin("own_id_map")
    trained = one_curve("embedding.id_map=modulo", "embedding.stride=5", "embedding.rows=157")
    assert trained["tensors"]["table.item.weight"].shape[0] == 157


def test_the_command_line_takes_a_plugin_in_every_rank(tmp_path, python):
    command = [python, "-m", "freescale", "train", *SMALL, *CURVE, "model.kind=gru4rec"]
    command += [f"run.out={tmp_path / 'run'}", "--nproc", "2", "--plugin", "own_encoder"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=110, cwd=PLUGINS, env={**_environment()}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    registry.load_plugin("own_encoder")
    alone = on_ranks(1, (*CURVE, "model.kind=gru4rec"))
    np.testing.assert_allclose(losses, alone["losses"], rtol=1e-9)
    without = subprocess.run(
        command[:-2], capture_output=True, text=True, timeout=60, env={**_environment()}, check=False
    )
    assert without.returncode == 1
    assert "--plugin MODULE" in without.stderr or "did you mean" in without.stderr


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_full_tensors_see_foreign_state():
    # What the other tests compare really holds every tensor of a run.
    registry.load_plugin("own_optimizer")
    run, _ = make_run((*CURVE, "embedding.optimizer=slowing_momentum"))
    assert "table.item.velocity" in full_tensors(run)


def trained_and_exported(folder, *recipe):
    """A short run as the command trains it, exported."""
    more = ("run.steps=2", "run.eval_every=0", f"run.out={folder / 'run'}")
    config = load_config(None, [*SMALL, *more, *recipe])
    train_run(config, resume="never", open_terminal=lambda total: Recorder())
    return export_run(folder / "run", folder / "export")


def forget_kinds():
    """As a process that has imported none of them."""
    for key in [key for key, kind in registry._kinds.items() if not kind.ships]:
        del registry._kinds[key]
    for path in PLUGINS.glob("*.py"):
        sys.modules.pop(path.stem, None)


NEEDED = {
    "encoder": (["own_encoder"], ("model.kind=gru4rec", "model.gru_layers=2")),
    "head": (["own_head"], ("head.kind=two_towers", "head.tower_width=5")),
    "mask": (["own_mask"], ("model.mask=dilated", "model.every=4", "model.near=1")),
    "all three": (
        ["own_encoder", "own_head", "own_mask"],
        ("model.kind=gru4rec", "head.kind=two_towers", "head.tower_width=5"),
    ),
}


@pytest.mark.parametrize("kinds", quick_first(NEEDED, "mask", "all three"))
def test_an_export_is_read_where_its_plugins_are_named(kinds, tmp_path):
    modules, recipe = NEEDED[kinds]
    for module in modules:
        registry.load_plugin(module)
    path = trained_and_exported(tmp_path, *recipe)
    before = load_export(path).recommend([1, 5, 9], times=[1, 2, 3], k=3)
    forget_kinds()
    with pytest.raises(CheckpointError, match=r"there is no \w+ '\w+'(.|\n)*plugins=\[MODULE\]"):
        load_export(path)
    assert load_export(path, plugins=modules).recommend([1, 5, 9], times=[1, 2, 3], k=3) == before


FEATURES = ("synthetic.features=true", "embedding.lr=0.05")
EVENTS = {"hour": [1, 2], "watched": [0.5, 1.0], "action": [["view"], []]}
ASKED = {"history": [1, 5], "times": [1, 2], "k": 3, "features": {"user": 7, "country": "de", **EVENTS}}


def test_what_only_training_needs_no_export_asks_for(tmp_path):
    for module in ("own_id_map", "own_optimizer", "own_transport"):
        registry.load_plugin(module)
    path = trained_and_exported(
        tmp_path,
        *FEATURES,
        "tables.item.map=modulo",
        "tables.user.map=hash",
        "tables.user.rows=400",
        "embedding.optimizer=slowing_momentum",
        "comm.transport=pairs",
    )
    before = load_export(path).recommend(**ASKED)
    forget_kinds()
    assert load_export(path).recommend(**ASKED) == before


def test_an_id_map_that_requests_need(tmp_path):
    # It was refused at the export.
    registry.load_plugin("own_id_map")
    user = ("tables.user.map=modulo", "tables.user.rows=400")
    path = trained_and_exported(tmp_path, *FEATURES, *user)
    before = load_export(path).recommend(**ASKED)
    other = load_export(path).recommend(**{**ASKED, "features": {**ASKED["features"], "user": 8}})
    assert [score for _, score in other] != [score for _, score in before]
    forget_kinds()
    with pytest.raises(CheckpointError, match=r"there is no id_map 'modulo'(.|\n)*plugins=\[MODULE\]"):
        load_export(path)
    assert load_export(path, plugins=["own_id_map"]).recommend(**ASKED) == before
