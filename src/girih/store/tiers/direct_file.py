"""A file without a name, read and written past the page cache, whose space is claimed before it is needed.

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
"""A multiple of what direct I/O begins at and takes, on whatever disk."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux' fallocate
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """The file; it ends with the process, or with :meth:`close`.

    Args:
        directory: made if it is missing.
        direct: False goes through the page cache.

    Attributes:
        descriptor: of the file, for who reads and writes.
        direct: whether the page cache is out of play; some file systems refuse that.
        num_bytes: its length, all of which has been claimed.
        where: for errors.

    Raises:
        ConfigError: no file can be made there.
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
        """Makes the file longer, by memory of the disk that writing will find.

        Raises:
            StorageFullError: there is no more; the file stays as long as it is.
        """
        start = self.num_bytes
        self.claim(start, start + num_bytes)
        os.ftruncate(self.descriptor, start + num_bytes)  # where nothing could be claimed ahead
        self.num_bytes += num_bytes

    def claim(self, start: int, stop: int) -> None:
        """Claims a part that was let go of.

        Raises:
            StorageFullError: the disk is full.
        """
        try:
            claim(self.descriptor, start, stop, self.where)
        except StorageFullError:
            os.ftruncate(self.descriptor, self.num_bytes)  # some file systems keep what they got
            raise

    def let_go(self, start: int, stop: int) -> bool:
        """Gives a part back to the file system; False where that cannot be done."""
        fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if fallocate is None:
            return False
        flags = _KEEP_SIZE | _PUNCH_HOLE
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return int(fallocate(self.descriptor, flags, start, stop - start)) == 0

    def write(self, memory: NDArray[np.uint8], offset: int) -> None:
        """Writes all of ``memory``, which is aligned where the file is direct.

        Raises:
            StorageFullError: the disk is full.
            OSError: it failed.
        """
        try:
            while len(memory):
                written = os.pwrite(self.descriptor, memory.data, offset)
                memory, offset = memory[written:], offset + written
        except OSError as error:
            raise disk_full(error, self.where) or error from None

    def read(self, memory: NDArray[np.uint8], offset: int) -> None:
        """Fills ``memory``, which is aligned where the file is direct.

        Raises:
            OSError: it failed, or the file ends before.
        """
        while len(memory):
            got = os.preadv(self.descriptor, [memory.data], offset)
            if got == 0:
                raise unreadable(errno.EIO, self.where)
            memory, offset = memory[got:], offset + got

    def close(self) -> None:
        """Lets go of the file and its space."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _opens(self, directory: str | os.PathLike[str], flags: int) -> bool:
        """Opens the file, and writes a block, since some refuse flags only then; False if these are refused."""
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
    """Zeros on pages of their own, as direct I/O asks for."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def unreadable(number: int, where: str) -> OSError:
    """The error for a block that could not be read; ``number`` is that of the system."""
    return OSError(
        number, f"{where}: rows cannot be read back ({os.strerror(number)}); look after the disk and resume"
    )


def _open_nameless(directory: str | os.PathLike[str], flags: int) -> int:
    flags |= os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    with contextlib.suppress(OSError, AttributeError):
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    # the file system knows no files without a name, or refuses the flags: the second try tells
    descriptor, name = tempfile.mkstemp(prefix=".rows-", dir=directory)
    try:
        return os.open(name, flags)
    finally:
        os.close(descriptor)
        os.unlink(name)
