"""Small text files, written whole or not at all, and directories that one user owns."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from girih.errors import StorageFullError

_UNFINISHED = ".unfinished"


def write_whole(path: Path, text: str) -> None:
    """Replaces a file. After a failure the old file stays, and nothing else is left.

    Raises:
        StorageFullError: the disk is full.
    """
    new = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise disk_full(error, path) or error from None


def sync(path: Path) -> None:
    """Makes a file, or the names in a directory, durable, even if the machine fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(directory: Path) -> list[Path]:
    """Returns files that :func:`write_whole` left when its process was killed."""
    return list(directory.glob(f".*{_UNFINISHED}"))


def append_line(path: Path, line: str) -> None:
    """Appends a line. After a failure the file is unchanged.

    Raises:
        StorageFullError: the disk is full.
    """
    data = (line + "\n").encode()
    try:
        with path.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(start)
                raise
    except OSError as error:
        raise disk_full(error, path) or error from None


def disk_full(error: OSError, path: str | os.PathLike[str]) -> StorageFullError | None:
    """Returns an error that names the path if the disk is full (also for a ``StorageFullError``), else None."""
    if not isinstance(error, StorageFullError) and error.errno not in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
    ):
        return None
    return StorageFullError(f"{os.fspath(path)}: no space left on the disk; free some and try again")


def make_private(path: Path) -> Path:
    """Makes a directory that only this user can write.

    Raises:
        OSError: others can write there, or this user cannot.
    """
    for place in (*reversed(path.parents), path):
        place.mkdir(exist_ok=True, mode=0o700)
    around, state = path.parent.stat().st_mode, path.lstat()
    if around & stat.S_IWOTH and not around & stat.S_ISVTX:
        raise PermissionError(f"{path.parent} can be written by everybody (mode {stat.S_IMODE(around):o})")
    if not stat.S_ISDIR(state.st_mode):
        raise PermissionError(f"{path} is a link, not a directory")
    if state.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {state.st_uid}, and you are user {os.geteuid()}")
    if state.st_mode & 0o022:
        mode = stat.S_IMODE(state.st_mode)
        raise PermissionError(f"{path} can be written by others (mode {mode:o}); chmod go-w may fix it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written")
    return path
