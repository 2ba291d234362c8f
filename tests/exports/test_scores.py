"""Scores of an exported model with tasks: what was trained, with a cache or without, in any chunks, for any users."""

from __future__ import annotations

import math

import pytest
import torch

from freescale.embedding import DirectMap
from freescale.errors import DataError
from freescale.exports.export import write_export
from freescale.exports.opened_export import load_export
from freescale.model import Recommender, make_encoder, make_head
from freescale.train.item_vectors import IdItems
from tests.exports.test_export import CATALOG, DIM, make_parts

TASKS = ("click = action > 0", "watched = number seconds log where click")
HISTORY, TIMES = [3, 90, 14, 3, 25], [10, 500, 700, 9000, 9100]
SHOWN = [7, 12, 500, 61]


def export(folder, *, late=False, time_bias=True, **options):
    parts = make_parts(dtype=torch.float64, id_map=DirectMap(501))
    torch.manual_seed(1)
    shape = {"kind": "hstu", "dim": DIM, "layers": 2, "heads": 2, "max_length": 6}
    shape |= {"position_bias": True, "time_bias": time_bias}
    head = make_head("tasks", dim=DIM, options={"tasks": TASKS, "late": late, **options})
    model = Recommender(encoder=make_encoder(**shape, dropout=0.2), head=head).double().eval()
    for param in model.parameters():
        param.data.normal_(std=0.4)
    items = IdItems(embedding=parts["embedding"], id_map=parts["id_map"], device=torch.device("cpu"))
    write_export(folder, model=model, items=items, catalog=CATALOG, encoder=shape, facts={})
    return load_export(folder)


def numbers(scores):
    return [[one["click"], one["watched"]] for one in scores]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export(tmp_path_factory.mktemp("scores") / "export")


def test_scores_are_the_same_alone_together_in_chunks_and_from_a_cache(model):
    asked = {"times": TIMES, "request_time": 9500}
    wanted = numbers(model.score(HISTORY, SHOWN, **asked))
    assert all(0 < click < 1 for click, _ in wanted)
    alone = [numbers(model.score(HISTORY, [item], **asked))[0] for item in SHOWN]
    cache = model.remember(HISTORY[:3], times=TIMES[:3])
    assert len(cache) == 2
    cache = model.remember(torch.tensor(HISTORY[2:]), times=TIMES[2:], cache=cache)
    assert len(cache) == 4
    latest = {"times": TIMES[4:], "request_time": 9500, "cache": cache}
    found = [alone, numbers(model.score(HISTORY[4:], SHOWN, **latest))]
    found += [numbers(model.score(HISTORY, SHOWN, **asked, chunk=chunk)) for chunk in (1, 3, 10)]
    found += [numbers(model.score(HISTORY[4:], SHOWN, **latest, chunk=3))]
    found += [numbers(model.score(torch.tensor(HISTORY), torch.tensor(SHOWN), **asked))]
    for got in found:
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=0, atol=1e-11)


def test_many_users_in_a_call(model):
    both = model.score([HISTORY, []], [SHOWN, [7]], times=[TIMES, []], request_time=[9500, 9600])
    assert numbers(both[0]) == pytest.approx(
        [pytest.approx(x) for x in numbers(model.score(HISTORY, SHOWN, times=TIMES, request_time=9500))]
    )
    assert numbers(both[1])[0] == pytest.approx(numbers(model.score([], [7], request_time=9600))[0])


def test_unknown_candidates_have_no_scores_and_known_ones_keep_theirs(model):
    got = model.score(HISTORY, [7, 4711, 12], times=TIMES)
    assert got[1] is None
    assert numbers([got[0], got[2]]) == [
        pytest.approx(x) for x in numbers(model.score(HISTORY, [7, 12], times=TIMES))
    ]
    assert model.score(HISTORY, [], times=TIMES) == []


def test_late_models_are_served_without_caches(tmp_path):
    model = export(tmp_path / "late", late=True, time_bias=False)
    got = numbers(model.score(HISTORY, SHOWN))
    assert numbers(model.score(HISTORY, SHOWN[::-1]))[::-1] == [pytest.approx(x) for x in got]
    with pytest.raises(DataError, match="late"):
        model.remember(HISTORY)


def test_what_cannot_be_asked_is_refused(model, tmp_path):
    with pytest.raises(DataError, match="ranks candidates"):
        model.recommend(HISTORY, times=TIMES)
    with pytest.raises(DataError, match="when it comes"):
        model.score([], [7])
    with pytest.raises(DataError, match="longer than the model has learnt"):
        model.remember([3, 7] * 5, times=list(range(10)))
    with pytest.raises(DataError, match="latest event"):
        model.score([], [7], request_time=3, cache=model.remember(HISTORY, times=TIMES))
    with pytest.raises(DataError, match="its candidates"):
        model.score([HISTORY], [[7], [12]], times=[TIMES])
    assert not math.isnan(numbers(model.score([3] * 50, [7], times=list(range(50))))[0][0])
