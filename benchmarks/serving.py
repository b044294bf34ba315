"""Answers of `girih serve`: latency and requests per second at several numbers of clients, who have a core of their own.

The server is a process of its own on one core, with one computing thread; clients are threads of another process on another
core, each with one connection, asking again as soon as it is answered. Requests are made before: 500 candidates of one user, binary,
ids drawn by Zipf's law, of which a few have no row. A DeepFM of 26 features (dim 16) and 13 numbers, hidden = [128, 64], unless said otherwise.

With ``updates`` a follower, on the server's core too, takes in what training on one core publishes: recorded before, and written again at the same
speed while clients ask. ``shared`` requests give half of the features once for all candidates, as those of a user are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pages
import pyarrow as pa
import torch
from updates import Replay, record, schema_of

import girih
from girih.serving import protocol
from girih.serving.exporting import export
from girih.serving.model_directory import open_served
from girih.serving.opening import open_model
from girih.serving.reading import RequestReader
from girih.serving.served import Served
from girih.serving.signature import RowsFile, Signature
from girih.store.mapped import MappedWriter

NUM_REQUESTS = 64
PAST_ROWS = 1.02
"""Ids are drawn from so many times the rows of a table: those behind them have none."""
_MORE_S = 4.0
"""Seconds of updates beside those of a measurement: before it begins, and behind its end."""
_VERSION = re.compile(rb'"model_version": ?"([^"]*)"')
INSIDE = "Inside, without HTTP"
ASKING = ("parsed", "read to a batch", "predicted", "answered")


def main() -> None:
    parser = harness.parser("serving", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--numbers", type=int, default=13)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--json-too", action="store_true", help="also asks in JSON")
    parser.add_argument(
        "--every-s", type=float, default=0.5, help="training between two updates; 0 leaves updates out"
    )
    parser.add_argument("--batch-size", type=int, default=2048, help="of the training that makes updates")
    options = parser.parse_args()
    report = harness.Report("serving", options)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        report.not_identical("one core for server and clients: each takes time from the other")
    with tempfile.TemporaryDirectory(prefix="girih-bench-") as directory:
        model = made(Path(directory), options)
        of_kind = {
            "binary": requests(model, options, binary=True),
            "binary, shared": requests(model, options, binary=True, shared=True),
        }
        if options.json_too:
            of_kind["JSON"] = requests(model, options, binary=False)
        if not report.has(INSIDE):
            with report.group():
                inside(report, model, of_kind, cores[0])
        title = f"DeepFM of {options.features} features, dim {options.dim}, hidden {options.hidden}; {options.candidates} candidates"
        table = report.table(
            f"{title}: asked by HTTP, server and clients on a core each",
            {
                "body": "{}", "updates": "{}", "clients": "{}", "requests/s": "{:,.0f}", "examples/s": "{:,.0f}", "p50 ms": "{:.2f}",
                "p99 ms": "{:.2f}", "longest ms": "{:.1f}", "asked": "{:,}", "versions": "{}",
            },
        )  # fmt: skip

        def row(kind: str, clients: int, updates: str, address: tuple[str, int]) -> None:
            if table.has({"body": kind, "updates": updates, "clients": clients}):
                return
            found, versions = asked(address, of_kind[kind], clients, options.seconds, cores[-1])
            rate = len(found) / options.seconds
            p50, p99 = np.percentile(found, [50, 99])
            table.row({
                "body": kind, "updates": updates, "clients": clients, "requests/s": rate, "examples/s": rate * options.candidates,
                "p50 ms": 1e3 * p50, "p99 ms": 1e3 * p99, "longest ms": 1e3 * max(found), "asked": len(found), "versions": len(versions),
            })  # fmt: skip

        with serving([str(model)], cores[0]) as (address, _):
            for kind in of_kind:
                for clients in options.clients:
                    row(kind, clients, "none", address)
        every = {"updates": updates_every(options)}
        if options.every_s and any(
            not table.has(every | {"clients": clients}) for clients in options.clients
        ):
            with_updates(report, options, Path(directory), cores, row)
    report.finish()


def with_updates(
    report: harness.Report,
    options: Any,
    directory: Path,
    cores: Sequence[int],
    row: Callable[[str, int, str, tuple[str, int]], None],
) -> None:
    """Adds the rows with updates: for each number of clients a server that begins with the same version."""
    log = directory / "log"
    record(log, options, options.seconds + _MORE_S, options.every_s, cores[-1])
    filled = -(-options.rows // options.batch_size)
    for clients in options.clients:
        place = directory / f"replayed-{clients}"
        replay = Replay(log, place / "log", filled)
        if clients == options.clients[0]:
            columns = {"versions": "{}", "in s": "{:.1f}", "rows, median": "{:,.0f}"}
            updates = report.table("updates: what training on one core publishes", columns)
            if not updates.rows:
                updates.row({
                    "versions": len(replay.rows), "in s": replay.seconds, "rows, median": float(np.median(replay.rows)),
                })  # fmt: skip
        words = [str(place / "log"), "--follow", "--cache", str(place / "cache"), "--name", "bench"]
        with serving(words, cores[0]) as (address, _), replay.running(cores[-1]):
            row("binary", clients, updates_every(options), address)
        shutil.rmtree(place)


def updates_every(options: Any) -> str:
    """The value of the column ``updates`` with updates."""
    return f"every {options.every_s:g} s"


def made(directory: Path, options: Any) -> Path:
    """An exported model with random rows."""
    schema = schema_of(options)
    rng = np.random.default_rng(0)
    columns = {f.name: rng.integers(0, 9, 512) for f in schema.sparse} | {
        f.name: rng.random(512) for f in schema.numeric
    }
    data = girih.read_arrow(pa.table(columns | {"click": rng.integers(0, 2, 512)}), schema, batch_size=256)
    with girih.Trainer(
        girih.models.DeepFM(schema, hidden=tuple(options.hidden)), run=str(directory / "run")
    ) as trainer:
        trainer.fit(data)
    path = directory / "model"
    signature = export(open_model(directory / "run"), path, "bench", print, programs=False)
    _, served = open_served(path)
    (stack,) = served.stacks
    ((rows,),) = signature.rows
    num_rows = options.rows * options.features
    with MappedWriter(path / rows.name, stack.spec, num_rows) as writer:
        for table in range(options.features):
            ids = rng.permutation(options.rows).astype(np.int64)
            values = rng.normal(scale=0.01, size=(options.rows, stack.spec.dim)).astype(np.float32)
            writer.add(ids, np.full(options.rows, table, np.int32), values)
        filled = RowsFile.written(path / rows.name, writer.finish())
    replace(signature, rows=((filled,),)).write(path)
    return path


def requests(model: Path, options: Any, *, binary: bool, shared: bool = False) -> list[tuple[bytes, str]]:
    """Bodies, and the header that says how much of them is JSON.

    Args:
        shared: gives the first half of the ids, and of the numbers, once for all candidates.
    """
    rng, found = np.random.default_rng(1), []
    signature = Signature.read(model)
    kinds = [[each.name for each in signature.inputs if (each.kind == "ids") == ids] for ids in (True, False)]
    once = {name for names in kinds for name in names[: len(names) // 2]} if shared else set()
    for _ in range(NUM_REQUESTS):
        described, tail = [], b""
        for each in signature.inputs:
            size = 1 if each.name in once else options.candidates
            if each.kind == "ids":
                values = (rng.zipf(1.2, size) % int(PAST_ROWS * options.rows)).astype(np.int64)
            else:
                values = rng.random(size, np.float32)
            tensor: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": [size]}
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
    report: harness.Report, model: Path, of_kind: Mapping[str, list[tuple[bytes, str]]], core: int
) -> None:
    """Adds a table of where the time goes in the server's process, without HTTP."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with harness.threads(1):
            signature, served = open_served(model)
            reader, parser = RequestReader(served.schema, 1 << 20), protocol.Parser(signature.outputs)
            table = report.table(INSIDE, {"body": "{}", "part": "{}", "p50 ms": "{:.3f}", "p99 ms": "{:.3f}"})
            for kind, bodies in of_kind.items():
                parts = [
                    spent(signature, served, reader, parser, body, length) for body, length in 10 * bodies
                ][len(bodies) :]
                for number, name in enumerate((*ASKING, "all")):
                    times = [sum(each) if name == "all" else each[number] for each in parts]
                    p50, p99 = np.percentile(times, [50, 99])
                    table.row({"body": kind, "part": name, "p50 ms": 1e3 * p50, "p99 ms": 1e3 * p99})
    finally:
        os.sched_setaffinity(0, before)


def spent(
    signature: Signature,
    served: Served,
    reader: RequestReader,
    parser: protocol.Parser,
    body: bytes,
    length: str,
) -> tuple[float, ...]:
    """Seconds of each part of an answer."""
    at = [time.perf_counter()]
    request = parser.parse(body, length or None)
    at.append(time.perf_counter())
    batch = reader.read_request(request)
    at.append(time.perf_counter())
    predictions = served.predict(batch)
    at.append(time.perf_counter())
    protocol.answer(request, predictions, signature.outputs, "bench", "1")
    at.append(time.perf_counter())
    return tuple(np.diff(at))


@contextmanager
def serving(words: Sequence[str], core: int) -> Iterator[tuple[tuple[str, int], int]]:
    """A server on one core, with all its processes; its host and port, and the number of its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "girih", "serve", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if "--follow" in words else None,  # a line for each version
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"http://([^:]+):(\d+)", line)
        if found is None:
            raise SystemExit(f"the server said {line!r}")
        yield (found[1], int(found[2])), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def asked(
    address: tuple[str, int], bodies: Sequence[tuple[bytes, str]], clients: int, seconds: float, core: int
) -> tuple[list[float], set[bytes]]:
    """Seconds of each answer to so many clients, in a process on a core of its own; and the versions that answered."""
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    process = context.Process(target=_ask_all, args=(address, bodies, clients, seconds, core, told.put))
    process.start()
    found: tuple[list[float], set[bytes]] = told.get()
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
    versions: set[bytes] = set()
    begin = time.perf_counter() + 1.0  # the first second warms up
    threads = [
        threading.Thread(
            target=_ask,
            args=(
                address,
                bodies[n % len(bodies) :] + bodies[: n % len(bodies)],
                begin,
                seconds,
                times[n],
                versions,
            ),
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell(([each for own in times for each in own], versions))


def _ask(
    address: tuple[str, int],
    bodies: Sequence[tuple[bytes, str]],
    begin: float,
    seconds: float,
    times: list[float],
    versions: set[bytes],
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
            answer = read_answer(connection)
            end = time.perf_counter()
            if start >= begin:
                times.append(end - start)
                versions.add(_VERSION.search(answer)[1])  # type: ignore[index]
            number += 1


def read_answer(connection: socket.socket) -> bytes:
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


AIM_MS = {"p50 ms": 2.0, "p99 ms": 10.0}


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    options, found = results["options"], pages.rows(results, "DeepFM")
    bodies = {
        "binary": f"all features {options['candidates']} times", "binary, shared": "half of them shared", "JSON": "all features, as JSON",
    }  # fmt: skip
    lines = [
        [
            bodies[row["body"]], row["updates"], str(row["clients"]), pages.shown(row.get("requests/s"), "{:,.0f}"),
            *(pages.shown(row.get(name), "{:.1f}") for name in AIM_MS),
        ]
        for row in found
    ]  # fmt: skip
    header = ("request", "updates", "clients", "requests/s", "p50, ms", "p99, ms")
    updated = next((row for row in found if row["updates"] != "none" and row["clients"] == 1), {})
    parts = {
        row["part"]: pages.shown(row.get("p50 ms"), "{:.1f}")
        for row in pages.rows(results, INSIDE, body="binary")
    }
    return {
        "answers": pages.paragraphs(
            f"{pages.measured(results)}:", pages.table(header, lines), pages.sentences(
                _aim(updated, options), f"Without HTTP, an answer takes {parts.get('all', '–')} ms, of which the prediction takes"
                f" {parts.get('predicted', '–')} ms.",
            ),
        )
    }  # fmt: skip


def _aim(updated: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if not updated:
        return ""
    verdicts = ["met" if updated[name] <= aim else "missed" for name, aim in AIM_MS.items()]
    verdict = (
        f"Both are {verdicts[0]}"
        if len(set(verdicts)) == 1
        else "The first is {}, the second is {}".format(*verdicts)
    )
    median, late = AIM_MS.values()
    return (
        f"The aim is {median:g} ms in the median, and {late:g} ms in 99 of 100 answers while updates arrive. With one client these are"
        f" {updated['p50 ms']:.1f} and {updated['p99 ms']:.1f} ms. **{verdict}.** In {options['seconds']:g} s the server answered from"
        f" {updated['versions']} versions."
    )


if __name__ == "__main__":
    main()
