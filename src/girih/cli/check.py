"""``girih check``: does everything that ``girih train`` does before its first step, and estimates rows and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.app.run_config import RunConfig
from girih.cli import cli
from girih.cli.show import show_skipped
from girih.cli.words import MODEL, config_options
from girih.config.user_code import naming
from girih.data import NULL_ID
from girih.data.batch import Batch
from girih.data.dataset import Dataset, Growth, examples_of
from girih.data.decode import columns, times
from girih.data.guessing.kinds import separator_in
from girih.lifecycle.dense_cost import host_bytes
from girih.models import ESMM
from girih.report.text import count, short, size
from girih.schema import Categorical, Numeric
from girih.sparse.spec import SparseSpec
from girih.store.accounting import loaded_bytes
from girih.store.rows.record import row_layout

SAMPLE_EXAMPLES = 200_000
MOST_TABLES = 20
MANY_MISSING, FEW_STEPS, LARGE = 0.9, 20, 1e4


@cli.command()
@config_options
@MODEL
def check(
    config_file: Path, overrides: tuple[str, ...], strategy: str | None, model_class: str | None
) -> int:
    """Check a config against its data, and estimate rows and memory; nothing is trained."""
    settings = RunConfig.load(config_file, overrides=[*overrides, *naming(model_class)], strategy=strategy)
    model = settings.model()
    notes: list[str] = []
    datasets = settings.datasets()
    train = datasets["train"]
    for split, data in datasets.items():
        batch = next(iter(data.in_order()))
        click.echo(
            f"{split}: {_described(data)}; of its first {count(batch.num_examples)} examples {_labels(batch, data)}"
        )
        notes += _constant_labels(split, batch, data)
        show_skipped(data, split)
    settings.rehearse(datasets)
    sparse = settings.sparse(model)
    growth, notes_of_features = _sampled(train, nested=isinstance(model, ESMM))
    read_all = growth.num_examples < SAMPLE_EXAMPLES
    total = float(growth.num_examples) if read_all else examples_of(train)
    notes += notes_of_features + _unsplit(train) + _implausible_times(train)
    parameters = sum(each.numel() for each in model.parameters())
    click.echo(
        f"model: {type(model).__name__}, {short(parameters)} dense parameters; strategy {settings.strategy.name}"
    )
    held = _show_tables(sparse, growth, total)
    free = host_bytes()
    click.echo(f"memory: about {size(held)} for rows after an epoch; {size(free)} is free on this machine")
    if held > free and not settings.store.on_ssd:
        notes.append(
            'rows may not fit into memory: see [store] tiers = ["dram", "ssd"], or [[tables]] with admission or eviction'
        )
    if total is not None and total < FEW_STEPS * settings.data.batch_size:
        steps = max(1, math.ceil(total / settings.data.batch_size))
        notes.append(f"an epoch has about {steps} steps: lower data.batch_size")
    if settings.data.splits == ("train",):
        notes.append("neither valid nor test: a run ends without AUC; name files, or set data.split")
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"{config_file}: ready; next: girih train {config_file}")
    return 0


def _described(data: Dataset) -> str:
    files = len(data.addresses)
    rows = "an unknown number of rows" if data.num_examples is None else f"{count(data.num_examples)} rows"
    return f"{rows} in {files} file{'' if files == 1 else 's'}"


def _labels(batch: Batch, data: Dataset) -> str:
    labels = data.schema.labels
    shown = []
    for values, name, loss in zip(_counted(batch), labels.names, labels.losses, strict=True):
        if not len(values):
            shown.append(f"{name} counts for no example")
        else:
            mean = float(values.mean())
            shown.append(
                f"{mean:.1%} are {name}" if loss == "bce" else f"{name} is {mean:.4g} on the average"
            )
    return ", ".join(shown)


def _counted(batch: Batch) -> list[NDArray[np.float32]]:
    """Returns the values of each label that count."""
    if batch.label_weights is None:
        return list(batch.labels.T)
    return [
        values[weights > 0] for values, weights in zip(batch.labels.T, batch.label_weights.T, strict=True)
    ]


def _constant_labels(split: str, batch: Batch, data: Dataset) -> list[str]:
    return [
        f"label {name!r} is {values[0]:g} in all of the first {count(batch.num_examples)} examples of {split}"
        for name, values in zip(data.schema.labels.names, _counted(batch), strict=True)
        if len(values) and (values == values[0]).all()
    ]


@dataclass(slots=True)
class _Seen:
    """The ids of a feature: the number of ids, the number of missing ids, and up to two different ids."""

    num_ids: int = 0
    num_missing: int = 0
    some: set[int] = field(default_factory=set)

    def add(self, ids: NDArray[np.int64]) -> None:
        self.num_ids += len(ids)
        self.num_missing += int(np.count_nonzero(ids == NULL_ID))
        if len(self.some) < 2:
            self.some.update(np.unique(ids)[:2].tolist())

    def note(self, where: str) -> str | None:
        """Describes anything unusual, or returns None."""
        if not self.num_ids:
            return f"has no id in {where}"
        if self.num_missing > MANY_MISSING * self.num_ids:
            return f"is missing in {self.num_missing / self.num_ids:.0%} of {where}"
        return f"has one id in all of {where}: nothing to learn" if len(self.some) == 1 else None


def _sampled(train: Dataset, *, nested: bool) -> tuple[Growth, list[str]]:
    """Reads the first examples. Returns the growth of tables, and notes about unusual features.

    Args:
        nested: True if the second label should be 1 only if the first label is 1.
    """
    schema, growth = train.schema, Growth(train.schema)
    seen = [_Seen() for _ in schema.sparse]
    largest, outside = np.zeros(len(schema.numeric)), 0
    for batch in train.in_order():
        growth.add(batch)
        for place, each in enumerate(seen):
            each.add(batch.ids[batch.ids_of(place)])
        largest = np.fmax(largest, np.abs(batch.numeric).max(axis=0, initial=0.0))
        if nested:
            counts = True if batch.label_weights is None else (batch.label_weights > 0).all(axis=1)
            outside += int(np.count_nonzero((batch.labels[:, 1] > batch.labels[:, 0]) & counts))
        if growth.num_examples >= SAMPLE_EXAMPLES:
            break
    where = f"the first {count(growth.num_examples)} examples"
    told = zip(schema.sparse, (each.note(where) for each in seen), strict=True)
    notes = [f"feature {feature.name!r} {note}" for feature, note in told if note is not None]
    for number, value in zip(schema.numeric, largest.tolist(), strict=True):
        if value > LARGE and "standardize" not in number.transform:
            mend = 'transform = ["log1p", "standardize"] keeps inputs small'
            notes.append(f"feature {number.name!r} reaches {value:.3g}: {mend}")
    if outside:
        first, second = schema.labels.names
        notes.append(
            f"label {second!r} is 1 in {count(outside)} of {where} where {first!r} is 0: esmm needs a second label that"
            " only follows the first; choose such a label, or use mmoe"
        )
    return growth, notes


def _kept(train: Dataset, sources: Iterable[str]) -> pa.Table:
    """Returns the columns of ``keep`` in the first batch, without bad rows."""
    return next(iter(replace(train.without_labels(keep=sources).in_order(), on_bad_row="skip"))).kept


def _unsplit(train: Dataset) -> list[str]:
    """Returns notes on features that read each string as one id, although it looks like several ids."""
    schema = train.plan.schema
    plain = [f for f in schema.sparse if not (isinstance(f, Categorical) and (f.bucketize or f.transform))]
    plain = [
        f for f in plain if not f.list_format and not (isinstance(f, Categorical) and f.weight_separator)
    ]
    sources = dict.fromkeys(feature.source for feature in plain)
    if not sources:
        return []
    kept = _kept(train, sources)
    notes = []
    for feature in plain:
        values = columns.flat(kept[feature.source]).drop_null()
        if not columns.is_string(values.type) or not len(values):
            continue
        words = values.cast(pa.large_binary())
        own = feature.separator
        if own is not None and pc.any(pc.match_substring(words, own.encode())).as_py():
            continue
        found = separator_in(feature.source, words)
        if found is not None:
            why = "it has no separator" if own is None else f"none has its separator {own!r}"
            notes.append(
                f"feature {feature.name!r} reads each string whole, as one id ({why}), as {words[0].as_py().decode(errors='replace')!r:.60}:"
                f" separator = {found!r} would split them"
            )
    return notes


def _implausible_times(train: Dataset) -> list[str]:
    """Returns notes on features of times that are implausible in the first batch.

    A note names a unit in which the times would be plausible, if there is one.
    """
    schema = train.schema
    timed = [
        f
        for f in (*schema.sparse, *schema.numeric)
        if isinstance(f, Categorical | Numeric) and f.part_of_time
    ]
    sources = dict.fromkeys(feature.source for feature in timed)
    if not sources:
        return []
    kept = _kept(train, sources)
    first = f"the first {count(kept.num_rows)} examples"
    notes = []
    for feature in timed:
        column = columns.flat(kept[feature.source])
        unit = feature.time_unit or "s"
        doubt = times.doubt(column, unit)
        if doubt is None:
            continue
        meant = (
            []
            if times.is_time(column.type)
            else [each for each in times.PER_SECOND if times.doubt(column, each) is None]
        )
        mend = f": time_unit = {meant[0]!r} is probably meant" if meant else ""
        notes.append(f"feature {feature.name!r}, counted in {unit}: {doubt} in {first}{mend}")
    return notes


def _show_tables(sparse: SparseSpec, growth: Growth, total: float | None) -> float:
    """Prints a line for each of the largest tables. Returns the bytes of all tables."""
    known = "the data" if total is not None else "these alone, because the data is not counted"
    own = {table.name: table for table in sparse.schema.tables}
    tables: list[tuple[int, str]] = []
    for group in sparse.groups():
        description = row_layout(group.spec, 0, 1).description
        for table in group.spec.tables:
            rows = growth.rows(table.name, total or growth.num_examples)
            eviction = own[table.name].eviction
            if eviction is not None and eviction.max_rows is not None:
                rows = min(rows, eviction.max_rows)
            taken = sum(loaded_bytes(description, round(rows)).values())
            tables.append(
                (taken, f"  {table.name}: dim {own[table.name].dim}, {short(rows)} rows, {size(taken)}")
            )
    tables.sort(key=lambda each: -each[0])
    click.echo(
        f"rows of tables after an epoch of {known}, estimated from the first {count(growth.num_examples)} examples:"
    )
    for _, line in tables[:MOST_TABLES]:
        click.echo(line)
    if len(tables) > MOST_TABLES:
        click.echo(f"  and {len(tables) - MOST_TABLES} smaller ones")
    return float(sum(taken for taken, _ in tables))
