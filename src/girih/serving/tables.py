"""The rows of a table as the files of a checkpoint hold them: chunk by chunk, without a store.

Shapes: n rows of a table, K rows of a chunk, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint import Manifest, Storage
from girih.checkpoint.parts import PartReader
from girih.models.needs import EMBEDDING
from girih.publishing.part import widened
from girih.store.snapshot.file import describe_header

COLUMNS = ("ids", "tables", "counts", EMBEDDING)


class TableRows(NamedTuple):
    """Rows of a table.

    Attributes:
        ids: int64[n]. rows: float32[n, D], their embeddings. counts: int64[n], how often training has seen each id.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    counts: NDArray[np.int64]


def table_chunks(place: Storage, manifest: Manifest, table: str) -> Iterator[TableRows]:
    """The rows of a table, some at a time, in the order of the files.

    Files of this machine are mapped, not read whole; one from elsewhere is copied to a temporary file first. Checksums of what
    is read are compared before the first row of a file is given.

    Raises:
        CheckpointError: a file is damaged.
    """
    reader = PartReader(place, manifest.shards)
    for name in sorted(name for name, facts in manifest.shards.items() if table in facts["tables"]):
        file = reader.open(name)
        file.verify(COLUMNS)
        names = [each["name"] for each in file.description["tables"]]
        number, dtype = names.index(table), file.description["dtype"]
        for chunk in file.chunks():
            own = np.flatnonzero(chunk["tables"] == number)
            rows, counts = widened(chunk[EMBEDDING][own], dtype), chunk["counts"][own].astype(np.int64)
            if len(own):
                yield TableRows(chunk["ids"][own], rows, counts)


def has_embeddings(place: Storage, manifest: Manifest, table: str) -> bool:
    """Whether the rows of a table have embeddings, not first-order weights alone, or nothing at all."""
    reader = PartReader(place, manifest.shards)
    names = (name for name, facts in manifest.shards.items() if table in facts["tables"])
    headers = (describe_header(reader.header(name), name) for name in names)
    return any(segment["name"] == EMBEDDING for each in headers for segment in each["segments"])


def whole_table(place: Storage, manifest: Manifest, table: str) -> TableRows:
    """All rows of a table, by id; see :func:`table_chunks`."""
    chunks = list(table_chunks(place, manifest, table))
    if not chunks:
        dim = _dim_of(place, manifest, table)
        return TableRows(np.empty(0, np.int64), np.empty((0, dim), np.float32), np.empty(0, np.int64))
    ids, rows, counts = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    order = np.argsort(ids)
    return TableRows(ids[order], rows[order], counts[order])


def _dim_of(place: Storage, manifest: Manifest, table: str) -> int:
    tables = {each["name"]: each for each in manifest.schema["tables"]}
    return int(tables[table]["dim"])
