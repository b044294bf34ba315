"""A topic as a source: partitions take turns, and a unit is the records of one turn.

A turn ends at a multiple of so many offsets. As long as records are there, which records come next is a function of the
offsets where reading stands; at the end of the topic a partition without records is passed over, unless several readers
have to see the same batches (decision 0054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.data.kafka.incoming import Incoming
from girih.data.kafka.messages import DECODE, Message, names_in
from girih.data.kafka.topic import Span, Topic, as_offsets, total
from girih.data.paths import DataFile
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import Unit
from girih.errors import DataError

TURN = {"json": 1024, "arrow": 8}
"""Messages of a turn: an Arrow message has many rows."""
_LOOK_AT = 100


def never() -> bool:
    """Says that nobody asked to stop."""
    return False


@dataclass(frozen=True, kw_only=True)
class KafkaSource:
    """The partitions of a topic; see :class:`girih.data.unit.Source`.

    Attributes:
        messages: ``json`` or ``arrow``.
        spans: of the partitions, as they were when the source was opened.
        endless: whether records to come are read too; else those before ``Span.behind``.
        patient: whether a partition without records is waited for, so that all readers see the same order.
        stopped: whether reading is to end.
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

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The topic, where files are listed."""
        return (DataFile(None, self.topic.name, self.topic.address, 0),)

    @property
    def identity(self) -> str:
        """Positions hold for the same topic; partitions may be added to it."""
        return f"kafka/{self.topic.name}/{self.messages}/{TURN[self.messages]}"

    @property
    def bounds(self) -> Any:
        """The partitions' beginnings and ends, on which several readers have to agree."""
        return [list(span) for span in self.spans]

    def within(self, bounds: Any) -> KafkaSource:
        """The same topic with the bounds of another reader, each batch as all its readers see it."""
        return replace(self, spans=tuple(Span(*each) for each in bounds), patient=True)

    def until(self, stopped: Callable[[], bool]) -> KafkaSource:
        """The same records, which end when asked to."""
        return replace(self, stopped=stopped)

    def so_far(self) -> KafkaSource:
        """The records that were there when the source was opened; those before the beginning, where there are no others."""
        spans = self.spans
        if not total(spans):
            spans = tuple(span._replace(begin=span.first) for span in spans)
        return replace(self, spans=spans, endless=False)

    def check(self, plan: ReadPlan) -> None:
        """Refuses a topic whose first records do not serve the plan; one without records is believed.

        Raises:
            DataError: it names the column, or the first message.
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
                f"{self.topic.address}: none of the first {len(self._first)} records is of use; offset {bad[0].number}:"
                f" {bad[0].message} (messages = {self.messages!r})"
            )

    def read(self, plan: ReadPlan, order: NDArray[np.int64], start: Cursor) -> Iterator[Unit]:
        """Yields turns from ``start`` on: of the partition whose turn it is, each in the order of its offsets.

        Raises:
            DataError: records that are to come next are no longer there.
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
                    f"{where}: the records from offset {begin} to {span.first - 1} are no longer there, and were not read;"
                    " keep records longer in Kafka, and train in another run directory"
                )
            if begin > span.behind:
                raise DataError(
                    f"{where}: ends at offset {span.behind}, before {begin}, where reading is to go on; was the topic made anew?"
                )
            begins[span.partition] = begin
        if known:
            raise DataError(f"{self.topic.address}: has no partition {min(known)} any more")
        return begins

    def _look(self) -> list[Message]:
        """The first records of some partition."""
        spans = [span for span in self.so_far().spans if span.behind > span.begin]
        span = spans[0]
        incoming = Incoming(self.topic, {span.partition: span.begin}, TURN[self.messages])
        with closing(incoming):
            until = min(span.behind, span.begin + _LOOK_AT)
            return incoming.take(span.partition, until, patient=True, stopped=never)
