"""A Kafka topic: its address, its partitions with their offsets, and the consumer that reads them.

girih commits nothing to Kafka. Its own checkpoints hold the offsets.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from girih.errors import ConfigError, DataError

if TYPE_CHECKING:
    import confluent_kafka

SCHEME = "kafka://"
ANSWER_S = 10.0
_LOG = logging.getLogger(__name__)
_OURS = (
    "bootstrap.servers", "group.id", "enable.auto.commit", "enable.partition.eof", "auto.offset.reset",
    "enable.auto.offset.store", "error_cb",
)  # fmt: skip


class Span(NamedTuple):
    """Offsets of a partition: the first existing record, the start of reading, and the end after the last record."""

    partition: int
    first: int
    begin: int
    behind: int


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A topic and its connection options.

    Attributes:
        brokers: ``host:port``, separated by commas.
        options: librdkafka options, by their names.
    """

    brokers: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, value in self.options.items():
            if not isinstance(value, str | int | float | bool):
                raise ConfigError(f"kafka: {option} = {value!r}: expected a string, a number, true or false")
            if option in _OURS:
                raise ConfigError(f"kafka: {option!r} is set by girih; drop it")

    @classmethod
    def at(cls, address: str, options: Mapping[str, object] | None = None) -> Topic:
        """Parses an address: ``kafka://host:port,host:port/topic``.

        Raises:
            ConfigError: not such an address.
        """
        brokers, slash, name = address.removeprefix(SCHEME).partition("/")
        if not address.startswith(SCHEME) or not brokers or not slash or not name or "/" in name:
            raise ConfigError(f"{address!r}: expected kafka://host:port,host:port/topic")
        return cls(brokers=brokers, name=name, options=dict(options or {}))

    @property
    def address(self) -> str:
        """``kafka://host:port/topic``."""
        return f"{SCHEME}{self.brokers}/{self.name}"

    def consumer(self, trouble: Trouble) -> confluent_kafka.Consumer:
        """Returns a consumer without partitions.

        Raises:
            ConfigError: confluent-kafka is not installed, or librdkafka refuses an option.
        """
        kafka = client()
        own = {
            "bootstrap.servers": self.brokers,
            "group.id": "girih",  # the client requires a group; nothing is committed under it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "error_cb": trouble.note,
        }
        try:
            consumer: confluent_kafka.Consumer = kafka.Consumer({"log_level": 0, **self.options, **own})
            return consumer
        except kafka.KafkaException as error:
            raise ConfigError(f"kafka: {_error_text(error)}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"kafka: {error}") from None

    def spans(self, start: str) -> tuple[Span, ...]:
        """Asks the brokers for all partitions and their offsets, in the order of partitions.

        Args:
            start: ``earliest``, ``latest``, or a moment such as ``2026-11-01T00:00:00Z``.

        Raises:
            DataError: no broker answers, the topic does not exist, or it may not be read.
        """
        kafka, trouble = client(), Trouble(self)
        moment = None if start in ("earliest", "latest") else _milliseconds(start)
        consumer = self.consumer(trouble)
        try:
            found = consumer.list_topics(self.name, timeout=ANSWER_S).topics[self.name]
            if found.error is not None:
                raise DataError(f"{self.address}: {_first_line(found.error)}")
            partitions = [kafka.TopicPartition(self.name, number) for number in sorted(found.partitions)]
            bounds = [consumer.get_watermark_offsets(each, timeout=ANSWER_S) for each in partitions]
            begins = [first if start == "earliest" else behind for first, behind in bounds]
            if moment is not None:
                asked = [kafka.TopicPartition(self.name, each.partition, moment) for each in partitions]
                told = consumer.offsets_for_times(asked, timeout=ANSWER_S)
                begins = [
                    behind if each.offset < 0 else each.offset  # no record is that late
                    for each, (_, behind) in zip(told, bounds, strict=True)
                ]
        except kafka.KafkaException as error:
            consumer.poll(0)  # lets the client report the reason
            why = trouble.last or _error_text(error)
            raise DataError(
                f"{self.address}: no answer within {ANSWER_S:g} s ({why}); are the brokers' addresses right,"
                " and the kafka options for security?"
            ) from None
        finally:
            consumer.close()
        return tuple(
            Span(each.partition, first, begin, behind)
            for each, begin, (first, behind) in zip(partitions, begins, bounds, strict=True)
        )


class Trouble:
    """Keeps the last error of a client. Logs once if no broker answers, and once more when records arrive again."""

    def __init__(self, topic: Topic) -> None:
        self._topic, self._down = topic, False
        self.last: str | None = None

    def note(self, error: confluent_kafka.KafkaError) -> None:
        """Records an error after which the client continues."""
        self.last = _first_line(error)
        if error.code() == client().KafkaError._ALL_BROKERS_DOWN and not self._down:
            self._down = True
            _LOG.warning("%s: no broker answers; the client keeps trying", self._topic.address)

    def over(self) -> None:
        """Notes that records arrive again."""
        if self._down:
            self._down = False
            _LOG.warning("%s: records come again", self._topic.address)


def client() -> ModuleType:
    """Returns the module ``confluent_kafka``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("confluent_kafka")
    except ImportError:
        raise ConfigError(
            "format 'kafka' needs a package that is not installed; pip install 'girih[kafka]'"
        ) from None


def as_offsets(offsets: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Returns offsets in the form of positions: pairs of partition and offset, by ascending partition."""
    return tuple(sorted(offsets.items()))


def total(spans: Iterable[Span]) -> int:
    """Number of offsets after the start of reading."""
    return sum(max(0, span.behind - span.begin) for span in spans)


def _milliseconds(start: str) -> int:
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise ConfigError(
            f"start = {start!r}: expected 'earliest', 'latest', or a moment as '2026-11-01T00:00:00Z'"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _error_text(error: confluent_kafka.KafkaException) -> str:
    return _first_line(error.args[0])


def _first_line(error: object) -> str:
    """Returns the first line of the client's error text."""
    return str(error.str() if hasattr(error, "str") else error).splitlines()[0]
