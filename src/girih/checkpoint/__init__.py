"""The whole recoverable state of a run: rows, parameters, data position, counters."""

from __future__ import annotations

from girih.checkpoint.directory import complete, find, latest, name_of, rotate
from girih.checkpoint.manifest import Manifest
from girih.checkpoint.options import CheckpointOptions
from girih.checkpoint.save import Content, Save, SaveBeside, load, save_manifest

__all__ = [
    "CheckpointOptions",
    "Content",
    "Manifest",
    "Save",
    "SaveBeside",
    "complete",
    "find",
    "latest",
    "load",
    "name_of",
    "rotate",
    "save_manifest",
]
