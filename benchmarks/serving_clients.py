"""Memory of `girih serve` before, during and after greedy and slow clients, and the latency of others meanwhile.

The server has its default options and one worker, on one core. Greedy clients of one kind ask from another core, and
connect again when they are refused. One client asks for predictions as in `girih bench serving`, and reads its answers.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import greedy
import harness
import numpy as np

import serving
from girih.serving import protocol

_AFTER_S = 5.0


def main() -> None:
    parser = harness.parser("serving_clients", __doc__)
    parser.add_argument(
        "--kinds", nargs="+", choices=greedy.KINDS, default=list(greedy.KINDS), metavar="KIND"
    )
    parser.add_argument("--clients", type=int, default=200, help="greedy ones")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each kind")
    options = parser.parse_args()
    options.features, options.numbers, options.rows, options.dim = 26, 13, 10_000, 16
    options.hidden, options.candidates = [128, 64], 500
    report = harness.Report("serving_clients", options)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="girih-bench-") as directory:
        model = serving.made(Path(directory), options)
        body, length = serving.requests(model, options, binary=True)[0]
        request = (
            f"POST /v2/models/bench/infer HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
            f"{protocol.JSON_LENGTH}: {length}\r\n\r\n"
        ).encode() + body
        table = report.table(
            f"{options.clients} greedy clients for {options.seconds:g} s; RSS in MiB, latency of another client in ms",
            {
                "clients": "{}", "before": "{:.0f}", "most": "{:+.1f}", "after": "{:+.1f}",
                "answers": "{:,}", "refused": "{:,}", "p50 ms": "{:.1f}", "p99 ms": "{:.1f}", "longest ms": "{:.0f}",
            },
        )  # fmt: skip
        for kind in ["none", *options.kinds]:
            with serving.serving([str(model)], cores[0]) as (address, pid):
                table.row({"clients": kind, **measured(address, pid, kind, request, options, cores[-1])})
    report.finish()


def measured(
    address: tuple[str, int], pid: int, kind: str, request: bytes, options: Any, core: int
) -> dict[str, object]:
    """Memory and latency while clients of one kind ask."""
    good = _Good(address, request)
    good.start()
    time.sleep(3.0)
    before = greedy.rss_megabytes(pid)
    good.times.clear()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_crowd, args=(core, address, kind, request, options))
    process.start()
    most = before
    while process.is_alive():
        most = max(most, greedy.rss_megabytes(pid))
        time.sleep(0.02)
    times = list(good.times)
    time.sleep(_AFTER_S)
    after = greedy.rss_megabytes(pid)
    good.end()
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "before": before, "most": most - before, "after": after - before, "answers": len(times), "refused": good.refused,
        "p50 ms": 1e3 * p50, "p99 ms": 1e3 * p99, "longest ms": 1e3 * max(times),
    }  # fmt: skip


def _crowd(core: int, address: tuple[str, int], kind: str, request: bytes, options: Any) -> None:
    os.sched_setaffinity(0, {core})
    kinds = [] if kind == "none" else [kind]
    clients = options.clients if kinds else 0
    greedy.crowd(address, kinds, "/v2/models/bench/infer", request, clients, options.seconds)


class _Good(threading.Thread):
    """A client that asks again and again, and reads its answers.

    Attributes:
        times: seconds of each answer. refused: requests without a prediction.
    """

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        super().__init__(daemon=True)
        self._address, self._request = address, request
        self._ends = False
        self.times: list[float] = []
        self.refused = 0

    def run(self) -> None:
        while not self._ends:
            try:
                with socket.create_connection(self._address, timeout=60) as connection:
                    while not self._ends:
                        start = time.perf_counter()
                        connection.sendall(self._request)
                        serving.read_answer(connection)
                        self.times.append(time.perf_counter() - start)
                        time.sleep(0.01)
            except (OSError, RuntimeError):
                self.refused += 1

    def end(self) -> None:
        """Ends after the next answer."""
        self._ends = True
        self.join()


if __name__ == "__main__":
    main()
