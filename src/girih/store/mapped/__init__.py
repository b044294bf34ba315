"""Rows of a group as predictions read them, in immutable files that every process of a machine maps: one memory for all.

A file (:mod:`~girih.store.mapped.file`) holds rows, and keys that are *buried*: they have no row any more, whatever older files
say. A :class:`Stack` of files, newest first, stands where a store stands in reading. So a published change is a small file on top, and what
is below stays as it is.
"""

from girih.store.mapped.file import MappedFile, MappedFileFacts, Stack
from girih.store.mapped.writer import MappedWriter, merge

__all__ = ["MappedFile", "MappedFileFacts", "MappedWriter", "Stack", "merge"]
