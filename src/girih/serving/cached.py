"""The exported model of a run, made where it is missing: what ``girih serve RUN`` serves."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from girih.errors import CheckpointError, MissingFileError
from girih.serving.limits import Notify
from girih.serving.signature import NAME, Signature

EXPORTED = "exported"
"""The directory in a run's that holds the export of its final model."""
_MAKING = ".making-"


def model_name(run: str) -> str:
    """The name of a model where none is given: that of its run directory."""
    return Path(run).resolve().name or "model"


@contextlib.contextmanager
def exported(path: str, name: str, notify: Notify, model: str | None = None) -> Iterator[Path]:
    """A directory with the exported model of a run, for as long as it is needed.

    It is kept in the run directory, and used again as long as its checkpoint is the final one; where nothing can be written there, or there is
    none, it is in a temporary one.

    Args:
        path: an exported directory, which is used as it is; a run directory, or a checkpoint. name: of the model, where it is made.
        notify: receives a line on what is made. model: the user's class, as ``file.py:Class``; the export is made again for it.

    Raises:
        MissingFileError, CheckpointError: neither an exported model nor a checkpoint there.
    """
    if (Path(path) / NAME).is_file():
        yield Path(path)
        return
    # which takes a second to import
    from girih.serving.exporting import export, source_of
    from girih.serving.opening import open_model

    opened = open_model(path, model)
    run = (
        Path(path)
        if (Path(path) / "config.toml").is_file() or (Path(path) / "checkpoints").is_dir()
        else None
    )
    if run is not None and os.access(run, os.W_OK):
        kept = run / EXPORTED
        if model is not None or not _is_of(kept, source_of(opened.place, opened.manifest)):
            notify(f"{path}: exporting {opened.place.name} to {kept}")
            making = run / f"{_MAKING}{uuid.uuid4().hex}"
            try:
                export(opened, making, name, notify, programs=False)
                _put(making, kept)
            finally:
                shutil.rmtree(making, ignore_errors=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="girih-export-") as temporary:
        notify(f"{path}: exporting {opened.place.name} to a temporary directory")
        export(opened, Path(temporary), name, notify, programs=False)
        yield Path(temporary)


def _is_of(directory: Path, source: object) -> bool:
    try:
        return dict(Signature.read(directory).source) == source
    except (MissingFileError, CheckpointError):
        return False


def _put(made: Path, place: Path) -> None:
    """Gives a directory its name; one that has it goes. Whoever serves that one has its files open, and goes on."""
    old = place.with_name(f".old-{place.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.replace(place, old)
    try:
        os.replace(made, place)
    finally:
        shutil.rmtree(old, ignore_errors=True)
