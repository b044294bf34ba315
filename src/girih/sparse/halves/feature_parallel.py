"""Tables spread over the trainers whole: each trainer has those of its own features, and reads no other column (DES).

Rows never leave their trainer; what crosses the wire are partial results, in the dense half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.comm.group import TrainerGroup
from girih.data import Dataset
from girih.data.batch import Batch
from girih.errors import ConfigError, GirihError, NonFiniteError
from girih.planner.placement import Placement
from girih.sparse.groups.local_shards import ShardsSave
from girih.sparse.halves.immediate import Done, ImmediateUpdates
from girih.sparse.halves.local import LocalPulled, LocalSparse
from girih.sparse.spec import SparseSpec


class FeatureParallelSparse(ImmediateUpdates):
    """The tables of this trainer's features; to be placed, once, before it reads.

    Methods but for ``pull``, ``peek`` and ``push`` are called by all trainers, in the same order.

    Attributes:
        schema: the features that are read here; all of them until they are placed.
    """

    by_columns = True

    def __init__(self, spec: SparseSpec, ranks: TrainerGroup) -> None:
        self.ranks, self.schema = ranks, spec.schema
        self._spec = spec
        self._tables: LocalSparse | None = None
        self.wire_bytes: Counter[str] = Counter()

    def place(self, placement: Placement) -> None:
        """Opens this rank's tables."""
        spec, ranks = self._spec, self.ranks
        self.schema = placement.schema_of(ranks.rank, spec.schema)
        here = {table.name for table in self.schema.tables}
        # as many shards on all ranks, whatever tables each has: files are numbered by them
        shards = spec.store.num_shards(group.spec for group in spec.groups())
        self._tables = LocalSparse(
            self.schema,
            {name: kinds for name, kinds in spec.needs.items() if name in placement.features_of(ranks.rank)},
            optimizer=spec.optimizer,
            first_order_optimizer=spec.first_order_optimizer,
            options=replace(spec.store, shards=shards),
            seed=spec.seed,
            place=ranks.rank,
            elsewhere={table.name for table in spec.schema.tables} - here,
        )

    @property
    def tables(self) -> LocalSparse:
        """This rank's."""
        if self._tables is None:
            raise ConfigError("features are not placed yet; fit, load or evaluate first")
        return self._tables

    @property
    def step(self) -> int:
        """Steps applied."""
        return self.tables.step

    @step.setter
    def step(self, step: int) -> None:
        self.tables.step = step

    def columns_of(self, data: Dataset) -> Dataset:
        """This rank's features, and the labels.

        Raises:
            ConfigError: bad rows are to be skipped: each trainer would skip those that are bad in its own columns.
        """
        if self.ranks.size == 1:
            return data
        if data.on_bad_row != "error":
            raise ConfigError(
                f"data.on_bad_row = {data.on_bad_row!r}: with strategy 'substitution' each trainer sees its own columns"
                " and cannot know what others skip; set it to 'error', or use 'synchronous'"
            )
        return data.select([feature.name for feature in self.schema.features], labels=True)

    def pull(self, batch: Batch) -> LocalPulled:
        """Reads a batch's rows for training."""
        return self.tables.pull(batch)

    def peek(self, batch: Batch) -> LocalPulled:
        """Reads for evaluation; keys without a row give their initial value."""
        return self.tables.peek(batch)

    def push(self, pulled: LocalPulled, lr_scale: float = 1.0) -> Done:
        """Applies the gradients that the pulled embeddings collected: one optimizer step, on each trainer.

        Raises:
            GirihError: finite gradients whose sum is not: other trainers may have moved their rows already.
        """
        try:
            return self.tables.push(pulled, lr_scale)
        except NonFiniteError as error:
            if self.ranks.size == 1:
                raise
            raise GirihError(
                f"trainer {self.ranks.rank}: {error}, summed up; other trainers have applied theirs; resume from the last"
                " checkpoint, with a lower learning rate or train.clip_norm"
            ) from error

    def counters(self) -> Mapping[str, int]:
        """Sums over all shards of all ranks."""
        return self.ranks.sum_by_name(self.tables.counters())

    def rows(self) -> dict[str, int]:
        """Rows of each table."""
        none = {table.name: 0 for table in self._spec.schema.tables}
        return self.ranks.sum_by_name(none | self.tables.rows())

    def begin_save(self, writer: Storage) -> ShardsSave:
        """All ranks take live snapshots of their tables, to be written as parts of one checkpoint."""
        return self.tables.begin_save(writer)

    def load(self, reader: PartReader) -> None:
        """Replaces all rows by those of any number of shards; each rank takes its tables."""
        self.tables.load(reader)

    def close(self) -> None:
        """Gives the memory back."""
        if self._tables is not None:
            self._tables.close()
