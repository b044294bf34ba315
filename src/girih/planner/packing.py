"""Packs tables into groups, so that one operation serves each group (D-packing, PICASSO §III-B)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.errors import ConfigError, nearest
from girih.planner.facts import Facts, GroupFacts

_ROUNDING = 1e-9  # relative error of sums of floats, so that an average group is not above the average


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """One group of a plan.

    Attributes:
        tables: tables of equal row layout, in the schema's order.
        dim: numbers per row, first-order weights included.
        volume: the group's :func:`parameter_volume`.
        excluded: whether the group runs before the interleaving groups.
    """

    name: str
    tables: tuple[str, ...]
    dim: int
    volume: float
    excluded: bool


def parameter_volume(num_ids: float, dims: Mapping[str, int], frequencies: Mapping[str, float]) -> float:
    """Returns CalcVParam(T) = N Σ_{t∈T} (t_dim Σ_{ID∈t} ID_freq), the numbers that a step looks up (PICASSO §III-B, eq.
    1).
    """
    return num_ids * sum(dims[table] * frequencies[table] for table in dims)


def volumes_of(facts: Facts) -> dict[str, float]:
    """Returns table → its part of a step's :func:`parameter_volume`.

    Without a profile, each feature counts one id per example.
    """
    dims = {table: group.dim for group in facts.groups for table in group.tables}
    profile = facts.profile
    if profile is not None and profile.ids_of_tables:
        num_ids, of_table = profile.ids, profile.ids_of_tables
    else:
        features = Counter(feature.table_name for feature in facts.schema.sparse)
        of_table = {table: float((facts.batch_size or 1) * features[table]) for table in dims}
        num_ids = sum(of_table.values())
    parts = {table: of_table.get(table, 0.0) / num_ids if num_ids else 0.0 for table in dims}
    return {table: parameter_volume(num_ids, {table: dim}, parts) for table, dim in dims.items()}


def excluded_tables(facts: Facts) -> frozenset[str]:
    """Returns the tables of the features in ``[schedule] excluded``.

    Raises:
        ConfigError: no feature of this name has ids, or the model reads none of its tables.
    """
    known = {feature.name: feature.table_name for feature in facts.schema.sparse}
    read = {table for group in facts.groups for table in group.tables}
    for name in facts.schedule.excluded:
        if name not in known:
            raise ConfigError(
                f"schedule: excluded: there is no feature {name!r} with ids{nearest(name, known)}"
            )
        if known[name] not in read:
            raise ConfigError(
                f"schedule: excluded: the model reads no rows of feature {name!r}; leave it out"
            )
    return frozenset(known[name] for name in facts.schedule.excluded)


def packed(facts: Facts, *, split: bool = False, at_least: int = 1) -> tuple[PackedGroup, ...]:
    """Returns the groups of a plan.

    Tables of one row layout share a group. The tables of excluded features have separate groups. With ``split``, a
    group with an above-average volume is divided. If V is its volume and A the average, it becomes ⌈V / A⌉ groups of
    about equal volume. A table is never cut (PICASSO §III-B). Without packing, each table is a group.

    Args:
        at_least: minimum number of groups, not counting excluded ones. girih divides the largest groups further if
            there are enough tables.
    """
    volumes, separate = volumes_of(facts), excluded_tables(facts)
    layouts: list[tuple[GroupFacts, bool, list[str]]] = []
    for group in facts.groups:
        for excluded in (False, True):
            tables = [table for table in group.tables if (table in separate) == excluded]
            if tables:
                layouts.append((group, excluded, tables))
    total = [sum(volumes[table] for table in tables) for _, _, tables in layouts]
    if facts.schedule.packing:
        included = [number for number, (_, excluded, _) in enumerate(layouts) if not excluded]
        most = {number: len(layouts[number][2]) for number in included}
        parts = _split_counts({number: total[number] for number in included}, most, split, at_least)
    else:
        parts = {number: len(tables) for number, (_, _, tables) in enumerate(layouts)}
    groups: list[PackedGroup] = []
    used: Counter[str] = Counter()
    for number, (group, excluded, tables) in enumerate(layouts):
        for part in _evenly(tables, volumes, parts.get(number, 1)):
            name = f"{group.name}.{used[group.name]}" if used[group.name] else group.name
            used[group.name] += 1
            volume = sum(volumes[table] for table in part)
            groups.append(
                PackedGroup(name=name, tables=tuple(part), dim=group.dim, volume=volume, excluded=excluded)
            )
    return tuple(groups)


def spread(volumes: Sequence[float], num_sets: int) -> list[list[int]]:
    """Spreads volumes over sets, and keeps the largest sum small: at most 4/3 of the minimum.

    Returns indices of volumes.

    The largest volume comes first. Each volume goes to the set with the smallest sum so far (Graham's rule). Every set
    gets a member if there are enough volumes. Members keep their order. The sets are in the order of their first
    members.
    """
    sets: list[list[int]] = [[] for _ in range(num_sets)]
    sums = [0.0] * num_sets
    for number in sorted(range(len(volumes)), key=lambda n: -volumes[n]):
        least = min(range(num_sets), key=lambda s: (sums[s], len(sets[s]), s))
        sets[least].append(number)
        sums[least] += volumes[number]
    return sorted(sorted(members) for members in sets if members)


def _split_counts(
    volumes: Mapping[int, float], most: Mapping[int, int], split: bool, at_least: int
) -> dict[int, int]:
    """Returns the number of parts of each group."""
    average = sum(volumes.values()) / max(1, len(volumes))
    parts = dict.fromkeys(volumes, 1)
    if split and average:
        shares = {n: volume / average - _ROUNDING for n, volume in volumes.items()}
        parts = {n: min(most[n], max(1, math.ceil(share))) for n, share in shares.items()}
    while sum(parts.values()) < at_least:
        can = [n for n in parts if parts[n] < most[n]]
        if not can:
            break
        parts[max(can, key=lambda n: volumes[n] / parts[n])] += 1
    return parts


def _evenly(tables: Sequence[str], volumes: Mapping[str, float], num_parts: int) -> list[list[str]]:
    """Splits tables into parts of about equal volume."""
    parts = spread([volumes[table] for table in tables], num_parts)
    return [[tables[number] for number in part] for part in parts]
