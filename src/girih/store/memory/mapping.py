"""Memory from the operating system: reserved, claimed, locked.

Nothing here knows what the memory is for. Sizes are bytes.
"""

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
    """Zero pages that cost nothing until they are touched.

    They are private, or those of a sparse file or of shared memory that is made ``size`` long.
    """
    if descriptor is None:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)


def claim(descriptor: int, start: int, stop: int, where: str) -> None:
    """Has the system set memory aside for a range, so that touching it cannot fail.

    Raises:
        StorageFullError: it has no more.
    """
    if stop <= start:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, start, stop - start)
        else:  # macOS: writing is the only way; the range has not been used yet
            for at in range(start, stop, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: stop - at], at)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise StorageFullError(
                f"{where}: no room for {stop - start:,} more bytes ({error.strerror});"
                " free space, or give its tables an eviction with max_rows"
            ) from None
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO, errno.ESPIPE):
            raise  # those mean that this kind of memory cannot be claimed ahead


def lock(descriptor: int, where: str) -> None:
    """Takes the arena for this process.

    Raises:
        ConfigError: another one has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{where}: another process has it open; stop that one first") from None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # shared memory has no locks on macOS
            raise


def unlock(descriptor: int) -> None:
    """Gives the arena back; a mapping alone does not hold it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def open_shared(name: str, flags: int) -> int:
    """Opens POSIX shared memory by name; ``flags`` are those of ``os.open``."""
    return int(_posixshmem().shm_open(f"/{name}", flags, mode=0o600))


def unlink_shared(name: str) -> None:
    """Removes the name of POSIX shared memory.

    Raises:
        FileNotFoundError: there is none.
    """
    _posixshmem().shm_unlink(f"/{name}")


def _posixshmem() -> ModuleType:
    """The module below multiprocessing, whose ``SharedMemory`` would unlink what should outlive us."""
    return importlib.import_module("_posixshmem")


def room_bytes(descriptor: int | None) -> int:
    """Bytes that the medium could hold if it were empty: the file system, or the machine's memory."""
    if descriptor is not None:
        with contextlib.suppress(OSError):
            system = os.fstatvfs(descriptor)
            if system.f_blocks > 0:
                return system.f_blocks * system.f_frsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mappings() -> tuple[int, int]:
    """The mappings that this process has, and those that it may have; 0 and 0 if the system does not report them."""
    few_bytes = 4096  # the default of Python 3.14 needs a mapping, and there may be none left
    with contextlib.suppress(OSError, ValueError):
        with Path("/proc/self/maps").open("rb", few_bytes) as lines:
            count = sum(1 for _ in lines)
        with Path("/proc/sys/vm/max_map_count").open("rb", few_bytes) as limit:
            return count, int(limit.read())
    return 0, 0


def boot_number() -> int:
    """63 bits that change when the machine starts; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
        return int(text, 16) >> 65
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heap:
    """Private memory, on huge pages where the system has them.

    ``reserve_rows`` bounds the rows; by default as many as the machine's memory could hold.
    """

    where: ClassVar[str] = "heap arena"
    reserve_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """POSIX shared memory, which outlives the process; ``attach`` goes on with what is there.

    ``repair`` has an attached one made whole whose writer was killed amid a change. ``segment`` is its name, without slashes. An attached arena keeps the rows that it was reserved for.
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
    """A memory-mapped sparse file; ``attach`` and ``repair`` as with :class:`Shared`."""

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
    """Removes a shared or file arena by name, if it is there; who has it mapped keeps the memory."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(options, File):
            os.unlink(options.path)
        elif isinstance(options, Shared):
            mapping.unlink_shared(options.segment)
