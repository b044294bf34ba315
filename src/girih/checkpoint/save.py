"""Writing and reading a checkpoint: all of it or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save_file
from torch import Tensor

from girih.checkpoint import trees
from girih.checkpoint.directory import WRITING, name_of, retire
from girih.checkpoint.manifest import Manifest
from girih.dense.half import DenseHalf
from girih.errors import CheckpointError, StorageFullError
from girih.schema import Schema
from girih.sparse.half import SparseHalf

DENSE = "dense.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint keeps, between two steps.

    Attributes:
        step: batches seen.
        state: plain values and tensors: everything that is neither row nor parameter.
        sparse, dense: the halves, which hold the rest.
    """

    step: int
    schema: Schema
    state: Mapping[str, Any]
    sparse: SparseHalf
    dense: DenseHalf


class Save:
    """A checkpoint of one moment; made between two steps, written by any thread while training goes on.

    Parameters, data position and counters are copied here; rows are kept by the sparse half.

    Args:
        root: the checkpoint becomes ``root/step-…``.

    Raises:
        StorageFullError: the disk is full; nothing is left behind.
    """

    def __init__(self, root: Path, content: Content) -> None:
        self._root = root
        self._final = root / name_of(content.step)
        self._writing = root / f"{WRITING}{os.getpid()}"
        self._manifest, self._tensors = _begin(content)
        with _told(root, self._writing):
            shutil.rmtree(self._writing, ignore_errors=True)
            self._writing.mkdir(parents=True)
            self._rows = content.sparse.begin_save(self._writing)

    def write(self) -> Path:
        """Writes ``root/step-…``; it appears under that name only when it is complete and on disk.

        What has that name already is replaced whole.

        Raises:
            StorageFullError: the disk is full; nothing is left behind.
        """
        with _told(self._root, self._writing):
            try:
                files = dict(self._rows.write())
            finally:
                self._rows.close()
            files[DENSE] = _write_dense(self._writing / DENSE, self._tensors)
            replace(self._manifest, files=files).write(self._writing)
            for directory in sorted(
                (path for path in self._writing.rglob("*") if path.is_dir()), reverse=True
            ):
                _sync(directory)
            _sync(self._writing)
            if self._final.exists():
                retire(self._final)
            self._writing.rename(self._final)
            _sync(self._root)
        return self._final


class SaveBeside:
    """What a trainer does while rank 0 makes a checkpoint: it writes the rows that it holds.

    Args:
        rows: False where only the manifest is written anew.
    """

    def __init__(self, content: Content, *, rows: bool = True) -> None:
        content.dense.state(), content.sparse.stats()  # as rank 0 asks for the manifest
        self._rows = content.sparse.begin_save(Path()) if rows else None

    def write(self) -> None:
        """Writes them; rank 0 hears what went wrong."""
        if self._rows is not None:
            try:
                self._rows.write()
            finally:
                self._rows.close()


def save_manifest(root: Path, content: Content) -> Path:
    """Replaces only the manifest of ``root/step-…``: it is there, and no row or parameter moved since.

    Raises:
        StorageFullError: the disk is full; the old manifest stays.
    """
    final = root / name_of(content.step)
    manifest, _ = _begin(content)
    with _told(root, None):
        replace(manifest, files=Manifest.read(final).files).write(final)
    return final


def load(path: Path, *, schema: Schema, sparse: SparseHalf, dense: DenseHalf) -> dict[str, Any]:
    """Puts a checkpoint's rows and parameters into the halves; returns the ``state`` that was saved.

    Raises:
        CheckpointError: incomplete, damaged, or of another schema or model; names the file or feature.
    """
    manifest = Manifest.read(path)
    check_schema(manifest, schema, path)
    tensors = _read_dense(path / DENSE, manifest.files[DENSE])
    state: dict[str, Any] = trees.join(manifest.state, tensors)
    try:
        dense.restore(trees.join(manifest.dense, tensors))
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path / DENSE}: does not fit this model: {reason}") from None
    run = state["run"]
    files = {name: facts for name, facts in manifest.files.items() if name != DENSE}
    sparse.load(path, files, step=run["step"] - run["refused"])
    return state


def check_schema(manifest: Manifest, schema: Schema, path: Path) -> None:
    """Refuses a checkpoint whose rows or inputs mean something else, and says what differs.

    Raises:
        CheckpointError: names the first feature or label that differs.
    """
    if manifest.fingerprint == schema.fingerprint():
        return
    theirs = Schema.from_dict(manifest.schema, str(path))
    if theirs.labels.names != schema.labels.names:
        got, expected = list(theirs.labels.names), list(schema.labels.names)
        raise CheckpointError(f"{path}: its labels are {got}, the configuration's are {expected}")
    for ours in schema.sparse:
        match = next((f for f in theirs.sparse if f.name == ours.name), None)
        if match is not None and theirs.dim_of(match) != schema.dim_of(ours):
            raise CheckpointError(
                f"{path}: feature {ours.name!r} has dim {theirs.dim_of(match)} in the checkpoint, "
                f"{schema.dim_of(ours)} in the configuration; set dim = {theirs.dim_of(match)} or start a new run"
            )
    got, expected = [f.name for f in theirs.features], [f.name for f in schema.features]
    what = (
        f"features {got} instead of {expected}"
        if got != expected
        else "features of other kinds, tables or transforms"
    )
    raise CheckpointError(f"{path}: was trained with {what}; use its own configuration or start a new run")


def _begin(content: Content) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest, files still to be named, and copies of the tensors of the dense half and of ``state``."""
    tree, tensors = trees.split({"dense": content.dense.state(), "state": content.state})
    manifest = Manifest(
        step=content.step,
        schema=content.schema.to_dict(),
        fingerprint=content.schema.fingerprint(),
        state=tree["state"],
        dense=tree["dense"],
        rows=dict(content.sparse.stats().rows),
        files={},
    )
    return manifest, tensors


@contextmanager
def _told(root: Path, writing: Path | None) -> Iterator[None]:
    """Removes what is half-written where writing fails, and says so where the disk is full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if writing is not None:
            shutil.rmtree(writing, ignore_errors=True)
        code = getattr(error, "errno", None)
        full = code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if full or isinstance(error, StorageFullError):
            raise StorageFullError(
                f"{root}: no space left for a checkpoint; free some, then --resume"
            ) from None
        raise


def _write_dense(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    save_file(tensors, str(path))
    _sync(path)
    content = path.read_bytes()
    return {"bytes": len(content), "crc32": {"": zlib.crc32(content)}}


def _read_dense(path: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    content = path.read_bytes()
    if zlib.crc32(content) != facts["crc32"][""]:
        raise CheckpointError(
            f"{path}: damaged (its checksum differs); delete {path.parent.name} to use an older one"
        )
    return parse(content)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
