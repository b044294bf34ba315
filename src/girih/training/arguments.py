"""Checks of what a trainer is given: each function refuses with one line that says how to mend it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

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


def device(name: str, rank: int = 0) -> torch.device:
    """ "auto", "cpu" or "cuda", with a number or not; refuses what torch does not find here.

    "auto" and "cuda" take the devices of this host in turn, by the rank of the trainer.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.device_count() > 1:
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise ConfigError(f"device = {name!r}: torch finds {found} CUDA device here; use 'cpu' or 'auto'")
    return device
