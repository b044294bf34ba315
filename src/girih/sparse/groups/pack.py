"""Packing: tables of equal row layout become one group, which one operation serves (PICASSO §III-B)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.models.needs import EMBEDDING, FIRST_ORDER, SEQUENCE, Needs
from girih.optim import SparseOptimizer
from girih.schema import Categorical, Schema, Sequence
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.tables import Normal, Table, Zeros

T = TypeVar("T")
Member = tuple[int, Categorical | Sequence]
"""A feature's index among the batch's features, and the feature."""


@dataclass(frozen=True)
class Output:
    """One tensor that a group gives: a segment's columns, pooled for some features or whole for one.

    Attributes:
        segment: which columns.
        features: indices among the batch's features.
        whole: every id's vector, as sequences have it; else one vector a bag.
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
    ) -> Output:
        """A segment's columns for some features."""
        indices, features = zip(*members, strict=True)
        return cls(
            segment=segment,
            first_column=first_column,
            features=np.array(indices, np.int64),
            names=tuple(feature.name for feature in features),
            modes=np.array([POOLING_MODES[feature.pooling] for feature in features], np.int8),
            whole=whole,
        )

    def ids_in(self, batch: Batch) -> slice:
        """Slice of the ids of a whole output's one feature in a batch."""
        return ids_within(batch, int(self.features[0]))

    def rows_in(self, batch: Batch, examples: slice) -> slice:
        """The rows of the tensor for a batch that are some examples'."""
        if not self.whole:
            return examples
        first = int(self.features[0]) * batch.num_examples
        begin, start, stop = (int(batch.offsets[first + b]) for b in (0, examples.start, examples.stop))
        return slice(start - begin, stop - begin)

    def shape_in(self, batch: Batch) -> tuple[int, ...]:
        """The shape of the tensor for a batch."""
        if self.whole:
            ids = self.ids_in(batch)
            return ids.stop - ids.start, self.segment.dim
        return batch.num_examples, len(self.features), self.segment.dim


@dataclass(frozen=True)
class Group:
    """Tables that one store holds, the features that read them, and the tensors that come out."""

    spec: GroupSpec
    features: NDArray[np.int64]
    """Indices among the batch's features; those of one table stand together."""
    tables: NDArray[np.int32]
    """The table number of each of :attr:`features`."""
    outputs: tuple[Output, ...]


POOLING_MODES = {"sum": 0, "mean": 1, "sqrtn": 2}


def ids_within(batch: Batch, feature: int) -> slice:
    """Slice of a feature's ids in a batch."""
    size = batch.num_examples
    return slice(int(batch.offsets[feature * size]), int(batch.offsets[(feature + 1) * size]))


def sequence_bounds(groups: Iterable[Group], batch: Batch) -> list[NDArray[np.int32]]:
    """For each whole output of all groups: where each example's ids begin, and the last one's end, int32[B+1]."""
    size = batch.num_examples
    firsts = [int(o.features[0]) * size for group in groups for o in group.outputs if o.whole]
    return [batch.offsets[first : first + size + 1] for first in firsts]


def by_group(groups: Iterable[Group], items: Iterable[T]) -> list[list[T]]:
    """One item for each output of all groups, as a list for each group."""
    items = iter(items)
    return [list(islice(items, len(group.outputs))) for group in groups]


def pack(
    schema: Schema,
    needs: Needs,
    optimizer: SparseOptimizer,
    first_order_optimizer: SparseOptimizer | None = None,
    seed: int = 0,
) -> tuple[Group, ...]:
    """Groups the schema's tables by row layout: segments with their dim and optimizer, and dtype.

    Args:
        needs: feature name → what the model reads of it ("embedding", "first_order", "sequence").
        optimizer: of embeddings, where a table has none of its own.
        first_order_optimizer: of first-order weights, where a table has none; the embeddings' one where None.
    """
    members_of: defaultdict[str, list[Member]] = defaultdict(list)
    for index, feature in enumerate(schema.sparse):
        if needs.get(feature.name):
            members_of[feature.table_name].append((index, feature))
    packed: defaultdict[tuple[tuple[Segment, ...], str], list[Table]] = defaultdict(list)
    for table in schema.tables:
        wanted = frozenset().union(*(needs[feature.name] for _, feature in members_of[table.name]))
        segments = []
        if wanted & {EMBEDDING, SEQUENCE}:
            segments.append(Segment(EMBEDDING, table.dim or 0, table.optimizer or optimizer))
        if FIRST_ORDER in wanted:
            own = table.optimizer or first_order_optimizer or optimizer
            segments.append(Segment(FIRST_ORDER, 1, own))
        if segments:
            packed[tuple(segments), table.dtype].append(table)
    groups: list[Group] = []
    names: Counter[str] = Counter()
    for (layout, dtype), tables in packed.items():
        name = "_".join(f"{s.name}-{s.dim}-{s.optimizer.name}" for s in layout)
        name += "" if dtype == "float32" else f"_{dtype}"
        names[name] += 1
        unique = name if names[name] == 1 else f"{name}-{names[name]}"
        specs = tuple(_table_spec(table, layout) for table in tables)
        members = [member for table in tables for member in members_of[table.name]]
        numbers = [number for number, table in enumerate(tables) for _ in members_of[table.name]]
        groups.append(
            Group(
                spec=GroupSpec(unique, specs, layout, dtype, seed),  # type: ignore[arg-type]
                features=np.array([index for index, _ in members], np.int64),
                tables=np.array(numbers, np.int32),
                outputs=_outputs(layout, sorted(members, key=lambda member: member[0]), needs),
            )
        )
    return tuple(groups)


def _table_spec(table: Table, segments: tuple[Segment, ...]) -> TableSpec:
    normal = table.initializer or Normal()
    initializers = tuple(normal if segment.name == EMBEDDING else Zeros() for segment in segments)
    return TableSpec(table.name, initializers, table.admission, table.eviction)


def _outputs(segments: tuple[Segment, ...], members: list[Member], needs: Needs) -> tuple[Output, ...]:
    outputs, column = [], 0
    for segment in segments:
        pooled = [(i, f) for i, f in members if segment.name in needs[f.name]]
        if pooled:
            outputs.append(Output.of(segment, column, pooled))
        if segment.name == EMBEDDING:
            whole = [(i, f) for i, f in members if SEQUENCE in needs[f.name]]
            outputs += [Output.of(segment, column, [member], whole=True) for member in whole]
        column += segment.dim
    return tuple(outputs)
