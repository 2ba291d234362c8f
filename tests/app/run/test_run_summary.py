"""What a run says before its first step."""

from __future__ import annotations

from pathlib import Path

from freescale.app.run.run_summary import describe
from freescale.recipe import build_source, load_config
from tests.small_run import SMALL, make_run


def test_every_table_is_told_with_its_rows_map_and_features(tmp_path: Path) -> None:
    recipe = [
        "synthetic.features=true",
        "tables.home.dim=5",
        "tables.home.optimizer=sgd",
        f"run.out={tmp_path}",
    ]
    config = load_config(None, [*SMALL, *recipe])
    run, _ = make_run(recipe, tmp_path)
    tables = describe(run, config, build_source(config))["tables"]
    assert set(tables) == set(run.state.embedding.plans)
    assert tables["home"] == "1,000 x 5, 0.0191 MiB, hash, sgd"
    assert str(tables["genre"]).endswith("direct, adam, of genre, genres")


def test_a_run_of_items_alone_tells_of_no_tables(tmp_path: Path) -> None:
    config = load_config(None, [*SMALL, f"run.out={tmp_path}"])
    run, _ = make_run([], tmp_path)
    assert "tables" not in describe(run, config, build_source(config))
