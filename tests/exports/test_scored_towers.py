"""MLPerf's DLRMv4 in a service: context tokens of each candidate, the last events of each kind, towers of items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.app.run.opened_run import export_run, open_run
from freescale.errors import DataError
from freescale.exports.opened_export import load_export
from freescale.kernels import SequenceLayout
from freescale.model import target_index
from tests.effort import slow
from tests.exports.test_scores import export
from tests.exports.test_served_features import trained
from tests.test_one_curve_mlperf import TINY

HOURS = [str(hour) for hour in range(24)]
NAMES = {0: [], 1: ["listened"], 2: ["liked"], 4: ["skipped"]}
RECIPES = {
    "towers": (*TINY, "model.dtype=float64"),
    "float32": (*TINY, "model.dtype=float32"),
    # Crosses of a candidate in front, and the last of each kind, without towers.
    "hstu": (
        *(each for each in TINY if not each.startswith(("tokens.", "model.", "head.towers", "head.hidden"))),
        *("model.dim=8", "model.dtype=float64", "model.heads=2"),
    ),
}


@pytest.fixture(scope="module", params=["towers", slow("float32"), "hstu"])
def asked(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]], Any]:
    """The exported model, some anchors of the test in words, and what evaluation predicts of them."""
    folder = tmp_path_factory.mktemp("towers")
    run = trained(folder / "run", (*RECIPES[request.param], "run.steps=3", "run.eval_every=3"))
    _, opened, _ = open_run(run, device="cpu")
    evaluator, examples = opened.evaluation.evaluator, opened.evaluation.test
    rows = np.linspace(0, len(examples.lengths()) - 1, 12).astype(np.int64)
    batch = examples.batch(rows)
    ready = evaluator.items.catalogue(examples.source.items.ids, chunk=1 << 16).look_up(batch)
    model = evaluator.model.eval()
    with torch.no_grad():
        states = model.states(ready.rows, ready.batch, SequenceLayout(batch.offsets), ready.tables)
        items = ready.rows[ready.batch.tokens["item_index"][target_index(ready.batch)]]
        wanted = torch.sigmoid(model.head.logits(states, items))[:, 0]
    users, events = (each[rows] for each in examples.index[:2])
    out = load_export(export_run(run, folder / "out"))
    told = [line.split(":")[0] for line in out.needs if "of every event" in line]
    requests = [in_words(examples.source, *each, told) for each in zip(users.tolist(), events.tolist())]
    assert max(len(each["history"]) for each in requests) > 60  # more than the window of the pools
    return out, requests, wanted.double().numpy()


def in_words(source: Any, user: int, event: int, told: list[str]) -> dict[str, Any]:
    """What a service would be asked about an anchor."""
    read = source.read([user])
    columns: dict[str, list[Any]] = {name: values.tolist() for name, values in read.columns.items()}
    columns["action"] = [NAMES[code] for code in columns["action"]]
    columns["hour"] = [HOURS[hour] for hour in columns["hour"]]
    columns["organic"] = [["recommended", "organic"][is_organic] for is_organic in columns["organic"]]
    return {
        "history": columns["item"][:event],
        "times": columns["time"][:event],
        "candidates": [columns["item"][event]],
        "features": {"user": int(read.users[0]), **{name: columns[name][:event] for name in told}},
        "candidate_features": {name: columns[name][event : event + 1] for name in ("hour", "organic")},
    }


def numbers(scores: Any) -> np.ndarray:
    return np.array([one["listened"] for one in scores])


def test_scores_are_those_of_evaluation(asked: Any) -> None:
    model, requests, wanted = asked
    assert wanted.std() > 1e-4
    got = np.concatenate([numbers(model.score(**each)) for each in requests])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    names = ("history", "times", "candidates", "features", "candidate_features")
    together = model.score(**{name: [each[name] for each in requests] for name in names})
    np.testing.assert_allclose(
        np.concatenate([numbers(each) for each in together]), wanted, rtol=0, atol=1e-6
    )


def test_candidates_have_context_tokens_of_their_own(asked: Any) -> None:
    model, requests, _ = asked
    request = requests[3]
    shown = [requests[n]["candidates"][0] for n in (1, 2, 3)]
    of_them = {"hour": ["3", "3", "17"], "organic": ["organic", None, "recommended"]}
    one = {name: request[name] for name in ("history", "times", "features")}
    alone = [
        numbers(
            model.score(**one, candidates=[item], candidate_features={k: [v[n]] for k, v in of_them.items()})
        )
        for n, item in enumerate(shown)
    ]
    unknown = [*shown[:1], 10**9, *shown[1:]]
    with_unknown = {name: [*values[:1], None, *values[1:]] for name, values in of_them.items()}
    for chunk in (None, 1, 2):
        got = model.score(**one, candidates=unknown, candidate_features=with_unknown, chunk=chunk)
        assert got[1] is None
        np.testing.assert_allclose(numbers([got[0], *got[2:]]), np.concatenate(alone), rtol=0, atol=1e-7)
    assert model.score(**one, candidates=[], candidate_features={}) == []


def test_what_a_service_cannot_do_is_refused(asked: Any) -> None:
    model, requests, _ = asked
    request = requests[0]
    with pytest.raises(DataError, match="tokens of their own"):
        model.remember(request["history"], times=request["times"], features=request["features"])
    with pytest.raises(DataError, match="needs to know hour of every candidate"):
        model.score(**{**request, "candidate_features": {}})
    without = {name: values for name, values in request["features"].items() if name != "action"}
    with pytest.raises(DataError, match="each action, which the request does not tell"):
        model.score(**{**request, "features": without})
    told = "\n".join(model.needs)
    if "hour: of every candidate" not in told:
        assert "hour: of every event" in told
        return
    hours = ["1"] * len(request["history"])
    with pytest.raises(DataError, match="hour of candidates alone"):
        model.score(**{**request, "features": {**request["features"], "hour": hours}})


def test_pools_that_requests_do_not_tell_are_refused(tmp_path: Path) -> None:
    pools = {"pools": "action", "pool_kinds": [0, 1], "pool_events": 3}
    with pytest.raises(DataError, match=r"head\.pools=action: a service finds the last of each kind"):
        export(tmp_path / "out", **pools)
    assert not (tmp_path / "out").exists()
