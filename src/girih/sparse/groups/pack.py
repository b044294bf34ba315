"""Packs tables with the same row layout into one group, which one operation serves (PICASSO §III-B)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.errors import ConfigError, nearest
from girih.models.needs import EMBEDDING, FIRST_ORDER, SEQUENCE, Needs
from girih.optim import SGD, SparseOptimizer
from girih.schema import Categorical, Schema, Sequence
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.tables import Normal, Table, Zeros

T = TypeVar("T")
Member = tuple[int, Categorical | Sequence]
"""A feature's index among the batch's features, and the feature."""
_Layout = tuple[tuple[Segment, ...], str]
"""The segments and the dtype of a row."""
NAME = re.compile(r"\w[\w.-]*", re.ASCII)


class Sized(Protocol):
    """The part of a batch that determines the sizes of tensors. The ids may be on any device."""

    @property
    def num_examples(self) -> int:
        """Number of examples, B."""
        ...

    def ids_of(self, feature: int) -> slice:
        """Slice of a feature's ids."""
        ...


@dataclass(frozen=True)
class GroupOutput:
    """One output tensor of a group: a segment's columns, pooled for several features or whole for one sequence.

    Attributes:
        segment: the segment of the row, which has the columns.
        features: indices among the batch's features.
        whole: True if the tensor has one vector for each id (sequences), False if one for each bag.
    """

    segment: Segment
    first_column: int
    features: NDArray[np.int64]
    names: tuple[str, ...]
    modes: NDArray[np.int8]
    whole: bool

    @classmethod
    def of(
        cls, segment: Segment, first_column: int, members: Iterable[Member], *, whole: bool = False
    ) -> GroupOutput:
        """Makes the output of a segment for some features."""
        indices, features = zip(*members, strict=True)
        return cls(
            segment=segment,
            first_column=first_column,
            features=np.array(indices, np.int64),
            names=tuple(feature.name for feature in features),
            modes=np.array([POOLING_MODES[feature.pooling] for feature in features], np.int8),
            whole=whole,
        )

    def ids_in(self, batch: Sized) -> slice:
        """Returns the slice of a batch's ids that a whole output reads. A whole output has one feature."""
        return batch.ids_of(int(self.features[0]))

    def shape_in(self, batch: Sized) -> tuple[int, ...]:
        """Returns the shape of the tensor for a batch."""
        if self.whole:
            ids = self.ids_in(batch)
            return ids.stop - ids.start, self.segment.dim
        return batch.num_examples, len(self.features), self.segment.dim


@dataclass(frozen=True)
class Group:
    """Tables that one store holds, the features that read them, and the output tensors."""

    spec: GroupSpec
    features: NDArray[np.int64]
    """Indices among the batch's features. Features of the same table are adjacent."""
    tables: NDArray[np.int32]
    """The table number of each of :attr:`features`."""
    outputs: tuple[GroupOutput, ...]


POOLING_MODES = {"sum": 0, "mean": 1, "sqrtn": 2}


def sequence_bounds(groups: Iterable[Group], batch: Batch) -> list[NDArray[np.int32]]:
    """Returns, for each whole output of all groups, int32[B+1]: the begin of each example's ids, and the last end."""
    size, bounds = batch.num_examples, []
    for group in groups:
        for output in group.outputs:
            if output.whole:
                first = int(output.features[0]) * size
                bounds.append(batch.offsets[first : first + size + 1])
    return bounds


def by_group(groups: Iterable[Group], items: Iterable[T]) -> list[list[T]]:
    """Splits items, one for each output of all groups, into one list for each group."""
    items, grouped = iter(items), []
    for group in groups:
        grouped.append(list(islice(items, len(group.outputs))))
    return grouped


def pack(
    schema: Schema,
    needs: Needs,
    optimizer: SparseOptimizer,
    first_order_optimizer: SparseOptimizer | None = None,
    seed: int = 0,
    partition: Mapping[str, Seq[str]] | None = None,
) -> tuple[Group, ...]:
    """Groups the schema's tables by row layout: the dtype, and each segment's dim and optimizer.

    Args:
        needs: feature name → the parts that the model reads ("embedding", "first_order", "sequence").
        optimizer: updates the embeddings of tables that name no optimizer.
        first_order_optimizer: updates the first-order weights of these tables; None takes ``optimizer``.
        partition: group name → its tables, from a plan. None puts all tables with the same layout into one group.

    Raises:
        ConfigError: the partition does not have every table once, or a group has tables with different layouts.
    """
    members_of: defaultdict[str, list[Member]] = defaultdict(list)
    for index, feature in enumerate(schema.sparse):
        if needs.get(feature.name):
            members_of[feature.table_name].append((index, feature))
    layouts: dict[str, _Layout] = {}
    for table in schema.tables:
        wanted = frozenset().union(*(needs[feature.name] for _, feature in members_of[table.name]))
        segments = []
        if wanted & {EMBEDDING, SEQUENCE}:
            segments.append(Segment(EMBEDDING, table.dim or 0, table.optimizer or optimizer))
        if FIRST_ORDER in wanted:
            table_optimizer = table.optimizer or first_order_optimizer or optimizer
            segments.append(Segment(FIRST_ORDER, 1, table_optimizer))
        if segments:
            layouts[table.name] = tuple(segments), table.dtype
    if partition is None:
        partition = _by_layout(layouts)
    else:
        _check_partition(partition, layouts)
    table_of = {table.name: table for table in schema.tables}
    groups: list[Group] = []
    for name, names in partition.items():
        layout, dtype = layouts[names[0]]
        members = [member for table in names for member in members_of[table]]
        numbers = [number for number, table in enumerate(names) for _ in members_of[table]]
        specs = tuple(_table_spec(table_of[table], layout) for table in names)
        groups.append(
            Group(
                spec=GroupSpec(name, specs, layout, dtype, seed),  # type: ignore[arg-type]
                features=np.array([index for index, _ in members], np.int64),
                tables=np.array(numbers, np.int32),
                outputs=_outputs(layout, sorted(members, key=lambda member: member[0]), needs),
            )
        )
    return tuple(groups)


def _by_layout(layouts: Mapping[str, _Layout]) -> dict[str, list[str]]:
    """Returns one group for each layout: its name, which describes the layout, and its tables."""
    packed: defaultdict[_Layout, list[str]] = defaultdict(list)
    for table, layout in layouts.items():
        packed[layout].append(table)
    members, names = {}, Counter[str]()
    for (segments, dtype), tables in packed.items():
        name = "_".join(f"{s.name}-{s.dim}-{s.optimizer.name}" for s in segments)
        name += "" if dtype == "float32" else f"_{dtype}"
        names[name] += 1
        members[name if names[name] == 1 else f"{name}-{names[name]}"] = tables
    return members


def _check_partition(partition: Mapping[str, Seq[str]], layouts: Mapping[str, _Layout]) -> None:
    """Raises ConfigError if a partition is not a packing of these tables."""
    times = Counter(table for tables in partition.values() for table in tables)
    for table in (*layouts, *times):
        if table not in layouts:
            raise ConfigError(f"plan: groups: the model reads no table {table!r}{nearest(table, layouts)}")
        if times[table] != 1:
            raise ConfigError(f"plan: groups: table {table!r} is in {times[table]} groups, expected one")
    for name, tables in partition.items():
        if not NAME.fullmatch(name):  # file names contain it
            raise ConfigError(f"plan: groups: {name!r}: expected a name of letters, digits, '-', '_' and '.'")
        if not tables:
            raise ConfigError(f"plan: groups: group {name!r} has no table; leave it out")
        first, *others = tables
        for table in others:
            if layouts[table] != layouts[first]:
                raise ConfigError(
                    f"plan: groups: tables {first!r} and {table!r} of group {name!r} differ in dim, optimizer, dtype or in the"
                    " parts that the model reads; tables of one group must agree in them"
                )


def _table_spec(table: Table, segments: tuple[Segment, ...]) -> TableSpec:
    normal = table.initializer or Normal()
    initializers = tuple(normal if segment.name == EMBEDDING else Zeros() for segment in segments)
    return TableSpec(table.name, initializers, table.admission, table.eviction)


def _outputs(segments: tuple[Segment, ...], members: list[Member], needs: Needs) -> tuple[GroupOutput, ...]:
    outputs, column = [], 0
    for segment in segments:
        pooled = [(i, f) for i, f in members if segment.name in needs[f.name]]
        if pooled:
            outputs.append(GroupOutput.of(segment, column, pooled))
        if segment.name == EMBEDDING:
            whole = [(i, f) for i, f in members if SEQUENCE in needs[f.name]]
            outputs += [GroupOutput.of(segment, column, [member], whole=True) for member in whole]
        column += segment.dim
    return tuple(outputs)


def served_schema(schema: Schema) -> Schema:
    """Returns the schema without the table options that only training needs: optimizers, admission, eviction."""
    tables = [replace(table, optimizer=None, admission=None, eviction=None) for table in schema.tables]
    return Schema(schema.features, schema.labels, tables, null_values=schema.null_values)


def served_groups(schema: Schema, needs: Needs, seed: int) -> tuple[Group, ...]:
    """Packs all tables only by their columns and dtype. Writers and readers of rows get the same groups.

    Every group of training is a part of one of these groups, because tables with the same optimizer and row layout
    have the same columns. Table numbers differ, so rows from training find their table number by the table's name.

    Args:
        schema: the run's schema.
        needs: the parts that the model reads: ``girih.models.needs_of(model, schema)``.
        seed: the run's seed. Initial values are a function of the seed.
    """
    return pack(served_schema(schema), needs, SGD(), seed=seed)  # SGD has no state
