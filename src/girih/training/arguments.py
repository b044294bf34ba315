"""Checks of what a trainer is given: each function refuses with one line that says how to mend it."""

from __future__ import annotations

from typing import Any

from torch import nn

from girih.data import Dataset
from girih.errors import ConfigError
from girih.schema import Schema


def expect(name: str, value: object, kind: Any, expected: str) -> None:
    """Refuses a value of another type than ``kind``."""
    if not isinstance(value, kind):
        shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
        raise ConfigError(f"{name} = {shown}: expected {expected}")


def schema_of(model: nn.Module, schema: Schema | None) -> Schema:
    """The schema given, or the model's own; refuses two that differ, or none."""
    own = getattr(model, "schema", None)
    schema = schema or own
    if not isinstance(schema, Schema):
        raise ConfigError(
            f"{type(model).__name__} has no schema of its own; give Trainer(model, schema=schema)"
        )
    if isinstance(own, Schema):
        refuse_other_schema("schema", schema, own)
    return schema


def refuse_other_schema(what: str, found: Schema, expected: Schema) -> None:
    """Refuses data whose features or labels are not the model's."""
    if found.fingerprint() == expected.fingerprint():
        return
    theirs, ours = ([*(f.name for f in s.features), *s.labels.names] for s in (found, expected))
    differs = f"features and labels {theirs} instead of {ours}"
    if ours == theirs:
        differs = "features of other kinds, dims, tables or transforms"
    raise ConfigError(f"{what}: of another schema than the model: {differs}; make both with one schema")


def expect_data(what: str, data: Dataset, schema: Schema, *, labels: bool = True) -> None:
    """Refuses what is no data of the model's schema, or has no labels where they are needed."""
    expect(what, data, Dataset, "a girih.Dataset, as girih.read_parquet(paths, schema) makes")
    refuse_other_schema(what, data.schema, schema)
    if labels and not data.with_labels:
        raise ConfigError(f"{what}: read without labels; expected with_labels=True")
