"""Topics on the broker that librdkafka brings, which speaks the real protocol over real sockets."""

import json
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

import girih
from girih.data import Position
from girih.errors import ConfigError, DataError

confluent_kafka = pytest.importorskip("confluent_kafka")

SCHEMA = girih.Schema([girih.Categorical(name="user"), girih.Numeric(name="price")], "click")
Produce = Callable[[str, list[tuple[int, bytes | None]]], str]


@pytest.fixture(scope="module")
def produce() -> Iterator[Produce]:
    """Writes records (partition, value) to a topic, and returns its address."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0}
    )

    def write(topic: str, records: list[tuple[int, bytes | None]]) -> str:
        (broker,) = producer.list_topics(topic, timeout=10).brokers.values()
        for partition, value in records:
            producer.produce(topic, value, partition=partition)
        assert not producer.flush(10)
        return f"kafka://{broker.host}:{broker.port}/{topic}"

    return write


def row(user: object, **other: object) -> bytes:
    return json.dumps({"user": user, "price": 0.5, "click": 1} | other).encode()


def test_every_record_comes_once_and_positions_go_on_with_the_same_batches(produce: Produce) -> None:
    address = produce("clicks", [(i % 4, row(i)) for i in range(3000)])
    data = girih.read_kafka(address, SCHEMA, stop_at="end", batch_size=400)
    steps = list(data.batches())
    assert sorted(i for batch, _ in steps for i in batch.ids.tolist()) == list(range(3000))
    saved = json.loads(json.dumps(steps[2][1].to_dict()))
    resumed = list(data.batches(0, Position.from_dict(saved)))
    assert all((a.ids == b.ids).all() for (a, _), (b, _) in zip(steps[3:], resumed, strict=True))
    assert dict(steps[-1][1].offsets) == dict.fromkeys(range(4), 750)


def test_an_endless_stream_gives_whole_batches_and_goes_on_with_new_records(produce: Produce) -> None:
    address = produce("endless", [(0, row(i)) for i in range(30)])
    with girih.read_kafka(address, SCHEMA, batch_size=10).ahead(0, None) as batches:
        assert [next(batches)[0].ids[0] for _ in range(3)] == [0, 10, 20]
        produce("endless", [(2, row(i)) for i in range(30, 40)])
        assert next(batches)[0].ids.tolist() == list(range(30, 40))


def test_an_epoch_begins_where_the_last_one_ended(produce: Produce) -> None:
    address = produce("days", [(0, row(1))])
    ((_, end),) = girih.read_kafka(address, SCHEMA, stop_at="end").batches()
    produce("days", [(0, row(2))])
    ((batch, _),) = girih.read_kafka(address, SCHEMA, stop_at="end").batches(1, end)
    assert batch.ids.tolist() == [2]


def test_messages_that_are_none_are_refused_or_counted(produce: Produce) -> None:
    values = [row(7), b"{", b"[1]", row(1.5), row("red"), row(3, click=7), None]
    address = produce("mixed", [(0, value) for value in values])
    with pytest.raises(DataError, match="partition 0, offset 1: not a JSON message"):
        list(girih.read_kafka(address, SCHEMA, stop_at="end"))
    data = girih.read_kafka(address, SCHEMA, stop_at="end", on_bad_row="skip")
    assert [batch.num_examples for batch in data] == [2]
    assert data.num_skipped == 5


def test_arrow_messages_hold_many_rows(produce: Produce) -> None:
    table = pa.table({"user": [1, 2, 3], "price": [0.5, 1.5, 2.5], "click": [0, 1, 1]})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    address = produce("arrow", [(0, out.getvalue().to_pybytes())] * 2)
    data = girih.read_kafka(address, SCHEMA, messages="arrow", stop_at="end", batch_size=4)
    steps = list(data.batches())
    assert [batch.ids.tolist() for batch, _ in steps] == [[1, 2, 3, 1], [2, 3]]
    ((rest, _),) = data.batches(0, steps[0][1])
    assert rest.ids.tolist() == [2, 3]


def test_mistakes_are_told_before_anything_is_read(produce: Produce) -> None:
    address = produce("told", [(0, row(7))])
    with pytest.raises(DataError, match="Unknown topic"):
        girih.read_kafka(address.replace("told", "nowhere"), SCHEMA)
    with pytest.raises(DataError, match=r"no column 'usr'.*did you mean 'user'"):
        girih.read_kafka(address, girih.Schema([girih.Categorical(name="usr")], "click"))
    with pytest.raises(DataError, match="not an Arrow IPC stream"):
        girih.read_kafka(address, SCHEMA, messages="arrow")
    with pytest.raises(ConfigError, match="No such configuration property"):
        girih.read_kafka(address, SCHEMA, kafka={"sasl.mechanismz": "x"})
    with pytest.raises(ConfigError, match="expected kafka://"):
        girih.read_kafka("kafka://nowhere", SCHEMA)
