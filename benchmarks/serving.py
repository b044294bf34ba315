"""Answers of `girih serve`: latency and requests per second at several numbers of clients, who have a core of their own.

The server is a process of its own on one core, with one computing thread; clients are threads of another process on another
core, each with one connection, asking again as soon as it is answered. Requests are made before: 500 candidates of one user, binary,
ids drawn by Zipf's law, of which a few have no row. A DeepFM of 26 features (dim 16) and 13 numbers, hidden = [128, 64], unless said otherwise.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import torch

import girih
from girih.serving import protocol
from girih.serving.exporting import export
from girih.serving.opening import open_model
from girih.serving.reading import RequestReader
from girih.serving.served import Served, open_served
from girih.serving.signature import Rows, Signature
from girih.store.mapped import MappedWriter

NUM_REQUESTS = 64
PAST_ROWS = 1.02
"""Ids are drawn from so many times the rows of a table: those behind them have none."""
ASKING = ("parsed", "read to a batch", "predicted", "answered")


def main() -> None:
    parser = harness.parser("serving", __doc__)
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--numbers", type=int, default=13)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--json-too", action="store_true", help="also asks in JSON")
    options = parser.parse_args()
    report = harness.Report("serving", options)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        report.not_identical("one core for server and clients: each takes time from the other")
    with tempfile.TemporaryDirectory(prefix="girih-bench-") as directory:
        model = made(Path(directory), options)
        kinds = {"binary": True} | ({"JSON": False} if options.json_too else {})
        of_kind = {kind: requests(model, options, binary=binary) for kind, binary in kinds.items()}
        inside(report, model, of_kind, cores[0])
        title = f"DeepFM of {options.features} features, dim {options.dim}, hidden {options.hidden}; {options.candidates} candidates"
        table = report.table(
            f"{title}: asked by HTTP, server and clients on a core each",
            {
                "body": "{}", "clients": "{}", "requests/s": "{:,.0f}", "examples/s": "{:,.0f}", "p50 ms": "{:.2f}",
                "p99 ms": "{:.2f}", "longest ms": "{:.1f}", "asked": "{:,}",
            },
        )  # fmt: skip
        with serving(model, cores[0]) as address:
            for kind, bodies in of_kind.items():
                for clients in options.clients:
                    found = asked(address, bodies, clients, options.seconds, cores[-1])
                    rate = len(found) / options.seconds
                    p50, p99 = np.percentile(found, [50, 99])
                    row = {
                        "body": kind,
                        "clients": clients,
                        "requests/s": rate,
                        "examples/s": rate * options.candidates,
                    }
                    row |= {
                        "p50 ms": 1e3 * p50,
                        "p99 ms": 1e3 * p99,
                        "longest ms": 1e3 * max(found),
                        "asked": len(found),
                    }
                    table.row(row)
    report.finish()


def made(directory: Path, options: Any) -> Path:
    """An exported model with random rows."""
    names = [f"c{n}" for n in range(options.features)]
    numbers = [f"x{n}" for n in range(options.numbers)]
    features = [girih.Categorical(name=name, dim=options.dim) for name in names]
    features += [girih.Numeric(name=name, transform="standardize") for name in numbers]
    schema = girih.Schema(features, "click")
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 9, 512) for name in names} | {name: rng.random(512) for name in numbers}
    data = girih.read_arrow(pa.table(columns | {"click": rng.integers(0, 2, 512)}), schema, batch_size=256)
    with girih.Trainer(
        girih.models.DeepFM(schema, hidden=tuple(options.hidden)), run=str(directory / "run")
    ) as trainer:
        trainer.fit(data)
    path = directory / "model"
    signature = export(open_model(directory / "run"), path, "bench", print, programs=False)
    _, served = open_served(path)
    (stack,) = served.stacks
    (rows,) = signature.rows
    num_rows = options.rows * options.features
    with MappedWriter(path / rows.file, stack.spec, num_rows) as writer:
        for table in range(options.features):
            ids = rng.permutation(options.rows).astype(np.int64)
            values = rng.normal(scale=0.01, size=(options.rows, stack.spec.dim)).astype(np.float32)
            writer.add(ids, np.full(options.rows, table, np.int32), values)
        facts = writer.finish()
    filled = Rows(file=rows.file, tables=rows.tables, num_rows=num_rows)
    replace(signature, rows=(filled,), files={**signature.files, rows.file: facts.to_dict()}).write(path)
    return path


def requests(model: Path, options: Any, *, binary: bool) -> list[tuple[bytes, str]]:
    """Bodies, and the header that says how much of them is JSON."""
    rng, found = np.random.default_rng(1), []
    signature = Signature.read(model)
    for _ in range(NUM_REQUESTS):
        described, tail = [], b""
        for each in signature.inputs:
            if each.kind == "ids":
                values = rng.zipf(1.2, options.candidates) % int(PAST_ROWS * options.rows)
                values = values.astype(np.int64)
            else:
                values = rng.random(options.candidates, np.float32)
            tensor: dict[str, Any] = {
                "name": each.name,
                "datatype": each.datatype,
                "shape": [options.candidates],
            }
            if binary:
                tensor["parameters"] = {"binary_data_size": values.nbytes}
                tail += values.tobytes()
            else:
                tensor["data"] = values.tolist()
            described.append(tensor)
        head = json.dumps({"inputs": described, "parameters": {"binary_data_output": binary}}).encode()
        found.append((head + tail, str(len(head)) if binary else ""))
    return found


def inside(
    report: harness.Report, model: Path, of_kind: dict[str, list[tuple[bytes, str]]], core: int
) -> None:
    """Adds a table of where the time goes in the server's process, without HTTP."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with harness.threads(1):
            signature, served = open_served(model)
            table = report.table(
                "Inside, without HTTP", {"body": "{}", "part": "{}", "p50 ms": "{:.3f}", "p99 ms": "{:.3f}"}
            )
            for kind, bodies in of_kind.items():
                parts = [spent(signature, served, body, length) for body, length in 10 * bodies][
                    len(bodies) :
                ]
                for number, name in enumerate((*ASKING, "all")):
                    times = [sum(each) if name == "all" else each[number] for each in parts]
                    p50, p99 = np.percentile(times, [50, 99])
                    table.row({"body": kind, "part": name, "p50 ms": 1e3 * p50, "p99 ms": 1e3 * p99})
    finally:
        os.sched_setaffinity(0, before)


def spent(signature: Signature, served: Served, body: bytes, length: str) -> tuple[float, ...]:
    """Seconds of each part of an answer."""
    reader = _reader(served)
    at = [time.perf_counter()]
    request = protocol.parse(body, length or None, signature.outputs)
    at.append(time.perf_counter())
    batch = reader.read(request.tensors)
    at.append(time.perf_counter())
    predictions = served.predict(batch)
    at.append(time.perf_counter())
    protocol.answer(request, predictions, signature.outputs, "bench", "1")
    at.append(time.perf_counter())
    return tuple(np.diff(at))


_READERS: dict[int, RequestReader] = {}


def _reader(served: Served) -> RequestReader:
    return _READERS.setdefault(id(served), RequestReader(served.schema, 1 << 20))


@contextmanager
def serving(model: Path, core: int) -> Iterator[tuple[str, int]]:
    """A server on one core; its host and port."""
    command = [sys.executable, "-m", "girih", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"http://([^:]+):(\d+)", line)
        if found is None:
            raise SystemExit(f"the server said {line!r}")
        yield found[1], int(found[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def asked(
    address: tuple[str, int], bodies: Sequence[tuple[bytes, str]], clients: int, seconds: float, core: int
) -> list[float]:
    """Seconds of each answer to so many clients, in a process on a core of its own."""
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    process = context.Process(target=_ask_all, args=(address, bodies, clients, seconds, core, told.put))
    process.start()
    found: list[float] = told.get()
    process.join()
    return found


def _ask_all(
    address: tuple[str, int],
    bodies: Sequence[tuple[bytes, str]],
    clients: int,
    seconds: float,
    core: int,
    tell: Callable[[Any], None],
) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    times: list[list[float]] = [[] for _ in range(clients)]
    begin = time.perf_counter() + 1.0  # the first second warms up
    threads = [
        threading.Thread(
            target=_ask,
            args=(address, bodies[n % len(bodies) :] + bodies[: n % len(bodies)], begin, seconds, times[n]),
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell([each for own in times for each in own])


def _ask(
    address: tuple[str, int],
    bodies: Sequence[tuple[bytes, str]],
    begin: float,
    seconds: float,
    times: list[float],
) -> None:
    heads = [
        f"POST /v2/models/bench/infer HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
        + (f"{protocol.JSON_LENGTH}: {length}\r\n" if length else "")
        + "\r\n"
        for body, length in bodies
    ]
    messages = [head.encode() + body for head, (body, _) in zip(heads, bodies, strict=True)]
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = 0
        while True:
            start = time.perf_counter()
            if start >= begin + seconds:
                return
            connection.sendall(messages[number % len(messages)])
            _answer(connection)
            end = time.perf_counter()
            if start >= begin:
                times.append(end - start)
            number += 1


def _answer(connection: socket.socket) -> bytes:
    """Reads one answer.

    Raises:
        RuntimeError: its status is not 200.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1 << 16)
        if not piece:
            raise RuntimeError("the server closed the connection")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{head[:80]!r} {body[:200]!r}")
    length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])  # type: ignore[index]
    while len(body) < length:
        body += connection.recv(1 << 16)
    return body


if __name__ == "__main__":
    main()
