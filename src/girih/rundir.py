"""The directory of a run: who may write there, and what lies where.

config.toml  metrics.jsonl  summary.json  timeline.json  report.html
checkpoints/step-00012000/
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from girih.errors import RunDirectoryError, StorageFullError

LOCK = ".lock"


class RunDirectory:
    """A run's directory, held by one process at a time.

    Args:
        path: missing or empty, unless ``resume``.
        resume: continue what lies there; nothing there is a fresh start.

    Raises:
        RunDirectoryError: it is taken, in use, not a directory, or not writable.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = sorted(name for name in os.listdir(path) if name != LOCK)
            if taken and not resume:
                raise RunDirectoryError(
                    f"{path}: not empty (it holds {taken[0]}); name another --run directory, or add --resume"
                )
            self._lock: IO[str] = (path / LOCK).open("a+")
        except (FileExistsError, NotADirectoryError) as error:
            if isinstance(error, RunDirectoryError):
                raise
            raise RunDirectoryError(f"{path}: is a file; expected a directory to write the run to") from None
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StorageFullError(f"{path}: no space left on the disk for a run directory") from None
            raise RunDirectoryError(
                f"{path}: cannot be written ({error.strerror}); choose another --run"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunDirectoryError(
                f"{path}: another process is writing this run; wait for it or stop it"
            ) from None

    @property
    def config(self) -> Path:
        """The configuration as it was run."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """Chrome trace of the first steps."""
        return self.path / "timeline.json"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces ``summary.json`` whole."""
        new = self.path / "summary.json.new"
        new.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(new, self.path / "summary.json")

    def close(self) -> None:
        """Lets the directory go."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_summary(run: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None while there is none."""
    file = run / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
