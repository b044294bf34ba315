"""One embedding server that several clients ask: shards in parallel beside one request after the other, by shards.

The server is a process of its own and the bottleneck. Each client is a process that sends what an embedding worker
sends: the keys of a batch, and then the gradients of its rows. It keeps ``--depth`` batches under way, computes nothing
and asks again for the same few batches, whose keys are drawn alike from all rows. All shard counts have equal rows in total.

- ``in parallel`` is the server of girih: each shard has its requests in a queue, so reads and updates of different
  shards overlap (Persia section 4.2.2).
- ``one after the other`` ends all shards' work on a request before the next one begins.

Both servers of a shard count have the same rows. They take turns, in windows of ``--seconds``.

    girih bench embedding_server --json docs/results/embedding-server.json     needs 2.5 GB of memory
    girih bench embedding_server --shards 1 8 64 416                           what a shard costs a request
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
import pages

import girih
from girih.comm.rpc import Client, Request
from girih.comm.service import answer, as_integer, connect
from girih.data.batch import Batch
from girih.models import DNN, needs_of
from girih.processes.segments import new_prefix
from girih.services.embedding_server import EmbeddingServer
from girih.sparse.protocol import SparseVerb
from girih.sparse.routing.key_router import KeyRouter
from girih.sparse.spec import SparseSpec
from girih.store.spec import LAST_STEP

SECRET = b"of this benchmark"
BATCHES = 8
"""Different batches of a client."""
FILLED_AT_ONCE = 1 << 17
PARALLEL, IN_TURN = "in parallel", "one after the other"


@dataclass(kw_only=True)
class InTurn(EmbeddingServer):
    """A server that ends a request on all shards before it begins the next one."""

    def on_lookup(self, request: Request) -> None:
        super().on_lookup(request)
        self._queues.drain()

    def on_update(self, request: Request) -> None:
        super().on_update(request)
        self._queues.drain()


KINDS = {PARALLEL: EmbeddingServer, IN_TURN: InTurn}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    if sys.argv[1:2] == ["--ask"]:
        ask()
        return
    parser = harness.parser("embedding_server", __doc__)
    pages.add_option(parser, page_parts)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=2_000_000, help="of all shards together")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--keys", type=int, default=40_000, help="of a batch")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2, help="batches of a client under way")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=5, help="windows of each server")
    parser.add_argument("--quick", action="store_true", help="little work: shows that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.keys, options.seconds, options.rounds = 20_000, 12_000, 0.3, 1
    report = harness.Report("embedding_server", options)
    table = report.table(
        f"A server of {options.rows:,} rows of dim {options.dim}, {options.clients} clients with {options.depth} batches of"
        f" {options.keys:,} keys each under way",
        {
            "shards": "{}", "requests": "{}", "batches/s": "{:.1f}", "ms a batch": "{:.1f}", "of one after the other": "{:.2f}×",
            "read ms": "{:.1f}", "read ms, 99 %": "{:.1f}", "update ms": "{:.1f}", "server's cores": "{:.2f}",
        },
    )  # fmt: skip
    for shards in options.shards:
        for row in measured(options, shards):
            table.row(row)
    report.finish()


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The table of docs/benchmarks.md."""
    lines = [
        [
            str(row["shards"]), row["requests"], f"{row['batches/s']:.1f}", pages.shown(row["of one after the other"], "{:.2f}"),
            f"{row['read ms']:.0f}", f"{row['read ms, 99 %']:.0f}", f"{row['update ms']:.0f}", pages.shown(row["server's cores"], "{:.2f}"),
        ]
        for row in pages.rows(results, "A server of")
    ]  # fmt: skip
    header = (
        "shards",
        "requests",
        "batches/s",
        "ratio",
        "read, ms",
        "99 %",
        "update, ms",
        "cores of the server",
    )
    table = pages.table(header, lines)
    return {"table": pages.paragraphs(f"{pages.measured(results)}.", table) if table else None}


def spec_of(options: argparse.Namespace, shards: int) -> SparseSpec:
    """One table of Adagrad rows."""
    schema = girih.Schema([girih.Categorical(name="id", dim=options.dim)], labels="click")
    return SparseSpec(
        schema=schema,
        needs=needs_of(DNN(schema, hidden=(2,)), schema),
        optimizer=girih.optim.Adagrad(lr=0.05),
        first_order_optimizer=None,
        store=girih.StoreOptions(shards=shards),
        seed=0,
    )


def measured(options: argparse.Namespace, shards: int) -> list[dict[str, Any]]:
    """Rows of the table: both servers of a shard count."""
    spec, found = spec_of(options, shards), {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(process("--serve", kind)) for kind in KINDS}
        addresses = {}
        for kind, server in servers.items():
            send(server, spec)
            addresses[kind] = server.stdout.readline().decode().strip()
            fill(spec, shards, addresses[kind], options.rows)
        clients = [stack.enter_context(process("--ask")) for _ in range(options.clients)]
        for number, client in enumerate(clients):
            send(client, (spec, shards, addresses, number, options))
        for number in range(1 + options.rounds):
            for kind in list(KINDS)[:: -1 if number % 2 else 1]:
                window = run_window(servers[kind], clients, kind, options.seconds)
                if number:
                    found[kind].append(window)
    return [row_of(shards, kind, found) for kind in (IN_TURN, PARALLEL)]


def run_window(
    server: subprocess.Popen[bytes], clients: Sequence[subprocess.Popen[bytes]], kind: str, seconds: float
) -> dict[str, Any]:
    """Lets all clients ask one server for some seconds."""
    before, start = cpu_s(server.pid), time.perf_counter()
    for client in clients:
        client.stdin.write(f"{json.dumps([kind, seconds])}\n".encode())
        client.stdin.flush()
    told = [json.loads(client.stdout.readline()) for client in clients]
    used = (cpu_s(server.pid) - before) / (time.perf_counter() - start)
    reads, updates = ([value for each in told for value in each[name]] for name in ("reads", "updates"))
    return {
        "rate": sum(each["batches"] / each["seconds"] for each in told),
        "reads": reads,
        "updates": updates,
        "cores": used,
    }


def row_of(shards: int, kind: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row of the table."""
    own = found[kind]
    rate = statistics.median(window["rate"] for window in own)
    reads = [value for window in own for value in window["reads"]]
    updates = [value for window in own for value in window["updates"]]
    ratios = [a["rate"] / b["rate"] for a, b in zip(own, found[IN_TURN], strict=True)]
    return {
        "shards": shards, "requests": kind, "batches/s": rate, "ms a batch": 1e3 / rate,
        "of one after the other": None if kind == IN_TURN else statistics.median(ratios),
        "read ms": 1e3 * statistics.median(reads), "read ms, 99 %": 1e3 * float(np.quantile(reads, 0.99)),
        "update ms": 1e3 * statistics.median(updates),
        "server's cores": statistics.median(window["cores"] for window in own),
    }  # fmt: skip


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """This file as another process, until the ``with`` statement ends."""
    command = [sys.executable, __file__, *words]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield started
    finally:
        started.stdin.close()
        started.wait(60)


def send(to: subprocess.Popen[bytes], what: object) -> None:
    """Sends an object to a process of this benchmark."""
    pickle.dump(what, to.stdin)
    to.stdin.flush()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(kind: str) -> None:
    """A server until its input ends."""
    spec, stop = pickle.load(sys.stdin.buffer), threading.Event()
    role = KINDS[kind](
        spec=spec,
        index=0,
        num_servers=1,
        num_contributors=1,
        address="shm://",
        secret=SECRET,
        segment=new_prefix(),
    )
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    role.run(lambda address: print(address, flush=True), stop)


def request_of(router: KeyRouter, ids: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """What an embedding worker asks a server for."""
    size = len(ids)
    batch = Batch(
        ids=ids,
        offsets=np.arange(size + 1, dtype=np.int32),
        numeric=np.empty((size, 0), np.float32),
        labels=np.zeros((size, 1), np.float32),
    )
    lengths, keys, counts = router.ask(batch).of_place(0)
    return lengths, np.array(keys), np.array(counts)


def router_of(spec: SparseSpec, shards: int) -> KeyRouter:
    """Routes as an embedding worker does."""
    return KeyRouter(spec.groups()[0], 1, shards, by_shard=True)


def fill(spec: SparseSpec, shards: int, address: str, rows: int) -> None:
    """Has the server make all rows."""
    router, waiting = router_of(spec, shards), deque()
    with connect(address, secret=SECRET) as client:
        for number, first in enumerate(range(0, rows, FILLED_AT_ONCE)):
            asked = request_of(router, np.arange(first, min(rows, first + FILLED_AT_ONCE)))
            waiting.append(client.call(SparseVerb.LOOKUP, (number, 1 << 20, number, 1, 0, 1), asked))
            if len(waiting) > 2:
                answer(waiting.popleft())
        for reply in waiting:
            answer(reply)
        answer(client.call(SparseVerb.RESET))


def ask() -> None:
    """A client: for each line of its input, it asks a server for some seconds and tells what came of it."""
    spec, shards, addresses, number, options = pickle.load(sys.stdin.buffer)
    router, rng = router_of(spec, shards), np.random.default_rng(number)
    batches = [request_of(router, rng.integers(0, options.rows, options.keys)) for _ in range(BATCHES)]
    gradients = [rng.normal(0, 1e-3, (len(keys), options.dim)).astype(np.float32) for _, keys, _ in batches]
    with ExitStack() as stack:
        clients = {k: stack.enter_context(connect(a, secret=SECRET)) for k, a in addresses.items()}
        numbers = dict.fromkeys(addresses, 0)
        while line := sys.stdin.buffer.readline():
            kind, seconds = json.loads(line)
            told = window(clients[kind], number, numbers[kind], batches, gradients, seconds, options.depth)
            numbers[kind] += told["batches"]
            print(json.dumps(told), flush=True)


def window(
    client: Client,
    trainer: int,
    first: int,
    batches: Sequence[tuple[Any, ...]],
    gradients: Sequence[Any],
    seconds: float,
    depth: int,
) -> dict[str, Any]:
    """Reads and updates with ``depth`` batches under way."""
    reading: deque[Any] = deque()
    updating: deque[Any] = deque()
    reads, updates, number, start = [], [], first, time.perf_counter()

    def read() -> None:
        nonlocal number
        fields = (number, trainer, number, min(number + 1, LAST_STEP), 0, 1)
        reading.append(
            (number, time.perf_counter(), client.call(SparseVerb.LOOKUP, fields, batches[number % BATCHES]))
        )
        number += 1

    def end_update() -> None:
        asked_s, reply = updating.popleft()
        answer(reply)
        updates.append(time.perf_counter() - asked_s)

    for _ in range(depth):
        read()
    while reading:
        turn, asked_s, reply = reading.popleft()
        answer(reply)
        now = time.perf_counter()
        reads.append(now - asked_s)
        fields = (turn, trainer, turn, turn, turn + 1, as_integer(1.0))
        updating.append((now, client.call(SparseVerb.UPDATE, fields, (gradients[turn % BATCHES],))))
        if now - start < seconds:
            read()
        while len(updating) > depth or (updating and not reading):
            end_update()
    ended_s = time.perf_counter() - start
    return {"batches": number - first, "seconds": ended_s, "reads": reads, "updates": updates}


if __name__ == "__main__":
    main()
