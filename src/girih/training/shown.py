"""A trainer or a loaded model as ``print`` shows it: one line, for which nothing is read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from girih.schema import Schema

MOST_TABLES = 6  # that are named


def summary_line(
    owner: object, model: nn.Module, step: int, schema: Schema, rows: Mapping[str, int] | None
) -> str:
    """The model, the step and the tables.

    Args:
        rows: of each table; None where it would take asking other processes, or nothing is open.
    """
    names = [table.name for table in schema.tables]
    if len(names) > MOST_TABLES:
        tables = f"{len(names)} tables"
        if rows is not None:
            tables += f" with {sum(rows.values()):,} rows"
    elif rows is None:
        tables = f"tables {', '.join(names)}" if names else "no tables"
    else:
        tables = ", ".join(f"{name} {rows.get(name, 0):,} rows" for name in names) or "no tables"
    return f"{type(owner).__name__}({type(model).__name__}, step {step}, {tables})"
