"""Records on a disk: what was appended is read back, whatever is freed, collected and written meanwhile."""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu.disk_reads import IO_URING_ENTER
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store.tiers.block_reader import IO_URING_SETUP
from girih.store.tiers.cold_file import ColdFile
from girih.store.tiers.record_log import blocks_of

SEGMENT = 16 << 10
ENGINES = ["io_uring", "threads"]


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


def cold(tmp_path, engine, record_bytes=96, **options):
    return ColdFile(
        tmp_path / "cold", record_bytes, **{"segment_bytes": SEGMENT, "engine": engine, **options}
    )


def random_records(rng, count, record_bytes=96):
    return rng.integers(0, 256, (count, record_bytes), np.uint8)


class Owners:
    """Whose records are where an array, int64[·] by owner, says."""

    def __init__(self, places):
        self.places = places

    def alive(self, owners, places):
        return ((owners >= 0) & (self.places[owners] == places)).astype(np.uint8)

    def moved(self, owners, places):
        self.places[owners] = places


def read(file, places, record_bytes=96):
    out = np.zeros((len(places), record_bytes), np.uint8)
    file.begin_read(places, out).result()
    return out


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("record_bytes", [4, 96, 1100, 4096, 5000])
def test_a_model_of_appends_frees_collections_and_reads(tmp_path, engine, record_bytes, direct):
    """Against a dict, over many segments."""
    rng = np.random.default_rng(record_bytes)
    size = SEGMENT if record_bytes < 4096 else 4 * SEGMENT
    per_segment = blocks_of(record_bytes, size).per_segment
    most = 12 * per_segment
    file = cold(tmp_path, engine, record_bytes, segment_bytes=size, direct=direct)
    assert file.direct == direct
    places, model = np.full(most, -1, np.int64), {}
    for _ in range(12 if JIT_DISABLED else 60):
        owners = rng.choice(most, rng.integers(1, 2 * per_segment), replace=False).astype(np.int32)
        before = places[owners]
        file.free(before[before >= 0])
        records = random_records(rng, len(owners), record_bytes)
        places[owners] = file.append(records, owners)
        model.update(zip(owners.tolist(), records, strict=True))
        gone = rng.choice(list(model), len(model) // 9, replace=False)
        file.free(places[gone])
        places[gone] = -1
        for owner in gone.tolist():
            del model[owner]
        file.collect(Owners(places), wait=bool(rng.integers(2)))
        asked = rng.choice(list(model), 50)  # some twice
        np.testing.assert_array_equal(read(file, places[asked], record_bytes), [model[o] for o in asked])
        assert file.num_records == len(model)
    owners = np.array(list(model))
    np.testing.assert_array_equal(read(file, places[owners], record_bytes), list(model.values()))
    assert file.counters.segments_collected > 0
    assert file.counters.records_in_memory < file.counters.records_read
    file.close()


def test_several_reads_are_in_flight_while_records_are_appended_and_freed(tmp_path, engine):
    rng = np.random.default_rng(0)
    file = cold(tmp_path, engine)
    records = random_records(rng, 5000)
    places = file.append(records, np.arange(5000, dtype=np.int32))
    asked = [rng.integers(0, 5000, 400) for _ in range(8)]
    outs = [np.zeros((400, 96), np.uint8) for _ in asked]
    pending = [file.begin_read(places[rows], out) for rows, out in zip(asked, outs, strict=True)]
    file.free(places)  # their segments may be used again, but not before they were read
    for _ in range(4):
        file.free(file.append(random_records(rng, 5000), np.arange(5000, dtype=np.int32)))
    for rows, out, each in reversed(list(zip(asked, outs, pending, strict=True))):
        each.result()
        assert each.done()
        np.testing.assert_array_equal(out, records[rows])
    file.close()


def test_blocks_are_read_once_neighbours_together_and_records_in_memory_not_at_all(tmp_path, engine):
    file, blocks = cold(tmp_path, engine, segment_bytes=4 * SEGMENT), blocks_of(96, 4 * SEGMENT)
    count = 4 * blocks.per_segment
    records = random_records(np.random.default_rng(1), count)
    places = file.append(records, np.arange(count, dtype=np.int32))
    np.testing.assert_array_equal(read(file, places[-2:]), records[-2:])
    assert file.counters.device_reads == 0
    file._log.settle(wait=True)
    for wanted, num_reads, num_blocks in (
        (np.arange(blocks.per_block), 1, 1),
        (np.array([2 * blocks.per_block, 0, blocks.per_block, 0, 4 * blocks.per_block]), 2, 4),
        (np.arange(blocks.per_segment), 4, 15),  # the last block of a segment has the owners
    ):
        before = file.counters.device_reads, file.counters.bytes_read
        np.testing.assert_array_equal(read(file, places[wanted]), records[wanted])
        assert file.counters.device_reads - before[0] == num_reads
        assert file.counters.bytes_read - before[1] == num_blocks * blocks.block_bytes
    assert file.counters.bytes_written == 3 * 4 * SEGMENT
    file.close()


def test_collection_keeps_live_records_and_the_file_small(tmp_path, engine):
    """The same rows written over and over: space is bounded by the live share that is asked for."""
    rng, count = np.random.default_rng(2), 6000
    file = cold(tmp_path, engine, most_dead=0.25)
    records = random_records(rng, count)
    places = file.append(records, np.arange(count, dtype=np.int32))
    smallest = file.num_bytes
    for _ in range(12 if JIT_DISABLED else 60):
        rows = rng.choice(count, 600, replace=False)
        file.free(places[rows])
        records[rows] = random_records(rng, 600)
        places[rows] = file.append(records[rows], rows.astype(np.int32))
        file.collect(Owners(places))
        assert file.dead_share < 0.7
    file.collect(Owners(places), wait=True)
    assert file.dead_share <= 0.25
    assert file.num_bytes < 2.5 * smallest
    np.testing.assert_array_equal(read(file, places), records)
    most = file.num_bytes
    file.free(places[100:])
    places[100:] = -1
    file.collect(Owners(places), wait=True)
    file.append(records[:1], np.zeros(1, np.int32))
    descriptor = file._file.descriptor
    assert file.num_bytes < most / 2
    assert os.fstat(descriptor).st_blocks * 512 < most / 2
    np.testing.assert_array_equal(read(file, places[:100]), records[:100])
    file.close()


def test_what_is_held_can_be_read_until_it_is_let_go_of(tmp_path, engine):
    """As a checkpoint reads: records that were given up and moved since are still where they were."""
    rng, count = np.random.default_rng(7), 2000
    file, owners = cold(tmp_path, engine), np.arange(2000, dtype=np.int32)
    records = random_records(rng, count)
    now = file.append(records, owners)
    then, ticket = now.copy(), file.hold()
    for _ in range(20):
        rows = rng.choice(count, 900, replace=False)
        file.free(now[rows])
        now[rows] = file.append(random_records(rng, 900), owners[rows])
        file.collect(Owners(now))
    np.testing.assert_array_equal(read(file, then), records)
    held = file.num_bytes
    file.let_go(ticket)
    for _ in range(20):
        file.free(now)
        now = file.append(records, owners)
    assert file.num_bytes < held / 2
    np.testing.assert_array_equal(read(file, now), records)
    file.close()


def test_places_and_frees_that_cannot_be_are_refused(tmp_path, engine):
    file = cold(tmp_path, engine)
    places = file.append(np.zeros((3, 96), np.uint8), np.arange(3, dtype=np.int32))
    for wrong in (-1, 1 << 40):
        with pytest.raises(IndexError, match="a place below 0 or above"):
            read(file, np.array([places[0], wrong]))
    with pytest.raises(RuntimeError, match="more records were freed"):
        file.free(np.concatenate([places, places]))
    file.close()


def test_the_file_has_no_name_and_goes_with_close(tmp_path, engine):
    file = cold(tmp_path, engine)
    file.append(np.zeros((1, 96), np.uint8), np.zeros(1, np.int32))
    assert list((tmp_path / "cold").iterdir()) == []
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._file.descriptor)


def test_a_directory_that_cannot_hold_a_file_is_named(tmp_path, engine):
    (tmp_path / "cold").write_text("a file")
    with pytest.raises(ConfigError, match=r"SSD tier in .*cold: no file can be made there .*store.ssd_dir"):
        cold(tmp_path, engine)
    with pytest.raises(ConfigError, match="expected a multiple of 4096 that holds a record of 9000"):
        ColdFile(tmp_path, 9000, segment_bytes=8192)


def test_blocks_that_the_disk_does_not_give_back_are_an_error(tmp_path, engine):
    """The file is cut behind its back: a block ends early, or is not there at all."""
    file = cold(tmp_path, engine)
    places = file.append(random_records(np.random.default_rng(3), 3000), np.arange(3000, dtype=np.int32))
    file._log.settle(wait=True)
    for left in (SEGMENT + 1536, SEGMENT):
        os.ftruncate(file._file.descriptor, left)
        pending = file.begin_read(places[:1000], np.zeros((1000, 96), np.uint8))
        with pytest.raises(OSError, match=r"rows cannot be read back \(Input/output error\)"):
            pending.result()
    file.close()


@pytest.fixture
def limited():
    """No file of this process becomes longer than 12 segments."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 * SEGMENT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 48 segments."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root on Linux")
    place = tmp_path / "cold"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={48 * SEGMENT}", "none", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("disk", ["limited", "small_disk"])
def test_a_full_disk_is_one_line_and_what_is_there_can_be_read(tmp_path, request, engine, disk):
    """Nothing was added by the append that failed; what is freed then is room for others."""
    request.getfixturevalue(disk)
    file, rng = cold(tmp_path, engine), np.random.default_rng(4)
    records, places = [], []

    def fill():
        while len(records) < 200:
            records.append(random_records(rng, 100))
            places.append(file.append(records[-1], np.arange(100, dtype=np.int32)))

    with pytest.raises(
        StorageFullError, match=r"SSD tier in .*/cold: no room for .*; free space, or"
    ) as found:
        fill()
    assert "\n" not in str(found.value)
    assert len(places) * 100 >= 9 * blocks_of(96, SEGMENT).per_segment
    np.testing.assert_array_equal(read(file, np.concatenate(places)), np.concatenate(records[:-1]))
    for each in places[:-1]:
        file.free(each)
    again = file.append(records[-1], np.arange(100, dtype=np.int32))
    np.testing.assert_array_equal(read(file, again), records[-1])
    file.close()


def test_collection_makes_room_on_a_full_disk(tmp_path, engine, limited):
    file, rng = cold(tmp_path, engine), np.random.default_rng(5)
    count = 8 * blocks_of(96, SEGMENT).per_segment
    records = random_records(rng, count)
    places = file.append(records, np.arange(count, dtype=np.int32))
    for _ in range(40):
        rows = rng.choice(count, count // 20, replace=False)
        file.free(places[rows])
        places[rows] = -1
        file.collect(Owners(places), wait=True)
        records[rows] = random_records(rng, len(rows))
        places[rows] = file.append(records[rows], rows.astype(np.int32))
    np.testing.assert_array_equal(read(file, places), records)
    file.close()


def test_a_disk_that_refuses_what_was_claimed_ahead_is_told_by_the_next_verb(tmp_path, engine, monkeypatch):
    """As file systems do that copy on write: here a real limit, which claiming does not meet."""
    monkeypatch.setattr("girih.store.tiers.direct_file.claim", lambda *_: None)
    file, rng = cold(tmp_path, engine), np.random.default_rng(6)

    def fill():
        for _ in range(100):
            file.append(random_records(rng, 100), np.arange(100, dtype=np.int32))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file.append(random_records(rng, 100), np.arange(100, dtype=np.int32))
    file._log.segments.reserve(40)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * SEGMENT, before[1]))
    try:
        with pytest.raises(
            StorageFullError, match=r"SSD tier in .*/cold: no space left on the disk; free some"
        ):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(StorageFullError, match="no space left"):
        file.begin_read(np.zeros(1, np.int64), np.zeros((1, 96), np.uint8))
    file.close()


FORBIDDEN = """
import ctypes, struct, sys
import numpy as np
from girih.errors import ConfigError
from girih.store.tiers.cold_file import ColdFile

words = (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in words))
filtered = struct.pack("H6xQ", len(words), ctypes.addressof(program))
prctl = ctypes.CDLL(None).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 4
assert prctl(38, 1, None, None, None) == 0
assert prctl(22, 2, ctypes.cast(filtered, ctypes.c_void_p), None, None) == 0
file = ColdFile(sys.argv[2], 96)
records = np.random.default_rng(8).integers(0, 256, (100_000, 96), np.uint8)
places, out = file.append(records, np.arange(100_000, dtype=np.int32)), np.zeros((1000, 96), np.uint8)
file._log.settle(wait=True)
file.begin_read(places[:1000], out).result()
assert (out == records[:1000]).all() and file.counters.device_reads > 0
print(file.engine)
try:
    ColdFile(sys.argv[2], 96, engine="io_uring")
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("call", [IO_URING_SETUP, IO_URING_ENTER])
def test_where_io_uring_is_forbidden_threads_read(tmp_path, call):
    """As in many containers: the system itself refuses the call."""
    if not sys.platform.startswith("linux"):
        pytest.skip("seccomp is Linux'")
    words = [sys.executable, "-c", FORBIDDEN, str(call), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "threads",
        "engine 'io_uring': this system does not offer it (Operation not permitted); use 'auto'",
    ]
