"""Records of all partitions of a topic as they arrive, kept apart by partition until their turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from girih.data.kafka.messages import Message
from girih.data.kafka.topic import Topic, Trouble, client
from girih.errors import DataError
from girih.runs.busy import waiting

WAIT_S = 0.2
_AT_ONCE = 1000
_MOST_TURNS = 8  # of one partition that are kept; then it is not fetched from until one is left


class Incoming:
    """A consumer of some partitions, each from an offset on.

    Args:
        begins: partition → the first offset.
        turn: records of a turn.
    """

    def __init__(self, topic: Topic, begins: Mapping[int, int], turn: int) -> None:
        self._topic, self._trouble, self._turn = topic, Trouble(topic), turn
        self._kept: dict[int, deque[Message]] = {partition: deque() for partition in begins}
        self._behind = dict(begins)  # what is before these offsets has arrived, or is not there
        self._at_end: set[int] = set()
        self._paused: set[int] = set()
        self._consumer = topic.consumer(self._trouble)
        kafka = client()
        self._consumer.assign([kafka.TopicPartition(topic.name, p, begin) for p, begin in begins.items()])

    def close(self) -> None:
        """Leaves the brokers."""
        self._consumer.close()

    def fetch(self) -> None:
        """Waits a moment for records.

        Raises:
            DataError: a partition cannot be read on.
        """
        kafka = client()
        try:
            with waiting():
                found = self._consumer.consume(_AT_ONCE, WAIT_S)
        except kafka.KafkaException as error:
            raise DataError(f"{self._topic.address}: {error.args[0].str()}") from None
        for each in found:
            if each.error() is None:
                self._keep(each)
            elif each.error().code() == kafka.KafkaError._PARTITION_EOF:
                self._at_end.add(each.partition())
                self._behind[each.partition()] = max(self._behind[each.partition()], each.offset())
            elif each.error().code() in (
                kafka.KafkaError._AUTO_OFFSET_RESET,
                kafka.KafkaError.OFFSET_OUT_OF_RANGE,
            ):
                raise DataError(
                    f"{self._topic.address}, partition {each.partition()}: the records to go on with are no longer there"
                    f" ({each.error().str()}); keep them longer in Kafka"
                )
            elif not each.error().retriable() and each.error().code() > 0:
                raise DataError(f"{self._topic.address}: {each.error().str()}")

    def take(
        self, partition: int, until: int, *, patient: bool, stopped: Callable[[], bool]
    ) -> list[Message]:
        """Takes the records of a partition below an offset, once they are here.

        Args:
            patient: waits for all of them; else what is here will do where the partition has no more.
        """
        while self._behind[partition] < until and not stopped():
            if not patient and partition in self._at_end:
                break
            self._resume(partition)
            self.fetch()
        kept, taken = self._kept[partition], []
        while kept and kept[0].offset < until:
            taken.append(kept.popleft())
        if len(kept) <= self._turn:
            self._resume(partition)
        return taken

    def reached(self, partition: int) -> int:
        """The offset of which all before has arrived."""
        return self._behind[partition]

    def idle(self) -> bool:
        """Whether no partition has any record here, and all are at their end."""
        return not any(self._kept.values()) and self._at_end >= self._kept.keys()

    def _keep(self, record: Any) -> None:
        self._trouble.over()
        partition, offset = record.partition(), record.offset()
        if offset < self._behind[partition]:
            return  # it came twice, around a pause
        kept = self._kept[partition]
        kept.append(Message(offset, record.value()))
        self._behind[partition] = offset + 1
        self._at_end.discard(partition)
        if len(kept) >= _MOST_TURNS * self._turn and partition not in self._paused:
            self._paused.add(partition)
            self._consumer.pause([client().TopicPartition(self._topic.name, partition)])

    def _resume(self, partition: int) -> None:
        if partition in self._paused:
            self._paused.discard(partition)
            self._consumer.resume([client().TopicPartition(self._topic.name, partition)])
