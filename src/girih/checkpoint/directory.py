"""Checkpoints of a run: their place, the latest one, and the removal of old ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

from girih.checkpoint.manifest import NAME, Manifest, name_of
from girih.checkpoint.storage import DOOMED, WRITING, Storage
from girih.config import read_toml
from girih.config.bounds import Count
from girih.config.options import Options
from girih.errors import CheckpointError, ConfigError, MissingFileError

PATTERN = re.compile(r"step-([0-9]{8,})")


def root_of(run: Path, directory: str | None) -> Storage:
    """Returns the storage of a run's checkpoints; ``directory`` is ``[checkpoint] dir``."""
    return Storage.at(run / "checkpoints" if directory is None else directory)


def complete(root: Storage) -> list[tuple[int, Storage]]:
    """Returns (step, place) of every checkpoint below ``root``, oldest first.

    In a local directory only complete checkpoints have such a name. In other storage a checkpoint counts if it has a
    manifest, which is written last.
    """
    matches = ((m, root / name) for name in root.names() if (m := PATTERN.fullmatch(name)))
    return sorted(
        ((int(m[1]), place) for m, place in matches if root.local is not None or place.exists(NAME)),
        key=lambda each: each[0],
    )


def latest(root: Storage) -> Storage | None:
    """Returns the newest checkpoint below ``root``, if any."""
    checkpoints = complete(root)
    return checkpoints[-1][1] if checkpoints else None


def rotate(root: Storage, keep: int, protected: int | None) -> None:
    """Removes leftovers of killed saves and all checkpoints except the last ``keep`` and the ``protected`` step."""
    checkpoints = complete(root)
    for step, place in checkpoints[:-keep]:
        if step != protected:
            root.remove(place.name, first=NAME)
    valid = {place.name for _, place in checkpoints}
    for name in root.names():
        if name.startswith((WRITING, DOOMED)) or (PATTERN.fullmatch(name) and name not in valid):
            root.remove(name, first=NAME)


def final_of(address: Storage | str | os.PathLike[str]) -> tuple[Storage, bool]:
    """Returns the checkpoint with the final weights of a run, for any address that :func:`find` accepts.

    Returns:
        The checkpoint, and whether it is marked as final, or was saved by hand. If there is none, the run has not
        ended. Then it is the best checkpoint so far under early stopping, else the latest.

    Raises:
        MissingFileError, CheckpointError: see :func:`find`.
    """
    newest = find(address)
    manifest = Manifest.read(newest)
    if newest == Storage.at(address):
        return newest, manifest.final or manifest.manual
    for _, place in reversed(complete(newest.parent)):
        if (manifest if place == newest else Manifest.read(place)).final:
            return place, True
    if manifest.manual:
        return newest, True
    best = manifest.run.best_step
    return (newest if best is None else find(newest.parent, step=best)), False


def find(address: Storage | str | os.PathLike[str], *, step: int | None = None) -> Storage:
    """Returns a checkpoint from a run directory, a directory of checkpoints or a checkpoint itself.

    Raises:
        MissingFileError: there is nothing.
        CheckpointError: there is no complete checkpoint.
    """
    storage = Storage.at(address)
    if not storage.exists():
        raise MissingFileError(
            f"{storage}: no such run or checkpoint directory; girih train CONFIG --run DIRECTORY makes one"
        )
    if PATTERN.fullmatch(storage.name) or storage.exists(NAME):
        return storage
    root = _root_in(storage)
    if step is not None:
        named = root / name_of(step)
        if not named.exists():
            raise CheckpointError(f"{named}: is gone, though it had the final weights; train with --resume")
        return named
    newest = latest(root)
    if newest is None:
        raise CheckpointError(
            f"{storage}: holds no complete checkpoint; train first, or name another directory"
        )
    return newest


def _root_in(address: Storage) -> Storage:
    """Returns the storage of a run directory's checkpoints; other directories hold checkpoints directly."""
    run = address.local
    if run is None:
        return address
    try:
        directory = read_toml(run / "config.toml").get("checkpoint", {}).get("dir")
    except (ConfigError, MissingFileError, AttributeError):
        directory = None
    if directory is None and not (run / "checkpoints").is_dir():
        return address
    return root_of(run, directory)


class CheckpointOptions(Options):
    """Options of checkpoints: where to save them, how often, and how many to keep.

    Attributes:
        dir: a directory, or any other fsspec address such as ``s3://bucket/run``, only for this run; None takes
            ``checkpoints`` in the run directory.
        every_steps: number of steps between two checkpoints; None saves only at the end, on a signal and at the best
            evaluation.
        keep: number of latest checkpoints that stay; the best one, under early stopping, stays too.

    Examples:
        >>> import girih
        >>> checkpoints = girih.CheckpointOptions(every_steps=1000, keep=2)
        >>> checkpoints.every_steps, checkpoints.dir
        (1000, None)
    """

    owner = "checkpoint: "

    dir: str | None = None
    every_steps: Count | None = None
    keep: Count = 3

    def _check(self) -> None:
        if self.dir == "":
            raise ConfigError("checkpoint: dir = '': expected a directory or an fsspec address")
