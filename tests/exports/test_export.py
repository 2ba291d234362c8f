"""Export: what was trained is what is served."""

from __future__ import annotations

import json
import math
import tempfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from freescale.data.batches.examples import Examples
from freescale.embedding import SGD, DirectMap, HashMap
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import CheckpointError, DataError
from freescale.exports.export import write_export
from freescale.exports.opened_export import load_export
from freescale.exports.requests.recommendations import best
from freescale.kernels import SequenceLayout
from freescale.model.compression.token_cache import TokenCache
from freescale.model.heads import RetrievalHead
from freescale.model.parts.moe import moe_layers
from freescale.model.recommender import Recommender, make_encoder
from freescale.train.item_vectors import IdItems
from tests.list_source import ListSource
from tests.other_user import as_other_user, only_root

DIM, MAX_LENGTH = 6, 5
HISTORY = [3, 90, 14, 3, 25, 61, 7, 12]
CATALOG = np.array([3, 7, 12, 14, 25, 61, 90, 91, 92, 500], dtype=np.int64)


def make_parts(
    kind="hstu",
    *,
    normalize=True,
    id_map=None,
    dtype=torch.float32,
    time_bias=True,
    ffn=None,
    segments=None,
    seed=5,
):
    torch.manual_seed(seed)
    shape = {"kind": kind, "dim": DIM, "layers": 2, "heads": 2, "max_length": MAX_LENGTH}
    if segments is not None:
        shape |= {"segments": segments, "max_length": 12}
    shape |= {"position_bias": True, "time_bias": time_bias, "ffn": ffn}
    model = Recommender(encoder=make_encoder(**shape, dropout=0.3), head=RetrievalHead(normalize=normalize))
    for param in model.parameters():
        param.data.normal_(std=0.4)
    for _, layer in moe_layers(model):
        layer.router.bias.normal_()
    id_map = id_map or DirectMap(501)
    table = TableSpec(
        name="item", num_rows=id_map.num_rows, dim=DIM, optimizer=SGD(), dtype=dtype, init_std=1.0
    )
    return {
        "model": model.to(torch.float32 if dtype == torch.bfloat16 else dtype).eval(),
        "embedding": ShardedEmbedding([table]),
        "id_map": id_map,
        "catalog": CATALOG,
        "encoder": shape,
    }


def export(folder, parts, **facts):
    table = {"embedding": parts["embedding"], "id_map": parts["id_map"]}
    rest = {name: part for name, part in parts.items() if name not in table}
    items = IdItems(**table, device=torch.device("cpu"))
    return write_export(folder, **rest, items=items, facts=facts)


def scores_in_training(parts, history):
    """Score of every catalogue item after a history, by the parts that are trained: examples, table, model."""
    source = ListSource([[*history, history[-1]]])
    batch = Examples(source=source, split="test", max_length=MAX_LENGTH).batch([0])
    model, table, id_map = parts["model"], parts["embedding"].tables["item"], parts["id_map"]
    rows = table.weight.to(next(model.parameters()).dtype)
    with torch.no_grad():
        batch = batch.with_tokens(item_index=id_map.rows(batch.tokens["item"]))
        state = model.states(rows, batch, SequenceLayout(batch.offsets))[-1]
        items = rows[id_map.rows(torch.from_numpy(CATALOG))]
        return dict(
            zip(CATALOG.tolist(), (model.head.candidates(items) @ model.head.queries(state)).tolist())
        )


def times_of(history):
    """The time stamps of `ListSource`, and that of the event after the last."""
    times = [100 * n + item for n, item in enumerate(history)]
    return {"times": times, "request_time": 100 * len(history) + history[-1]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": False},
        {"kind": "sasrec", "time_bias": False},
        {"id_map": HashMap(50)},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"ffn": {"kind": "moe", "hidden": 8, "num_experts": 5, "top_k": 2, "shared": 1}},
        {"ffn": {"kind": "dense", "hidden": 8, "activation": "relu2"}},
    ],
    ids=["hstu", "dot product", "sasrec", "hashed ids", "float64", "bfloat16 table", "experts", "dense ffn"],
)
def test_recommendations_have_the_scores_of_training(tmp_path, options):
    parts = make_parts(**options)
    served = load_export(export(tmp_path / "out", parts))
    wanted = scores_in_training(parts, HISTORY)
    times = times_of(HISTORY) if options.get("kind") != "sasrec" else {}
    got = dict(served.recommend(HISTORY, k=100, filter_seen=False, **times))
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    top = served.recommend(HISTORY, k=3, **times)
    unseen = sorted((i for i in wanted if i not in HISTORY), key=lambda i: -wanted[i])
    assert [item for item, _ in top] == unseen[:3]


def test_times_that_a_model_has_no_use_for_are_told(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts(time_bias=False)))
    with pytest.warns(UserWarning, match="times are not used"):
        served.recommend([3, 14], times=[10, 20])


def test_no_more_than_the_unseen_items_are_recommended(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts()))
    assert {item for item, _ in served.recommend(HISTORY, k=100, **times_of(HISTORY))} == {91, 92, 500}
    everything = CATALOG.tolist()
    assert served.recommend(everything, k=5, times=list(range(len(everything)))) == []


@pytest.mark.parametrize("times", [["2026-01-01", "2026-01-02"], [datetime(2026, 1, 1)] * 2, [10, math.nan]])
def test_times_that_are_no_seconds_are_refused_by_name(tmp_path, times):
    """Before: an error of int() or numpy, or nothing at all."""
    served = load_export(export(tmp_path / "out", make_parts()))
    with pytest.raises(DataError, match=r"times must be numbers\n.*\n.*seconds since 1970"):
        served.recommend([3, 14], times=times)
    with pytest.raises(DataError, match="times must be numbers"):
        served.recommend([3, 14], times=[10, 20], request_time="now")


def test_milliseconds_are_told(tmp_path):
    """Before they were taken for seconds without a word, and all differences were a thousand times as long."""
    served = load_export(export(tmp_path / "out", make_parts()))
    with pytest.warns(UserWarning, match="divide milliseconds by 1000"):
        served.recommend([3, 14], times=[1767225600000, 1767225601000])


def test_unknown_items_are_left_out_with_their_times(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts()))
    plain = served.recommend([3, 14, 7], times=[10, 20, 30], request_time=40, k=3)
    assert served.recommend([99, 3, 14, 12345, 7], times=[5, 10, 20, 25, 30], request_time=40, k=3) == plain
    with pytest.raises(DataError, match="no event of the history"):
        served.recommend([99], times=[1])
    with pytest.raises(DataError, match="no event of the history"):
        served.recommend([], times=[])


def test_the_request_comes_at_the_last_event_unless_said_otherwise(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts()))
    at_once = served.recommend([3, 14], times=[10, 20], k=3)
    assert served.recommend([3, 14], times=[10, 20], request_time=20, k=3) == at_once
    assert served.recommend([3, 14], times=[10, 20], request_time=10**7, k=3) != at_once


def test_a_history_that_is_told_backwards_is_refused_and_an_early_request_told(tmp_path):
    """Before: a history newest first was read as it came, and gave other items without a word."""
    served = load_export(export(tmp_path / "out", make_parts()))
    with pytest.raises(DataError, match="20 and then 10, events 1 and 2"):
        served.recommend([3, 14, 7], times=[20, 20, 10])
    with pytest.warns(UserWarning, match="request_time 5 is before the last event, 20"):
        served.recommend([3, 14], times=[10, 20], request_time=5)
    with pytest.raises(DataError, match="no event of the history"):
        served.recommend([99], times=[10], request_time=5)


def test_times_are_asked_for_and_must_match_the_history(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts()))
    with pytest.raises(DataError, match="times="):
        served.recommend([3, 14])
    with pytest.raises(DataError, match="3 events, 2 times"):
        served.recommend([3, 14, 7], times=[1, 2])


@pytest.mark.parametrize("bad", [[3.5, 14], [3.0, 14.0], ["3"], [True], [2**70]])
def test_items_that_are_not_whole_numbers_are_refused(tmp_path, bad):
    served = load_export(export(tmp_path / "out", make_parts()))
    times = list(range(len(bad)))
    with pytest.raises(DataError, match="items must be whole numbers"):
        served.recommend(bad, times=times)
    with pytest.raises(DataError, match="items must be whole numbers"):
        served.recommend([3], times=[1], exclude=bad)


@pytest.mark.parametrize("k", [0, -1])
def test_at_least_one_item_is_asked_for(tmp_path, k):
    served = load_export(export(tmp_path / "out", make_parts()))
    with pytest.raises(DataError, match="k must be at least 1"):
        served.recommend([3, 14], times=[1, 2], k=k)


def test_the_folder_holds_weights_items_and_a_manifest_and_no_pickle(tmp_path):
    parts = make_parts()
    folder = export(tmp_path / "a" / "out", parts, trained_steps=12)
    assert sorted(path.name for path in folder.iterdir()) == [
        "items.parquet",
        "manifest.json",
        "model.safetensors",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["num_items"] == len(CATALOG)
    assert manifest["trained_steps"] == 12
    table = pq.read_table(folder / "items.parquet")
    assert table.column("item").to_pylist() == CATALOG.tolist()
    rows = parts["id_map"].rows(torch.from_numpy(CATALOG))
    assert table.column("vector").to_pylist() == parts["embedding"].tables["item"].weight[rows].tolist()


def test_large_catalogues_are_written_in_chunks(tmp_path, monkeypatch):
    parts = make_parts()
    whole = load_export(export(tmp_path / "whole", parts))
    monkeypatch.setattr("freescale.exports.export._CHUNK_ITEMS", 3)
    chunked = load_export(export(tmp_path / "chunked", parts))
    assert torch.equal(chunked.vectors, whole.vectors)
    assert chunked.items.tolist() == CATALOG.tolist()


def test_an_empty_folder_is_used_and_a_full_one_refused(tmp_path):
    (tmp_path / "out").mkdir()
    folder = export(tmp_path / "out", make_parts())
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(DataError, match="not empty"):
        export(folder, make_parts("sasrec"))
    assert (folder / "manifest.json").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError):
        export(tmp_path / "file", make_parts())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    parts = make_parts()
    with pytest.raises(DataError, match="outside the table"):
        export(tmp_path / "out", {**parts, "catalog": np.array([1, 9999])})
    assert list(tmp_path.iterdir()) == []


def rewrite_manifest(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


BAD = {
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "no items": lambda f: (f / "items.parquet").unlink(),
    "garbled manifest": lambda f: (f / "manifest.json").write_text("{"),
    "manifest is a list": lambda f: (f / "manifest.json").write_text("[]"),
    "another format": lambda f: rewrite_manifest(f, format="other"),
    "another version": lambda f: rewrite_manifest(f, version=3),
    "no encoder": lambda f: rewrite_manifest(f, encoder=None),
    "another encoder": lambda f: rewrite_manifest(f, encoder={"kind": "hstu", "dim": 3}),
    "unknown encoder": lambda f: rewrite_manifest(
        f, encoder=json.loads((f / "manifest.json").read_text())["encoder"] | {"kind": "gpt"}
    ),
    "no head": lambda f: rewrite_manifest(f, head=None),
    "unknown head": lambda f: rewrite_manifest(f, head={"name": "oracle", "options": {}}),
    "a head that cannot retrieve": lambda f: rewrite_manifest(f, head={"name": "ranking", "options": {}}),
    "unknown options": lambda f: rewrite_manifest(f, head={"name": "retrieval", "options": {"warmth": 1}}),
    "truncated weights": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-9]
    ),
    "truncated items": lambda f: (f / "items.parquet").write_bytes((f / "items.parquet").read_bytes()[:-9]),
    "pickled weights": lambda f: torch.save({"a": torch.zeros(1)}, f / "model.safetensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_refused_in_one_message(tmp_path, kind):
    folder = export(tmp_path / "out", make_parts())
    BAD[kind](folder)
    with pytest.raises(CheckpointError, match="not a readable FreeScale export") as caught:
        load_export(folder)
    assert str(folder) in str(caught.value)
    assert "freescale export" in str(caught.value)


@pytest.mark.parametrize("normalize", [True, False])
def test_an_export_of_the_first_version_still_opens(tmp_path, normalize):
    folder = export(tmp_path / "out", make_parts(normalize=normalize))
    wanted = load_export(folder).recommend(HISTORY, k=3, **times_of(HISTORY))
    manifest = json.loads((folder / "manifest.json").read_text())
    first = {
        "format": "freescale-export",
        "version": 1,
        "freescale": "0.1.0",
        "encoder": {
            "kind": "hstu",
            "dim": DIM,
            "layers": 2,
            "heads": 2,
            "max_length": MAX_LENGTH,
            "position_bias": True,
            "time_bias": True,
            "segments": None,
            "kv_heads": None,
            "ffn_dim": None,
            "rope_base": 10000.0,
            "ffn": None,
        },
        "normalize": normalize,
        "num_items": len(CATALOG),
        "fingerprint": manifest["fingerprint"],
        "trained_steps": 12,
    }
    (folder / "manifest.json").write_text(json.dumps(first))
    assert load_export(folder).recommend(HISTORY, k=3, **times_of(HISTORY)) == wanted
    rewrite_manifest(folder, normalize=not normalize)
    assert load_export(folder).recommend(HISTORY, k=3, **times_of(HISTORY)) != wanted


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a readable"):
        load_export(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        TimeoutError(110, "Connection timed out"),
        MemoryError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_damage_is_not_told_as_damage(tmp_path, monkeypatch, error):
    def broken(*args, **options):
        raise error

    folder = export(tmp_path / "out", make_parts())
    monkeypatch.setattr("freescale.exports.export_reader.make_encoder", broken)
    with pytest.raises(type(error)) as caught:
        load_export(folder)
    assert caught.value is error


def test_an_error_with_a_next_step_of_its_own_keeps_it(tmp_path, monkeypatch):
    def refused(*args, **options):
        raise DataError("the words of features are of another time", got="3", next_step="train again")

    folder = export(tmp_path / "out", make_parts())
    monkeypatch.setattr("freescale.exports.export_reader.make_encoder", refused)
    with pytest.raises(DataError, match=r"got: +3\n +next: +train again"):
        load_export(folder)


def test_weights_of_another_shape_than_the_manifest_says_are_refused(tmp_path):
    folder = export(tmp_path / "out", make_parts())
    shape = json.loads((folder / "manifest.json").read_text())["encoder"]
    rewrite_manifest(folder, encoder=shape | {"layers": 1})
    with pytest.raises(CheckpointError, match="not a readable FreeScale export"):
        load_export(folder)


@only_root
def test_a_folder_of_another_user_is_not_called_damaged(tmp_path):
    def told():
        try:
            load_export(folder)
        except Exception as error:
            return type(error).__name__
        return "read"

    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        Path(parent).chmod(0o755)
        folder = export(Path(parent) / "out", make_parts())
        (folder / "manifest.json").chmod(0o600)
        assert as_other_user(told) == "PermissionError"


SEGMENTS = {"recent": 3, "length": 4, "summaries": 2}
LONG = [3, 90, 14, 3, 25, 61, 7, 12, 91, 3, 14]


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_a_request_from_a_cache_scores_as_one_with_the_whole_history(tmp_path, kind):
    parts = make_parts(kind, time_bias=kind == "hstu", segments=SEGMENTS)
    served = load_export(export(tmp_path / "out", parts))
    times = list(range(100, 100 + 37 * len(LONG), 37))
    timed = {"times": times, "request_time": 999} if kind == "hstu" else {}
    wanted = dict(served.recommend(LONG, k=100, filter_seen=False, **timed))

    def parts_of(first, last, name="next_time"):
        after = times[last] if last < len(times) else 999
        return {"times": times[first:last], name: after} if kind == "hstu" else {}

    cache = served.compress(LONG[:8], **parts_of(0, 8))
    assert cache.sizes == (4, 4)
    first = served.compress(LONG[:4], **parts_of(0, 4))
    grown = served.compress(LONG[4:8], **parts_of(4, 8), cache=TokenCache.from_bytes(first.to_bytes()))
    for kept in (cache, grown):
        recent = parts_of(8, 11, "request_time")
        got = dict(served.recommend(LONG[8:], k=100, filter_seen=False, cache=kept, **recent))
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    unseen = served.recommend(LONG[8:], k=100, cache=cache, exclude=LONG[:8], **recent)
    assert {item for item, _ in unseen} == {92, 500}


def test_a_cache_of_another_export_is_refused(tmp_path):
    one, two = (
        load_export(export(tmp_path / str(seed), make_parts(time_bias=False, segments=SEGMENTS, seed=seed)))
        for seed in (5, 6)
    )
    cache = one.compress(LONG[:8])
    two.compress(LONG[:8])
    with pytest.raises(DataError, match="made by another model"):
        two.recommend(LONG[8:], cache=cache)
    other = load_export(
        export(tmp_path / "other", make_parts(time_bias=False, segments={**SEGMENTS, "length": 5}))
    )
    with pytest.raises(DataError, match="length 4"):
        other.recommend(LONG[8:], cache=cache)


def test_what_compressing_needs_is_asked_for(tmp_path):
    served = load_export(export(tmp_path / "timed", make_parts(segments=SEGMENTS)))
    with pytest.raises(DataError, match="next_time"):
        served.compress(LONG[:4], times=[1, 2, 3, 4])
    whole = load_export(export(tmp_path / "whole", make_parts(time_bias=False)))
    with pytest.raises(DataError, match=r"segments\.recent"):
        whole.compress(LONG)


def test_only_the_latest_events_the_model_has_learnt_are_compressed(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts(time_bias=False, segments=SEGMENTS)))
    long = served.compress(LONG * 3)
    assert long.num_events == 12 - 3
    assert torch.equal(long.keys, served.compress((LONG * 3)[-9:]).keys)
    assert torch.equal(long.keys, served.compress(torch.tensor(LONG * 3)).keys)
    assert served.compress([777, 778]) is None
    with pytest.raises(DataError, match="longer than the model has learnt"):
        served.compress(LONG[:4], cache=long)


def test_many_users_get_what_each_gets_alone_whatever_is_given_for_them(tmp_path, monkeypatch):
    served = load_export(export(tmp_path / "out", make_parts()))
    histories = [HISTORY, [91], [3, 14, 7], [500, 92, 777]]
    times = [[100 * n for n in range(len(history))] for history in histories]
    for budget in (1 << 16, 5):
        monkeypatch.setattr("freescale.exports.requests.recommendations._TOKENS", budget)
        for more in (
            {},
            {"exclude": [92]},
            {"exclude": [[92], [], [3, 90], [12]], "filter_seen": False},
            {"request_time": 10**6},
            {"request_time": [900, 950, 10**6, 10**7]},
        ):
            together = served.recommend(histories, times=times, k=4, **more)
            assert len(together) == 4
            for n, answer in enumerate(together):
                mine = {
                    name: value if name == "filter_seen" else one(value, n) for name, value in more.items()
                }
                alone = served.recommend(histories[n], times=times[n], k=4, **mine)
                assert [item for item, _ in answer] == [item for item, _ in alone]
                assert [s for _, s in answer] == pytest.approx([s for _, s in alone], rel=1e-5, abs=1e-6)


def one(value, n):
    """What a batch was given for a user: its own, or the same for all."""
    return value[n] if isinstance(value, list) and (isinstance(value[0], list) or len(value) == 4) else value


def test_what_a_batch_is_given_must_fit_its_users(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts()))
    with pytest.raises(DataError, match=r"times must be one for each user(.|\n)*2 histories, 1 times"):
        served.recommend([[3], [14]], times=[[1]])
    with pytest.raises(DataError, match="request_time must be one for each user"):
        served.recommend([[3], [14]], times=[[1], [1]], request_time=[5])
    with pytest.raises(DataError, match="user 1 of the batch: \\[99\\]"):
        served.recommend([[3], [99]], times=[[1], [1]])


def test_users_with_and_without_a_cache_are_asked_for_together(tmp_path):
    served = load_export(export(tmp_path / "out", make_parts(time_bias=False, segments=SEGMENTS)))
    cache = served.compress(LONG[:8])
    together = served.recommend([LONG[8:], LONG, [7, 12]], cache=[cache, None, None], k=5, filter_seen=False)
    alone = [
        served.recommend(LONG[8:], cache=cache, k=5, filter_seen=False),
        served.recommend(LONG, k=5, filter_seen=False),
        served.recommend([7, 12], k=5, filter_seen=False),
    ]
    for answer, wanted in zip(together, alone, strict=True):
        assert [item for item, _ in answer] == [item for item, _ in wanted]


@pytest.mark.parametrize("filters", [True, False])
def test_seen_items_are_left_out_as_the_model_was_evaluated(tmp_path, filters):
    folder = export(tmp_path / "out", make_parts(), evaluation={"filter_seen": filters})
    served = load_export(folder)
    asked = {"k": 100, **times_of(HISTORY)}
    usual = served.recommend(HISTORY, **asked)
    assert usual == served.recommend(HISTORY, filter_seen=filters, **asked)
    assert {item for item, _ in usual} == ({91, 92, 500} if filters else set(CATALOG.tolist()))
    assert usual != served.recommend(HISTORY, filter_seen=not filters, **asked)


def test_ties_go_to_the_smaller_id_as_in_evaluation():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, -torch.inf, 2.0, 2.0, 2.0], [-torch.inf] * 5])
    assert best(scores, 2) == [[(1, 3.0), (2, 3.0)], [(0, 2.0), (2, 2.0)], []]
    assert best(scores, 9)[0] == [(1, 3.0), (2, 3.0), (3, 3.0), (0, 1.0), (4, 0.0)]
    assert best(scores, 9)[1] == [(0, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
