"""One real shard of 10¹⁴ parameters: filled, trained on, saved while training goes on, and restored.

Persia trains 10¹⁴ parameters on 30 servers. At dim 128 these are 12,480 shards of 62.6 million rows. This benchmark fills
shard 0 of 12,480 with ids that really belong to it, in float16, in an arena in a file whose blocks are all
reserved before the first row. A step reads ``--keys`` rows, drawn alike from all, and updates them. The small shard has the
same kind of arena. The two take turns.

    girih bench one_shard --directory DIR --json docs/results/one-shard.json
        the whole: 21 GB of free memory for the page cache (the arena is 19 GB) and 39 GB of free disk at DIR
    girih bench one_shard --rows 2000000        a smaller one

If memory or disk has no room for all rows, it takes the largest shard that has room, and says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pages
from numpy.typing import NDArray

import girih
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.store import File, GroupSpec, Keys, RowUpdate, Segment, Store, TableSpec, shard_of, write_rows
from girih.store.accounting import disk_bytes, row_bytes
from girih.store.memory.arena import SLOT_BYTES, index_slots
from girih.tables import Normal

PARAMETERS, SERVERS, NUM_SHARDS = 10**14, 30, 12_480
FILLED_AT_ONCE = 1 << 17
SAMPLED = 1 << 17
"""Rows that are compared before the save and after the restore."""
SPARE_BYTES = 3 << 29
GOLDEN, FIRST, SECOND = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
"""The constants of splitmix64, see :mod:`girih.kernels.cpu.hashing`."""
OPTIMIZERS = {"sgd": girih.optim.SGD(lr=0.01), "rowwise_adagrad": girih.optim.RowwiseAdagrad(lr=0.01)}


def main() -> None:
    parser = harness.parser("one_shard", __doc__)
    pages.add_option(parser, page_parts)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, help="of the shard; default: those of 10¹⁴ parameters")
    parser.add_argument("--small", type=int, default=100_000, help="rows of the small shard")
    parser.add_argument("--keys", type=int, default=10_000, help="of a step")
    parser.add_argument("--rounds", type=int, default=200, help="steps that count, of each shard")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="for arenas and checkpoint"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small shard and few steps: shows that it runs"
    )
    options = parser.parse_args()
    if not options.directory.is_dir():
        parser.error(f"--directory {options.directory}: no such directory; make it first")
    if options.quick:
        options.rows, options.small, options.rounds = 200_000, 20_000, 5
    whole = -(-PARAMETERS // (options.dim * NUM_SHARDS))
    report = harness.Report("one_shard", options)
    rows = fitting(options, options.rows or whole, report)
    with tempfile.TemporaryDirectory(prefix="girih-bench-", dir=options.directory) as directory:
        run(options, rows, whole, Path(directory), report)
    report.finish()


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """Tables of docs/scale.md: the shard, its steps, and its checkpoint. A sentence has all shards."""
    shard, checkpoint, servers = (pages.row(results, title) for title in ("Shard 0", "Checkpoint", "All "))
    steps = pages.rows(results, "Steps of")
    if not (shard and checkpoint and servers):
        return {"tables": None}
    filled = pages.table(
        ("rows", "parameters", "fill, s", "bytes a row", "of the embedding", "of the index", "GB"),
        [[
            f"{shard['rows']:,}", f"{shard['parameters']:.3g}", f"{shard['fill s']:.0f}", f"{shard['bytes a row']:.1f}",
            f"{shard['embedding']:.1f}", f"{shard['index']:.1f}", f"{shard['GB']:.2f}",
        ]],
    )  # fmt: skip
    taken = pages.table(
        ("rows", "step, ms", "ns a key", "of the small shard"),
        [
            [
                f"{row['rows']:,}", f"{row['step ms']:.2f}", f"{row['ns a key']:.0f}",
                pages.shown(row["of the small shard"], "{:.2f}"),
            ]
            for row in steps
        ],
    )  # fmt: skip
    kept = pages.table(
        ("GB", "written, s", "step meanwhile, ms", "restored, s", "step after, ms", "rows are equal"),
        [[
            f"{checkpoint['GB']:.2f}", f"{checkpoint['write s']:.0f}",
            pages.shown(checkpoint["step ms while it is written"], "{:.2f}"), f"{checkpoint['restore s']:.0f}",
            f"{checkpoint['step ms after']:.2f}", checkpoint["rows are equal"],
        ]],
    )  # fmt: skip
    whole = (
        f"All {NUM_SHARDS:,} shards have {servers['rows']:.3g} rows and {servers['parameters']:.3g} parameters. They need"
        f" {servers['TB']:.0f} TB, {servers['TB a server']:.1f} TB on each of {SERVERS} servers, and a checkpoint has"
        f" {servers['TB of a checkpoint']:.0f} TB."
    )
    return {"tables": pages.paragraphs(f"{pages.measured(results)}.", filled, taken, kept, whole)}


def spec_of(options: argparse.Namespace) -> GroupSpec:
    """One table of float16 rows."""
    segment = Segment("embedding", options.dim, OPTIMIZERS[options.optimizer])
    return GroupSpec("all", (TableSpec("all", (Normal(),)),), (segment,), dtype="float16")


def sizes(options: argparse.Namespace) -> tuple[int, int]:
    """Bytes of a row in the arena, without the index, and in a checkpoint."""
    with Store(spec_of(options)) as store:
        description = store.state.layout.description
        return sum(row_bytes(description).values()), sum(disk_bytes(description).values())


def fitting(options: argparse.Namespace, rows: int, report: harness.Report) -> int:
    """The rows that memory and disk have room for, at most ``rows``."""
    own, saved = sizes(options)
    memory, disk = (
        harness.available_bytes() - SPARE_BYTES,
        shutil.disk_usage(options.directory).free - SPARE_BYTES,
    )
    wanted = rows
    while rows > options.small and (
        arena_bytes(own, rows) > memory or 2 * SLOT_BYTES * index_slots(rows) + rows * (own + saved) > disk
    ):
        rows -= max(1, wanted // 1000)
    if rows < wanted:
        report.skip(
            f"{wanted:,} rows",
            f"memory has room for {memory / 1e9:.1f} GB and the disk for {disk / 1e9:.1f} GB; {rows:,} rows instead",
        )
    return rows


def arena_bytes(row: int, rows: int) -> int:
    """Bytes of the pages that rows and their index use."""
    return rows * row + SLOT_BYTES * index_slots(rows)


def ids_of(numbers: NDArray[np.int64], shard: int = 0, num_shards: int = NUM_SHARDS) -> NDArray[np.int64]:
    """An id that belongs to the shard for each number below 2³²: all different, by the inverse of the hash.

    The upper half of the hash of (table 0, id) is a shard's, and its lower half a bijection of the number.
    """
    first, behind = -(-(shard << 32) // num_shards), -(-((shard + 1) << 32) // num_shards)
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint32)
        for shift, factor in ((16, 0x85EB_CA6B), (13, 0xC2B2_AE35), (16, 1)):  # the finalizer of MurmurHash3
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        upper = np.uint64(first) + mixed(numbers.astype(np.uint64)) % np.uint64(behind - first)
        h = upper << np.uint64(32) | x.astype(np.uint64)
        of_table = mixed(np.array([GOLDEN], np.uint64))
        return unmixed(unmixed(h) ^ of_table).view(np.int64)


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


def unmixed(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The inverse of :func:`mixed`."""
    for shift, factor in ((31, SECOND), (27, FIRST)):
        h = h ^ (h >> np.uint64(shift)) ^ (h >> np.uint64(2 * shift))
        h = h * np.uint64(pow(factor, -1, 1 << 64))
    return h ^ (h >> np.uint64(30)) ^ (h >> np.uint64(60))


class Shard:
    """A shard in a file, filled.

    Attributes:
        reserve_s, fill_s: what it took to reserve all blocks, and to make all rows.
    """

    def __init__(self, options: argparse.Namespace, path: Path, rows: int, *, filled: bool = True) -> None:
        self.path, self._keys, self._dim = path, options.keys, options.dim
        arena = File(path=str(path), reserve_rows=rows)
        self.store = Store(spec_of(options), shard=0, num_shards=NUM_SHARDS, arena=arena)
        self._rng, self._step, self._rows = np.random.default_rng(0), 1, rows
        start = time.perf_counter()
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        self.reserve_s = time.perf_counter() - start
        start = time.perf_counter()
        for first in range(0, rows if filled else 0, FILLED_AT_ONCE):
            self._read(np.arange(first, min(rows, first + FILLED_AT_ONCE)))
        self.fill_s = time.perf_counter() - start

    def _read(self, numbers: NDArray[np.int64]) -> Keys:
        keys = Keys(ids_of(numbers), np.zeros(len(numbers), np.int32))
        rows = self.store.lookup(keys, self._step, np.empty((len(numbers), self._dim), np.float32))
        return keys._replace(rows=rows)

    def step(self) -> float:
        """Reads and updates rows drawn alike from all. Returns seconds, without the making of ids."""
        drawn = np.unique(self._rng.integers(0, self._rows, 2 * self._keys))
        numbers = np.sort(self._rng.permutation(drawn)[: self._keys])
        self._step += 1
        keys = Keys(ids_of(numbers), np.zeros(len(numbers), np.int32))
        out = np.empty((len(numbers), self._dim), np.float32)
        start = time.perf_counter()
        rows = self.store.lookup(keys, self._step, out)
        read_s = time.perf_counter() - start
        gradients = out * np.float32(0.1)
        start = time.perf_counter()
        self.store.apply_gradients(keys._replace(rows=rows), RowUpdate(gradients, self._step, 1.0))
        return read_s + time.perf_counter() - start

    def sample(self) -> NDArray[np.float32]:
        """Rows of the same numbers each time."""
        numbers = np.linspace(0, self._rows - 1, min(SAMPLED, self._rows)).astype(np.int64)
        out = np.empty((len(numbers), self._dim), np.float32)
        if (self.store.peek(Keys(ids_of(numbers), np.zeros(len(numbers), np.int32)), out) < 0).any():
            raise RuntimeError("a row is missing")
        return out

    def close(self) -> None:
        """Removes the file first, so that what is not written yet need not be."""
        self.path.unlink()
        self.store.close()


def run(options: argparse.Namespace, rows: int, whole: int, directory: Path, report: harness.Report) -> None:
    """Adds all tables."""
    some = ids_of(np.arange(min(rows, 1 << 16)))
    if shard_of(some, np.zeros(len(some), np.int32), NUM_SHARDS).any():
        raise RuntimeError("ids of other shards")
    small = Shard(options, directory / "small", options.small)
    large = Shard(options, directory / "large", rows)
    held = {part: found["used"] for part, found in large.store.memory().items()}
    per_row, on_disk = sum(held.values()) / rows, large.path.stat().st_blocks * 512
    report.table(
        f"Shard 0 of {NUM_SHARDS:,}, dim {options.dim}, float16, {options.optimizer}",
        {
            "rows": "{:,}", "parameters": "{:.3g}", "reserve s": "{:.1f}", "fill s": "{:.1f}", "M rows/s": "{:.2f}", "bytes a row": "{:.1f}",
            "embedding": "{:.1f}", "index": "{:.1f}", "GB": "{:.2f}", "GB on disk": "{:.2f}",
        },
    ).row(
        {
            "rows": rows, "parameters": rows * options.dim, "reserve s": large.reserve_s, "fill s": large.fill_s,
            "M rows/s": rows / large.fill_s / 1e6, "bytes a row": per_row, "embedding": held["embedding"] / rows,
            "index": held["index"] / rows, "GB": per_row * rows / 1e9, "GB on disk": on_disk / 1e9,
        }
    )  # fmt: skip
    shards = {"small": small, "large": large}
    contestants = {name: lambda _, shard=shard: (shard.step(),) for name, shard in shards.items()}
    times = harness.alternate(contestants, options.rounds, warmup=10)
    steps = report.table(
        f"Steps of {options.keys:,} keys, drawn alike from all rows",
        {"rows": "{:,}", "step ms": "{:.2f}", "ns a key": "{:.0f}", "of the small shard": "{:.2f}×"},
    )
    for name, shard in shards.items():
        median = harness.median(times[name])
        compared = None if name == "small" else harness.ratio(times["small"], times["large"])
        steps.row(
            {
                "rows": shard.store.num_rows, "step ms": 1e3 * median, "ns a key": 1e9 * median / options.keys,
                "of the small shard": compared,
            }
        )  # fmt: skip
    small.close()
    saved = checkpoint(options, large, directory, report)
    total_rows = whole * NUM_SHARDS
    report.table(
        f"All {NUM_SHARDS:,} shards on {SERVERS} servers, from the bytes of this one",
        {
            "rows": "{:.3g}", "parameters": "{:.3g}", "TB": "{:.1f}", "TB a server": "{:.2f}", "shards a server": "{}",
            "TB of a checkpoint": "{:.1f}",
        },
    ).row(
        {
            "rows": total_rows, "parameters": total_rows * options.dim, "TB": per_row * total_rows / 1e12,
            "TB a server": per_row * total_rows / SERVERS / 1e12, "shards a server": NUM_SHARDS // SERVERS,
            "TB of a checkpoint": saved / rows * total_rows / 1e12,
        }
    )  # fmt: skip


def checkpoint(options: argparse.Namespace, shard: Shard, directory: Path, report: harness.Report) -> int:
    """Saves a shard while it trains, and restores it into another arena. Returns the bytes of the checkpoint."""
    storage, name = Storage.at(directory / "checkpoint"), "all.safetensors"
    rows, expected = shard.store.num_rows, shard.sample()
    start = time.perf_counter()
    snapshot = shard.store.snapshot(storage.scratch)
    begin_s = time.perf_counter() - start
    facts: dict[str, Any] = {}

    def write() -> None:
        with snapshot, storage.create(name) as sink:
            facts.update(write_rows(snapshot, sink, name))

    writer = threading.Thread(target=write)
    writer.start()
    meanwhile = []
    while writer.is_alive():
        meanwhile.append(shard.step())
    writer.join()
    save_s = time.perf_counter() - start
    shard.close()
    covers = {"group": "all", "tables": {"all": rows}, "shard": 0, "num_shards": NUM_SHARDS}
    file = PartReader(storage, {name: {"bytes": facts["bytes"], "crc32": facts["crc32"], **covers}}).open(
        name
    )
    restored = Shard(options, directory / "restored", rows, filled=False)
    start = time.perf_counter()
    restored.store.restore([file])
    restore_s = time.perf_counter() - start
    same = restored.store.num_rows == rows and bool(np.array_equal(restored.sample(), expected))
    again = statistics.median(restored.step() for _ in range(options.rounds))
    restored.close()
    report.table(
        "Checkpoint, written while training goes on, and restored",
        {
            "rows": "{:,}", "GB": "{:.2f}", "begin ms": "{:.1f}", "write s": "{:.1f}", "GB/s written": "{:.2f}", "step ms while it is written": "{:.2f}",
            "restore s": "{:.1f}", "GB/s restored": "{:.2f}", "step ms after": "{:.2f}", "rows are equal": "{}",
        },
    ).row(
        {
            "rows": rows, "GB": facts["bytes"] / 1e9, "begin ms": 1e3 * begin_s, "write s": save_s,
            "GB/s written": facts["bytes"] / save_s / 1e9, "step ms while it is written": 1e3 * statistics.median(meanwhile) if meanwhile else None,
            "restore s": restore_s, "GB/s restored": facts["bytes"] / restore_s / 1e9, "step ms after": 1e3 * again,
            "rows are equal": "yes" if same else "NO",
        }
    )  # fmt: skip
    if not same:
        raise RuntimeError("restored rows differ")
    return int(facts["bytes"])


if __name__ == "__main__":
    main()
