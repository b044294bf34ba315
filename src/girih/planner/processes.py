"""Which processes a run begins with, from the options of its strategy alone: before anything of it is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINER = "trainer"
ROLES = {
    "embedding-server": "embedding_servers",
    "embedding-worker": "embedding_workers",
    "loader": "loaders",
}
"""Role → the option that says how many processes it has."""
WITH_ROLES = ("hybrid", "asynchronous")


def count_processes(strategy: Any) -> dict[str, int]:
    """Role → processes, trainers first.

    A role that a plan has beyond these is started when the plan is known. What is no count is one here: the trainer
    that reads the option says what is wrong with it.

    Args:
        strategy: ``[strategy]`` of a config, or its name alone.
    """
    options: Mapping[str, Any] = strategy if isinstance(strategy, Mapping) else {"name": strategy}
    counts = {TRAINER: _count(options.get("trainers", 1))}
    if options.get("name") in WITH_ROLES:
        counts |= {role: _count(options.get(option, 1)) for role, option in ROLES.items()}
        counts["loader"] = min(counts["loader"], counts[TRAINER])
    return counts


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
