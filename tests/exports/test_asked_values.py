"""What a request cannot mean is refused in one sentence that names it, never by Python or numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.errors import DataError
from freescale.exports.exported_model import ExportedModel
from freescale.exports.opened_export import load_export
from tests.exports.test_export import export, make_parts

TWO = {"times": [1, 2]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    found = load_export(export(tmp_path_factory.mktemp("out") / "out", make_parts()))
    assert isinstance(found, ExportedModel)
    return found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"k": "3"}, r"k must be a whole number\n +got: +'3' \(str\)"),
        ({"k": 2.0}, r"k must be a whole number\n +got: +2.0 \(float\)"),
        ({"k": True}, r"k must be a whole number\n +got: +True \(bool\)"),
        ({"k": None}, "k must be a whole number"),
        (
            {"filter_seen": "yes"},
            r"filter_seen is on or off\n +got: +'yes' \(str\)\n +allowed: True or False",
        ),
        ({"filter_seen": 0}, "filter_seen is on or off"),
        ({"times": [1, math.nan]}, r"times must be numbers\n +got: +nan \(float\)"),
        ({"times": [1, -math.inf]}, r"times must be numbers\n +got: +-inf"),
        ({"times": [1, None]}, r"times must be numbers\n +got: +None"),
        ({"times": [1, [2]]}, r"times must be numbers\n +got: +\[2\]"),
        ({"times": [1, 2**70]}, f"times must be numbers\n +got: +{2**70}"),
        ({"times": 5}, "times must be a list of seconds\n +got: +5"),
        ({"request_time": [7]}, r"times must be numbers\n +got: +\[7\]"),
        ({"history": 5}, "history must be a list of items\n +got: +5"),
        ({"history": None}, "history must be a list of items"),
        ({"history": "3"}, "history must be a list of items"),
        ({"history": [[3], 5], "times": [[1], [1]]}, "history must be a list of items\n +got: +5"),
        ({"history": [[3], [5]], "times": 5}, "times must be a list of one value a user"),
        ({"exclude": 5}, "exclude must be a list of items"),
    ],
)
def test_what_recommend_cannot_mean_is_refused(
    served: ExportedModel, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        served.recommend(**({"history": [3, 14]} | TWO | asked))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"candidates": 5}, "candidates must be a list of items\n +got: +5"),
        ({"candidates": "57"}, "candidates must be a list of items"),
        ({"history": None}, "history must be a list of items"),
        ({"chunk": "2"}, "chunk must be a whole number"),
        ({"chunk": 0}, "chunk must be at least 1"),
    ],
)
def test_what_score_cannot_mean_is_refused(served: ExportedModel, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        served.score(**({"history": [3, 14], "candidates": [7]} | TWO | asked))


@pytest.mark.parametrize("listed", [list, tuple, np.array, torch.tensor], ids=lambda listed: listed.__name__)
def test_whatever_holds_numbers_in_order_is_a_list(
    served: ExportedModel, listed: Callable[[Any], Any]
) -> None:
    wanted = served.recommend([3, 14], times=[1, 2], k=2, filter_seen=True)
    seen = np.bool_(True)
    found = served.recommend(listed([3, 14]), times=listed([1, 2]), k=np.int64(2), filter_seen=seen)
    assert found == wanted
    users = [listed([3, 14]), listed([3, 14])]
    assert served.recommend(users, times=[[1, 2], [1, 2]], k=2) == [wanted, wanted]
    less = served.recommend([3, 14], times=[1, 2], k=2, exclude=listed([wanted[0][0]]))
    assert less[0] == wanted[1]
    assert served.unknown(listed([3, 99, 14, 99])) == [99]


@pytest.mark.parametrize("listed", [torch.tensor, np.array], ids=["torch.tensor", "array"])
def test_users_as_rows_of_one_array_are_users(served: ExportedModel, listed: Callable[[Any], Any]) -> None:
    wanted = served.recommend([[3, 14], [7, 3]], times=[[1, 2], [3, 4]], k=2)
    assert served.recommend(listed([[3, 14], [7, 3]]), times=listed([[1, 2], [3, 4]]), k=2) == wanted


def test_a_file_of_the_export_is_no_request(served: ExportedModel) -> None:
    with pytest.raises(DataError, match="history must be a list of items"):
        served.recommend(Path("history"), times=[1])
