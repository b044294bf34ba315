"""Memory of a run's processes by role, accounted before they start, so that what fits nowhere ends the run early (HT §4.3).

Counted are rows at the most that a table may have, and parameters with their gradients and their optimizer's state: what is known. Tables
without a limit count nothing. What operators keep is for :mod:`girih.planner.tagging`.
"""

from __future__ import annotations

from collections.abc import Mapping

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.traffic import FLOAT_BYTES

EMBEDDING, TRAINER, GROUP, DENSE = "embedding-server", "trainer", "group-server", "dense-server"
GRADIENT = 2.0
"""Copies of a parameter where the optimizer's state is not known: itself and its gradient."""
PARAMETERS = "dense parameters"

Account = Mapping[str, Mapping[str, float]]
"""Role → table, or part of the dense half → bytes in all processes of the role."""


def account(facts: Facts, *, groups: int, servers_per_group: int, dense_servers: int) -> Account:
    """The bytes of a run of ``hierarchical``: rows in embedding servers, a copy of the dense half for each group, averages.

    Every trainer has the parameters as they are first; with group servers their gradients and state are there.
    """
    dense = facts.dense_cost
    copies = GRADIENT if dense is None else max(GRADIENT, dense.parameter_copies)
    size = float(FLOAT_BYTES * facts.model.num_parameters)
    found: dict[str, dict[str, float]] = {
        EMBEDDING: {
            table.name: float(table.max_rows * table.row_bytes)
            for table in facts.tables
            if table.max_rows is not None
        },
        TRAINER: {PARAMETERS: facts.num_trainers * size * (1.0 if servers_per_group else copies)},
    }
    if servers_per_group:
        found[GROUP] = {PARAMETERS: groups * size * copies}
    if dense_servers:
        found[DENSE] = {PARAMETERS: size}
    return found


def check(found: Account, facts: Facts, strategy: str) -> None:
    """Refuses what the machine has no memory for; where processes are on several hosts, nothing is known.

    Raises:
        ConfigError: names what takes most, where, and how much of it would fit.
    """
    free = facts.free_bytes
    total = sum(size for items in found.values() for size in items.values())
    if free is None or total <= free:
        return
    size, role, item = max(
        (size, role, item) for role, items in found.items() for item, size in items.items()
    )
    left = max(0.0, free - (total - size))
    if role == EMBEDDING:
        (table,) = (each for each in facts.tables if each.name == item)
        raise ConfigError(
            f"strategy: {strategy}: table {item!r} fits nowhere: its {table.max_rows:,} rows (max_rows) of {table.row_bytes} bytes"
            f" take {_gigabytes(size)} in embedding servers, and {_gigabytes(left)} of this machine's {_gigabytes(free)} are left"
            f" for it; set its max_rows to at most {int(left // table.row_bytes):,}, or store.tiers = ['dram', 'ssd']"
        )
    raise ConfigError(
        f"strategy: {strategy}: {item} fit nowhere: they take {_gigabytes(size)} with gradients and optimizer state in all {role}"
        f" processes, and {_gigabytes(left)} of this machine's {_gigabytes(free)} are left for them; set groups or"
        " trainers_per_group lower, or make the model smaller"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3g} GB"
