"""A dataset describes data that can be read repeatedly, epoch by epoch, from any position.

To resume, it loads only the window of the position; see :mod:`girih.data.epoch`.

Shapes: B examples of a batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np

from girih.config import build
from girih.config.bounds import Bounds, Count
from girih.config.sections import hints_of
from girih.data.batch import Batch
from girih.data.decode.columns import Notation
from girih.data.decode.conditions import Where, parse_where
from girih.data.decode.decoder import chosen
from girih.data.epoch import SkippedRows, read_epoch
from girih.data.formats.text import SUFFIXES
from girih.data.negatives import Negatives
from girih.data.position import Cursor, Position
from girih.data.read_ahead import ReadAhead
from girih.data.read_plan import ReadPlan, make_read_plan
from girih.data.unit import Source
from girih.errors import ConfigError, nearest
from girih.files.sealed import digest
from girih.kernels.cpu.arrays import I64
from girih.schema import Schema, list_of_texts

BATCH_SIZE = 4096
MOST_EXAMPLES = (1 << 31) - 1  # per batch, because offsets are int32
SHUFFLE_ROWS = 1_000_000


class OrderOptions(TypedDict, total=False):
    """Options of every dataset; see :class:`Dataset`."""

    batch_size: int
    shuffle: bool
    shuffle_rows: int
    seed: int
    on_bad_row: str


class ReadOptions(OrderOptions, total=False):
    """Options of every reader; see :func:`girih.read_parquet`."""

    keep: Iterable[str]
    with_labels: bool
    where: str | Where | None
    null_values: Iterable[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Batches of examples from files, made by ``read_parquet`` and the other readers.

    Attributes:
        schema: the features and labels that batches hold.
        batch_size: B, the number of examples of a batch; the last batch of an epoch may be smaller.
        shuffle: permute rows, in another order in each epoch.
        shuffle_rows: the minimum number of rows that are permuted together.
        seed: together with the epoch's number, determines the order.
        on_bad_row: ``error`` stops at the first bad row; ``skip`` drops and counts bad rows.
        read_ahead: number of batches that are read before they are needed.
        source: the files.
        plan: the columns of the files to read, and their uses.
        negatives: adds examples to each batch, beyond its size; None adds none.
        skipped: the bad rows that the latest pass over the data has dropped so far.

    Examples:
        >>> import girih
        >>> import pyarrow as pa
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> table = pa.table({"user": [7, 8, 7], "clicked": [1, 0, 1]})
        >>> data = girih.read_arrow(table, schema, batch_size=2)
        >>> data.num_examples, [batch.ids.tolist() for batch in data]
        (3, [[7, 8], [7]])
    """

    schema: Schema
    batch_size: Annotated[int, Bounds(1, MOST_EXAMPLES)] = BATCH_SIZE
    shuffle: bool = False
    shuffle_rows: Count = SHUFFLE_ROWS
    seed: int = 0
    on_bad_row: Literal["error", "skip"] = "error"
    read_ahead: int = 4
    source: Source
    plan: ReadPlan
    negatives: Negatives | None = field(default=None, compare=False)
    skipped: SkippedRows = field(default_factory=SkippedRows, init=False, compare=False)

    def __post_init__(self) -> None:
        hints = hints_of(Dataset)
        for name in OrderOptions.__annotations__:
            build(hints[name], getattr(self, name), name)

    def batches(self, epoch: int = 0, position: Position | None = None) -> Iterator[tuple[Batch, Position]]:
        """Yields the batches of an epoch, each with the position of the next batch.

        After the last batch, this position is the start of the next epoch.

        Args:
            epoch: number of the epoch, from 0. With shuffling, each epoch has its own order.
            position: the place to begin at, from an earlier pass; None begins the epoch.

        Raises:
            ConfigError: a position of another epoch, or of data in another order.
            DataError: a bad row or a damaged file, while iterating.
        """
        order = self._order_digest()
        if position is None:
            position = Position(epoch=epoch, order=order)
        if position.epoch != epoch:
            raise ConfigError(f"position: epoch {position.epoch} is not the epoch asked for, {epoch}")
        if position.order not in ("", order):
            raise ConfigError(
                "position: from other files, or another shuffle, shuffle_rows, seed, on_bad_row or where;"
                " start the epoch again"
            )
        batches = read_epoch(self, replace(position, order=order))
        if self.negatives is None:
            return batches
        added = self.negatives.added
        return ((added(batch), after) for batch, after in batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of epoch 0.

        Raises:
            DataError: a bad row or a damaged file, while iterating.
        """
        return (batch for batch, _ in self.batches(0))

    def first(self) -> Batch:
        """Returns the first batch of epoch 0. For a stream, returns a batch of existing records.

        Raises:
            StopIteration: the data has no rows.
            DataError: a bad row or a damaged file.
        """
        return next(iter(self.in_order() if self.source.endless else self))

    @property
    def num_examples(self) -> int | None:
        """Number of rows in all files, bad rows included.

        It is None unless the number is known without reading the rows: in Parquet files without ``where``.
        """
        return self.source.num_rows if self.plan.where is None else None

    @property
    def num_epoch_examples(self) -> int | None:
        """Number of examples of an epoch, including items that are drawn for each batch.

        None if the rows are not counted.
        """
        rows, drawn = self.num_examples, self.negatives
        if rows is None or drawn is None:
            return rows
        return rows + -(-rows // self.batch_size) * drawn.per_step

    @property
    def with_labels(self) -> bool:
        """True if batches hold labels."""
        return bool(self.plan.labels)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The files that are read, as paths or fsspec addresses."""
        return tuple(file.address for file in self.source.files)

    @property
    def num_skipped(self) -> int:
        """Number of bad rows that the latest pass has dropped so far."""
        return self.skipped.count

    def with_negatives(self, items: Dataset, per_step: int) -> Dataset:
        """Returns the same rows, and adds items of a catalogue to each batch.

        They are examples with label 0 and no user.

        Losses over the batch use these examples as negatives. Evaluations leave them out. The drawn items depend only
        on the seed and the batch.

        Args:
            items: one row per item, read without labels, with the schema of the item's features:
                ``schema.narrowed(names)``.
            per_step: number of items per batch, drawn uniformly with replacement.

        Raises:
            ConfigError: features that this schema does not have.
            DataError: a catalogue without items.
        """
        build(Count, per_step, "per_step")
        names = items.schema.names
        drawn = Negatives(items, self.schema, names, per_step, self.seed)
        return replace(self, negatives=drawn)

    def with_batch_size(self, batch_size: int) -> Dataset:
        """Returns the same rows in the same order, in batches of another size.

        Args:
            batch_size: number of examples of a batch, at least 1.

        Raises:
            ConfigError: the size is out of range.
        """
        return replace(self, batch_size=batch_size)

    def meeting(self, where: Where) -> Dataset:
        """Returns a dataset with another condition on rows, which replaces the present condition.

        Raises:
            DataError: the files do not have a column of the condition.
        """
        plan = replace(self.plan, where=where)
        self.source.check(plan)
        return replace(self, plan=plan)

    def in_order(self) -> Dataset:
        """Returns the same rows without shuffling, and only the existing records of a stream.

        Returns this dataset itself if nothing changes.
        """
        data = self
        if self.shuffle or self.negatives is not None:
            data = replace(self, shuffle=False, negatives=None)
        return data._over(data.source.so_far()) if data.source.endless else data

    def within(self, bounds: Sequence[Sequence[int]]) -> Dataset:
        """Returns the same stream with the bounds of another reader. All readers of the stream see the same order."""
        return self._over(self.source.within(bounds))

    def ahead(
        self,
        epoch: int,
        position: Position | None,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
        stopped: Callable[[], bool] = lambda: False,
    ) -> ReadAhead[tuple[Batch, Position]]:
        """Reads :meth:`batches` in a thread.

        Args:
            epoch: number of the epoch, from 0.
            position: the place to begin at; None begins the epoch.
            prepare: transforms each batch.
            stopped: returns whether a stream that waits for rows must end.
        """
        closed = threading.Event()
        data = self
        if self.source.bounds is not None:
            data = self._over(self.source.until(lambda: closed.is_set() or stopped()))
        batches = ((prepare(batch), after) for batch, after in data.batches(epoch, position))
        return ReadAhead(batches, self.read_ahead, closed)

    def _over(self, source: Source) -> Dataset:
        """Returns the same data from another source. Both count their bad rows together."""
        data = replace(self, source=source)
        object.__setattr__(data, "skipped", self.skipped)
        return data

    def without_labels(self, *, keep: Iterable[str] = ()) -> Dataset:
        """Returns the same rows in file order, without labels, with additional columns: for prediction.

        Args:
            keep: columns to pass on, as ``Batch.kept``.

        Raises:
            DataError: a column to keep that the files do not have.
        """
        plan = self.plan.without_labels(tuple(dict.fromkeys(keep)))
        self.source.check(plan)
        return replace(self, shuffle=False, plan=plan)

    def select(self, features: Iterable[str], *, labels: bool = False) -> Dataset:
        """Returns the same rows with only some of the features. Other columns are not read.

        Args:
            features: names of features of the schema.
            labels: keep labels, example weights and kept columns, if there are any.

        Raises:
            ConfigError: a feature that the schema does not have.
        """
        wanted = set(features)
        names = self.schema.names
        for name in wanted.difference(names):
            raise ConfigError(f"select: no feature {name!r}{nearest(name, names)}")
        plan = replace(self.plan, schema=self.plan.schema.narrowed(wanted))
        plan = plan if labels else plan.without_labels()
        return replace(self, schema=self.schema.narrowed(wanted), plan=plan)

    def _order_digest(self) -> str:
        parts = [self.source.identity, self.shuffle, self.on_bad_row]
        parts += [self.shuffle_rows, self.seed] if self.shuffle else []
        parts += [self.plan.where.condition] if self.plan.where else []
        return digest(repr(parts))


def make_dataset(
    source: Source,
    schema: Schema,
    columns: Schema | None = None,
    *,
    notation: Notation | None = None,
    **options: Unpack[ReadOptions],
) -> Dataset:
    """Makes a dataset over a source. ``columns`` is the schema in the source's own columns, if they differ.

    Raises:
        ConfigError: an option cannot be used.
        DataError: the files do not fit the schema.
    """
    check_schema(schema)
    for option in options:
        if option not in ReadOptions.__annotations__:
            raise ConfigError(f"unknown option {option!r}{nearest(option, ReadOptions.__annotations__)}")
    keep, where, null_values = options.get("keep", ()), options.get("where"), options.get("null_values")
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    if where is not None and not isinstance(where, Where):
        where = parse_where(build(str, where, "where"))
    nulls = schema.null_values
    if null_values is not None:
        nulls = build(tuple[str, ...], list_of_texts(null_values), "null_values")
    plan = make_read_plan(columns or schema, kept, options.get("with_labels", True), where, nulls)
    plan = replace(plan, notation=None if notation == Notation() else notation)
    source.check(plan)
    order: dict[str, Any] = {n: value for n, value in options.items() if n in OrderOptions.__annotations__}
    return Dataset(schema=schema, source=source, plan=plan, **order)


def check_schema(schema: object) -> None:
    """Raises an error unless the argument is a schema."""
    if not isinstance(schema, Schema):
        raise ConfigError(
            f"schema = {schema!r}: expected a girih.Schema, as Schema.load('config.toml') gives"
        )


UNITS = 8


class Growth:
    """Predicts the growth of tables with the number of examples.

    The number of unique ids follows a power of the number of examples (Heaps' law). This class keeps the ids of each
    table in the first examples.

    Attributes:
        num_examples: number of examples in the sample.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._ids: dict[str, list[I64]] = {feature.table_name: [] for feature in schema.sparse}
        self._ends: list[int] = []  # ends of batches, in examples
        self.num_examples = 0

    def add(self, batch: Batch) -> None:
        """Adds the ids of a batch."""
        of_tables: dict[str, list[I64]] = {}
        for place, feature in enumerate(self._schema.sparse):
            of_tables.setdefault(feature.table_name, []).append(batch.ids[batch.ids_of(place)])
        for name, ids in of_tables.items():
            self._ids[name].append(np.concatenate(ids))
        self.num_examples += batch.num_examples
        self._ends.append(self.num_examples)

    def rows(self, table: str, num_examples: float) -> float:
        """Returns the expected number of rows after ``num_examples`` examples.

        The exponent is measured between half of the sample and the whole sample. It is 0 for a table that has stopped
        growing, and 1 if each example brings new ids.
        """
        if not self._ids[table]:
            return 0.0
        firsts = np.unique(np.concatenate(self._ids[table]), return_index=True)[1]
        now, half = len(firsts), int(np.searchsorted(self._ends, self.num_examples / 2, side="right"))
        before = int(np.count_nonzero(firsts < sum(map(len, self._ids[table][:half]))))
        if num_examples <= self.num_examples or not before:
            return float(now)
        exponent = math.log(now / before) / math.log(self.num_examples / self._ends[half - 1])
        return float(now * (num_examples / self.num_examples) ** min(1.0, exponent))


def examples_of(data: Dataset) -> float | None:
    """Returns the number of examples of an epoch. If they are not counted, estimates the number from some units.

    The estimate assumes that a condition keeps the same share of all rows as of the sampled rows. It assumes that all
    text has the same number of rows per byte. Returns None for streams, for compressed text, and for pyarrow datasets
    of files other than Parquet.
    """
    if data.num_examples is not None or data.source.bounds is not None:
        return None if data.num_examples is None else float(data.num_examples)
    source, num_rows, num_kept, num_bytes = data.source, 0, 0, 0
    for part in sorted({place * (source.num_parts - 1) // (UNITS - 1) for place in range(UNITS)}):
        unit = next(source.read(data.plan, np.array([part]), Cursor()), None)
        if unit is not None:
            num_rows += unit.table.num_rows + len(unit.bad)
            num_kept += chosen(unit, data.plan).table.num_rows
            num_bytes += unit.after.byte
    total = None if source.num_rows is None else float(source.num_rows)
    if total is None and num_bytes and not any(file.path.endswith(tuple(SUFFIXES)) for file in source.files):
        total = num_rows / num_bytes * sum(file.size for file in source.files)
    return None if total is None or not num_rows else total * num_kept / num_rows
