"""The index of a checkpoint: what was saved, when, and how to tell that it is whole."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from girih.errors import CheckpointError

NAME = "manifest.json"
CHECKSUM = "crc32"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``manifest.json``.

    Attributes:
        step: batches seen.
        schema: as ``Schema.to_dict`` gives it; fingerprint: of that schema.
        state: counters, data position, schedule and the like: everything that is neither row nor parameter.
        dense: the dense half's state with names in place of tensors, which lie in ``dense.safetensors``.
        rows: rows of each table.
        files: relative path → {"bytes": int, "crc32": {part: int}}.
    """

    step: int
    schema: Mapping[str, Any]
    fingerprint: str
    state: Mapping[str, Any]
    dense: Any
    rows: Mapping[str, int]
    files: Mapping[str, Mapping[str, Any]]
    format: int = FORMAT
    girih: str = version("girih")

    def write(self, directory: Path) -> None:
        """Replaces the directory's manifest whole; a checksum of all else in it comes first."""
        new = directory / (NAME + ".new")
        text = json.dumps(asdict(self))
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(json.dumps({CHECKSUM: zlib.crc32(text.encode())})[:-1] + ", " + text[1:])
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, directory / NAME)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads it and checks that every file is there in its full size.

        Raises:
            CheckpointError: not a checkpoint, of another format, or damaged; names the file.
        """
        file = directory / NAME
        if not file.is_file():
            raise CheckpointError(f"{directory}: no {NAME}, so this is not a complete checkpoint")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            checksum = content.pop(CHECKSUM)
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{file}: format {content['format']}, written by girih {content['girih']}; this one reads {FORMAT}"
                )
            if zlib.crc32(json.dumps(content).encode()) != checksum:
                raise ValueError("its checksum differs")
            manifest = cls(**content)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            told = f"damaged ({type(error).__name__}: {error})"
            raise CheckpointError(f"{file}: {told}; delete {directory.name} to use an older one") from None
        for name, facts in manifest.files.items():
            part = directory / name
            actual = part.stat().st_size if part.is_file() else None
            if actual != facts["bytes"]:
                what = "missing" if actual is None else f"damaged: {actual} bytes instead of {facts['bytes']}"
                raise CheckpointError(f"{part}: {what}; delete {directory.name} to use an older checkpoint")
        return manifest
