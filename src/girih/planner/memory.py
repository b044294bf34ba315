"""Counts the memory that each role of a run needs, and refuses a run that cannot fit before it starts (HT §4.3).

The account includes rows, up to the limits of their tables. It includes parameters, gradients, optimizer state and the
copies for averaging. Tables without a limit do not count. :mod:`girih.planner.tagging` counts the outputs of operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.tagging.group import gigabytes, held_copies
from girih.planner.traffic import FLOAT_BYTES

EMBEDDING, TRAINER, GROUP, DENSE = "embedding-server", "trainer", "group-server", "dense-server"
PARAMETERS = "dense parameters"
KEPT = {"easgd": 1, "ma": 0, "bmuf": 2}
"""Copies of the parameters that dense servers keep between rounds.

``easgd`` keeps the centre. ``bmuf`` keeps the global model and its last update.
"""
ROUND = {"easgd": 2, "ma": 4, "bmuf": 4}
"""Copies of the parameters that a round needs for each replica. They are the received values and the stacked values.

A round of all replicas also has the differences and the answers.
"""

Account = Mapping[str, Mapping[str, float]]
"""Role → table or part of the dense half → bytes in all processes of the role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies of the dense parameters in a run of ``hierarchical``, and the nets that train on them.

    Attributes:
        averaging: the algorithm; irrelevant with one group.
    """

    groups: int = 1
    trainers_per_group: int = 1
    servers_per_group: int = 0
    nets: int = 1
    averaging: str = "easgd"

    @property
    def trainers(self) -> int:
        """Number of trainers in all groups."""
        return self.groups * self.trainers_per_group

    def fewer(self) -> Iterator[tuple[str, Copies]]:
        """Yields smaller runs, the most similar run first. Each item has the options to set and the copies."""
        for nets in range(self.nets - 1, 0, -1):
            yield f"nets to at most {nets}", replace(self, nets=nets)
        one = "nets = 1 and " if self.nets > 1 else ""
        for groups in range(self.groups - 1, 0, -1):
            yield f"{one}groups to at most {groups}", replace(self, nets=1, groups=groups)
        one += "groups = 1 and " if self.groups > 1 else ""
        for trainers in range(self.trainers_per_group - 1, 0, -1):
            less = replace(self, nets=1, groups=1, trainers_per_group=trainers)
            yield f"{one}trainers_per_group to at most {trainers}", less


def account(facts: Facts, copies: Copies) -> Account:
    """Returns the bytes that a run of ``hierarchical`` needs, by role.

    Embedding servers have the rows. A group's servers have its one copy of the parameters and the optimizer state. They
    also have gradients for each net of each trainer. Each trainer also has the model as it was built. One trainer of
    each group collects the optimizer state for a checkpoint.
    """
    size = float(FLOAT_BYTES * facts.model.num_parameters)
    averaged = copies.groups > 1
    state = 1.0 if facts.dense_cost is None else facts.dense_cost.parameter_copies
    sizes: dict[str, dict[str, float]] = {
        EMBEDDING: {
            table.name: float(table.max_rows * table.row_bytes)
            for table in facts.tables
            if table.max_rows is not None
        }
    }
    if copies.servers_per_group:
        nets = copies.trainers_per_group * copies.nets
        gathered = copies.groups * (max(2.0, state) - 2)
        sizes[TRAINER] = {PARAMETERS: size * (copies.trainers + gathered)}
        sizes[GROUP] = {PARAMETERS: size * copies.groups * held_copies(state, nets, averaged=averaged)}
    else:
        held = held_copies(state, copies.nets, averaged=averaged)
        sizes[TRAINER] = {PARAMETERS: size * copies.trainers * held}
    if averaged:
        sizes[DENSE] = {PARAMETERS: size * (KEPT[copies.averaging] + ROUND[copies.averaging] * copies.groups)}
    return sizes


def check(facts: Facts, copies: Copies, strategy: str) -> None:
    """Checks that a run fits into the machine's memory. A run on several hosts is not checked.

    Raises:
        ConfigError: the run does not fit. The error names the table or operator that needs most memory, the role, and a
            run that would fit.
    """
    free, required = facts.free_bytes, account(facts, copies)
    total = _total(required)
    if free is None or total <= free:
        return
    size, role, item = max(
        (size, role, item) for role, items in required.items() for item, size in items.items()
    )
    left = max(0.0, free - (total - size))
    if role == EMBEDDING:
        (table,) = (each for each in facts.tables if each.name == item)
        raise ConfigError(
            f"strategy: {strategy}: table {item!r} does not fit into memory: its {table.max_rows:,} rows (max_rows) of {table.row_bytes} bytes"
            f" take {gigabytes(size)} in embedding servers, but only {gigabytes(left)} of this machine's {gigabytes(free)} are left"
            f" for it; set its max_rows to at most {int(left // table.row_bytes):,}, or store.tiers = ['dram', 'ssd']"
        )
    nets = copies.nets * (copies.trainers_per_group if copies.servers_per_group else 1)
    averages = ", copies for averaging" if copies.groups > 1 else ""
    raise ConfigError(
        f"strategy: {strategy}: {item} do not fit into memory: they take {gigabytes(size)} in all {role} processes, with optimizer state,"
        f" a gradient for each of {nets} nets{averages}{_largest(facts)}, but only {gigabytes(left)} of this machine's"
        f" {gigabytes(free)} are left for them; {_mended(facts, copies, free)}"
    )


def _mended(facts: Facts, copies: Copies, free: float) -> str:
    """Returns the advice that makes the run fit."""
    for told, fewer in copies.fewer():
        if _total(account(facts, fewer)) <= free:
            return f"set {told}"
    least = replace(copies, groups=1, trainers_per_group=1, nets=1)
    of_tables, total = sum(account(facts, least)[EMBEDDING].values()), _total(account(facts, least))
    most = int(max(0.0, free - of_tables) / (total - of_tables) * facts.model.num_parameters)
    return (
        f"make the model smaller: one trainer with one net has memory for {most:,} of its"
        f" {facts.model.num_parameters:,} parameters"
    )


def _largest(facts: Facts) -> str:
    """Names the operator with most of the parameters, if operators are known."""
    if facts.graph is None or not facts.graph.operators:
        return ""
    largest = max(facts.graph.operators, key=lambda each: each.parameter_bytes)
    return f" (operator {largest.name!r}, {largest.kind}, has most of them: {gigabytes(largest.parameter_bytes)})"


def _total(account: Account) -> float:
    return sum(size for items in account.values() for size in items.values())
