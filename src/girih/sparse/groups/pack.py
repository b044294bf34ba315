"""Packing: tables of equal row layout become one group, which one operation serves (PICASSO §III-B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.models.needs import EMBEDDING, FIRST_ORDER, SEQUENCE, Needs
from girih.optim import SparseOptimizer
from girih.schema import Categorical, Schema, Sequence
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.tables import Normal, Table, Zeros


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
    features_of: dict[str, list[tuple[int, Categorical | Sequence]]] = {}
    for index, feature in enumerate(schema.sparse):
        if needs.get(feature.name):
            features_of.setdefault(feature.table_name, []).append((index, feature))
    packed: dict[tuple[tuple[Segment, ...], str], list[Table]] = {}
    for table in schema.tables:
        wanted = frozenset().union(*(needs[f.name] for _, f in features_of.get(table.name, [])))
        if wanted:
            own = table.optimizer or optimizer
            segments = _segments(table, wanted, own, table.optimizer or first_order_optimizer or optimizer)
            packed.setdefault((segments, table.dtype), []).append(table)
    groups: list[Group] = []
    for (segments, dtype), tables in packed.items():
        name, taken = _name(segments, dtype), {group.spec.name for group in groups}
        unique = next(
            n for n in (name, *(f"{name}-{i}" for i in range(2, len(packed) + 2))) if n not in taken
        )
        groups.append(_group(unique, segments, dtype, tables, features_of, needs, seed))
    return tuple(groups)


def _segments(
    table: Table, wanted: frozenset[str], optimizer: SparseOptimizer, first_order: SparseOptimizer
) -> tuple[Segment, ...]:
    segments = []
    if wanted & {EMBEDDING, SEQUENCE}:
        segments.append(Segment(EMBEDDING, table.dim or 0, optimizer))
    if FIRST_ORDER in wanted:
        segments.append(Segment(FIRST_ORDER, 1, first_order))
    return tuple(segments)


def _group(
    name: str,
    segments: tuple[Segment, ...],
    dtype: str,
    tables: list[Table],
    features_of: Mapping[str, list[tuple[int, Categorical | Sequence]]],
    needs: Needs,
    seed: int,
) -> Group:
    specs = tuple(
        TableSpec(
            name=table.name,
            initializers=tuple(
                (table.initializer or Normal()) if segment.name == EMBEDDING else Zeros()
                for segment in segments
            ),
            admission=table.admission,
            eviction=table.eviction,
        )
        for table in tables
    )
    members = [(i, f, number) for number, table in enumerate(tables) for i, f in features_of[table.name]]
    spec = GroupSpec(name, specs, segments, dtype, seed)  # type: ignore[arg-type]
    return Group(
        spec=spec,
        features=np.array([i for i, _, _ in members], np.int64),
        tables=np.array([number for _, _, number in members], np.int32),
        outputs=tuple(
            _outputs(segments, sorted(((i, f) for i, f, _ in members), key=lambda member: member[0]), needs)
        ),
    )


def _name(segments: tuple[Segment, ...], dtype: str) -> str:
    parts = [f"{s.name}-{s.dim}-{s.optimizer.name}" for s in segments]
    return "_".join(parts) + ("" if dtype == "float32" else f"_{dtype}")


def _outputs(
    segments: tuple[Segment, ...], members: list[tuple[int, Categorical | Sequence]], needs: Needs
) -> list[Output]:
    outputs, column = [], 0
    for segment in segments:
        pooled = [(i, f) for i, f in members if segment.name in needs[f.name]]
        if pooled:
            outputs.append(_output(segment, column, pooled, whole=False))
        if segment.name == EMBEDDING:
            outputs += [
                _output(segment, column, [(i, f)], whole=True)
                for i, f in members
                if SEQUENCE in needs[f.name]
            ]
        column += segment.dim
    return outputs


def _output(
    segment: Segment, column: int, members: list[tuple[int, Categorical | Sequence]], *, whole: bool
) -> Output:
    return Output(
        segment=segment,
        first_column=column,
        features=np.array([i for i, _ in members], np.int64),
        names=tuple(f.name for _, f in members),
        modes=np.array([POOLING_MODES[f.pooling] for _, f in members], np.int8),
        whole=whole,
    )
