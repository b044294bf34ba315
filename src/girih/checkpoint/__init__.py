"""The whole recoverable state of a run: rows, parameters, data position, counters.

This module exports the names that a launcher needs. Saving and loading need torch and a store. They are in
:mod:`girih.checkpoint.save`, :mod:`girih.checkpoint.load` and :mod:`girih.checkpoint.parts`.
"""

from __future__ import annotations

from girih.checkpoint.directory import CheckpointOptions, complete, final_of, find, latest, root_of, rotate
from girih.checkpoint.manifest import Manifest, name_of
from girih.checkpoint.storage import Storage

__all__ = [
    "CheckpointOptions",
    "Manifest",
    "Storage",
    "complete",
    "final_of",
    "find",
    "latest",
    "name_of",
    "root_of",
    "rotate",
]
