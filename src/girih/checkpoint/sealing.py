"""Seals checkpoints and segments of logs whose files were changed by hand: by tools, and by tests of damage that no checksum shows."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

from girih.checkpoint.manifest import DENSE, NAME
from girih.runs.sealed import seal_again
from girih.store.snapshot.tensorfile import HEADER


def seal(directory: Path) -> None:
    """Makes sizes and checksums in the manifest of a checkpoint those of its files."""

    def update(tree: Any) -> None:
        for name, facts in tree["parts"].items():
            if (directory / name).is_file():
                facts |= _facts_of(directory / name)

    seal_again(directory / NAME, update)


def _facts_of(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    crc32 = {HEADER: zlib.crc32(content)}
    if file.name != DENSE:
        begin = 8 + int.from_bytes(content[:8], "little")
        crc32[HEADER] = zlib.crc32(content[:begin])
        with contextlib.suppress(Exception):  # a header that is damaged
            for name, entry in json.loads(content[8:begin]).items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    crc32[name] = zlib.crc32(content[begin + first : begin + last])
    return {"bytes": len(content), "crc32": crc32}
