"""The groups in which rows are served: what predictions read of tables, whatever optimizers trained them."""

from __future__ import annotations

from dataclasses import replace

from girih.models.needs import Needs
from girih.optim import SGD
from girih.schema import Schema
from girih.sparse.groups.pack import Group, pack


def served_schema(schema: Schema) -> Schema:
    """The schema without what training alone needs of its tables: optimizers, admission and eviction."""
    tables = [replace(table, optimizer=None, admission=None, eviction=None) for table in schema.tables]
    return Schema(schema.features, schema.labels, tables, null_values=schema.null_values)


def served_groups(schema: Schema, needs: Needs, seed: int) -> tuple[Group, ...]:
    """All tables packed by their columns and dtype alone, which are the same for whoever writes rows and whoever reads them.

    Every group of training is a part of one of these: tables of one optimizer and row layout have equal columns. Table numbers differ,
    so that rows of training find their number by the table's name.

    Args:
        schema: of the run. needs: what the model reads: ``girih.models.needs_of(model, schema)``.
        seed: of the run; initial values are a function of it.
    """
    return pack(served_schema(schema), needs, SGD(), seed=seed)  # which has no state
