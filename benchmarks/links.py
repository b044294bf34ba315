"""Links of slow hosts: round trips without and with a delay, throughput of TCP, and what a relay costs.

    girih bench links                          as root
    girih bench links --delays 1 10 --rates 100mbit

Two hosts without other work send each other one byte, in turns, and then a stream. ``error`` is a round trip minus twice the delay. A relay delays
the packets if the kernel has no netem, see ``delays``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import fleet
import harness
import network
import numpy as np
import pages
from picasso import bytes_per_s

TITLE = "round trips of a byte and throughput of a stream, TCP"
PORT = 29_999
CHUNK = bytes(1 << 16)


def main() -> None:
    parser = harness.parser("links", __doc__)
    pages.add_option(parser, page_parts)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 10.0], help="ms, one way")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="as tc writes them")
    parser.add_argument("--trips", type=int, default=1000, help="round trips")
    parser.add_argument("--stream-s", type=float, default=5.0, help="duration of the stream")
    options = parser.parse_args()
    report = harness.Report("links", options)
    table = report.table(
        TITLE,
        {
            "rate": "{}", "delay ms": "{:g}", "relay": "{}", "error ms: median": "{:.3f}", "p90": "{:.3f}", "p99": "{:.3f}",
            "most": "{:.3f}", "Mbit/s": "{:,.0f}", "of the rate": "{:.2f}", "counted bytes of those sent": "{:.3f}",
            "relay, CPU s per GB": "{:.2f}", "machine, CPU s per GB": "{:.2f}",
        },
    )  # fmt: skip
    reason = network.missing(delay=any(options.delays))
    if reason is not None:
        report.skip("all", reason)
    else:
        for rate in options.rates:
            for delay_ms in options.delays:
                table.row(
                    {"rate": rate, "delay ms": delay_ms}
                    | measured(rate, delay_ms, trips=options.trips, stream_s=options.stream_s)
                )
    report.finish()


def measured(rate: str, delay_ms: float, *, trips: int, stream_s: float) -> dict[str, Any]:
    """Columns of a link of this rate in both directions, with this delay at both ends."""
    speed = network.Host(rate, delay_ms)
    with network.network({"a": speed, "b": speed}) as hosts:
        listener, sender = (
            subprocess.Popen(
                [*hosts.places[name].command, sys.executable, __file__, role, hosts.places["b"].host, str(trips), str(stream_s)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for name, role in (("b", "listen"), ("a", "send"))
        )  # fmt: skip
        with listener, sender:
            line = sender.stdout.readline() if sender.stdout is not None else ""  # the round trips are over
            before, relay_s, machine_s = (
                fleet.link_counts(hosts.links["b"], "bytes"),
                _used_s(hosts),
                fleet.machine_cpu_s(),
            )
            sender.communicate("\n")
            relay_s, machine_s = _used_s(hosts) - relay_s, fleet.machine_cpu_s() - machine_s
            counted = fleet.link_counts(hosts.links["b"], "bytes")[1] - before[1]
            received, seconds = json.loads(listener.communicate()[0])
    errors = 1e3 * np.array(json.loads(line)) - 2 * delay_ms
    quantiles = np.quantile(errors, (0.5, 0.9, 0.99, 1.0))
    return {
        "relay": "no" if hosts.relay is None else "yes",
        **dict(zip(("error ms: median", "p90", "p99", "most"), map(float, quantiles), strict=True)),
        "Mbit/s": 8e-6 * received / seconds,
        "of the rate": received / seconds / (bytes_per_s(rate) or 1.0),
        "counted bytes of those sent": counted / received,
        "relay, CPU s per GB": relay_s / received * 1e9,
        "machine, CPU s per GB": machine_s / received * 1e9,
    }


def _used_s(hosts: network.Hosts) -> float:
    return 0.0 if hosts.relay is None else fleet.cpu_s(hosts.relay)


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The table of ``docs/scale.md``."""
    lines = [
        [
            row["rate"], f"{row['delay ms']:g}", row["relay"], *(f"{row[name]:.3f}" for name in ("error ms: median", "p90", "p99", "most")),
            f"{row['Mbit/s']:,.0f}", f"{row['relay, CPU s per GB']:.1f}", f"{row['machine, CPU s per GB']:.1f}",
        ]
        for row in pages.rows(results, TITLE)
    ]  # fmt: skip
    header = (
        "rate", "delay, ms", "relay", "error, ms: median", "p90", "p99", "largest", "stream, Mbit/s", "CPU of the relay, s", "CPU of the machine, s",
    )  # fmt: skip
    table = pages.table(header, lines)
    return {"table": pages.paragraphs(f"{pages.measured(results)}.", table) if table else None}


def listen(address: str, trips: int) -> None:
    """Returns each byte to the sender, then reads the stream. Prints the bytes, and the seconds that they took."""
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(trips):
        connection.send(connection.recv(1))
    received = len(connection.recv(len(CHUNK)))
    start = time.perf_counter()
    while chunk := len(connection.recv(1 << 20)):
        received += chunk
    print(json.dumps((received, time.perf_counter() - start)))


def send(address: str, trips: int, stream_s: float) -> None:
    """Prints the seconds of each round trip. Sends a stream after a line on standard input."""
    while True:
        try:
            connection = socket.create_connection((address, PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    for _ in range(trips):
        start = time.perf_counter()
        connection.send(b"x")
        connection.recv(1)
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds), flush=True)
    sys.stdin.readline()
    until = time.perf_counter() + stream_s
    while time.perf_counter() < until:
        connection.send(CHUNK)
    connection.close()


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "listen":
        listen(sys.argv[2], int(sys.argv[3]))
    elif len(sys.argv) == 5 and sys.argv[1] == "send":
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
