"""Files of an exported directory: known again by size and checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from girih.errors import CheckpointError, MissingFileError
from girih.serving.signature import Signature
from girih.store.mapped import MappedFile

_PIECE = 16 << 20


def facts_of(file: Path) -> dict[str, int]:
    """``bytes`` and ``crc32`` of a file."""
    crc, size = 0, 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return {"bytes": size, "crc32": crc}


def check_file(directory: Path, name: str, files: Mapping[str, Mapping[str, int]]) -> Path:
    """The path of a file that is as the signature says.

    Raises:
        MissingFileError: it is gone. CheckpointError: damaged, or the signature does not know it.
    """
    path = directory / name
    if name not in files:
        raise CheckpointError(f"{path}: the signature has no checksum of it; export the model again")
    try:
        found = facts_of(path)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file; export the model again") from None
    for what, expected in found.items():
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
    mapped = {rows.file for rows in signature.rows}
    for name, facts in signature.files.items():
        if name in mapped:
            MappedFile(directory / name, facts)
        else:
            check_file(directory, name, signature.files)
    return signature
