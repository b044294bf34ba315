"""A file of two numbers that says, step by step, how far a run has trained: a crash leaves it behind the last checkpoint."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from girih.errors import UserError
from girih.runs.sealed import open_file

TRAINED = "trained"
_FORM = struct.Struct("<qq")


class TrainedMark:
    """Examples trained on so far, and how many of them came twice; written in place, as often as wanted."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        self._path = path

    def write(self, examples: int, repeated: int) -> None:
        """Replaces both numbers; they outlive the process, not the machine."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(self._file, _FORM.pack(examples, repeated), 0)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def repeated_from(path: Path, examples: int, repeated: int) -> int:
    """Examples that were trained on twice, once a run goes on from a checkpoint.

    Args:
        path: of the mark that the run left.
        examples, repeated: what the checkpoint says.
    """
    try:
        with open_file(path) as file:
            then, told = _FORM.unpack(file.read(_FORM.size + 1))
    except (UserError, struct.error):
        return repeated
    return max(repeated, int(told)) + max(0, int(then) - examples)
