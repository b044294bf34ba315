"""Compiles kernels before they are needed: on all cores, once for all processes of a machine.

Each compiled kernel leaves a mark, a file next to numba's cache. A process that needs kernels without marks takes a
lock and compiles them. Other processes wait for the lock, and then find the marks. The process starts helper processes,
because numba compiles only one function at a time in a process. A pipe contains numbers of modules, and each helper
takes the next number. The kernels of a module are compiled by the same helper, because they use the same functions,
which each process must compile again. If a process is killed, its kernels have no mark, and the lock goes to the
remaining processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from girih.kernels.cpu import (
    dedup,
    device_slots,
    disk_reads,
    gradients,
    lookup,
    mapped,
    pairs,
    pool,
    routing,
    strings,
    take,
    tensor_codecs,
    tiers,
    update,
    wire_codecs,
)
from girih.kernels.cpu.arrays import SEALED
from girih.kernels.cpu.jit import (
    CACHE_DIRECTORY,
    CACHE_WARNING,
    JIT_DISABLED,
    KERNELS,
    Kernel,
    lock_file,
    numba,
    types,
)
from girih.kernels.cpu.optimizers import number_of
from girih.optim import SparseOptimizer
from girih.processes.pipe import module_command
from girih.tables import LFU, TTL, Eviction

MOST_PROCESSES = 4
TELL_EVERY_S = 10.0
"""Seconds between two log lines about compilation progress."""
MODULES = (
    dedup, device_slots, disk_reads, gradients, lookup, mapped, pairs, pool, routing, strings, take, tensor_codecs,
    tiers, update, wire_codecs,
)  # fmt: skip
"""The modules that, with their imports, contain all kernels."""
_LOG = logging.getLogger(__name__)
_WARNED = "GIRIH_CACHE_WARNED"
_EXPIRING = ("lookup.expire",)
_LEAST_USED = ("recency.oldest_first", "update.drop_rows")
_RESTORING = tuple(
    f"update.{name}" for name in ("load_keys", "initial_values", "relink", "follow", "add_cells")
)
_LOADING = (*_RESTORING, "update.begin_states", *_LEAST_USED)
_ON_DISK = ("disk.", "disk_reads.", "tiers.")
_ABOVE_HOST = ("device_slots.",)
_MAPPED = ("mapped.",)
_UNTRAINED = (
    "update.apply_", "update.assign", "update.begin_states", "index.insert_all", "recency.walk", "pairs.", "strings.unpack",
    "wire_codecs.", "tensor_codecs.",
)  # fmt: skip
"""Kernels that are rarely called: in a repair, by one format or by one role."""
_AS_LOOKUP = ("index.", "recency.", *_RESTORING, "update.drop_rows")
"""Kernels that use the same functions as the kernels of ``lookup``, so one process compiles them together."""
_SCALARS: dict[Any, Any] = {int: types.int64, bool: types.boolean, np.uint64: types.uint64}


def training(
    rows: Iterable[Sequence[SparseOptimizer]], evictions: Iterable[Eviction | None] = ()
) -> list[str]:
    """Returns the kernels that steps of training and evaluation call, and the kernels that write checkpoints.

    Args:
        rows: for each group of tables, the optimizer of each segment of the group's rows.
        evictions: the eviction policies of the tables.
    """
    kinds = {type(each) for each in evictions}
    needed = {*(_EXPIRING if TTL in kinds else ()), *(_LEAST_USED if LFU in kinds else ())}
    others = tuple({*_UNTRAINED, *_LOADING, *_EXPIRING, *_ON_DISK, *_ABOVE_HOST, *_MAPPED} - needed)
    applying = [update.applying([number_of(each) for each in row]) for row in rows]
    names = [f"update.{apply.__name__}" for apply in applying]
    return [*names, *(name for name in KERNELS if not name.startswith(others))]


def _named(*beginnings: str) -> list[str]:
    return [name for name in KERNELS if name.startswith(beginnings)]


def loading() -> list[str]:
    """Returns kernels that load rows from checkpoints."""
    return _named(*_LOADING)


def packing() -> list[str]:
    """Returns kernels that compress ids and floats between processes."""
    return _named("wire_codecs.")


def packing_tensors() -> list[str]:
    """Returns kernels that compress activations and their gradients between processes."""
    return _named("tensor_codecs.")


def on_disk() -> list[str]:
    """Returns kernels that read and write the rows of an SSD tier."""
    return _named(*_ON_DISK)


def above_host() -> list[str]:
    """Returns kernels that manage rows in GPU memory above the host's."""
    return _named(*_ABOVE_HOST)


def writing_mapped() -> list[str]:
    """Returns kernels that write rows into mapped files, and check these files."""
    return _named(*_MAPPED)


def serving() -> list[str]:
    """Returns kernels that answer requests from mapped rows."""
    return _named(*_MAPPED, "dedup.dedup", "pool.stitch", "strings.", "take.")


def usual() -> list[str]:
    """Returns kernels of a process that trains, loads, predicts, exports and serves with all rows in memory."""
    applying = _named("update.apply_")
    return list(dict.fromkeys([*training(()), *applying, *loading(), *writing_mapped(), *serving()]))


def publishing() -> list[str]:
    """Returns kernels that copy changed rows."""
    return ["device_slots.copy_values"]


def make_ready(names: Iterable[str], log: Callable[[str], None] = _LOG.warning) -> float:
    """Compiles the named kernels that this machine has not compiled before.

    Args:
        log: receives a line at the start and at the end, and lines between if compilation takes long.

    Returns:
        The seconds that compilation took, or 0 if no kernel was missing.
    """
    names = list(names)
    if CACHE_WARNING and _WARNED not in os.environ:
        os.environ[_WARNED] = "1"  # child processes do not repeat the warning
        log(CACHE_WARNING)
    if JIT_DISABLED or not missing_of(names):
        return 0.0
    start = time.perf_counter()
    log(f"compiling kernels{' (kept for later runs)' if CACHE_DIRECTORY else ''}")
    with _alone() as lock:
        missing = missing_of(names)
        with _logging_progress(missing, log):
            _compile_together(missing, lock)
    seconds = time.perf_counter() - start
    log(f"compiled kernels in {seconds:.1f} s")
    return seconds


@contextlib.contextmanager
def _logging_progress(names: Sequence[str], log: Callable[[str], None]) -> Iterator[None]:
    """Logs the number of compiled kernels when it changes, regardless of the process that compiled them."""
    done = threading.Event()

    def log_until_done() -> None:
        logged = None
        while not done.wait(TELL_EVERY_S):
            ready = len(names) - len(missing_of(names))
            if ready != logged:
                log(f"compiling kernels: {ready} of {len(names)}")
                logged = ready

    thread = threading.Thread(target=log_until_done, name="compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def signatures(kernel: Kernel) -> list[tuple[Any, ...]]:
    """Returns the argument types for each compilation of a kernel."""
    hints = get_type_hints(kernel.dispatcher.py_func, include_extras=True)
    hints.pop("return")
    return [tuple(_type_of(kind) for kind in (hints | dict(kinds)).values()) for kinds in kernel.kinds]


def _type_of(hint: Any) -> Any:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, tuple):
        fields = get_type_hints(hint, include_extras=True).values()
        return types.BaseTuple.from_types([_type_of(field) for field in fields], hint)
    metadata = getattr(hint, "__metadata__", ())
    array = hint.__origin__ if metadata else hint
    alias = getattr(get_origin(array), "__value__", None)  # from NumPy 2.5 on, NDArray is a type alias
    if alias is not None:
        array = alias[get_args(array)]
    (item,) = get_args(get_args(array)[1])
    (num_dims,) = [word for word in metadata if word != SEALED] or [1]
    return types.Array(numba.from_dtype(np.dtype(item)), num_dims, "C", readonly=SEALED in metadata)


def _mark(name: str) -> Path:
    return Path(CACHE_DIRECTORY or "", "ready", name)


def is_kept(name: str) -> bool:
    """Returns whether the cache directory has a kernel."""
    return CACHE_DIRECTORY is not None and _mark(name).exists()


def _is_ready(name: str) -> bool:
    if CACHE_DIRECTORY is not None:
        return is_kept(name)
    kernel = KERNELS[name]
    return len(kernel.dispatcher.overloads) >= len(kernel.kinds)


def missing_of(names: Iterable[str]) -> list[str]:
    """Returns the named kernels that are not compiled yet, without duplicates."""
    return [name for name in dict.fromkeys(names) if not _is_ready(name)]


def _by_module(names: Iterable[str]) -> list[list[str]]:
    """Groups kernels by module. The modules that take longest to compile are first."""
    modules: dict[str, list[str]] = {"lookup": [], "update": []}
    for name in names:
        module = "lookup" if name.startswith(_AS_LOOKUP) else name.partition(".")[0]
        modules.setdefault(module, []).append(name)
    return [members for members in modules.values() if members]


def _alone() -> contextlib.AbstractContextManager[int | None]:
    """Waits until no other process of this machine compiles, and then takes the lock.

    The lock is free again when this process and its helpers have ended.
    """
    if CACHE_DIRECTORY is None:
        return contextlib.nullcontext()
    with contextlib.suppress(OSError):  # a full disk
        _mark("").mkdir(mode=0o700, exist_ok=True)
    return lock_file(Path(CACHE_DIRECTORY, "lock"))


def _compile_together(names: Sequence[str], lock: int | None) -> None:
    queue, feed = os.pipe()
    num_modules = len(_by_module(names))
    os.write(feed, bytes(range(num_modules)))
    os.close(feed)
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        if lock is not None:  # without a directory, no process would find the work of helpers
            num_helpers = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, num_modules) - 1
            with contextlib.suppress(OSError):  # no process can be started; this one compiles all
                helpers.extend(_helper(names, queue, lock) for _ in range(num_helpers))
        _work_off(queue, names)
        for helper in helpers:
            helper.wait()
        for name in missing_of(names):  # kernels of a killed helper
            _compile(name)
    finally:
        os.close(queue)
        for helper in helpers:
            helper.kill()
            helper.wait()


def _helper(names: Sequence[str], queue: int, lock: int) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    command = module_command(__name__, str(queue), *names)
    return subprocess.Popen(
        command, pass_fds=(queue, lock), start_new_session=True, stdin=null, stdout=null, stderr=null
    )


def _work_off(queue: int, names: Sequence[str]) -> None:
    modules = _by_module(names)
    while number := os.read(queue, 1):
        for name in modules[number[0]]:
            _compile(name)


def _compile(name: str) -> None:
    kernel = KERNELS[name]
    for signature in signatures(kernel):
        kernel.dispatcher.compile(signature)
    if CACHE_DIRECTORY is not None and kernel.dispatcher._cache.num_kept() >= len(kernel.kinds):
        with contextlib.suppress(OSError):  # a full disk
            _mark(name).touch()


if __name__ == "__main__":
    _work_off(int(sys.argv[1]), sys.argv[2:])
