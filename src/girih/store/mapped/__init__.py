"""Rows of a group for predictions, in immutable files that all processes of a machine map.

The processes share one copy of each file in memory. A file (:mod:`~girih.store.mapped.file`) holds rows and *buried*
keys. A buried key has no row any more, regardless of older files. A :class:`Stack` of files, newest first, replaces a
store for reading. A published change is a small file on top, and the files below stay unchanged.
"""

from girih.store.mapped.file import MappedFile, MappedFileFacts, Stack
from girih.store.mapped.writer import MappedWriter, merge

__all__ = ["MappedFile", "MappedFileFacts", "MappedWriter", "Stack", "merge"]
