"""Seals logs whose files were changed by hand; see :mod:`girih.checkpoint.sealing`."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from girih.checkpoint.sealing import seal as seal_segment
from girih.publishing.log import SEGMENTS, SNAPSHOTS, name_of
from girih.publishing.manifest import HEAD, NAME, PIN
from girih.runs.sealed import seal_again


def seal(root: Path) -> None:
    """Makes sizes and checksums of a log those of its files: in all manifests, the head and the pin."""
    for manifest in root.glob(f"*/*/{NAME}"):
        seal_segment(manifest.parent)

    def update(tree: Any) -> None:
        for pointer in (tree["snapshot"], tree["newest"]):
            for kind in (SEGMENTS, SNAPSHOTS):
                manifest = root / kind / name_of(pointer["number"]) / NAME
                if manifest.is_file():
                    pointer["manifest_crc32"] = zlib.crc32(manifest.read_bytes())

    for index in (root / HEAD, root / PIN):
        if index.is_file():
            seal_again(index, update)
