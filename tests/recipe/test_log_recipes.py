"""What does not go with a log is refused, all of it at once."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from freescale.recipe import load_config
from freescale.recipe.log import problems

FITS = ("embedding.id_map=zero_collision", "embedding.rows=100", "data.max_length=50")
TASKS = ("head.kind=tasks", 'head.tasks=["liked = action > 3"]')


def found(*keys: str, deleted: bool = False) -> list[str]:
    log = SimpleNamespace(windows=[SimpleNamespace(deleted=deleted)])
    source = cast("Any", SimpleNamespace(log=log, max_length=50))
    return problems(load_config(None, [*FITS, *keys]), source)


def test_nothing_is_said_of_a_recipe_that_fits() -> None:
    assert found() == []
    assert found(*TASKS) == []


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (("embedding.rows=null",), "embedding.rows"),
        (("optim.schedule=cosine",), "optim.schedule"),
        (("data.global_tokens=100",), "data.global_tokens"),
        (("run.epochs=3",), "run.epochs"),
        (("run.patience=2",), "run.patience"),
        (("run.mllog=true",), "run.mllog"),
        (("data.order=listed",), "data.order"),
        (("run.eval_every=10",), "run.eval_every"),
        (("data.max_length=20",), "data.max_length"),
        ((*TASKS, "head.anchors=action"), "head.anchors"),
    ],
)
def test_each_is_named(keys: tuple[str, ...], named: str) -> None:
    (said,) = found(*keys)
    assert named in said


def test_all_are_told_at_once() -> None:
    said = found("run.epochs=3", "run.patience=2", "optim.schedule=cosine", *TASKS, deleted=True)
    assert [text.split(":")[0] for text in said] == [
        "optim.schedule",
        "head.kind",
        "run.epochs",
        "run.patience",
    ]
