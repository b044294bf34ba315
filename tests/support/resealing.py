"""Seals files again that a test has changed, so that no checksum shows the damage."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path

from girih.files.sealed import seal_text, sealed_text


def seal(directory: Path) -> None:
    """Makes all sizes and checksums in a checkpoint, an export or a log those of its files.

    Files of JSON that are no trees, or other trees, get a checksum of their text all the same.
    """
    indexes = [path for path in directory.rglob("*.json") if path.is_file()]
    for index in sorted(indexes, key=lambda path: -len(path.parts)):  # the head of a log knows its manifests
        text = sealed_text(index.read_bytes())
        with contextlib.suppress(Exception):
            tree = json.loads(text)
            for name, facts in [*tree.get("parts", {}).items(), *_files_in(tree)]:
                facts |= _facts_of(index.parent / name, dict(facts))
            for pointer in (tree[name] for name in ("snapshot", "newest") if "snapshot" in tree):
                for manifest in directory.glob(f"s*/{pointer['number']:08d}/manifest.json"):
                    pointer["manifest_crc32"] = zlib.crc32(manifest.read_bytes())
            text = text if tree == json.loads(text) else json.dumps(tree)
        index.write_bytes(seal_text(text))


def _files_in(tree: object) -> list[tuple[str, dict[str, object]]]:
    """All facts of files in the tree of a signature, by name."""
    if isinstance(tree, list):
        return [found for item in tree for found in _files_in(item)]
    if not isinstance(tree, dict):
        return []
    if {"name", "bytes", "crc32"} <= tree.keys():
        return [(str(tree["name"]), tree)]
    return [found for item in tree.values() for found in _files_in(item)]


def _facts_of(file: Path, facts: dict[str, object]) -> dict[str, object]:
    if not file.is_file():
        return facts
    content = file.read_bytes()
    if not isinstance(facts["crc32"], dict):
        return {"bytes": len(content), "crc32": zlib.crc32(content)}
    begin, crc32 = 8 + int.from_bytes(content[:8], "little"), {"": zlib.crc32(content)}
    if len(facts) > 2:  # a part with rows
        crc32[""] = zlib.crc32(content[:begin])
        with contextlib.suppress(Exception):  # a header that is damaged
            for name, entry in json.loads(content[8:begin]).items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    crc32[name] = zlib.crc32(content[begin + first : begin + last])
    return {"bytes": len(content), "crc32": crc32}
