"""Where the checkpoints of a run lie, which one is the latest, which ones go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from girih.errors import CheckpointError, MissingFileError

PATTERN = re.compile(r"step-(\d{8,})")
WRITING = ".writing-"


def name_of(step: int) -> str:
    """``step-00012000``."""
    return f"step-{step:08d}"


def complete(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint below ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := PATTERN.fullmatch(p.name)) and p.is_dir()]
    return sorted(found)


def latest(root: Path) -> Path | None:
    """The newest checkpoint below ``root``, if any."""
    found = complete(root)
    return found[-1][1] if found else None


def rotate(root: Path, keep: int, protected: int | None) -> None:
    """Deletes all but the last ``keep`` checkpoints and the ``protected`` step, and what killed saves left."""
    for step, path in complete(root)[:-keep]:
        if step != protected:
            retire(path)
    for leftover in (*root.glob(WRITING + "*"), *root.glob(".old-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def retire(path: Path) -> None:
    """Deletes a checkpoint; it loses its name first, so that nobody meets one that is half deleted."""
    doomed = path.with_name(f".old-{path.name.removeprefix('step-')}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def find(path: Path, *, step: int | None = None) -> Path:
    """A checkpoint directory from a run directory, a ``checkpoints`` directory or a checkpoint itself.

    Raises:
        MissingFileError: nothing there.
        CheckpointError: a directory without a complete checkpoint.
    """
    if not path.exists():
        raise MissingFileError(f"{path}: no such run or checkpoint directory")
    if (path / "manifest.json").is_file() or PATTERN.fullmatch(path.name):
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if step is not None:
        named = root / name_of(step)
        if not named.is_dir():
            raise CheckpointError(f"{named}: is gone, though it had the final weights; train with --resume")
        return named
    newest = latest(root)
    if newest is None:
        raise CheckpointError(f"{path}: holds no complete checkpoint; train first, or name another directory")
    return newest
