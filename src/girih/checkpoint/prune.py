"""Writes a checkpoint again, file by file, without rows that are rare or old.

Shapes: n rows of a file, K rows of a chunk.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.manifest import DENSE, NAME, Manifest, PartFacts, rows_of
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.store import SnapshotFile, write_rows
from girih.store.snapshot.columns import Chunk, columns_of
from girih.store.snapshot.tensorfile import StoredTensor
from girih.store.spec import Description

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class PruneRule:
    """The rule that decides which rows stay.

    Attributes:
        tables: the tables from which rows are removed. Other tables stay unchanged.
        min_count: a row stays if training saw its key at least this number of times. None disables the test.
        max_age: a row stays if its last use was at most this number of steps ago. In tables whose TTL is in seconds,
            the number is in seconds. None disables the test.
    """

    tables: Collection[str]
    min_count: int | None = None
    max_age: int | None = None


def prune(place: Storage, root: Storage, rule: PruneRule) -> tuple[Storage, Manifest]:
    """Writes ``root/step-…``: the checkpoint ``place`` without the rows that the rule removes.

    Its files have the same shards and tables. Rows lose their places in the eviction lists. A load rebuilds these lists
    in the order of last use.

    Returns:
        The new checkpoint, and its manifest.

    Raises:
        CheckpointError: a part is damaged. Nothing is written.
        StorageFullError: the disk is full. No partial checkpoint stays.
    """
    manifest = Manifest.read(place)
    reader = PartReader(place, manifest.shards)
    newest = _newest(reader, rule)
    draft = root.draft(place.name)
    root.remove(draft.name, first=NAME)
    draft.make()
    try:
        parts: dict[str, PartFacts] = {}
        for name, facts in manifest.shards.items():
            file = reader.open(name)
            file.verify()
            kept = _Kept(file, rule, newest)
            with draft.create(name) as sink:
                written = write_rows(kept, sink, f"{draft}/{name}")
            parts[name] = {**facts, "tables": kept.rows, "bytes": written["bytes"], "crc32": written["crc32"]}
        dense = place.read(DENSE)
        draft.replace(DENSE, dense)
        parts[DENSE] = {"bytes": len(dense), "crc32": {"": zlib.crc32(dense)}}
        parts = {name: parts[name] for name in manifest.parts}
        pruned = replace(manifest, parts=parts, rows=rows_of({n: f for n, f in parts.items() if n != DENSE}))
        if manifest.run.best_step not in (None, manifest.step):  # ``root`` does not have the best checkpoint
            run = manifest.state["run"] | {"best_step": None, "best_value": None}
            pruned = replace(pruned, state={**manifest.state, "run": run})
        pruned.write(draft)
    except BaseException:
        root.remove(draft.name, first=NAME)
        raise
    if draft.name != place.name:
        root.publish(draft, place.name)
    return root / place.name, pruned


class _Kept:
    """The rows of a file that stay, in the form for :func:`girih.store.write_rows`.

    Attributes:
        rows: the number of rows of each table.
    """

    def __init__(self, file: SnapshotFile, rule: PruneRule, newest: Mapping[str, int]) -> None:
        self._file, self._rule, self.where = file, rule, file.where
        tables = [table["name"] for table in file.description["tables"]]
        self._asked = np.array([name in rule.tables for name in tables])
        self._newest = np.array([newest.get(name, 0) for name in tables], np.int64)
        counts = np.zeros(len(tables), np.int64)
        for chunk in file.chunks():
            counts += np.bincount(chunk["tables"][self._stays(chunk)], minlength=len(tables))
        self.rows = dict(zip(tables, counts.tolist(), strict=True))
        self.num_rows = int(counts.sum())
        self.description: Description = {**file.description, "num_rows": self.num_rows, "linked": False}
        self._columns = columns_of(self.description)

    def tensors(self) -> list[StoredTensor]:
        """Returns all columns and Bloom filters."""
        return [*(column.tensor(self.num_rows) for column in self._columns), *self._file.bloom_tensors()]

    def chunks(self) -> Iterator[Chunk]:
        """Yields the columns of rows in chunks."""
        for chunk in self._file.chunks():
            stays = self._stays(chunk)
            yield {column.name: chunk[column.name][stays] for column in self._columns}

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yields the name of each table and its Bloom cells."""
        for table in self.rows:
            cells = self._file.bloom(table)
            if cells is not None:
                yield table, cells

    def _stays(self, chunk: Chunk) -> Bools:
        stays = np.ones(len(chunk["ids"]), np.bool_)
        if self._rule.min_count is not None:
            stays &= chunk["counts"] >= self._rule.min_count
        if self._rule.max_age is not None:
            stays &= self._newest[chunk["tables"]] - chunk["last_used"] <= self._rule.max_age
        stays |= ~self._asked[chunk["tables"]]
        return stays


def _newest(reader: PartReader, rule: PruneRule) -> dict[str, int]:
    """Returns the moment at which each table's rows have age 0: the last step, or the second of their last use."""
    newest: dict[str, int] = {}
    for name in reader.parts if rule.max_age is not None else ():
        description = reader.open(name).description
        for table in description["tables"]:
            newest[table["name"]] = max(newest.get(table["name"], 0), int(description["last_step"]))
    return newest if rule.max_age is None else newest | reader.newest_uses()
