"""A run over a log is published checkpoint by checkpoint, served, and refreshed while threads ask."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.app.commands.serve import serve
from freescale.app.run.opened_run import open_run, write_run_export
from freescale.app.serving.first_recommended import FirstRecommended
from freescale.app.serving.publishing import Published, compact_chain, publish_run
from freescale.app.serving.server import ChainServer
from freescale.data import LogSource, load_log
from freescale.errors import CheckpointError, ConfigError
from freescale.exports import ChainModel, exported_version, load_export, read_version
from freescale.exports.chains.chain import load_version
from freescale.recipe import load_config
from freescale.trace import read_published
from freescale.train import NextWindowEvaluation, Rule, load_run, read_meta, saved_in
from freescale.train.loop import train
from tests.grown_log import ON_A_LOG, events_of_day, grow
from tests.small_run import SMALL, make_run

DAYS = 5
HISTORY = {"history": [12, 20, 33], "times": [1, 2, 3], "k": 5}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run over five windows that has kept a checkpoint of each, and evicted ids on the way."""
    folder = tmp_path_factory.mktemp("trained")
    keys = (*ON_A_LOG, f"data.path={grow(folder, 0, DAYS)}", "run.eval_every=0")
    run, recorder = make_run(keys, folder / "run")
    train(run)
    config = load_config(None, [*SMALL, *keys, f"run.out={folder}/run"])
    (folder / "run" / "config.yaml").write_text(config.to_yaml())
    assert sum(event["evictions"] for event in recorder.of("ids")) > 10
    return folder


@pytest.fixture(scope="module")
def chain(trained: Path) -> tuple[Path, list[Published]]:
    """Its checkpoints as a chain."""
    told: list[Published] = []
    assert publish_run(trained / "run", trained / "chain", tell=told.append) == DAYS
    return trained / "chain", told


def test_base_and_deltas_are_the_full_export_of_every_checkpoint(
    trained: Path, chain: tuple[Path, list[Published]], tmp_path: Path
) -> None:
    config, run, _ = open_run(trained / "run", device="cpu")
    deleted = 0
    for seq, path in enumerate(saved_in(trained / "run" / "checkpoints")):
        load_run(run, path)
        full = read_version(
            write_run_export(tmp_path / path.name, config, run, read_meta(path), trained / "run")
        )
        part = tmp_path / f"chain-{seq}"
        shutil.copytree(chain[0], part)
        current = json.loads((part / "current.json").read_text())
        current |= {"seq": seq, "fingerprint": full.fingerprint}
        (part / "current.json").write_text(json.dumps(current))
        found = load_version(part)[1]
        assert found.ids.tolist() == full.ids.tolist()
        assert found.vectors.tobytes() == full.vectors.tobytes()
        assert found.manifest == full.manifest
        if seq:
            deleted += json.loads((part / f"delta-{seq:08d}" / "delta.json").read_text())["deleted"]
    assert deleted > 0
    assert publish_run(trained / "run", chain[0]) == 0


def test_a_window_is_judged_among_the_items_that_its_version_can_recommend(
    trained: Path, tmp_path: Path
) -> None:
    config, run, _ = open_run(trained / "run", device="cpu")
    path = saved_in(trained / "run" / "checkpoints")[DAYS - 2]
    load_run(run, path)
    served = read_version(write_run_export(tmp_path / "full", config, run, read_meta(path), trained / "run"))
    assert isinstance(run.evaluation, NextWindowEvaluation)
    examples, evaluator = run.evaluation.examples_of(DAYS - 1), run.evaluation.evaluator
    source, items = examples.source, examples.source.items.ids
    assert len(np.setdiff1d(items, served.ids)) > 5  # evicted
    parts = list(evaluator.items.catalogue(items, chunk=7).parts())
    assert (
        items[torch.cat([numbers for numbers, _ in parts])].tolist()
        == np.intersect1d(items, served.ids).tolist()
    )
    # In a list of all items each is found that can be recommended at all.
    whole = replace(evaluator, cutoffs=(len(items),), rule=Rule(filter_seen=False))
    rows = np.flatnonzero(examples.lengths() > 0)
    targets = [int(examples.batch([row]).tokens["target"][-1]) for row in rows]
    assert whole.run(examples)[f"hr@{len(items)}"] == pytest.approx(np.isin(targets, served.ids).mean())
    assert len(rows) == int((~source.unknown).sum())


def test_every_publication_is_told_with_the_age_of_items_that_it_brings(
    trained: Path, chain: tuple[Path, list[Published]]
) -> None:
    noted = read_published(trained / "run")
    assert [event["seq"] for event in noted] == list(range(DAYS))
    log = load_log(trained / "log")
    first: dict[int, int] = {}
    for day in range(DAYS):
        for _, item, moment in events_of_day(day):
            first[item] = min(first.get(item, moment), moment)
    early = {item for item in first if first[item] <= log.windows[0].last}
    told: set[int] = set()
    for event, published in zip(noted, chain[1]):
        assert event["num_bytes"] == published.num_bytes > 0
        assert event["asked"] > 10
        for item, age in event["fresh"]:
            assert item not in early | told
            assert age == log.windows[event["windows"] - 1].last - first[item] >= 0
            told.add(item)
    assert len(told) > 5
    again = FirstRecommended(LogSource(trained / "log"), noted)
    model = exported_version(load_version(chain[0])[1])
    assert again.ask(model, windows=DAYS)["fresh"] == []


def test_what_is_no_chain_is_told_to_be_published(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "manifest.json").write_text("{}")
    for name, what in (("empty", "not a chain"), ("export", "an export, not a chain"), ("no", "not a chain")):
        with pytest.raises(ConfigError, match=f"(?s){what}.*freescale publish"):
            serve(tmp_path / name)


def test_a_version_is_swapped_without_a_mixed_or_failed_answer(
    trained: Path, chain: tuple[Path, list[Published]], tmp_path: Path
) -> None:
    wanted = _answers(chain[0], tmp_path)
    place = tmp_path / "followed"
    shutil.copytree(chain[0], place)
    _point(place, 0, tmp_path)
    model = load_export(place)
    assert isinstance(model, ChainModel)
    assert model.refresh() is False
    server = ChainServer(model, refresh_s=0.02)
    threading.Thread(target=server.serve, daemon=True).start()
    found: list[dict[str, Any]] = []
    try:
        done = threading.Event()
        askers = [threading.Thread(target=_ask_until, args=(server.address, found, done)) for _ in range(3)]
        for asker in askers:
            asker.start()
        for seq in range(1, DAYS):
            _point(place, seq, tmp_path)
            for _ in range(500):
                if model.seq == seq and any(answer["seq"] == seq for answer in found):
                    break
                done.wait(0.02)
            assert model.seq == seq
        done.set()
        for asker in askers:
            asker.join()
        health = json.loads(urllib.request.urlopen(f"{server.address}/health").read())
    finally:
        server.close()
    assert {answer["seq"] for answer in found} == set(range(DAYS))
    for answer in found:
        assert answer["items"] == wanted[answer["seq"]]
    assert health["requests"] == len(found)
    assert (health["failures"], health["refreshes"], health["seq"]) == (0, DAYS - 1, DAYS - 1)
    assert 0 < health["p50_ms"] <= health["p99_ms"]


def test_a_delta_that_is_missing_leaves_the_version_before(
    chain: tuple[Path, list[Published]], tmp_path: Path
) -> None:
    place = tmp_path / "followed"
    shutil.copytree(chain[0], place)
    _point(place, 1, tmp_path)
    model = ChainModel(place)
    before = model.recommend(**HISTORY)
    shutil.rmtree(place / "delta-00000003")
    _point(place, DAYS - 1, tmp_path)
    with pytest.raises(CheckpointError, match="delta-00000003 is missing"):
        model.refresh()
    assert model.seq == 1
    assert model.recommend(**HISTORY) == before
    shutil.copytree(chain[0] / "delta-00000003", place / "delta-00000003")
    assert model.refresh() is True
    _point(place, 1, tmp_path)
    with pytest.raises(CheckpointError, match="the chain goes back"):
        model.refresh()


def test_a_server_follows_on_after_an_error_that_has_nothing_to_do_with_the_chain(
    chain: tuple[Path, list[Published]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told, looked = ChainModel(chain[0]), [], threading.Event()
    errors = [KeyError("parent"), PermissionError(13, "Permission denied"), *[MemoryError()] * 3]

    def refresh() -> bool:
        if errors:
            raise errors.pop()
        looked.set()
        return False

    monkeypatch.setattr(model, "refresh", refresh)
    server = ChainServer(model, refresh_s=0.01, tell=told.append)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        assert looked.wait(20)
    finally:
        server.close()
    assert [
        line.removeprefix("the version before goes on answering: ").split(" in ")[0] for line in told
    ] == [
        "MemoryError",
        "PermissionError: [Errno 13] Permission denied",
        "KeyError: 'parent'",
    ]


def test_a_model_behind_a_compacted_chain_loads_the_new_base(
    chain: tuple[Path, list[Published]], tmp_path: Path
) -> None:
    place = tmp_path / "followed"
    shutil.copytree(chain[0], place)
    whole = load_version(place)[1]
    _point(place, 1, tmp_path)
    model = ChainModel(place)
    shutil.copy(chain[0] / "current.json", place / "current.json")
    assert compact_chain(place).fingerprint == whole.fingerprint
    assert model.refresh() is True
    assert model.served.version.fingerprint == whole.fingerprint


def test_a_server_says_what_is_wrong_and_lets_nobody_else_in(chain: tuple[Path, list[Published]]) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        ChainServer(ChainModel(chain[0]), host="0.0.0.0")
    server = ChainServer(ChainModel(chain[0]), token="secret")
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            _ask(server.address, HISTORY)
        assert _ask(server.address, HISTORY, token="secret")["seq"] == DAYS - 1
        for asked, said in (
            ({"history": []}, "no event of the history"),
            ({"histry": [1]}, "nobody knows"),
            ({"history": [12], "times": [1], "k": 0}, "k must be at least 1"),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                _ask(server.address, asked, token="secret")
            assert said in caught.value.read().decode()
    finally:
        server.close()


def _point(chain: Path, seq: int, scratch: Path) -> None:
    """Let a chain end at an earlier version, as it did when that was published."""
    said = json.loads((chain / "current.json").read_text())
    delta = chain / f"delta-{seq:08d}" / "delta.json"
    facts = json.loads((delta if seq else chain / "base-00000000" / "manifest.json").read_text())
    said |= {"seq": seq, "fingerprint": facts["fingerprint"]}
    aside = scratch / "current.json"
    aside.write_text(json.dumps(said))
    aside.replace(chain / "current.json")


def _answers(chain: Path, tmp_path: Path) -> list[Any]:
    """What every version answers."""
    place = tmp_path / "each"
    shutil.copytree(chain, place)
    found = []
    for seq in range(DAYS):
        _point(place, seq, tmp_path)
        found.append(json.loads(json.dumps(ChainModel(place).recommend(**HISTORY))))
    return found


def _ask(address: str, asked: dict[str, Any], token: str | None = None) -> dict[str, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{address}/recommend", json.dumps(asked).encode(), headers)
    answer: dict[str, Any] = json.loads(urllib.request.urlopen(request, timeout=30).read())
    return answer


def _ask_until(address: str, found: list[dict[str, Any]], done: threading.Event) -> None:
    while not done.is_set():
        found.append(_ask(address, HISTORY))
