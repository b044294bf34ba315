"""Decides which trainer owns which features. All features of a table have the same owner (DES §5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.errors import ConfigError
from girih.planner.operators import DisjointSets
from girih.schema import Schema

Colocated = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Feature name → the rank that owns it."""

    owners: Mapping[str, int]

    def features_of(self, rank: int) -> frozenset[str]:
        """Returns the features that a rank owns."""
        return frozenset(name for name, owner in self.owners.items() if owner == rank)

    def schema_of(self, rank: int, schema: Schema) -> Schema:
        """Returns the part of a schema that a rank reads."""
        return schema.narrowed(self.features_of(rank))


def modulo(schema: Schema, num_ranks: int, colocated: Colocated = ()) -> Placement:
    """Places table t on rank t mod N, numeric feature x on rank x mod N (DES §5: field f on node f mod N).

    Args:
        colocated: sets of features that must be on one rank. Their tables count as one table.

    Raises:
        ConfigError: there are fewer tables than ranks.
    """
    units = _units(schema, num_ranks, colocated)
    rank_of = {table: number % num_ranks for number, unit in enumerate(units) for table in unit}
    return _placed(schema, rank_of, [number % num_ranks for number in range(len(schema.numeric))])


def balanced(
    schema: Schema, num_ranks: int, loads: Mapping[str, float], colocated: Colocated = ()
) -> Placement:
    """Places the heaviest table first. Each table goes to the rank with the least load so far.

    This is Graham's rule, which gives at most 4/3 of the best load. The other arguments, and errors, are the same as in
    :func:`modulo`.

    Args:
        loads: table name → the cost for its owner: rows per step × numbers per row.
    """
    units = _units(schema, num_ranks, colocated)
    total, num_units = [0.0] * num_ranks, [0] * num_ranks
    rank_of: dict[str, int] = {}
    weighed = sorted(
        ((sum(loads.get(table, 0.0) for table in unit), unit) for unit in units), key=lambda u: -u[0]
    )
    for left, (load, unit) in zip(range(len(units), 0, -1), weighed, strict=True):
        empty = [rank for rank in range(num_ranks) if not num_units[rank]]
        candidates = empty if len(empty) == left else range(num_ranks)  # every rank must get a table
        rank = min(candidates, key=lambda r: (total[r], r))
        rank_of |= dict.fromkeys(unit, rank)
        total[rank] += load
        num_units[rank] += 1
    numeric = sorted(range(num_ranks), key=lambda r: (total[r], r))
    return _placed(schema, rank_of, [numeric[x % num_ranks] for x in range(len(schema.numeric))])


def _placed(schema: Schema, rank_of: Mapping[str, int], numeric: Sequence[int]) -> Placement:
    owners = {feature.name: rank_of[feature.table_name] for feature in schema.sparse}
    owners |= {feature.name: rank for feature, rank in zip(schema.numeric, numeric, strict=True)}
    return Placement(owners)


def _units(schema: Schema, num_ranks: int, colocated: Colocated) -> list[list[str]]:
    """Returns the tables in order. Tables that must be on the same rank form one unit."""
    table_of = {feature.name: feature.table_name for feature in schema.sparse}
    joined = DisjointSets(table.name for table in schema.tables)
    for first, *others in colocated:
        for name in others:
            joined.join(table_of[first], table_of[name])
    units = joined.sets()
    if len(units) < num_ranks:
        raise ConfigError(
            f"strategy: substitution: {num_ranks} trainers, but {len(units)} tables, which cannot be split;"
            f" set strategy.trainers to {len(units)} or less, or use 'synchronous'"
        )
    return units
