"""Functions that reserve, claim and lock memory from the operating system. Sizes are in bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from girih.errors import ConfigError, StorageFullError
from girih.store.memory import mapping

_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_ZEROS = bytes(1 << 20)


def map_memory(descriptor: int | None, size: int) -> mmap.mmap:
    """Maps pages of zeros that take no memory until their first access.

    Without a descriptor, the pages are private. Otherwise they map a sparse file or shared memory, which becomes
    ``size`` bytes long.
    """
    if descriptor is None:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)


def claim(descriptor: int, start: int, stop: int, where: str) -> None:
    """Claims memory for a range, so that access cannot fail.

    Raises:
        StorageFullError: the system has no more memory.
    """
    if stop <= start:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, start, stop - start)
        else:  # on macOS, only a write claims memory; the range is not used yet, so zeros do no harm
            for at in range(start, stop, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: stop - at], at)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise StorageFullError(
                f"{where}: no room for {stop - start:,} more bytes ({error.strerror});"
                " free space, or give its tables an eviction with max_rows"
            ) from None
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO, errno.ESPIPE):
            raise  # these errors mean that this kind of memory cannot be claimed ahead


def lock(descriptor: int, where: str) -> None:
    """Locks the arena for this process.

    Raises:
        ConfigError: another process has locked the arena.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{where}: another process has it open; stop that process first") from None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # shared memory has no locks on macOS
            raise


def unlock(descriptor: int) -> None:
    """Unlocks the arena. Its memory may stay mapped, because a mapping holds no lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def open_shared(name: str, flags: int) -> int:
    """Opens POSIX shared memory by name. ``flags`` are the flags of ``os.open``."""
    return int(_posixshmem().shm_open(f"/{name}", flags, mode=0o600))


def unlink_shared(name: str) -> None:
    """Removes the name of POSIX shared memory.

    Raises:
        FileNotFoundError: the name does not exist.
    """
    _posixshmem().shm_unlink(f"/{name}")


def _posixshmem() -> ModuleType:
    """Returns the module that multiprocessing uses for shared memory.

    ``SharedMemory`` of multiprocessing would unlink memory that should outlive this process.
    """
    return importlib.import_module("_posixshmem")


def room_bytes(descriptor: int | None) -> int:
    """Returns the total size of the medium in bytes: the file system of the descriptor, or the machine's memory."""
    if descriptor is not None:
        with contextlib.suppress(OSError):
            system = os.fstatvfs(descriptor)
            if system.f_blocks > 0:
                return system.f_blocks * system.f_frsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mappings() -> tuple[int, int]:
    """Returns the number of mappings that this process has, and the maximum. Both are 0 if the system reports none."""
    few_bytes = 4096  # Python 3.14's default buffer needs a mapping, but perhaps no mapping is left
    with contextlib.suppress(OSError, ValueError):
        with Path("/proc/self/maps").open("rb", few_bytes) as lines:
            count = sum(1 for _ in lines)
        with Path("/proc/sys/vm/max_map_count").open("rb", few_bytes) as limit:
            return count, int(limit.read())
    return 0, 0


def boot_number() -> int:
    """Returns 63 bits that change at each start of the machine, or 0 if the system does not report them."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
        return int(text, 16) >> 65
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heap:
    """Private memory, on huge pages if the system has them.

    ``reserve_rows`` limits the rows. By default, the limit is the number of rows that fit into the machine's memory.
    """

    where: ClassVar[str] = "heap arena"
    reserve_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """POSIX shared memory, which outlives the process.

    ``segment`` is the name of the memory, without slashes. ``attach`` continues with existing memory, which keeps its
    number of reserved rows. ``repair`` repairs an attached arena whose writer was killed during a change.
    """

    segment: str
    attach: bool = False
    repair: bool = False
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """The arena's name, for errors."""
        return f"shared arena {self.segment!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A memory-mapped sparse file. ``attach`` and ``repair`` work as with :class:`Shared`."""

    path: str
    attach: bool = False
    repair: bool = False
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """The arena's name, for errors."""
        return f"arena file {self.path!r}"


ArenaOptions = Heap | Shared | File


def remove_arena(options: ArenaOptions) -> None:
    """Removes a shared or file arena by name, if it exists. Processes that have it mapped keep the memory."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(options, File):
            os.unlink(options.path)
        elif isinstance(options, Shared):
            mapping.unlink_shared(options.segment)
