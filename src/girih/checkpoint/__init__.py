"""The whole recoverable state of a run: rows, parameters, data position, counters.

Saving and loading the dense half needs torch, and is in :mod:`girih.checkpoint.save` and
:mod:`girih.checkpoint.load`; nothing here does.
"""

from __future__ import annotations

from girih.checkpoint.directory import complete, find, latest, name_of, root_of, rotate
from girih.checkpoint.manifest import Manifest
from girih.checkpoint.options import CheckpointOptions
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage

__all__ = [
    "CheckpointOptions",
    "Manifest",
    "PartReader",
    "Storage",
    "complete",
    "find",
    "latest",
    "name_of",
    "root_of",
    "rotate",
]
