"""Begins a run with the weights of an earlier run: rows by table, and dense parameters by name and shape.

Everything else begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from girih.checkpoint.load import LoadedCheckpoint
from girih.checkpoint.parts import PartReader
from girih.dense.half import DenseHalf
from girih.schema import Schema
from girih.sparse.groups.pack import Group
from girih.store.rows.record import row_layout
from girih.store.snapshot.file import describe_header
from girih.store.snapshot.inherit import Fit, fit_of

MOST_NAMES = 8


@dataclass
class Inherited:
    """The weights that a run took from an earlier one, and those that it did not take, with the reason.

    Attributes:
        place: the checkpoint.
        rows: table → number of rows in the checkpoint.
        begun: table → reason why its optimizers start again.
        parameters: names of dense parameters and buffers.
        normalized: features whose mean and deviation are kept.
        left: name of a thing that was not taken → reason.
        fresh: things without a counterpart in the checkpoint.
    """

    place: str
    rows: dict[str, int] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    normalized: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns the result in sentences."""
        rows = [f"{name} ({count:,})" for name, count in self.rows.items()]
        taken = [
            f"rows of {_listed(rows)}" if rows else "no rows",
            f"{len(self.parameters)} dense parameters" if self.parameters else "no dense parameter",
        ]
        if self.normalized:
            taken.append(f"mean and deviation of {_listed(self.normalized)}")
        sentences = [f"begins with {self.place}: {'; '.join(taken)}"]
        sentences += [
            f"optimizers of rows start again: {_listed(names)} ({why})"
            for why, names in _by_reason(self.begun)
        ]
        sentences += [f"left: {_listed(names)} ({why})" for why, names in _by_reason(self.left)]
        if self.fresh:
            sentences.append(f"new: {_listed(self.fresh)}")
        return sentences


def rows_that_fit(loaded: LoadedCheckpoint, groups: Sequence[Group], inherited: Inherited) -> PartReader:
    """Records the tables that fit, and returns the parts to load.

    Raises:
        CheckpointError: a part is damaged.
    """
    reader = PartReader(loaded.place, loaded.shards, begins=True)
    descriptions = [
        (facts["tables"], describe_header(reader.header(name), f"{loaded.place}/{name}"))
        for name, facts in loaded.shards.items()
    ]
    ours = {
        table.name: row_layout(group.spec, 0, 1).description
        for group in groups
        for table in group.spec.tables
    }
    fits: dict[str, Fit] = {}
    for tables, description in descriptions:
        for table, count in tables.items():
            if table not in ours:
                inherited.left[f"table {table}"] = "this model has no such table"
                continue
            fit = fits.setdefault(table, fit_of(description, ours[table]))
            if fit.why_not:
                inherited.left[f"table {table}"] = fit.why_not
                continue
            inherited.rows[table] = inherited.rows.get(table, 0) + count
            if fit.why_begins:
                inherited.begun[table] = fit.why_begins
    inherited.fresh += [f"table {table}" for table in ours if table not in fits]
    for table, fit in fits.items():
        segment_names = [segment["name"] for segment in ours[table]["segments"]]
        inherited.fresh += [
            f"{name} of table {table}" for name in segment_names if fit.segments and name not in fit.segments
        ]
    return reader


def put_parameters(loaded: LoadedCheckpoint, dense: DenseHalf, inherited: Inherited) -> None:
    """Replaces dense parameters and buffers with the checkpoint's values of equal name and shape.

    Keeps the optimizer.
    """
    state = dense.state()
    theirs: Mapping[str, Any] = loaded.dense["model"]
    model: dict[str, Any] = dict(state["model"])
    for name, parameter in model.items():
        saved = theirs.get(name)
        if saved is None:
            inherited.fresh.append(name)
        elif not isinstance(saved, Tensor) or saved.shape != parameter.shape:
            there = list(saved.shape) if isinstance(saved, Tensor) else "something else"
            inherited.left[name] = f"{there} there, {list(parameter.shape)} here"
        else:
            model[name] = saved.to(parameter.dtype)
            inherited.parameters.append(name)
    for name in theirs.keys() - model.keys():
        inherited.left[name] = "this model has no such parameter"
    dense.restore({**state, "model": model})


def moments_of(loaded: LoadedCheckpoint, schema: Schema, inherited: Inherited) -> dict[str, object]:
    """Returns the checkpoint's mean and deviation of standardized features, for :meth:`NormalizationStats.to_dict`.

    The parameters depend on these values, so they stay. The new data are measured only for features that the earlier
    run lacks or transforms differently.
    """
    theirs = {feature.name: feature for feature in loaded.schema.numeric}
    saved = {} if loaded.normalization is None else loaded.normalization.to_dict()
    kept = {
        feature.name: saved[feature.name]
        for feature in schema.numeric
        if "standardize" in feature.transform
        and feature.name in saved
        and (other := theirs.get(feature.name)) is not None
        and feature.transform == other.transform
    }
    inherited.normalized = sorted(kept)
    return kept


def _by_reason(reasons: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    return by_reason.items()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
