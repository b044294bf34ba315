"""Checkpoints: a shard's file beside a plain write of as many bytes, and how long training waits meanwhile.

Both are written to the same directory in turn and synced in the same way. ``of plain`` is how many times as fast
as the plain write ours is, paired round by round. Then a thread trains (look-up and update of Zipf ids) while
another saves: the longest that a verb waited for the lock, that moving the log to its file took, and a step.
Last, whole training steps without and with a save under way (saving.py).

    girih bench checkpoint                  a file of some 2.5 GB
    girih bench checkpoint --rows 2000000   a smaller one
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import harness
import numpy as np
import saving
from ids import Shape, Stream
from numpy.typing import NDArray

from girih import optim
from girih.store import GroupSpec, Keys, RowUpdate, Segment, Snapshot, Store, TableSpec
from girih.store.spec import shard_of
from girih.tables import LRU, Normal
from girih.telemetry.status_file import resident_bytes
from support.store_verbs import write_snapshot

FEATURES, BATCH, FILL = 26, 4096, 1 << 18
PIECE_BYTES = 64 << 20


def main() -> None:
    parser = harness.parser("checkpoint", __doc__)
    parser.add_argument("--rows", type=int, default=13_000_000, help="of all tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--eviction", choices=["lru", "none"], default="lru")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--steps", type=int, default=100, help="without a save; during one, as many as fit")
    parser.add_argument("--saves", type=int, default=4, help="beside whole training steps")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs", "bench"), help="on the disk to measure"
    )
    options = parser.parse_args()
    report = harness.Report("checkpoint", options)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        stores = filled(options)
        at_rest(report, options, stores, Path(directory))
        in_training(report, options, stores, Path(directory))
        for store in stores:
            store.close()
        saving.beside_training(report, options, Path(directory))
    report.finish()


def filled(options: argparse.Namespace) -> list[Store]:
    """Shards of one group of tables, all rows made and moved once."""
    eviction = LRU(max_rows=options.rows // FEATURES + 1) if options.eviction == "lru" else None
    tables = tuple(
        TableSpec(f"t{number}", (Normal(std=0.01),), eviction=eviction) for number in range(FEATURES)
    )
    spec = GroupSpec("g", tables, (Segment("embedding", options.dim, optim.Adagrad(lr=0.05)),))
    stores = [Store(spec, shard=s, num_shards=options.shards) for s in range(options.shards)]
    per_table = options.rows // FEATURES
    for table in range(FEATURES):
        for first in range(0, per_table, FILL):
            ids = np.arange(first, min(first + FILL, per_table))
            step_of(stores, ids, np.full(len(ids), table, np.int32), 1)
    return stores


def step_of(stores: list[Store], ids: NDArray[np.int64], tables: NDArray[np.int32], step: int) -> None:
    """Look-up and update of unique keys, on all shards in turn."""
    owner = shard_of(ids, tables, len(stores)) if len(stores) > 1 else np.zeros(len(ids), np.int64)
    for shard, store in enumerate(stores):
        mine = np.flatnonzero(owner == shard)
        out = np.empty((len(mine), store.spec.dim), np.float32)
        rows = store.lookup(Keys(ids[mine], tables[mine]), step, out)
        store.apply_gradients(Keys(ids[mine], tables[mine], rows=rows), RowUpdate(out, step))


def at_rest(
    report: harness.Report, options: argparse.Namespace, stores: list[Store], directory: Path
) -> None:
    """Ours and a plain write in turn."""
    files = [directory / f"shard-{shard}" for shard in range(len(stores))]
    sizes = [write_snapshot(store, file)["bytes"] for store, file in zip(stores, files, strict=True)]
    same = [memoryview(file.read_bytes()) for file in files]

    def ours(_: int) -> Sequence[float]:
        fresh(files)
        start = time.perf_counter()
        for store, file in zip(stores, files, strict=True):
            write_snapshot(store, file)
        return (time.perf_counter() - start,)

    def plain(_: int) -> Sequence[float]:
        fresh(files)
        start = time.perf_counter()
        for content, file in zip(same, files, strict=True):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
            for first in range(0, len(content), PIECE_BYTES):
                os.write(descriptor, content[first : first + PIECE_BYTES])
            os.fsync(descriptor)
            os.close(descriptor)
        return (time.perf_counter() - start,)

    times = harness.alternate({"plain write": plain, "girih": ours}, options.repeats, warmup=1)
    table = report.table(
        "Save at rest, synced",
        {"what": "{}", "bytes": "{:,}", "s": "{:.2f}", "GB/s": "{:.2f}", "of plain": "{:.2f}"},
    )
    for what, measured in times.items():
        seconds = harness.median(measured)
        values = {"what": what, "bytes": sum(sizes), "s": seconds, "GB/s": sum(sizes) / seconds / 1e9}
        if what == "girih":
            values["of plain"] = harness.ratio(measured, times["plain write"])
        table.row(values)


def fresh(files: Sequence[Path]) -> None:
    """Removes what was written, and has the disk done with it."""
    for file in files:
        file.unlink(missing_ok=True)
    os.sync()


class TimedLock:
    """A lock that remembers how long its taking took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waits: list[float] = []
        self.trainer = threading.get_ident()

    def __enter__(self) -> None:
        start = time.perf_counter()
        self._lock.acquire()
        if threading.get_ident() == self.trainer:
            self.waits.append(time.perf_counter() - start)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class TimedSnapshot(Snapshot):
    """A snapshot that remembers how long verbs waited for their log."""

    def make_room(self, num_records: int) -> None:
        start = time.perf_counter()
        super().make_room(num_records)
        self.rooms_s: list[float] = [*getattr(self, "rooms_s", []), time.perf_counter() - start]


def in_training(
    report: harness.Report, options: argparse.Namespace, stores: list[Store], directory: Path
) -> None:
    """Steps alone, then steps while all shards are saved."""
    shape = Shape(FEATURES, BATCH, options.rows // FEATURES)
    stream = Stream(shape, "clipped", seed=1)
    tables = np.repeat(np.arange(FEATURES, dtype=np.int32), BATCH)
    batches = []
    for _ in range(64):
        keys = np.unique(np.stack([tables.astype(np.int64), stream.next()]), axis=1)
        batches.append((np.ascontiguousarray(keys[1]), keys[0].astype(np.int32)))
    locks = [TimedLock() for _ in stores]
    for store, lock in zip(stores, locks, strict=True):
        store.state.memory.lock = lock  # type: ignore[assignment]
    step = 1

    def one_step() -> float:
        nonlocal step
        step += 1
        return harness.seconds(lambda: step_of(stores, *batches[step % len(batches)], step))

    for _ in range(10):
        one_step()
    alone = [one_step() for _ in range(options.steps)]
    for lock in locks:
        lock.waits.clear()
    memory = resident_bytes()
    begin = time.perf_counter()
    snapshots = [TimedSnapshot(store.state.values, directory) for store in stores]
    begun_s = time.perf_counter() - begin
    num_bytes: list[int] = []

    def save() -> None:
        for shard, snapshot in enumerate(snapshots):
            with snapshot:
                num_bytes.append(write_snapshot(snapshot, directory / f"live-{shard}")["bytes"])

    thread = threading.Thread(target=save)
    during, most_memory = [], 0
    thread.start()
    while thread.is_alive():
        during.append(one_step())
        most_memory = max(most_memory, resident_bytes())
    saved_s = time.perf_counter() - begin
    thread.join()
    table = report.table(
        f"Steps of {FEATURES} × {BATCH:,} ids, {statistics.fmean(len(b[0]) for b in batches):,.0f} unique",
        {"what": "{}", "steps": "{}", "median ms": "{:.1f}", "p99 ms": "{:.1f}", "max ms": "{:.1f}"},
    )
    for what, times in (("alone", alone), ("while saving", during)):
        ms = 1e3 * np.array(times)
        table.row(
            {"what": what, "steps": len(times), "median ms": float(np.median(ms)),
             "p99 ms": float(np.quantile(ms, 0.99)), "max ms": float(ms.max())}
        )  # fmt: skip
    waits = report.table("A save while training", {"what": "{}", "value": "{:,.1f}"})
    for what, value in (
        ("save, s", saved_s),
        ("GB/s", sum(num_bytes) / saved_s / 1e9),
        ("to begin, ms", 1e3 * begun_s),
        ("longest wait for the lock, ms", 1e3 * max(max(lock.waits) for lock in locks)),
        ("longest wait for the log, ms", 1e3 * max(max(s.rooms_s) for s in snapshots)),
        ("spilled, MB", sum(s._spills.num_bytes for s in snapshots) / 1e6),
        ("more memory, MB", (most_memory - memory) / 1e6),
    ):
        waits.row({"what": what, "value": value})


if __name__ == "__main__":
    main()
