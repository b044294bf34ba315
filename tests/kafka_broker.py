"""Kafka's protocol on real sockets: librdkafka's own broker, in a process of its own, with a click log in its topic.

Record i of the log lies in partition i % 4; its content is a function of i alone.
"""

import json
import os
import signal
import subprocess
import sys

import numpy as np

TOPIC, PARTITIONS, TURN = "clicks", 4, 1024


class Broker:
    """A process with the first ``num_records`` of the log; more are added where asked."""

    def __init__(self, num_records):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = f"kafka://{self.process.stdout.readline().strip()}/{TOPIC}"
        self.num_records = 0
        self.add(num_records)

    def add(self, num_records):
        """Returns once they are there."""
        self.process.stdin.write(f"{self.num_records} {num_records}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "added\n"
        self.num_records += num_records

    def hang(self):
        """No request is answered until :meth:`wake`."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        """Dies, and all records with it."""
        self.process.kill()
        self.process.communicate()


def records(num_records):
    """The first records of the log."""
    users = np.random.default_rng(1).integers(0, 50, num_records).tolist()
    chances = np.random.default_rng(2).random(num_records).tolist()
    return [
        {"record": i, "user": user, "item": i % 20, "price": i % 7 / 7, "click": int(chance < 0.2 + 0.6 * (user % 2))}
        for i, (user, chance) in enumerate(zip(users, chances, strict=True))
    ]  # fmt: skip


def in_turns(rows):
    """Rows in the order in which a reader of the whole topic gets them."""
    turn_of = {id(row): (row["record"] // PARTITIONS // TURN, row["record"] % PARTITIONS) for row in rows}
    return sorted(rows, key=lambda row: turn_of[id(row)])


def serve():
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = producer.list_topics(TOPIC, timeout=10).brokers.values()
    print(f"{broker.host}:{broker.port}", flush=True)
    for line in sys.stdin:
        begin, count = map(int, line.split())
        for row in records(begin + count)[begin:]:
            producer.produce(TOPIC, json.dumps(row), partition=row["record"] % PARTITIONS)
            producer.poll(0)
        assert not producer.flush(30)
        print("added", flush=True)
    os._exit(0)


if __name__ == "__main__":
    serve()
