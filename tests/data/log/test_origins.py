"""Origins of a log: nothing is sealed twice, what is gone or changed is refused, a killed sealer goes on.

The plain contract is tried with an origin in memory; tables and brokers are real ones, where their packages are there.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from freescale import registry
from freescale.data import append_log, load_log
from freescale.data.log import sealer
from freescale.data.log.origin import Words, nothing_new, open_origin, unfinished
from freescale.errors import DataError
from tests.data.log.reference import Event, ReferenceLog, check
from tests.data.log.test_sealer import FIRST, SECOND

THIRD = [(1, 16, 40), (4, 16, 41), (2, 10, 42)]
TOPICS: dict[str, list[Event]] = {}


class Memory:
    """A list that grows, read by offsets."""

    kind = "memory"

    def __init__(self, where: str) -> None:
        self._name = where

    def describe(self) -> str:
        return f"memory:{self._name}"

    def new(self, before: list[Words]) -> Words:
        start = max([words["to"] for words in before if words["name"] == self._name], default=0)
        if start == len(TOPICS[self._name]):
            raise nothing_new(self.describe(), f"up to {start}")
        return {"kind": self.kind, "name": self._name, "from": start, "to": len(TOPICS[self._name])}

    def again(self, words: Words) -> Words:
        if words["name"] != self._name:
            raise unfinished(self.describe(), words["name"])
        return words

    def fetch(self, words: Words, work: Path) -> Path:
        events = TOPICS[self._name][words["from"] : words["to"]]
        lines = [json.dumps(dict(zip(("user", "item", "time"), event))) for event in events]
        (work / "events.jsonl").write_text("\n".join(lines) + "\n")
        return work / "events.jsonl"


@pytest.fixture
def memory(own_kinds: None) -> None:
    registry.register("origin", "memory")(Memory)
    TOPICS.clear()


@pytest.mark.usefixtures("memory")
def test_an_origin_is_read_on_where_the_log_ends(tmp_path: Path) -> None:
    reference = ReferenceLog(200)
    TOPICS["a"] = []
    for events in (FIRST, SECOND, THIRD):
        TOPICS["a"] += events
        log = append_log(tmp_path / "log", "memory:a").log
        reference.append(events)
        with pytest.raises(DataError, match="memory:a is in the log already"):
            append_log(tmp_path / "log", "memory:a")
    check(log, reference)
    assert [entry.origin["to"] for entry in log.windows] == [5, 10, 13]


@pytest.mark.usefixtures("memory")
def test_a_sealer_that_was_killed_reads_the_same_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TOPICS["a"], TOPICS["b"] = [*FIRST, *SECOND], [*FIRST]
    whole = append_log(tmp_path / "whole", "memory:a", every=3).log
    assert len(whole.windows) > 2

    class KilledError(Exception):
        pass

    def killed(log: Any) -> None:
        save(log)
        raise KilledError

    save = sealer.save_log
    monkeypatch.setattr(sealer, "save_log", killed)
    with pytest.raises(KilledError):
        append_log(tmp_path / "log", "memory:a", every=3)
    monkeypatch.setattr(sealer, "save_log", save)
    TOPICS["a"] += THIRD  # what came meanwhile is not part of it
    (tmp_path / "file.csv").write_text("user,item,time\n1,2,3\n1,3,4\n")
    for other in ("memory:b", tmp_path / "file.csv"):
        with pytest.raises(DataError, match="its input comes first"):
            append_log(tmp_path / "log", other)
    assert append_log(tmp_path / "log", "memory:a", every=3).log.fingerprint == whole.fingerprint
    assert append_log(tmp_path / "log", "memory:a").log.windows[-1].origin["from"] == 10


def test_origins_without_their_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("deltalake", "pyiceberg.catalog", "confluent_kafka"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for address, package in (
        ("delta:x", "deltalake"),
        ("iceberg:a.b.c", "pyiceberg"),
        ("kafka:h:1/t", "kafka"),
    ):
        with pytest.raises(DataError, match=f"pip install .*{package}"):
            open_origin(address)
    assert open_origin(Path(__file__)).kind == "files"


@pytest.mark.extras
def test_versions_of_a_delta_table(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    reference = ReferenceLog(200)
    where = str(tmp_path / "table")
    for events in (FIRST, SECOND, THIRD):
        deltalake.write_deltalake(where, _table(events), mode="append")
        log = append_log(tmp_path / "log", f"delta:{where}").log
        reference.append(events)
        with pytest.raises(DataError, match="is in the log already"):
            append_log(tmp_path / "log", f"delta:{where}")
    check(log, reference)
    assert [(entry.origin["from"], entry.origin["to"]) for entry in log.windows] == [
        (None, 0),
        (0, 1),
        (1, 2),
    ]
    deltalake.DeltaTable(where).delete("item = 16")
    with pytest.raises(DataError, match="files of version 2 are gone in version 3"):
        append_log(tmp_path / "log", f"delta:{where}")
    with pytest.raises(DataError, match="There is no Delta table"):
        append_log(tmp_path / "log", f"delta:{tmp_path}/nowhere")
    assert load_log(tmp_path / "log") == log


@pytest.mark.extras
def test_snapshots_of_an_iceberg_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogs = pytest.importorskip("pyiceberg.catalog")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    (tmp_path / "warehouse").mkdir()
    # Read once, when it is imported, which another test may have done.
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", pytest.importorskip("pyiceberg.utils.config").Config())
    catalog = catalogs.load_catalog("here")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.events", schema=_table(FIRST).schema)
    with pytest.raises(DataError, match="is in the log already"):
        append_log(tmp_path / "log", "iceberg:here.shop.events")
    reference = ReferenceLog(200)
    for events in (FIRST, [*SECOND, *THIRD]):
        for part in (events[:3], events[3:]):  # two snapshots a window
            table.append(_table(part))
        log = append_log(tmp_path / "log", "iceberg:here.shop.events").log
        reference.append(events)
        with pytest.raises(DataError, match="is in the log already"):
            append_log(tmp_path / "log", "iceberg:here.shop.events")
    check(log, reference)
    assert log.windows[1].origin["from"] == log.windows[0].origin["to"]
    table.delete("item = 16")
    with pytest.raises(DataError, match="does more than append"):
        append_log(tmp_path / "log", "iceberg:here.shop.events")
    with pytest.raises(DataError, match="There is no Iceberg table"):
        append_log(tmp_path / "log", "iceberg:here.shop.nothing")


@pytest.mark.extras
def test_offsets_of_a_topic(tmp_path: Path) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    # librdkafka's own broker, in this process: it speaks Kafka's protocol over sockets.
    producer = kafka.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1})
    broker = next(iter(producer.list_topics("events", timeout=30).brokers.values()))
    address = f"kafka:{broker.host}:{broker.port}/events"
    reference = ReferenceLog(200)
    for events in (FIRST, SECOND, THIRD):
        for user, item, time in events:
            message = json.dumps({"user": user, "item": item, "time": time})
            producer.produce("events", message.encode(), partition=user % 2)
        assert producer.flush(30) == 0
        log = append_log(tmp_path / "log", address).log
        reference.append(events)
        with pytest.raises(DataError, match="is in the log already"):
            append_log(tmp_path / "log", address)
    check(log, reference)
    offsets = [entry.origin["offsets"] for entry in log.windows]
    for before, after in itertools.pairwise(offsets):
        assert {part: stop for part, (_, stop) in before.items()} == {
            part: start for part, (start, _) in after.items()
        }
    producer.produce("events", b"no json", partition=0)
    assert producer.flush(30) == 0
    with pytest.raises(DataError, match="is no JSON object"):
        append_log(tmp_path / "log", address)
    assert load_log(tmp_path / "log") == log


def _table(events: list[Event]) -> Any:
    import pyarrow as pa

    return pa.table(dict(zip(("user", "item", "time"), map(list, zip(*events)))))
