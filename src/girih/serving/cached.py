"""The exported model of a run, for ``girih serve RUN``. girih exports the model first if there is no export."""

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
"""The directory in a run directory that holds the export of its final model."""
_MAKING = ".making-"


def model_name(run: str) -> str:
    """Returns the default name of a model: the name of its run directory."""
    return Path(run).resolve().name or "model"


@contextlib.contextmanager
def exported(path: str, name: str, notify: Notify, model: str | None = None) -> Iterator[Path]:
    """Yields a directory with the exported model of a run. The directory exists until the context ends.

    The export is kept in the run directory, and reused while its checkpoint is still the final one. If there is no run
    directory, or the directory is read-only, the export goes to a temporary directory.

    Args:
        path: an exported directory, which is used directly; a run directory; or a checkpoint.
        name: the name of the model in a new export.
        notify: receives a line before an export.
        model: the user's class, as ``file.py:Class``. It forces a new export.

    Raises:
        MissingFileError, CheckpointError: ``path`` is neither an exported model nor a checkpoint.
    """
    if (Path(path) / NAME).is_file():
        yield Path(path)
        return
    # these imports take a second
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
    """Renames a directory to its final name, and deletes the old directory of this name.

    A server that uses the old directory keeps its files open.
    """
    old = place.with_name(f".old-{place.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.replace(place, old)
    try:
        os.replace(made, place)
    finally:
        shutil.rmtree(old, ignore_errors=True)
