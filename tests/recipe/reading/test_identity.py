"""Which run it is follows from recipe and data; from nothing that may change within a run."""

from __future__ import annotations

import json

import pytest

from freescale.recipe import load_config, run_identity


def identity(*keys: str, data: str = "a") -> str:
    return run_identity(load_config(None, list(keys)).as_dict(), data)


@pytest.mark.parametrize(
    "keys",
    [("run.out=elsewhere",), ("run.steps=9",), ("data.path=moved",), ("run.keep=7", "comm.transport=local")],
)
def test_it_stays_where_a_run_goes_on(keys: tuple[str, ...]) -> None:
    assert identity(*keys) == identity()


@pytest.mark.parametrize("keys", [("run.seed=9",), ("model.dim=32",), ("optim.schedule=cosine",)])
def test_other_runs_have_others(keys: tuple[str, ...]) -> None:
    assert identity(*keys) != identity()


def test_data_and_the_length_of_a_cosine_count() -> None:
    assert identity(data="b") != identity()
    cosine = "optim.schedule=cosine"
    assert identity(cosine, "run.steps=9") != identity(cosine, "run.steps=10")


def test_a_checkpoint_without_a_key_that_came_later_is_of_the_same_run() -> None:
    saved = json.loads(json.dumps(load_config(None, ["run.seed=3"]).as_dict()))
    assert run_identity(saved, "a") == identity("run.seed=3")
    saved["eval"].pop("max_users")
    assert run_identity(saved, "a") == identity("run.seed=3")
