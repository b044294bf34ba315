"""A file without a name that bypasses the page cache. Its disk space is claimed before it is needed.

Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError, StorageFullError
from girih.files.whole import disk_full
from girih.store.memory.mapping import claim

BLOCK_BYTES = 4096
"""A multiple of the alignment and size that direct I/O needs on any disk."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of Linux' fallocate
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A file without a name. It is deleted when the process ends, or by :meth:`close`.

    Args:
        directory: the directory of the file, created if missing.
        direct: False uses the page cache.

    Attributes:
        descriptor: the file descriptor, for reads and writes.
        direct: True if the page cache is bypassed. Some file systems do not support this.
        num_bytes: the length of the file. All of its space is claimed.
        where: the file's name in errors.

    Raises:
        ConfigError: no file can be created in the directory.
        StorageFullError: the disk is full already.
    """

    def __init__(self, directory: str | os.PathLike[str], *, direct: bool = True) -> None:
        self.where = f"SSD tier in {os.fspath(directory)}"
        self.num_bytes = 0
        self.descriptor = -1
        try:
            os.makedirs(directory, exist_ok=True)
            self.direct = direct and self._opens(directory, getattr(os, "O_DIRECT", 0))
            if not self.direct:
                self._opens(directory, 0)
        except OSError as error:
            raise disk_full(error, self.where) or ConfigError(
                f"{self.where}: no file can be made there ({error.strerror});"
                " set store.ssd_dir to a directory that can be written"
            ) from None

    def grow(self, num_bytes: int) -> None:
        """Makes the file longer, and claims the space on the disk.

        Raises:
            StorageFullError: the disk is full. The file keeps its length.
        """
        start = self.num_bytes
        self.claim(start, start + num_bytes)
        os.ftruncate(self.descriptor, start + num_bytes)  # for file systems that cannot claim space ahead
        self.num_bytes += num_bytes

    def claim(self, start: int, stop: int) -> None:
        """Claims the space of a part that was released.

        Raises:
            StorageFullError: the disk is full.
        """
        try:
            claim(self.descriptor, start, stop, self.where)
        except StorageFullError:
            os.ftruncate(self.descriptor, self.num_bytes)  # some file systems keep a partial claim
            raise

    def let_go(self, start: int, stop: int) -> bool:
        """Gives the space of a part back to the file system. Returns False if the system does not support this."""
        fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if fallocate is None:
            return False
        flags = _KEEP_SIZE | _PUNCH_HOLE
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return int(fallocate(self.descriptor, flags, start, stop - start)) == 0

    def write(self, memory: NDArray[np.uint8], offset: int) -> None:
        """Writes all of ``memory``, which must be aligned if the file is direct.

        Raises:
            StorageFullError: the disk is full.
            OSError: the write failed.
        """
        try:
            while len(memory):
                written = os.pwrite(self.descriptor, memory.data, offset)
                memory, offset = memory[written:], offset + written
        except OSError as error:
            raise disk_full(error, self.where) or error from None

    def read(self, memory: NDArray[np.uint8], offset: int) -> None:
        """Fills ``memory``, which must be aligned if the file is direct.

        Raises:
            OSError: the read failed, or the file is too short.
        """
        while len(memory):
            got = os.preadv(self.descriptor, [memory.data], offset)
            if got == 0:
                raise unreadable(errno.EIO, self.where)
            memory, offset = memory[got:], offset + got

    def close(self) -> None:
        """Releases the file and its space."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _opens(self, directory: str | os.PathLike[str], flags: int) -> bool:
        """Opens the file and writes a block. Returns False if the system refuses the flags.

        Some systems refuse the flags only at the first write.
        """
        try:
            self.descriptor = _open_nameless(directory, flags)
            os.pwrite(self.descriptor, aligned_memory(BLOCK_BYTES).data, 0)
        except OSError as error:
            self.close()
            if flags and error.errno in _REFUSED:
                return False
            raise
        return True


def aligned_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Returns zeros on separate pages, as direct I/O needs."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def unreadable(number: int, where: str) -> OSError:
    """Returns the error for a block that could not be read. ``number`` is the system's error number."""
    return OSError(
        number, f"{where}: rows cannot be read back ({os.strerror(number)}); check the disk and resume"
    )


def _open_nameless(directory: str | os.PathLike[str], flags: int) -> int:
    flags |= os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    with contextlib.suppress(OSError, AttributeError):
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    # the file system has no nameless files, or refuses the flags; the next open shows which
    descriptor, name = tempfile.mkstemp(prefix=".rows-", dir=directory)
    try:
        return os.open(name, flags)
    finally:
        os.close(descriptor)
        os.unlink(name)
