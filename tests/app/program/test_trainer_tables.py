"""Several tables and features for a model of one's own: the words of the schema, one curve, export."""

from __future__ import annotations

import tempfile

import pytest

from freescale import Table, Trainer, load_export
from freescale.errors import ConfigError
from freescale.recipe import build_run, build_source, load_config
from freescale.train import Progress, train
from tests.check import planted
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, Recorder, full_tensors, make_run, these_ranks
from tests.test_one_curve import assert_same_curve

TABLES = [
    Table("item", dim=planted.DIM, map="zero_collision", rows=256, buckets=8),
    Table("genre", dim=5, optimizer="sgd", lr=0.05),
    Table("home", dim=7, optimizer="rowwise_adagrad"),
    Table("user", dim=6, map="zero_collision", rows=128),
]
SHORT = {
    "synthetic.features": True,
    "synthetic.users": 120,
    "synthetic.items": 60,
    "synthetic.mean_length": 8,
    "data.max_length": 16,
    "data.global_batch": 10,
    "head.num_negatives": 4,
    "model.dtype": "float64",
    "run.device": "cpu",
    "run.steps": 6,
    "run.eval_every": 3,
    "run.checkpoint_every": 3,
    "run.log_every": 1,
}


def make(folder, **recipe):
    return Trainer(
        encoder=lambda: planted.Gru(), tables=TABLES, recipe={**SHORT, "run.out": str(folder), **recipe}
    )


def fitted(rank, folder, resume_from=None):
    trainer, told = make(folder), Recorder()
    with trainer._objects.offered():
        run = build_run(trainer.config, build_source(trainer.config), these_ranks(), Progress([told]))
        train(run, resume_from=resume_from)
    losses = [event["loss"] for event in told.of("step")]
    return {"losses": losses, "evals": told.of("eval"), "tensors": full_tensors(run)}


def test_own_model_with_several_tables_on_the_one_curve(tmp_path):
    alone = fitted(0, tmp_path / "alone")
    tables = {name.split(".")[1] for name in alone["tensors"] if name.startswith("table.")}
    assert {"item", "genre", "home", "user"} <= tables
    assert alone["tensors"]["table.genre.weight"].shape[1] == 5
    assert "table.home.square_sum" in alone["tensors"]
    assert_same_curve(run_on_ranks(fitted, 2, tempfile.mkdtemp())[0], alone)
    saved = tmp_path / "alone" / "checkpoints" / "step-00000003"
    resumed = run_on_ranks(fitted, 2, tempfile.mkdtemp(), saved)[0]
    assert_same_curve(resumed, alone, first_step=3)


def test_it_is_checked_exported_and_asked_with_features(tmp_path):
    trainer = make(tmp_path / "run", **{"model.dtype": "float32"})
    assert trainer.check().ok
    trainer.fit(quiet=True)
    model = load_export(trainer.export(tmp_path / "export"), encoder=planted.Gru())
    events = {"hour": [1, 2, 3], "watched": [0.5, None, 1.0], "action": [["view"], [], ["view", "like"]]}
    one, other = (
        model.recommend([3, 5, 8], k=4, features={"user": 7, "country": country, **events})
        for country in ("de", "us")
    )
    assert len(one) == 4
    assert [score for _, score in one] != [score for _, score in other]


def test_words_of_tables_are_those_of_a_recipe(tmp_path):
    config = make(tmp_path / "run").config
    assert config.model.dim == planted.DIM
    assert config.tables.extra["genre"] == {"dim": 5, "optimizer": "sgd", "lr": 0.05}
    assert config.tables.extra["item"] == {"map": "zero_collision", "rows": 256, "buckets": 8}
    assert config.embedding.id_map == "direct"
    with pytest.raises(ConfigError, match=r"tables\.genre\.mop: unknown word; did you mean map"):
        Trainer(tables=[Table("genre", mop="hash")], recipe={**SHORT, "run.out": str(tmp_path / "a")})
    other = Trainer(
        tables=[Table("gerne", dim=3)], recipe={**SHORT, "model.dim": 8, "run.out": str(tmp_path / "b")}
    )
    with pytest.raises(ConfigError, match=r"tables\.gerne: no feature has rows in it; did you mean genre"):
        other.fit(quiet=True)


def test_what_is_said_of_items_counts_where_they_are_alone():
    # It was ignored without a word.
    run, _ = make_run(["tables.item.optimizer=sgd", "tables.item.lr=0.5", "embedding.lr=0.25"])
    spec = run.state.embedding.plans["item"].spec
    assert type(spec.optimizer).__name__ == "SGD"
    assert spec.lr_scale == 2.0
    config = load_config(None, [*SMALL, "tables.itme.lr=0.5", "run.out=nowhere"])
    with pytest.raises(ConfigError, match="did you mean item"):
        build_run(config, build_source(config), these_ranks(), Progress())
