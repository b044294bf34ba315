"""Messages between two processes: raw sockets, TCP, TLS, shared memory; and the codecs.

A round trip is what a trainer does with an embedding worker: it writes a request of 0.85 MB, the other process reads
every byte of it and writes a reply of 6.8 MB, of which the trainer reads every byte. The raw sockets are Python's,
with ``sendall`` and ``recv_into`` to and from memory that is used again. ``of raw`` is how many times as fast as they
are, paired round by round. ``in this process`` has no second process: the ends are threads.

Each takes its turn with two round trips. The first finds its memory where the others left it, mostly outside the
cache: ``cold``. The second, by which they are compared, is as in a loop of its own.

    girih bench wire                     all
    girih bench wire --rounds 200        closer
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import harness
import numpy as np
from numpy.typing import NDArray

from girih.comm import endpoints
from girih.comm.codecs import index_codec, value_codec
from girih.comm.rpc import Client, Request
from girih.testing import inproc

SECRET = b"of this benchmark"
MEGABYTE = 1_000_000
FEATURES, BATCH, DIM = 26, 4096, 16
Ask = Callable[[], object]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve([int(size) for size in sys.argv[2:]])
        return
    parser = harness.parser("wire", __doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out-mb", type=float, default=0.85, help="of the request")
    parser.add_argument("--back-mb", type=float, default=6.8, help="of the reply")
    options = parser.parse_args()
    report = harness.Report("wire", options)
    round_trips(report, options)
    codecs(report, options)
    report.finish()


def words(megabytes: float) -> int:
    """How many int64 are so many megabytes."""
    return int(megabytes * MEGABYTE) // 8


def timed(ask: Ask) -> harness.Contestant:
    """For ``harness.alternate``, which is to time the whole call."""

    def contestant(_: int) -> None:
        ask()

    return contestant


def twice(ask: Ask) -> harness.Contestant:
    """For ``harness.alternate``: seconds of a first and a second round trip."""

    def contestant(_: int) -> tuple[float, float]:
        return harness.seconds(ask), harness.seconds(ask)

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
    """The second process: raw sockets, TCP, TLS and shared memory."""
    num_out, num_back = sizes
    answer = Answer(num_back)
    with (
        socket.create_server(("127.0.0.1", 0)) as raw,
        endpoints.listen(answer, secret=SECRET) as tcp,
        endpoints.listen(answer, address="tls://127.0.0.1:*", secret=SECRET) as tls,
        endpoints.listen(answer, address="shm://", secret=SECRET) as shared,
    ):
        print(raw.getsockname()[1], tcp.address, tls.address, shared.address, flush=True)
        threading.Thread(target=serve_raw, args=(raw, num_out, answer.source), daemon=True).start()
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


def ask_raw(port: int, source: NDArray[np.int64], num_back: int) -> Ask:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, reply = np.empty_like(source), np.empty(num_back, np.int64)

    def ask() -> None:
        np.copyto(request, source)
        connection.sendall(request.data.cast("B"))
        receive_all(connection, reply)
        reply.sum()

    return ask


def ask_wire(client: Client, source: NDArray[np.int64]) -> Ask:
    def ask() -> None:
        request = client.buffer(np.int64, len(source))
        np.copyto(request, source)
        (array,) = client.call(1, (), (request,)).wait().arrays
        array.sum()

    return ask


def round_trips(report: harness.Report, options: argparse.Namespace) -> None:
    num_out, num_back = words(options.out_mb), words(options.back_mb)
    source = np.arange(num_out)
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(num_out), str(num_back)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    port, tcp_address, tls_address, shared_address = child.stdout.readline().split()  # type: ignore[union-attr]
    with (
        endpoints.connect(tcp_address, secret=SECRET) as tcp,
        endpoints.connect(tls_address, secret=SECRET) as tls,
        endpoints.connect(shared_address, secret=SECRET) as shared,
        inproc.listen(Answer(num_back), secret=SECRET) as server,
        inproc.connect(server.address, secret=SECRET) as near,
    ):
        clients = {"TCP": tcp, "TLS": tls, "shared memory": shared, "in this process": near}
        asks = {"raw sockets": ask_raw(int(port), source, num_back)}
        asks |= {name: ask_wire(client, source) for name, client in clients.items()}
        contestants = {name: twice(ask) for name, ask in asks.items()}
        alone = {"in this process": contestants.pop("in this process")}  # as far as the cache goes
        times = harness.alternate(contestants, options.rounds, warmup=5)
        times |= harness.alternate(alone, options.rounds, warmup=5)
        cold = {name: [parts[:1] for parts in measured] for name, measured in times.items()}
        times = {name: [parts[1:] for parts in measured] for name, measured in times.items()}
        small = harness.alternate(
            {name: timed(lambda client=client: client.call(0, (1,)).wait()) for name, client in clients.items()},
            20 * options.rounds, warmup=20,
        )  # fmt: skip
    child.communicate()
    table = report.table(
        f"Round trips, {options.out_mb} MB out, {options.back_mb} MB back",
        {"over": "{}", "ms": "{:.2f}", "GB/s": "{:.2f}", "of raw": "{:.2f}×", "of TCP": "{:.2f}×",
         "cold ms": "{:.2f}", "of raw, cold": "{:.2f}×", "of TCP, cold": "{:.2f}×", "empty, µs": "{:.0f}"},
    )  # fmt: skip
    for name, measured in times.items():
        median = harness.median(measured)
        table.row({
            "over": name, "ms": 1e3 * median, "GB/s": 8 * (num_out + num_back) / median / 1e9,
            "of raw": harness.ratio(measured, times["raw sockets"]),
            "of TCP": harness.ratio(measured, times["TCP"]),
            "cold ms": 1e3 * harness.median(cold[name]),
            "of raw, cold": harness.ratio(cold[name], cold["raw sockets"]),
            "of TCP, cold": harness.ratio(cold[name], cold["TCP"]),
            "empty, µs": 1e6 * harness.median(small[name]) if name in small else None,
        })  # fmt: skip


def codecs(report: harness.Report, options: argparse.Namespace) -> None:
    table = report.table(
        f"Codecs, {FEATURES} × {BATCH:,} bags, vectors of {DIM}; GB/s of what is packed",
        {
            "what": "{}",
            "MB": "{:.2f}",
            "bytes left": "{:.2f}",
            "pack GB/s": "{:.2f}",
            "unpack GB/s": "{:.2f}",
        },
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
        packed = index_codec.pack(ids, offsets, BATCH, pooled)
        row(what, ids.nbytes + offsets.nbytes,
            lambda ids=ids, offsets=offsets: index_codec.pack(ids, offsets, BATCH, pooled),
            lambda packed=packed: index_codec.unpack(packed), sum(array.nbytes for array in packed))  # fmt: skip
    values = rng.normal(0, 1e-3, (FEATURES * BATCH, DIM)).astype(np.float32)
    halves, scales = value_codec.shrink(values)
    row("float32 → float16", values.nbytes, lambda: value_codec.shrink(values),
        lambda: value_codec.grow(halves, scales), halves.nbytes + scales.nbytes)  # fmt: skip


if __name__ == "__main__":
    main()
