"""A topic of Kafka as an origin: messages by their offsets, each a JSON object. Needs `confluent-kafka`.

Offsets [from, to) of every partition stand in log.json. No consumer group is asked and nothing is committed: what the
log has sealed is what was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freescale.data.log.origin import Words, missing_package, nothing_new, unfinished
from freescale.errors import DataError
from freescale.registry import register

_PATIENCE_S = 30.0
"""How long a broker may say nothing."""


@register("origin", "kafka")
class KafkaOffsets:
    """Messages of a topic up to where it ends now.

    Args:
        where: HOST:PORT/TOPIC; several hosts with commas.
    """

    kind = "kafka"

    def __init__(self, where: str) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise missing_package("confluent-kafka", f"kafka:{where}") from None
        self._kafka: Any = confluent_kafka
        self._servers, _, self.topic = where.rpartition("/")
        if not self._servers or not self.topic:
            raise DataError("This is no topic", got=f"kafka:{where}", allowed="kafka:HOST:PORT/TOPIC")
        self._consumer: Any = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "freescale-log",  # a name is asked for; nothing is kept under it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
            }
        )
        self._ends = self._look()

    def describe(self) -> str:
        """Where it is."""
        return f"kafka:{self._servers}/{self.topic}"

    def new(self, before: list[Words]) -> Words:
        """Of every partition what came behind the offsets that were sealed."""
        done: dict[str, int] = {}
        for words in before:
            if words["topic"] == self.topic:
                done |= {partition: stop for partition, (_, stop) in words["offsets"].items()}
        offsets: dict[str, list[int]] = {}
        for partition, (low, high) in self._ends.items():
            start = done.get(str(partition), low)
            if start < low:
                raise self._gone(partition, start, low)
            if high < start:
                raise DataError(
                    f"{self.describe()}: partition {partition} ends before what was sealed of it",
                    got=f"offset {high}",
                    allowed=f"{start} or later",
                    next_step="the topic was made anew: name another one, or make a new log",
                )
            offsets[str(partition)] = [start, high]
        if all(start == stop for start, stop in offsets.values()):
            raise nothing_new(self.describe(), f"up to offset {sum(stop for _, stop in offsets.values())}")
        return {"kind": self.kind, "topic": self.topic, "offsets": offsets}

    def again(self, words: Words) -> Words:
        """The same offsets of the same topic."""
        if words["topic"] != self.topic:
            raise unfinished(self.describe(), f"topic {words['topic']} came first")
        for partition, (start, stop) in words["offsets"].items():
            low, high = self._ends.get(int(partition), (0, 0))
            if start < low and start < stop:
                raise self._gone(int(partition), start, low)
            if stop > high:
                raise unfinished(self.describe(), f"partition {partition} ends at {high}, before {stop}")
        return words

    def fetch(self, words: Words, work: Path) -> Path:
        """A file with a line a message, partition by partition in the order of their numbers."""
        target = work / "messages.jsonl"
        with target.open("wb") as file:
            for partition, (start, stop) in sorted(words["offsets"].items(), key=lambda pair: int(pair[0])):
                for value in self._messages(int(partition), start, stop):
                    file.write(json.dumps(value).encode() + b"\n")
        return target

    def _messages(self, partition: int, start: int, stop: int) -> Iterator[Any]:
        if start == stop:
            return
        kafka = self._kafka
        self._consumer.assign([kafka.TopicPartition(self.topic, partition, start)])
        try:
            while True:
                message = self._consumer.poll(_PATIENCE_S)
                if message is None:
                    raise DataError(
                        f"{self.describe()}: partition {partition} says nothing for {_PATIENCE_S:.0f} s",
                        got=f"offsets {start} to {stop} are wanted",
                    )
                error = message.error()
                if error is not None and error.code() != kafka.KafkaError._PARTITION_EOF:
                    raise DataError(
                        f"{self.describe()}: partition {partition} cannot be read", got=str(error)
                    )
                # Transactions leave offsets without a message: the end of the partition ends it, too.
                if message.offset() >= stop or (error is not None and message.offset() >= stop):
                    return
                if error is not None:
                    continue
                if message.value() is not None:  # none: a key that was deleted
                    yield self._read(message, partition)
                if message.offset() + 1 >= stop:
                    return
        finally:
            self._consumer.unassign()

    def _read(self, message: Any, partition: int) -> Any:
        try:
            value = json.loads(message.value())
            if not isinstance(value, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise DataError(
                f"{self.describe()}: message {message.offset()} of partition {partition} is no JSON object",
                got=str(error),
                allowed='such as {"user": 1, "item": 2, "time": 3}',
            ) from error
        return value

    def _look(self) -> dict[int, tuple[int, int]]:
        """Of every partition the first offset that is there, and the one behind the last."""
        try:
            known = self._consumer.list_topics(self.topic, timeout=_PATIENCE_S).topics[self.topic]
            if known.error is not None:
                raise DataError(f"There is no topic {self.topic}", got=str(known.error))
            part = self._kafka.TopicPartition
            return {
                number: self._consumer.get_watermark_offsets(part(self.topic, number), timeout=_PATIENCE_S)
                for number in sorted(known.partitions)
            }
        except self._kafka.KafkaException as error:
            raise DataError(f"{self.describe()} cannot be asked", got=str(error)) from error

    def _gone(self, partition: int, start: int, low: int) -> DataError:
        return DataError(
            f"{self.describe()}: messages of partition {partition} were deleted before they were sealed",
            got=f"it begins at offset {low}",
            allowed=f"offset {start}, where the log ends",
            next_step="seal more often than messages are deleted; make a new log to begin behind the gap",
        )
