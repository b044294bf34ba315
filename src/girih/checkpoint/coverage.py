"""Whether the parts of a checkpoint hold all shards of every table once, and which parts a shard needs.

The facts of a part with rows: ``group``, ``tables`` (rows of each), ``shard`` and ``num_shards``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from girih.errors import CheckpointError

Parts = Mapping[str, Mapping[str, Any]]
"""Name relative to the checkpoint → facts: ``bytes``, ``crc32`` (of the header and each tensor), …"""


def part_name(group: str, number: int) -> str:
    """``tables/<group>/shard-0000.safetensors``."""
    return f"tables/{group}/shard-{number:04d}.safetensors"


def rows_of(parts: Parts) -> dict[str, int]:
    """Rows of each table, all shards together."""
    rows: defaultdict[str, int] = defaultdict(int)
    for facts in parts.values():
        for table, count in facts.get("tables", {}).items():
            rows[table] += count
    return dict(rows)


def check_coverage(parts: Parts, where: str, tables: Iterable[str] = ()) -> None:
    """Refuses parts that lack a shard of a table, or hold one twice.

    Args:
        where: the checkpoint, for errors. tables: those that must be there.

    Raises:
        CheckpointError: names the part, or the table and shard.
    """
    shards: defaultdict[str, dict[int, str]] = defaultdict(dict)
    sizes: dict[str, tuple[str, int]] = {}
    for name, facts in parts.items():
        for table in facts.get("tables", {}):
            group, shard, num_shards = facts["group"], facts["shard"], facts["num_shards"]
            if sizes.setdefault(table, (group, num_shards)) != (group, num_shards):
                expected = sizes[table]
                raise CheckpointError(
                    f"{where}/{name}: table {table!r} of group {group!r} in {num_shards} shards; other parts say"
                    f" {expected[0]!r} in {expected[1]}; use another checkpoint"
                )
            other = shards[table].setdefault(shard, name)
            if other != name:
                raise CheckpointError(
                    f"{where}/{name}: shard {shard} of table {table!r} is in {other} too; use another checkpoint"
                )
    for table, (group, num_shards) in sizes.items():
        for shard in range(num_shards):
            if shard not in shards[table]:
                raise CheckpointError(
                    f"{where}/{part_name(group, shard)}: missing: no part holds shard {shard} of {num_shards} of"
                    f" table {table!r}; use another checkpoint"
                )
    for table in tables:
        if table not in sizes:
            raise CheckpointError(f"{where}: no part holds table {table!r}; use another checkpoint")


def parts_for(parts: Parts, tables: Sequence[str], shard: int, num_shards: int) -> list[str]:
    """The names of those that a shard of some tables is restored from, in order.

    All shards of the tables; its own alone, where the same tables, in the same order, were in as many shards as
    now: a key's shard depends on its table's number in the group.
    """
    found = [name for name in sorted(parts) if not parts[name].get("tables", {}).keys().isdisjoint(tables)]
    if all(
        parts[name]["num_shards"] == num_shards and list(parts[name]["tables"]) == list(tables)
        for name in found
    ):
        return [name for name in found if parts[name]["shard"] == shard]
    return found
