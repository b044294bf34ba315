"""Memory that outlives its process, and what is refused of it."""

import errno
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from girih import optim
from girih.errors import ConfigError, MissingFileError, StorageFullError
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import File, Heap, Keys, RowUpdate, Shared, Store, remove_arena
from girih.store.memory import mapping
from girih.store.memory.arena import difference, index_slots
from girih.tables import LRU
from support.store_verbs import contents, group, keys_of, look, peek

# Memory, files and processes, the same whatever runs the kernels.
pytestmark = [pytest.mark.heavy] if JIT_DISABLED else []

SPEC = group(("a", "b"), optimizer=optim.Adagrad(lr=0.1), eviction=LRU(max_rows=500))


def again(arena):
    """Options that attach to what these options made."""
    return (
        Shared(segment=arena.segment, attach=True)
        if isinstance(arena, Shared)
        else File(path=arena.path, attach=True)
    )


@pytest.fixture(params=["shared", "file"])
def lasting(request, tmp_path):
    """An arena that outlives its store."""
    options = (
        Shared(segment=f"girih-test-{os.getpid()}", reserve_rows=2000)
        if request.param == "shared"
        else File(path=str(tmp_path / "arena"), reserve_rows=2000)
    )
    remove_arena(options)
    yield options
    remove_arena(options)


def run_elsewhere(code, *arguments):
    """Runs code in a new process, which may end itself by a signal; returns how it ended."""
    here = str(Path(__file__).parent)
    preamble = f"import sys; sys.path.insert(0, {here!r})\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", preamble + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode not in (0, -signal.SIGKILL):
        pytest.fail(done.stderr)
    return done


TRAIN = """
    import os, signal, sys
    import numpy as np
    from support.store_verbs import keys_of, look
    from test_arena import SPEC, again
    from girih.store import File, Keys, RowUpdate, Shared, Store
    kind, name, end = sys.argv[1:]
    options = Shared(segment=name, reserve_rows=2000) if kind == "Shared" else File(path=name, reserve_rows=2000)
    store = Store(SPEC, arena=options)
    ids, tables = keys_of(*range(300))
    rows, values = look(store, ids, tables, 1)
    store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(values), 1))
    if end == "close":
        store.close()
    elif end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "killed amid a change":
        with store.state.memory.changing(2):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def train_elsewhere(arena, end):
    return run_elsewhere(TRAIN, type(arena).__name__, getattr(arena, "segment", None) or arena.path, end)


@pytest.mark.parametrize("end", ["close", "killed"])
def test_another_process_goes_on_with_what_one_left(lasting, end):
    train_elsewhere(lasting, end)
    twin = Store(SPEC)
    ids, tables = keys_of(*range(300))
    rows, values = look(twin, ids, tables, 1)
    twin.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(values), 1))
    with Store(SPEC, arena=again(lasting)) as store:
        for name, column in contents(twin).items():
            np.testing.assert_array_equal(contents(store)[name], column)
        assert store.counters() == twin.counters()
        assert store.last_step == 1
        rows, _ = look(store, *keys_of(*range(250, 900)), 2)
        assert (rows >= 0).sum() == 500
        assert store.num_rows == 500


def test_a_writer_that_died_amid_a_change_is_refused(lasting):
    train_elsewhere(lasting, "killed amid a change")
    with pytest.raises(ConfigError, match=r"died during a change.*restore from a checkpoint"):
        Store(SPEC, arena=again(lasting))


def test_an_arena_in_use_is_refused(lasting):
    with Store(SPEC, arena=lasting), pytest.raises(ConfigError, match="another process has it open"):
        Store(SPEC, arena=again(lasting))


def test_an_arena_that_exists_is_not_overwritten(lasting):
    Store(SPEC, arena=lasting).close()
    with pytest.raises(ConfigError, match="exists already; attach to it"):
        Store(SPEC, arena=lasting)
    Store(SPEC, arena=again(lasting)).close()


def test_nothing_to_attach_to(lasting):
    with pytest.raises(MissingFileError, match="nothing to attach to"):
        Store(SPEC, arena=again(lasting))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            group(("a", "b"), dim=8, optimizer=optim.Adagrad(), eviction=LRU(max_rows=500)),
            "dim is 4, expected 8",
        ),
        (group(("a", "b"), optimizer=optim.Adam(), eviction=LRU(max_rows=500)), "optimizer is 'adagrad'"),
        (
            group(("a", "c"), optimizer=optim.Adagrad(), eviction=LRU(max_rows=500)),
            "name is 'b', expected 'c'",
        ),
        (
            group(("a", "b"), optimizer=optim.Adagrad(), eviction=LRU(max_rows=600)),
            "max_rows is 500, expected 600",
        ),
        (
            group(("a", "b"), optimizer=optim.Adagrad(), dtype="float16"),
            "dtype is 'float32', expected 'float16'",
        ),
    ],
)
def test_an_arena_of_another_layout_is_refused(lasting, other, message):
    Store(SPEC, arena=lasting).close()
    with pytest.raises(ConfigError, match=f"made for another layout: .*{message}"):
        Store(other, arena=again(lasting))
    Store(SPEC, arena=again(lasting)).close()


def test_a_learning_rate_may_change_between_processes(lasting):
    Store(SPEC, arena=lasting).close()
    other = group(("a", "b"), optimizer=optim.Adagrad(lr=0.5), eviction=LRU(max_rows=500))
    Store(other, arena=again(lasting)).close()


def flags_of(name):
    """The flags of each part of a file's mapping."""
    parts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [part.partition("VmFlags:")[2].split() for part in parts if name in part.partition("\n")[0]]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="tells of mappings on Linux alone")
def test_rows_in_a_file_are_not_read_ahead(lasting):
    """With pages of 2 MB, a step on 10,000 rows of a large file would write the whole file to the disk.

    The index is read ahead, because the system evicts pages first that it does not read ahead.
    """
    name = lasting.path if isinstance(lasting, File) else lasting.segment
    for arena in (lasting, again(lasting)):
        with Store(SPEC, arena=arena):
            advised = ["rr" in flags for flags in flags_of(name)]
        assert len(advised) > sum(advised) == isinstance(lasting, File)


def test_a_foreign_file_is_refused(tmp_path):
    for content in (b"", b"hello" * 5000):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigError, match="not an arena of girih"):
            Store(SPEC, arena=File(path=str(tmp_path / "file"), attach=True))


def test_a_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "arena"
    Store(SPEC, arena=File(path=str(path), reserve_rows=2000)).close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ConfigError, match="it was cut short"):
        Store(SPEC, arena=File(path=str(path), attach=True))


def test_a_file_that_a_reboot_interrupted_is_refused(tmp_path, monkeypatch):
    options = File(path=str(tmp_path / "arena"), reserve_rows=2000)
    train_elsewhere(options, "killed")
    monkeypatch.setattr("girih.store.memory.mapping.boot_number", lambda: 12345)
    with pytest.raises(ConfigError, match="machine went down before it was closed"):
        Store(SPEC, arena=again(options))


def test_a_closed_file_survives_a_reboot(tmp_path, monkeypatch):
    options = File(path=str(tmp_path / "arena"), reserve_rows=2000)
    train_elsewhere(options, "close")
    monkeypatch.setattr("girih.store.memory.mapping.boot_number", lambda: 12345)
    with Store(SPEC, arena=again(options)) as store:
        assert store.num_rows == 300


def test_options_that_cannot_be_used(tmp_path):
    for arena, message in (
        (Heap(reserve_rows=0), "reserve_rows = 0"),
        (Heap(reserve_rows=2**31), "reserve_rows = 2147483648"),
        (Shared(segment="a/b"), "without slashes"),
        (File(path=str(tmp_path / "x"), attach=True, reserve_rows=5), "drop reserve_rows"),
        (File(path=str(tmp_path / "x"), repair=True), "give attach = True too"),
    ):
        with pytest.raises(ConfigError, match=message):
            Store(SPEC, arena=arena)
    with pytest.raises(MissingFileError, match="no such directory"):
        Store(SPEC, arena=File(path=str(tmp_path / "no" / "x")))
    with pytest.raises(StorageFullError, match="lower reserve_rows"):
        Store(group(dim=8192, optimizer=optim.Adam()), arena=Heap(reserve_rows=3 << 29))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot set memory aside")
def test_a_full_disk_is_an_error_and_no_signal(arena, monkeypatch):
    if isinstance(arena, Heap):
        pytest.skip("private memory is not claimed ahead")
    store = Store(group(), arena=arena)
    look(store, *keys_of(1, 2, 3), 1)

    def full(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match=r"no room for [\d,]+ more bytes"):
        look(store, *keys_of(*range(5000)), 2)
    ids = contents(store)["ids"].tolist()
    assert {1, 2, 3} < set(ids)
    assert len(set(ids)) == len(ids) == store.num_rows
    monkeypatch.undo()
    rows, _ = look(store, *keys_of(*range(5000)), 3)
    assert (rows >= 0).all()
    store.close()


def test_a_file_grows_as_rows_come_and_gives_old_indexes_back(tmp_path, small_index):
    path = tmp_path / "arena"
    with Store(group(dim=16), arena=File(path=str(path), reserve_rows=1_000_000)) as store:
        assert path.stat().st_size > 64_000_000
        small = path.stat().st_blocks * 512
        look(store, *keys_of(*range(3000)), 1)
        grown = path.stat().st_blocks * 512
        assert 3000 * 96 <= grown - small <= 4 * 4096 * 96
        np.testing.assert_array_equal(peek(store, *keys_of(77)), peek(Store(group(dim=16)), *keys_of(77)))


@pytest.mark.skipif(
    not hasattr(mmap, "MAP_NORESERVE") and sys.platform != "linux", reason="Linux reserves freely"
)
def test_a_reservation_costs_no_memory():
    store = Store(group(dim=64), arena=Heap(reserve_rows=100_000_000))
    assert store.memory()["embedding"]["reserved"] >= 25_600_000_000
    look(store, *keys_of(1), 1)
    assert store.memory()["embedding"]["used"] == 256


def test_index_slots_hold_at_three_quarters():
    for rows in (1, 12, 13, 24, 25, 1000, 2**31 - 2):
        slots = index_slots(rows)
        assert slots & (slots - 1) == 0
        assert 3 * slots >= 4 * rows
        assert slots == 16 or 3 * slots // 2 < 4 * rows


def test_difference_names_the_first_place():
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a[1].b is 2, expected 3"
    assert difference({"a": [1]}, {"a": [1, 2]}) == "a is [1], expected [1, 2]"
    assert difference({"a": 1}, {"a": 1}) == ""
    assert difference({}, {"a": 1}) == "a is None, expected 1"


SHORT_OF_MAPPINGS = """
import mmap
from girih.errors import StorageFullError
from girih.optim import SGD
from girih.store import GroupSpec, Segment, Store, TableSpec
from girih.tables import Zeros

spec = GroupSpec("g", (TableSpec("t", (Zeros(),)),), (Segment("s", 2, SGD()),))
Store(spec).close()
held = []
try:
    while True:
        held.append(mmap.mmap(-1, mmap.PAGESIZE))
except OSError:
    pass
try:
    Store(spec)
except StorageFullError as error:
    held.clear()
    print(error)
"""


def test_a_process_without_mappings_left_is_told_so():
    _, most = mapping.mappings()
    if not 0 < most <= 1 << 18:
        pytest.skip(f"{most:,} mappings would have to be made")
    done = subprocess.run([sys.executable, "-c", SHORT_OF_MAPPINGS], capture_output=True, text=True)
    assert f"of the {most:,} mappings that it may have: keep tables packed" in done.stdout, done.stderr
