"""The directory of a run: its lock, and the names of its files.

config.toml  plan.json  metrics.jsonl  summary.json  timeline.json  report.html  trained
checkpoints/step-00012000/
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import struct
from pathlib import Path
from typing import IO, Any

from girih.config import build, options
from girih.config.user_code import RECORD
from girih.errors import RunDirectoryError, UserError
from girih.files.sealed import open_file, parse, refusing
from girih.files.whole import disk_full, unfinished, write_whole
from girih.processes.lease import Lease
from girih.processes.segments import remove_segments
from girih.runs import scale_requests
from girih.telemetry.status_file import LIVE, LOGS, TARGETS, forget

TRAINED = "trained"
_FORM = struct.Struct("<qq")


class TrainedMark:
    """The number of examples trained on so far, and the number of repeated ones; written in place, at any time."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        self._path = path

    def write(self, examples: int, repeated: int) -> None:
        """Replaces both numbers. They survive the process, but not the machine."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(self._file, _FORM.pack(examples, repeated), 0)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def repeated_from(path: Path, examples: int, repeated: int) -> int:
    """Returns the number of examples that were trained on twice, when a run resumes from a checkpoint.

    Args:
        path: the mark that the run left.
        examples, repeated: the numbers of the checkpoint.
    """
    try:
        with open_file(path) as file:
            then, saved = _FORM.unpack(file.read(_FORM.size + 1))
    except (UserError, struct.error):
        return repeated
    return max(repeated, int(saved)) + max(0, int(then) - examples)


LOCK = ".lock"
"""Locked by the process that writes the run; holds its lease until the run ends by itself."""
PROCESSES = "processes.json"
PUBLISHED = "published.json"
"""The file with the name under which followers know the run."""
TIERS = "tiers"
"""The directory of the files of lower tiers. These files have no names."""
BEFORE_TRAINING = frozenset({
    LOCK, "config.toml", RECORD, "plan.json", PROCESSES, "timeline.json", "tensorboard", "checkpoints", TIERS, LIVE, LOGS,
    TARGETS, TRAINED, PUBLISHED,
})  # fmt: skip
"""Everything that a run may have written before its first record."""


class RunDirectory(contextlib.AbstractContextManager["RunDirectory"]):
    """A run's directory, held by one process at a time.

    Args:
        path: missing or empty, unless ``resume``.
        resume: continue the run in the directory; an empty directory is a fresh start.

    Attributes:
        config: the configuration as it was run.

    Raises:
        RunDirectoryError: the directory is not empty, in use, not local, or not writable.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        if address := re.match(r"([a-z][a-z0-9+.-]+):/", str(path)):  # Path turns two slashes into one
            raise RunDirectoryError(
                f"{address[1]}://…: a run directory is local; name one, and set checkpoint.dir to an address like"
                " this for checkpoints elsewhere"
            )
        self.path, self.config = path, path / "config.toml"
        self._made = [p for p in (path, *path.parents) if not os.path.lexists(p)]
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = sorted(name for name in os.listdir(path) if name != LOCK)
            self._was_empty = not taken
            if taken and not resume:
                if (path / LOCK).exists():
                    _locked(path).close()  # a run in progress is the better reason
                raise RunDirectoryError(
                    f"{path}: not empty (it holds {taken[0]}); name another --run directory, or add --resume"
                )
            self._lock = _locked(path)
            try:
                self._remove_left()
                Lease.of_this_run().write(self._lock)
            except BaseException:
                self._lock.close()
                raise
        except (FileExistsError, NotADirectoryError) as error:
            if isinstance(error, RunDirectoryError):
                raise
            file = next(p for p in (path, *path.parents) if os.path.lexists(p))
            raise RunDirectoryError(f"{file}: is a file; expected a directory to write the run to") from None
        except OSError as error:
            self._unmake()
            told = f"{path}: cannot be written ({error.strerror}); choose another --run"
            raise disk_full(error, path) or RunDirectoryError(told) from None

    def write_summary(self, summary: dict[str, object]) -> None:
        """Replaces ``summary.json`` whole."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        """Releases the directory."""
        if not self._lock.closed:
            self._lock.truncate(0)
            self._lock.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError | MemoryError):
            self._clear()
        self.close()

    def _remove_left(self) -> None:
        """Removes leftovers of a run whose processes were all killed."""
        earlier = Lease.read(self._lock)
        if earlier is not None and earlier.is_of_this_machine and not earlier.lives:
            remove_segments(earlier.segments)
        if earlier is None or not earlier.lives:  # else trainers restart next to processes that stayed
            forget(self.path)
            scale_requests.withdraw_stale(self.path)
        for file in (self.path / PROCESSES, *unfinished(self.path)):
            file.unlink(missing_ok=True)

    def _clear(self) -> None:
        """Restores the directory to its earlier state after a mistake, or a lack of memory, before training."""
        left, saved = set(os.listdir(self.path)), (self.path / "checkpoints").rglob("*")
        if not self._was_empty or not left <= BEFORE_TRAINING or any(path.is_file() for path in saved):
            return
        for path in map(self.path.joinpath, left):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._unmake()

    def _unmake(self) -> None:
        with contextlib.suppress(OSError):
            for directory in self._made:
                directory.rmdir()


def read_summary(run: Path) -> dict[str, Any] | None:
    """Returns the summary of a finished run; None if there is none.

    Raises:
        RunDirectoryError: it is damaged.
    """
    file = run / "summary.json"
    if not os.path.lexists(file):
        return None
    fix = "delete it, and train with --resume to write it again"
    with open_file(file, kind=RunDirectoryError) as opened, refusing(file, fix, RunDirectoryError):
        summary: dict[str, Any] = build(dict[str, Any], parse(opened.read()), "")
        options.integer("checkpoint_step", summary["checkpoint_step"], 0)
        return summary


def _locked(path: Path) -> IO[str]:
    """Locks a directory, which no other run may hold.

    Raises:
        RunDirectoryError: a live run holds it; names its process.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDirectoryError(f"{path / LOCK}: not a regular file; delete it")
    lock = os.fdopen(descriptor, "a+")
    lease = Lease.read(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lease is None or not lease.lives or lease == Lease.of_this_run():
            return lock
    except OSError:
        pass
    lock.close()
    if lease is not None and lease.is_of_this_machine and not lease.lives:
        raise RunDirectoryError(f"{path}: processes of {lease} are still ending; try again in ten seconds")
    who = "another process" if lease is None else str(lease)
    raise RunDirectoryError(f"{path}: {who} is writing this run; wait for it or stop it")


def remove_summary(run: Path) -> None:
    """Removes the summary of a run that continues, because it no longer describes the end of the run."""
    (run / "summary.json").unlink(missing_ok=True)
