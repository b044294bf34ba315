"""A Kafka topic as a source. Partitions take turns, and a unit is the records of one turn.

A turn ends at a multiple of a fixed number of offsets. So the offsets in a position determine which records come next,
while there are records. At the end of the topic, reading skips a partition without records. It does not skip it if
several readers must see the same batches (decision 0054).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from girih.data.formats.jsonl import ObjectRows, objects_to_rows
from girih.data.from_memory import REFUSED
from girih.data.kafka.topic import Span, Topic, Trouble, as_offsets, client, total
from girih.data.paths import DataFile, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Source, Unit, never
from girih.errors import DataError
from girih.kernels.cpu.arrays import I64
from girih.telemetry.busy import waiting

if TYPE_CHECKING:
    import confluent_kafka


class Message(NamedTuple):
    """A record: its offset in the partition, and its value. None is a tombstone."""

    offset: int
    value: bytes | None


def json_rows(messages: Sequence[Message], plan: ReadPlan) -> ObjectRows:
    """Returns one row per message. Absent columns are missing values. An unusable message is a bad row."""
    empty = [_bad(message, "", "") for message in messages if message.value is None]
    objects = [(message.offset, message.value) for message in messages if message.value is not None]
    rows = objects_to_rows(objects, list(plan.columns), plan, "message", {})
    return rows._replace(bad=sorted([*rows.bad, *empty]))


def arrow_rows(messages: Sequence[Message], plan: ReadPlan) -> ObjectRows:
    """Concatenates the rows of the record batches of all messages."""
    names = list(plan.columns)
    tables: list[pa.Table] = []
    offsets: list[int] = []
    bad = []
    for message in messages:
        try:
            table = pa.ipc.open_stream(message.value or b"").read_all()
            table.validate(full=True)
        except (OSError, *REFUSED) as error:
            bad.append(_bad(message, "not an Arrow message", f"not an Arrow IPC stream: {one_line(error)}"))
            continue
        try:
            plan.check_names(table.column_names, "the message")
            table = table.select(names).replace_schema_metadata(None)
            if not tables or not table.schema.equals(tables[0].schema):
                plan.check_types(dict(zip(names, table.schema.types, strict=True)), "the message")
                table = table.cast(tables[0].schema) if tables else table
        except (DataError, *REFUSED) as error:
            bad.append(_bad(message, "other columns", one_line(error)))
            continue
        tables.append(table)
        offsets.append(message.offset)
    counts = [table.num_rows for table in tables]
    whole = pa.concat_tables(tables) if tables else pa.table({name: pa.nulls(0) for name in names})
    return ObjectRows(whole, np.repeat(np.array(offsets, np.int64), np.array(counts, np.int64)), bad)


DECODE: Mapping[str, Callable[[Sequence[Message], ReadPlan], ObjectRows]] = {
    "json": json_rows,
    "arrow": arrow_rows,
}


def names_in(messages: Sequence[Message]) -> set[str]:
    """Returns the names that JSON messages use."""
    found: set[str] = set()
    for message in messages:
        try:
            row = json.loads(message.value or b"")
        except (ValueError, RecursionError):
            continue
        found.update(row if isinstance(row, dict) else ())
    return found


def _bad(message: Message, reason: str, text: str) -> BadRow:
    if message.value is None:
        return BadRow(message.offset, "no value", "a record without a value; expected a message")
    return BadRow(message.offset, reason, text)


WAIT_S = 0.2
_AT_ONCE = 1000
_MOST_TURNS = 8  # turns of one partition that are kept; the partition then pauses until one turn is left


class Incoming:
    """A consumer of some partitions, each from its own offset.

    Args:
        begins: partition → the first offset.
        turn: number of records in a turn.
    """

    def __init__(self, topic: Topic, begins: Mapping[int, int], turn: int) -> None:
        self._topic, self._trouble, self._turn = topic, Trouble(topic), turn
        self._kept: dict[int, deque[Message]] = {partition: deque() for partition in begins}
        self._behind = dict(begins)  # records before these offsets have arrived, or do not exist
        self._at_end: set[int] = set()
        self._paused: set[int] = set()
        self._consumer = topic.consumer(self._trouble)
        kafka = client()
        self._consumer.assign([kafka.TopicPartition(topic.name, p, begin) for p, begin in begins.items()])

    def close(self) -> None:
        """Closes the connection to the brokers."""
        self._consumer.close()

    def fetch(self) -> None:
        """Waits a moment for records.

        Raises:
            DataError: a partition cannot be read any further.
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
                    f"{self._topic.address}, partition {each.partition()}: the next records no longer exist"
                    f" ({each.error().str()}); keep them longer in Kafka"
                )
            elif not each.error().retriable() and each.error().code() > 0:
                raise DataError(f"{self._topic.address}: {each.error().str()}")

    def take(
        self, partition: int, until: int, *, patient: bool, stopped: Callable[[], bool]
    ) -> list[Message]:
        """Takes the records of a partition below an offset, when they have arrived.

        Args:
            patient: if True, waits for all records. If False and the partition has no more records, returns the records
                that have arrived.
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
        """Returns the offset up to which all records have arrived."""
        return self._behind[partition]

    def idle(self) -> bool:
        """Returns whether all partitions are at their end, and all arrived records are taken."""
        return not any(self._kept.values()) and self._at_end >= self._kept.keys()

    def _keep(self, record: confluent_kafka.Message) -> None:
        self._trouble.over()
        partition, offset = record.partition(), record.offset()
        if offset < self._behind[partition]:
            return  # the record came twice, before and after a pause
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


TURN = {"json": 1024, "arrow": 8}
"""Messages of a turn: an Arrow message has many rows."""
_LOOK_AT = 100


@dataclass(kw_only=True)
class KafkaSource(Source):
    """The partitions of a topic; see :class:`girih.data.unit.Source`.

    Attributes:
        messages: ``json`` or ``arrow``.
        spans: the spans of the partitions when the source was opened.
        endless: if True, also reads future records. If False, reads the records before ``Span.behind``.
        patient: if True, waits for a partition without records, so that all readers see the same order.
        stopped: returns whether reading must end.
    """

    topic: Topic
    messages: str
    spans: tuple[Span, ...]
    endless: bool
    patient: bool = False
    stopped: Callable[[], bool] = never
    num_parts: int = 1
    num_rows: int | None = None
    _first: list[Message] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        topic, kind = self.topic, self.messages
        self.files = (DataFile(None, topic.name, topic.address, 0),)
        self.identity = f"kafka/{topic.name}/{kind}/{TURN[kind]}"
        self.bounds = [list(span) for span in self.spans]

    def within(self, bounds: Sequence[Sequence[int]]) -> KafkaSource:
        """Returns the same topic with the bounds of another reader. All readers then see the same batches."""
        return replace(self, spans=tuple(Span(*each) for each in bounds), patient=True)

    def until(self, stopped: Callable[[], bool]) -> KafkaSource:
        """Returns the same source, which ends when ``stopped`` returns True."""
        return replace(self, stopped=stopped)

    def so_far(self) -> KafkaSource:
        """Returns the existing records, as of the opening of the source.

        If there are none after its start, returns the records before it.
        """
        spans = self.spans
        if not total(spans):
            spans = tuple(span._replace(begin=span.first) for span in spans)
        return replace(self, spans=spans, endless=False)

    def check(self, plan: ReadPlan) -> None:
        """Refuses a topic whose first records do not fit the plan. A topic without records passes.

        Raises:
            DataError: names the column or the first message.
        """
        if not self._first and total(self.so_far().spans):
            self._first.extend(self._look())
        if not self._first:
            return
        if self.messages == "json" and (names := names_in(self._first)):
            plan.check_names(sorted(names), self.topic.address)
        table, _, bad = DECODE[self.messages](self._first, plan)
        if bad and not table.num_rows:
            raise DataError(
                f"{self.topic.address}: none of the first {len(self._first)} records is usable; offset {bad[0].number}:"
                f" {bad[0].message} (messages = {self.messages!r})"
            )

    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields turns from ``start`` on. Partitions take turns, and each is read in the order of its offsets.

        Raises:
            DataError: the next records no longer exist.
        """
        next_offsets, turn = self._begins(start), TURN[self.messages]
        ends = {span.partition: span.behind for span in self.spans}
        partitions = sorted(next_offsets)
        place = start.part
        with closing(Incoming(self.topic, next_offsets, turn)) as incoming:
            while not self.stopped():
                if not self.endless and all(next_offsets[p] >= ends[p] for p in partitions):
                    return
                partition = partitions[place % len(partitions)]
                place = (place + 1) % len(partitions)
                begin = next_offsets[partition]
                until = (begin // turn + 1) * turn
                if not self.endless:
                    until = max(begin, min(until, ends[partition]))
                elif not self.patient and incoming.idle():
                    incoming.fetch()
                patient = self.patient or not self.endless
                taken = incoming.take(partition, until, patient=patient, stopped=self.stopped)
                if self.stopped():
                    return
                next_offsets[partition] = min(until, incoming.reached(partition))
                if taken:
                    after = Cursor(part=place, offsets=as_offsets(next_offsets))
                    yield self._unit(partition, taken, plan, after)

    def _unit(self, partition: int, taken: list[Message], plan: ReadPlan, after: Cursor) -> Unit:
        table, offsets, bad = DECODE[self.messages](taken, plan)
        where = f"{self.topic.address}, partition {partition}"
        return Unit(table, where, after, offsets, place="offset", bad=bad)

    def _begins(self, start: Cursor) -> dict[int, int]:
        known = dict(start.offsets)
        begins = {}
        for span in self.spans:
            where = f"{self.topic.address}, partition {span.partition}"
            begin = known.pop(span.partition, span.first if start.offsets else span.begin)
            if begin < span.first:
                raise DataError(
                    f"{where}: the records from offset {begin} to {span.first - 1} no longer exist, and were not read;"
                    " keep records longer in Kafka, and train in another run directory"
                )
            if begin > span.behind:
                raise DataError(
                    f"{where}: ends at offset {span.behind}, before {begin}, the next offset to read; was the topic recreated?"
                )
            begins[span.partition] = begin
        if known:
            raise DataError(f"{self.topic.address}: no longer has partition {min(known)}")
        return begins

    def _look(self) -> list[Message]:
        """Returns the first records of some partition."""
        spans = [span for span in self.so_far().spans if span.behind > span.begin]
        span = spans[0]
        incoming = Incoming(self.topic, {span.partition: span.begin}, TURN[self.messages])
        with closing(incoming):
            until = min(span.behind, span.begin + _LOOK_AT)
            return incoming.take(span.partition, until, patient=True, stopped=never)
