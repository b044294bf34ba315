"""Writing and reading a checkpoint: all of it or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save_file
from torch import Tensor

from girih.checkpoint import trees
from girih.checkpoint.directory import WRITING, name_of, retire
from girih.checkpoint.manifest import Manifest
from girih.errors import CheckpointError, StorageFullError
from girih.schema import Schema
from girih.tiles import DenseHalf, SparseHalf

DENSE = "dense.safetensors"


def save(
    root: Path,
    *,
    step: int,
    schema: Schema,
    state: Mapping[str, Any],
    sparse: SparseHalf,
    dense: DenseHalf,
    unchanged: bool = False,
) -> Path:
    """Writes ``root/step-…``; it appears under that name only when it is complete and on disk.

    Args:
        state: plain values and tensors.
        unchanged: that step is there already and no row or parameter moved since: only its manifest is
            replaced. Otherwise what has its name is replaced whole.

    Raises:
        StorageFullError: the disk is full; nothing is left behind.
    """
    final = root / name_of(step)
    writing = root / f"{WRITING}{os.getpid()}"
    tree, tensors = trees.split({"dense": dense.state(), "state": state})
    files: dict[str, Any] = {}
    try:
        if unchanged:
            files.update(Manifest.read(final).files)
        else:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            files.update(sparse.save(writing))
            files[DENSE] = _write_dense(writing / DENSE, tensors)
        manifest = Manifest(
            step=step,
            schema=schema.to_dict(),
            fingerprint=schema.fingerprint(),
            state=tree["state"],
            dense=tree["dense"],
            rows=sparse.rows(),
            files=files,
        )
        if unchanged:
            manifest.write(final)
            return final
        manifest.write(writing)
        for directory in sorted((path for path in writing.rglob("*") if path.is_dir()), reverse=True):
            _sync(directory)
        _sync(writing)
        if final.exists():
            retire(final)
        writing.rename(final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise StorageFullError(
                f"{root}: no space left for a checkpoint; free some, then --resume"
            ) from None
        raise
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
    sparse.load(path, {name: facts for name, facts in manifest.files.items() if name != DENSE})
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
