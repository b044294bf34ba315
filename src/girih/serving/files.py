"""Files of an exported directory: known again by size and checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from girih.errors import CheckpointError
from girih.runs.sealed import open_file
from girih.serving.signature import AGAIN, Signature
from girih.store.mapped import MappedFile

_PIECE = 16 << 20


def facts_of(file: Path) -> dict[str, int]:
    """``bytes`` and ``crc32`` of a file."""
    crc, size = 0, 0
    with open_file(file, file.parent, AGAIN) as opened:
        while piece := opened.read(_PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return {"bytes": size, "crc32": crc}


def check_file(directory: Path, name: str, files: Mapping[str, Mapping[str, int]]) -> Path:
    """The path of a file that is as the signature says.

    Raises:
        MissingFileError: it is gone. CheckpointError: damaged.
    """
    path = directory / name
    for what, expected in facts_of(path).items():
        if files[name][what] != expected:
            raise CheckpointError(
                f"{path}: damaged: its {what} are {expected}, the signature says {files[name][what]}; export the model again"
            )
    return path


def check_all(directory: Path) -> Signature:
    """Reads all files of an exported directory, and nothing into memory.

    Raises:
        MissingFileError: one is gone. CheckpointError: one is damaged; names it.
    """
    signature = Signature.read(directory)
    for rows in signature.rows:
        MappedFile(directory / rows.file, signature.files[rows.file])
    for name in signature.dense.files:
        check_file(directory, name, signature.files)
    return signature
