"""Messages between two processes: raw sockets, ZeroMQ, and girih's TCP, TLS and shared memory; and the codecs.

A round trip is what a trainer does with an embedding worker: it writes a request of 0.85 MB, the other process reads
every byte of it and writes a reply of 6.8 MB, of which the trainer reads every byte. An empty call carries no array.

- Raw sockets are Python's, with ``sendall`` and ``recv_into`` to and from memory that is used again. Their empty call is
  eight bytes each way.
- ZeroMQ is pyzmq's REQ and REP over TCP, which send and receive without a copy. Its empty call is an empty message.
- ``in this process`` has no second process: the ends are threads.

The contestants take turns, each with two round trips. The first finds its memory where the others left it, mostly
outside the cache: ``cold``. The second is as in a loop with one contestant: ``warm``. A turn of empty calls is twenty
calls; the table has the mean of one.

A block has processes and connections of its own. Times are medians over the rounds of all blocks. ``lowest`` and
``highest`` are those of the blocks' medians: how much one run differs from the next.

    girih bench wire --json docs/results/wire.json          about two minutes
    girih bench wire --from-results docs/results/wire.json  writes the tables and sentences of this file into the pages
                                                            that have them; measures nothing
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import harness
import numpy as np
import pages
from numpy.typing import NDArray

from girih.comm import service
from girih.comm.codecs import rows as row_codecs
from girih.comm.rpc import Client, Request
from support import inproc

SECRET = b"of this benchmark"
MEGABYTE = 1_000_000
FEATURES, BATCH, DIM = 26, 4096, 16
EMPTY_CALLS = 20
"""Empty calls of one turn."""
QUIET_LOAD = 0.5
"""A load average above this, before the benchmark begins, shows that other work uses the machine."""
RAW, ZEROMQ, TCP, NEAR = "raw sockets", "ZeroMQ", "TCP", "in this process"
ROUND_TRIPS = "Round trips"
COLUMNS = {
    "over": "{}", "cold ms": "{:.2f}", "warm ms": "{:.2f}", "warm ms, lowest": "{:.2f}", "warm ms, highest": "{:.2f}",
    "GB/s": "{:.2f}", "of raw, cold": "{:.2f}×", "of raw": "{:.2f}×", "of TCP, cold": "{:.2f}×", "of TCP": "{:.2f}×",
    "empty µs": "{:.0f}", "empty µs, lowest": "{:.0f}", "empty µs, highest": "{:.0f}",
}  # fmt: skip
CODECS = {
    "what": "{}",
    "MB": "{:.2f}",
    "bytes left": "{:.2f}",
    "pack GB/s": "{:.2f}",
    "unpack GB/s": "{:.2f}",
}
Ask = Callable[[], object]
Times = dict[str, list[tuple[float, ...]]]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve([int(size) for size in sys.argv[2:]])
        return
    parser = harness.parser("wire", __doc__)
    parser.add_argument(
        "--blocks", type=int, default=5, help="each with processes and connections of its own"
    )
    parser.add_argument("--rounds", type=int, default=60, help="of each block")
    parser.add_argument("--out-mb", type=float, default=0.85, help="of the request")
    parser.add_argument("--back-mb", type=float, default=6.8, help="of the reply")
    pages.add_option(parser, page_parts)
    options = parser.parse_args()
    options.load_before = os.getloadavg()[0]
    report = harness.Report("wire", options)
    blocks = [measured(report, options) for _ in range(options.blocks)]
    show(report, options, blocks)
    codecs(report, options)
    report.finish()


def words(megabytes: float) -> int:
    """The number of int64 in a number of megabytes."""
    return int(megabytes * MEGABYTE) // 8


def timed(ask: Ask) -> harness.Contestant:
    """For ``harness.alternate``, which times the whole call."""

    def contestant(_: int) -> None:
        ask()

    return contestant


def twice(ask: Ask) -> harness.Contestant:
    """For ``harness.alternate``: seconds of a first and a second round trip."""

    def contestant(_: int) -> tuple[float, float]:
        return harness.seconds(ask), harness.seconds(ask)

    return contestant


def many(ask: Ask) -> harness.Contestant:
    """For ``harness.alternate``: mean seconds of one of several calls in a row."""

    def contestant(_: int) -> tuple[float]:
        def calls() -> None:
            for _ in range(EMPTY_CALLS):
                ask()

        return (harness.seconds(calls) / EMPTY_CALLS,)

    return contestant


class Answer:
    """The other side's work: reads all, writes all."""

    def __init__(self, num_back: int) -> None:
        self.source = np.arange(num_back)

    def __call__(self, request: Request) -> None:
        for array in request.frame.arrays:
            array.sum()
        if request.frame.kind == 0:
            request.reply()
            return
        array = request.buffer(np.int64, len(self.source))
        np.copyto(array, self.source)
        request.reply((), (array,))


def serve(sizes: list[int]) -> None:
    """The second process: raw sockets, ZeroMQ, TCP, TLS and shared memory. It prints their addresses in this order."""
    num_out, num_back = sizes
    answer = Answer(num_back)
    with (
        socket.create_server(("127.0.0.1", 0)) as raw,
        socket.create_server(("127.0.0.1", 0)) as empty,
        service.listen(answer, secret=SECRET) as tcp,
        service.listen(answer, address="tls://127.0.0.1:*", secret=SECRET) as tls,
        service.listen(answer, address="shm://", secret=SECRET) as shared,
    ):
        zeromq = listen_zeromq(answer.source)
        ports = [listener.getsockname()[1] for listener in (raw, empty)]
        print(*ports, zeromq, tcp.address, tls.address, shared.address, flush=True)
        for listener, num_words, source in ((raw, num_out, answer.source), (empty, 1, np.arange(1))):
            threading.Thread(target=serve_raw, args=(listener, num_words, source), daemon=True).start()
        sys.stdin.read()


def serve_raw(listener: socket.socket, num_out: int, source: NDArray[np.int64]) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, reply = np.empty(num_out, np.int64), np.empty_like(source)
    while receive_all(connection, request):
        request.sum()
        np.copyto(reply, source)
        connection.sendall(reply.data.cast("B"))


def receive_all(connection: socket.socket, array: NDArray[np.int64]) -> bool:
    rest = array.data.cast("B")
    while len(rest):
        num_bytes = connection.recv_into(rest)
        if not num_bytes:
            return False
        rest = rest[num_bytes:]
    return True


def listen_zeromq(source: NDArray[np.int64]) -> str:
    """Starts a thread that answers ZeroMQ's requests. Returns its address, or ``-`` if pyzmq is not installed."""
    try:
        import zmq
    except ImportError:
        return "-"
    replies: Any = zmq.Context.instance().socket(zmq.REP)
    replies.bind("tcp://127.0.0.1:*")
    threading.Thread(target=serve_zeromq, args=(replies, source), daemon=True).start()
    return str(replies.last_endpoint.decode())


def serve_zeromq(replies: Any, source: NDArray[np.int64]) -> None:
    while True:
        request = np.frombuffer(replies.recv(copy=False).buffer, np.int64)
        request.sum()
        replies.send(source.copy() if len(request) else b"", copy=False)


def ask_raw(port: str, source: NDArray[np.int64], num_back: int) -> Ask:
    connection = socket.create_connection(("127.0.0.1", int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, reply = np.empty_like(source), np.empty(num_back, np.int64)

    def ask() -> None:
        np.copyto(request, source)
        connection.sendall(request.data.cast("B"))
        receive_all(connection, reply)
        reply.sum()

    return ask


def ask_zeromq(requests: Any, source: NDArray[np.int64] | None) -> Ask:
    """A call with an array, or an empty one."""

    def ask() -> None:
        requests.send(b"" if source is None else source.copy(), copy=False)
        np.frombuffer(requests.recv(copy=False).buffer, np.int64).sum()

    return ask


def ask_wire(client: Client, source: NDArray[np.int64] | None) -> Ask:
    """A call with an array, or an empty one."""
    if source is None:
        return lambda: client.call(0, (1,)).wait()

    def ask() -> None:
        request = client.buffer(np.int64, len(source))
        np.copyto(request, source)
        (array,) = client.call(1, (), (request,)).wait().arrays
        array.sum()

    return ask


@contextmanager
def connected_zeromq(address: str) -> Iterator[Any]:
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as requests:
        requests.connect(address)
        yield requests


def measured(report: harness.Report, options: argparse.Namespace) -> tuple[Times, Times]:
    """One block: seconds of a cold and a warm round trip of each contestant, and seconds of an empty call."""
    num_out, num_back = words(options.out_mb), words(options.back_mb)
    source = np.arange(num_out)
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(num_out), str(num_back)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    raw, raw_empty, zeromq, *addresses = child.stdout.readline().split()  # type: ignore[union-attr]
    asks = {RAW: ask_raw(raw, source, num_back)}
    empty = {RAW: ask_raw(raw_empty, source[:1], 1)}
    with ExitStack() as stack:
        if report.peer("zmq") is not None:
            requests = stack.enter_context(connected_zeromq(zeromq))
            asks[ZEROMQ], empty[ZEROMQ] = ask_zeromq(requests, source), ask_zeromq(requests, None)
        server = stack.enter_context(inproc.listen(Answer(num_back), secret=SECRET))
        clients = {
            name: stack.enter_context(service.connect(address, secret=SECRET))
            for name, address in zip((TCP, "TLS", "shared memory"), addresses, strict=True)
        } | {NEAR: stack.enter_context(inproc.connect(server.address, secret=SECRET))}
        asks |= {name: ask_wire(client, source) for name, client in clients.items()}
        empty |= {name: ask_wire(client, None) for name, client in clients.items()}
        contestants = {name: twice(ask) for name, ask in asks.items()}
        alone = {NEAR: contestants.pop(NEAR)}  # it shares the cache with the others
        times = harness.alternate(contestants, options.rounds, warmup=5)
        times |= harness.alternate(alone, options.rounds, warmup=5)
        small = harness.alternate({name: many(ask) for name, ask in empty.items()}, options.rounds, warmup=5)
    child.communicate()
    return times, small


def show(report: harness.Report, options: argparse.Namespace, blocks: Sequence[tuple[Times, Times]]) -> None:
    """The table of all contestants, over all blocks."""
    table = report.table(
        f"{ROUND_TRIPS}, {options.out_mb} MB out, {options.back_mb} MB back, {options.blocks} blocks", COLUMNS
    )
    cold = [{name: [parts[:1] for parts in each] for name, each in times.items()} for times, _ in blocks]
    warm = [{name: [parts[1:] for parts in each] for name, each in times.items()} for times, _ in blocks]
    empty = [small for _, small in blocks]
    num_bytes = 8 * (words(options.out_mb) + words(options.back_mb))
    for name in warm[0]:
        cold_s, warm_s = (_all(times, name) for times in (cold, warm))
        table.row({
            "over": name, "cold ms": 1e3 * harness.median(cold_s), "warm ms": 1e3 * harness.median(warm_s),
            "GB/s": num_bytes / harness.median(warm_s) / 1e9,
            "of raw, cold": harness.ratio(cold_s, _all(cold, RAW)), "of raw": harness.ratio(warm_s, _all(warm, RAW)),
            "of TCP, cold": harness.ratio(cold_s, _all(cold, TCP)), "of TCP": harness.ratio(warm_s, _all(warm, TCP)),
            "empty µs": 1e6 * harness.median(_all(empty, name)),
            **_extremes("warm ms", 1e3, warm, name), **_extremes("empty µs", 1e6, empty, name),
        })  # fmt: skip
    report.not_identical(
        "raw sockets and ZeroMQ check no secret, count no calls, and repeat none after a broken connection"
    )


def _all(blocks: Sequence[Times], name: str) -> list[tuple[float, ...]]:
    return [parts for times in blocks for parts in times[name]]


def _extremes(column: str, unit: float, blocks: Sequence[Times], name: str) -> dict[str, float]:
    medians = [unit * harness.median(times[name]) for times in blocks]
    return {f"{column}, lowest": min(medians), f"{column}, highest": max(medians)}


PAGE_COLUMNS = (
    "over", "cold, ms", "warm, ms", "warm: lowest, highest block", "of raw sockets, warm", "of TCP, cold", "of TCP, warm",
    "empty call, µs", "lowest, highest block",
)  # fmt: skip


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    calls = {"sentences": page_sentences, "encryption": encryption, "round trips": page_table}
    parts = {name: part(results) for name, part in calls.items() if pages.rows(results, ROUND_TRIPS)}
    return {**dict.fromkeys(calls), **parts, "codecs": codec_table(results)}


def encryption(results: Mapping[str, Any]) -> str:
    """What docs/security.md says about TLS."""
    tls, tcp = (pages.row(results, ROUND_TRIPS, over=name) for name in ("TLS", TCP))
    warm, empty = (
        [pages.shown(row.get(name), COLUMNS[name]) for row in (tls, tcp)] for name in ("warm ms", "empty µs")
    )
    sizes = results["options"]
    return (
        f"{pages.measured(results)}: a round trip of {sizes['out_mb']:g} MB out and {sizes['back_mb']:g} MB back takes {warm[0]} ms over"
        f" TLS and {warm[1]} ms over TCP. An empty call takes {empty[0]} µs and {empty[1]} µs."
    )


def page_sentences(results: Mapping[str, Any]) -> str:
    """What docs/benchmarks.md and decisions 10 and 12 say of a run, from its JSON."""
    of = {row["over"]: row for row in pages.rows(results, ROUND_TRIPS)}
    shared, busy = of.get("shared memory", {}), (results["options"].get("load_before") or 0) > QUIET_LOAD
    calls = ", ".join(
        f"{name} {pages.shown(of[name].get('empty µs'), '{:.0f}')}"
        for name in (TCP, "shared memory", ZEROMQ, RAW)
        if name in of
    )
    speeds = {name: pages.shown(of[name].get("of raw"), "{:.2f}") for name in (TCP, ZEROMQ) if name in of}
    return (
        pages.measured(results)
        + (", while other work used them" if busy else "")
        + ": with both ends warm, "
        + " and ".join(f"{name} has {speed}" for name, speed in speeds.items())
        + f" of the speed of raw sockets. Shared memory is {pages.shown(shared.get('of TCP'), '{:.1f}')} times as fast as TCP"
        f" ({pages.shown(shared.get('of TCP, cold'), '{:.1f}')} cold). An empty call takes, in µs: {calls}."
    )


def page_table(results: Mapping[str, Any]) -> str | None:
    """The table of docs/benchmarks.md, from the JSON of a run."""
    cells: tuple[tuple[str, ...], ...] = (
        ("over",), ("cold ms",), ("warm ms",), ("warm ms, lowest", "warm ms, highest"), ("of raw",), ("of TCP, cold",), ("of TCP",),
        ("empty µs",), ("empty µs, lowest", "empty µs, highest"),
    )  # fmt: skip
    lines = (
        [", ".join(pages.shown(row.get(name), COLUMNS[name].strip("×")) for name in names) for names in cells]
        for row in pages.rows(results, ROUND_TRIPS)
    )
    return pages.table(PAGE_COLUMNS, lines)


def codec_table(results: Mapping[str, Any]) -> str | None:
    """The table of codecs of docs/benchmarks.md, from the JSON of a run."""
    rows = pages.rows(results, "Codecs")
    return pages.table(
        tuple(CODECS), ([pages.shown(row.get(name), form) for name, form in CODECS.items()] for row in rows)
    )


def codecs(report: harness.Report, options: argparse.Namespace) -> None:
    table = report.table(
        f"Codecs, {FEATURES} × {BATCH:,} bags, vectors of {DIM}; GB/s of what is packed",
        CODECS,
    )
    rng = np.random.default_rng(0)

    def row(what: str, num_bytes: int, pack: Ask, unpack: Ask, left: int) -> None:
        times = harness.alternate({"pack": timed(pack), "unpack": timed(unpack)}, options.rounds)  # fmt: skip
        speeds = [num_bytes / harness.median(times[name]) / 1e9 for name in ("pack", "unpack")]
        table.row({"what": what, "MB": num_bytes / MEGABYTE, "bytes left": left / num_bytes,
                   "pack GB/s": speeds[0], "unpack GB/s": speeds[1]})  # fmt: skip

    pooled = np.ones(FEATURES, bool)
    for what, sizes in (
        ("single ids, Zipf", np.ones(FEATURES * BATCH, int)),
        ("bags of 10, Zipf", rng.integers(0, 21, FEATURES * BATCH)),
    ):
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        ids = rng.zipf(1.2, offsets[-1]) % 1_000_000
        packed = row_codecs.pack(ids, offsets, BATCH, pooled)
        row(what, ids.nbytes + offsets.nbytes,
            lambda ids=ids, offsets=offsets: row_codecs.pack(ids, offsets, BATCH, pooled),
            lambda packed=packed: row_codecs.unpack(packed), sum(array.nbytes for array in packed))  # fmt: skip
    values = rng.normal(0, 1e-3, (FEATURES * BATCH, DIM)).astype(np.float32)
    halves, scales = row_codecs.shrink(values)
    row("float32 → float16", values.nbytes, lambda: row_codecs.shrink(values),
        lambda: row_codecs.grow(halves, scales), halves.nbytes + scales.nbytes)  # fmt: skip


if __name__ == "__main__":
    main()
