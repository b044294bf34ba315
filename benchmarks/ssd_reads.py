"""Random rows from an SSD: the cold tier's file, the disk bare, and RocksDB.

All read the same number of records, each from a block of its own, at random places of files of the same size, with
direct I/O and 4096 bytes a block; each has fresh places in every round, so that nobody finds what another one left in a cache below. The bare
contestants read the blocks of such records and do nothing with them. ``of bare`` is the rate beside the faster of them
in the same round, ``of RocksDB`` beside the fastest setting of RocksDB; CPU is that of the process, system calls
included.

    girih bench ssd_reads                        2,000,000 records of 512 bytes: 3 GB in all, below two minutes
    girih bench ssd_reads --directory /mnt/ssd   on another disk
    girih bench ssd_reads --records 200000 --rounds 3
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
from bare_reads import bare_ring, bare_threads
from numpy.typing import NDArray
from rocks_side import RocksSide, Way, keys_of

from girih.store.tiers.cold_file import ColdFile
from girih.store.tiers.record_log import blocks_of

WAYS = (Way(1, False), Way(16, False), Way(16, True), Way(64, False))
PART = 50_000  # records made at a time
COLUMNS = {
    "what": "{}",
    "reads/s": "{:,.0f}",
    "slowest round": "{:,.0f}",
    "of bare": "{:.2f}×",
    "of RocksDB": "{:.2f}×",
    "CPU µs/read": "{:.1f}",
}


class Turn(NamedTuple):
    """What a contestant does: ``prepare`` is outside the time, ``check`` too, of what ``run`` returned."""

    prepare: Callable[[NDArray[np.int64]], object]
    run: Callable[..., object]
    check: Callable[[NDArray[np.int64], object], None]


def main() -> None:
    options = arguments()
    report = harness.Report("ssd_reads", options)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="ssd-reads-") as directory:
        turns, close = contestants(report, options, Path(directory))
        cpu: dict[str, list[float]] = {name: [] for name in turns}
        rng = np.random.default_rng(options.seed)
        times = harness.alternate(
            {name: turn_of(turn, rng, options, cpu[name]) for name, turn in turns.items()}, options.rounds
        )
        close()
    show(report, options, times, cpu)
    report.finish()


def arguments() -> argparse.Namespace:
    parser = harness.parser("ssd_reads", __doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--record-bytes", type=int, default=512)
    parser.add_argument("--reads", type=int, default=20_000, help="records that are read in a round")
    parser.add_argument("--rounds", type=int, default=15, help="that count")
    parser.add_argument("--depth", type=int, default=256, help="of the bare ring")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    blocks = blocks_of(options.record_bytes, 4 << 20)
    options.num_blocks = options.records // blocks.per_block // 2
    if options.reads > options.num_blocks:
        parser.error(f"--reads {options.reads}: expected at most {options.num_blocks}, half of all blocks")
    needed = 3 * options.records * options.record_bytes * 9 // 8
    if (free := shutil.disk_usage(options.directory).free) < needed:
        parser.error(
            f"{options.directory}: {needed:,} bytes are needed, {free:,} are free; --records takes fewer"
        )
    return options


def contestants(
    report: harness.Report, options: argparse.Namespace, directory: Path
) -> tuple[dict[str, Turn], Callable[[], None]]:
    """All who take turns, and what ends them."""
    files = {engine: cold_file(report, options, directory, engine) for engine in ("io_uring", "threads")}
    turns = {f"girih, {name}": girih_turn(*file) for name, file in files.items() if file is not None}
    file, places = next(file for file in files.values() if file is not None)
    blocks, descriptor = blocks_of(options.record_bytes, 4 << 20), file._file.descriptor

    def offsets(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        segment, inside = np.divmod(places[numbers], blocks.per_segment)
        return segment * blocks.segment_bytes + inside // blocks.per_block * blocks.block_bytes

    bare = {"bare, 16 threads of preadv": bare_threads(descriptor, blocks.block_bytes, 16)}
    if files["io_uring"] is not None:
        bare["bare, io_uring"] = bare_ring(descriptor, blocks.block_bytes, options.depth)
    turns |= {name: Turn(offsets, read, lambda numbers, found: None) for name, read in bare.items()}
    rocksdict = report.peer("rocksdict")
    if rocksdict is not None:
        rocks = RocksSide(rocksdict, directory, records_of(options), 24 << 20)
        turns |= {f"RocksDB, {way.name}": rocks_turn(rocks, way) for way in WAYS}
    report.not_identical(
        "RocksDB finds rows by key, from an index and a bloom filter in memory (10 bits per key), with 24 MiB of"
        " cache for blocks, and gives Python's bytes; girih is told the place of each row, for which its tier keeps"
        " 8 bytes per row, with 21 MiB of buffers, and fills one array"
    )
    report.not_identical(
        "RocksDB's table is ingested sorted, its best state; girih's file is as it was appended"
    )
    report.not_identical("bare reads check the number of bytes, and copy nothing")

    def close() -> None:
        for each in files.values():
            if each is not None:
                each[0].close()

    return turns, close


def cold_file(
    report: harness.Report, options: argparse.Namespace, directory: Path, engine: str
) -> tuple[ColdFile, NDArray[np.int64]] | None:
    """A filled file, and the place of each record; None where the system forbids this way to read."""
    try:
        file = ColdFile(directory, options.record_bytes, engine=engine)
    except ValueError as error:
        report.skip(engine, str(error))
        return None
    if not file.direct:
        report.not_identical("the file system refuses direct I/O: these are reads of the page cache")
    places, first = [], 0
    for part in records_of(options):
        places.append(file.append(part, np.arange(first, first + len(part), dtype=np.int32)))
        first += len(part)
    file.append(np.zeros((PART, options.record_bytes), np.uint8), np.arange(PART, dtype=np.int32))
    file._log.settle(wait=True)  # so that all records but the last are on the disk
    return file, np.concatenate(places)


def records_of(options: argparse.Namespace) -> Iterator[NDArray[np.uint8]]:
    """All records in parts; each begins with its number and goes on at random."""
    rng = np.random.default_rng(options.seed)
    for first in range(0, options.records, PART):
        count = min(PART, options.records - first)
        part = rng.integers(0, 256, (count, options.record_bytes), np.uint8)
        part[:, :8] = np.arange(first, first + count)[:, None].view(np.uint8)
        yield part


def girih_turn(file: ColdFile, places: NDArray[np.int64]) -> Turn:
    size = file._blocks.record_bytes

    def prepare(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        return places[numbers], np.zeros((len(numbers), size), np.uint8)

    def run(wanted: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        file.begin_read(wanted, out).result()
        return out

    def check(numbers: NDArray[np.int64], out: object) -> None:
        assert isinstance(out, np.ndarray)
        assert (out[:, :8].copy().view(np.int64)[:, 0] == numbers).all()

    return Turn(prepare, lambda prepared: run(*prepared), check)


def rocks_turn(rocks: RocksSide, way: Way) -> Turn:
    def check(numbers: NDArray[np.int64], found: object) -> None:
        assert isinstance(found, list)
        got = sorted(int.from_bytes(value[:8], "little") for value in found)
        assert got == sorted(numbers.tolist())

    return Turn(keys_of, lambda keys: rocks.read(way, keys), check)


def turn_of(
    turn: Turn, rng: np.random.Generator, options: argparse.Namespace, cpu: list[float]
) -> harness.Contestant:
    """Reads fresh records and returns the seconds; every other block has none, so that nobody can read two together."""
    per_block = blocks_of(options.record_bytes, 4 << 20).per_block

    def run(number: int) -> Sequence[float]:
        blocks = rng.choice(options.num_blocks, options.reads, replace=False)
        numbers = 2 * blocks * per_block + rng.integers(0, per_block, options.reads)
        prepared, found, before = turn.prepare(numbers), [], cpu_seconds()
        seconds = harness.seconds(lambda: found.append(turn.run(prepared)))
        cpu.append(cpu_seconds() - before)
        turn.check(numbers, found[0])
        return (seconds,)

    return run


def cpu_seconds() -> float:
    """Of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def show(
    report: harness.Report,
    options: argparse.Namespace,
    times: dict[str, list[tuple[float, ...]]],
    cpu: dict[str, list[float]],
) -> None:
    table = report.table(
        f"{options.reads:,} random reads, {options.records:,} records of {options.record_bytes} bytes",
        COLUMNS,
    )

    def best(prefix: str) -> list[tuple[float, ...]] | None:
        names = [name for name in times if name.startswith(prefix)]
        return times[min(names, key=lambda name: harness.median(times[name]))] if names else None

    bare, rocks = best("bare"), best("RocksDB")
    for name, own in times.items():
        table.row(
            {
                "what": name,
                "reads/s": options.reads / harness.median(own),
                "slowest round": options.reads / max(sum(parts) for parts in own),
                "of bare": None if bare is None else harness.ratio(own, bare),
                "of RocksDB": None if rocks is None else harness.ratio(own, rocks),
                "CPU µs/read": 1e6 * statistics.median(cpu[name]) / options.reads,
            }
        )


if __name__ == "__main__":
    main()
