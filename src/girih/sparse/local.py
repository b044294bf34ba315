"""The sparse half of one process: shards in its own memory, on threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from girih.data.batch import Batch
from girih.errors import CheckpointError, NonFiniteError
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.needs import EMBEDDING, Needs
from girih.optim import SparseOptimizer
from girih.schema import Schema
from girih.sparse.gather import GroupPulled, GroupTile
from girih.sparse.options import StoreOptions
from girih.sparse.pack import pack
from girih.store import LiveSnapshot, Store, header_checksum, read_snapshot, write_snapshot


@dataclass
class LocalPulled:
    """A batch whose embeddings are here already."""

    batch: Batch
    parts: list[GroupPulled]
    embeddings: Embeddings

    def wait(self) -> Embeddings:
        """The embeddings."""
        return self.embeddings


class Applied:
    """An update that is applied already."""

    def wait(self) -> None:
        """Returns at once."""
        return


class LocalSave:
    """The shards as they were at one moment, one file each below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.snapshots: list[tuple[Path, LiveSnapshot]] = []

    def write(self) -> dict[str, Any]:
        """Writes every shard's file; each shard is free again as soon as its own is written."""
        files = {}
        for name, snapshot in self.snapshots:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with snapshot:
                facts = write_snapshot(snapshot, path)
            files[name.as_posix()] = {**facts, "header_crc32": header_checksum(path)}
        return files

    def close(self) -> None:
        """Ends what was not written."""
        for _, snapshot in self.snapshots:
            snapshot.close()


class LocalSparse:
    """Tables in this process.

    Args:
        schema: features and tables.
        needs: feature name → what the model reads of it.
        optimizer: of embeddings; first_order_optimizer: of first-order weights, the same where None.
        options: shards, and where their memory lies.
        seed: initial values are a function of it, the table's name, the id and the column.
    """

    def __init__(
        self,
        schema: Schema,
        needs: Needs,
        *,
        optimizer: SparseOptimizer,
        first_order_optimizer: SparseOptimizer | None = None,
        options: StoreOptions | None = None,
        seed: int = 0,
    ) -> None:
        options = options or StoreOptions()
        self.schema = schema
        self.step = 0
        groups = pack(schema, needs, optimizer, first_order_optimizer, seed)
        num_shards = options.num_shards(group.spec for group in groups)
        self._pool = ThreadPoolExecutor(num_shards, "girih-shard") if num_shards > 1 else None
        self.tiles = [
            GroupTile(group, options.open_stores(group.spec, num_shards), self._pool) for group in groups
        ]

    def pull(self, batch: Batch) -> LocalPulled:
        """Reads a batch's rows for training."""
        return self._read(batch, train=True)

    def peek(self, batch: Batch) -> LocalPulled:
        """Reads for evaluation; keys without a row give their initial value."""
        return self._read(batch, train=False)

    def push(self, pulled: LocalPulled, lr_scale: float = 1.0) -> Applied:
        """Applies the gradients that the pulled embeddings collected: one optimizer step.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; no row was moved.
        """
        batch, step = pulled.batch, self.step + 1
        updates = []
        for tile, part in zip(self.tiles, pulled.parts, strict=True):
            gradients = tile.gradients(part, batch)
            if gradients is None:
                continue
            if gradients.nonfinite_key >= 0:
                feature = tile.feature_of(part, gradients.nonfinite_key, batch)
                name = "?" if feature is None else self.schema.sparse[feature].name
                raise NonFiniteError(f"the gradient of feature {name!r} is NaN or infinite")
            updates.append((tile, part, gradients))
        for tile, part, gradients in updates:
            tile.apply(part, gradients, step, lr_scale)
        self.step = step
        return Applied()

    def drain(self) -> None:
        """Nothing is ever in flight."""
        return

    def counters(self) -> Mapping[str, int]:
        """Sums over all shards, see ``Store.counters``, and ``rows``."""
        total: Counter[str] = Counter()
        for _, store in self.stores():
            total.update(store.counters())
            total["rows"] += store.num_rows
        return total

    def rows(self) -> dict[str, int]:
        """Rows of each table."""
        rows: Counter[str] = Counter()
        for tile in self.tiles:
            for store in tile.shards:
                for number, table in enumerate(tile.group.spec.tables):
                    rows[table.name] += store.num_rows_of(number)
        return dict(rows)

    def begin_save(self, directory: Path) -> LocalSave:
        """Takes a live snapshot of every shard, to be written below a directory."""
        save = LocalSave(directory)
        try:
            for name, store in self.stores():
                save.snapshots.append((name, store.live_snapshot(directory)))
        except BaseException:
            save.close()
            raise
        return save

    def load(self, directory: Path, files: Mapping[str, Any]) -> None:
        """Replaces all rows by those of any number of shards."""
        for name, facts in files.items():  # a header holds the checksums of what follows it
            if header_checksum(directory / name) != facts["header_crc32"]:
                raise CheckpointError(
                    f"{directory / name}: damaged, or of another checkpoint (its header differs)"
                )
        snapshots = [read_snapshot(directory / name) for name in sorted(files)]
        for tile in self.tiles:
            tables = {table.name for table in tile.group.spec.tables}
            mine = [s for s in snapshots if tables & {table["name"] for table in s.description["tables"]}]
            for store in tile.shards:
                store.restore(mine)

    def stores(self) -> Iterator[tuple[Path, Store]]:
        """Every shard, and the place of its file in a checkpoint."""
        for tile in self.tiles:
            for s, store in enumerate(tile.shards):
                yield Path("tables", tile.group.spec.name, f"shard-{s:04d}.safetensors"), store

    def close(self) -> None:
        """Gives the memory back; the tile cannot be used after it."""
        if self._pool is not None:
            self._pool.shutdown()
        for _, store in self.stores():
            store.close()

    def _read(self, batch: Batch, *, train: bool) -> LocalPulled:
        parts = [tile.read(batch, self.step + 1, train=train) for tile in self.tiles]
        return LocalPulled(batch, parts, self._assemble(parts, batch))

    def _assemble(self, parts: list[GroupPulled], batch: Batch) -> Embeddings:
        blocks, first_order, sequences = [], [], {}
        for tile, part in zip(self.tiles, parts, strict=True):
            for output, leaf in zip(tile.group.outputs, part.leaves, strict=True):
                if output.whole:
                    feature, size = int(output.features[0]), batch.num_examples
                    bounds = torch.from_numpy(batch.offsets[feature * size : (feature + 1) * size + 1]).long()
                    sequences[output.names[0]] = Jagged(leaf, bounds - bounds[0])
                elif output.segment.name == EMBEDDING:
                    blocks.append(Block(output.names, leaf))
                else:
                    first_order.append(Block(output.names, leaf))
        return Embeddings(tuple(blocks), sequences, tuple(first_order))
