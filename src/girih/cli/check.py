"""``girih check``: everything that ``girih train`` does before its first step, and what it would take."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from girih.cli import cli
from girih.cli.show import skipped
from girih.cli.words import config_options
from girih.config.file import RunConfig
from girih.data import NULL_ID, Batch, Dataset
from girih.data.growth import Growth, examples_of
from girih.report.text import count, short, size
from girih.sparse.spec import SparseSpec
from girih.store.accounting import loaded_bytes
from girih.store.rows.record import row_layout
from girih.training.dense_cost import host_bytes

SAMPLE_EXAMPLES = 200_000
MANY_MISSING, FEW_STEPS, LARGE = 0.9, 20, 1e4


@cli.command()
@config_options
def check(config_file: Path, overrides: tuple[str, ...], strategy: str | None) -> int:
    """Check a config against its data, and estimate rows and memory, without training."""
    settings = RunConfig.load(config_file, overrides=overrides, strategy=strategy)
    model = settings.model()
    notes: list[str] = []
    train = settings.dataset("train")
    for split in settings.data.splits:
        data = train if split == "train" else settings.dataset(split)
        batch = next(iter(data.in_order()))
        click.echo(
            f"{split}: {_described(data)}; of its first {count(batch.num_examples)} examples {_labels(batch, data)}"
        )
        notes += _constant_labels(split, batch, data)
        skipped(data, split)
    settings.planned()
    sparse = settings.sparse(model)
    growth, notes_of_features = _sampled(train)
    total = examples_of(train)
    notes += notes_of_features
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
        steps = max(1, round(total / settings.data.batch_size))
        notes.append(f"an epoch has about {steps} steps: lower data.batch_size")
    if settings.data.splits == ("train",):
        notes.append("neither valid nor test: a run ends without AUC; name files, or set data.split")
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"{config_file}: ready; next: girih train {config_file}")
    return 0


def _described(data: Dataset) -> str:
    files = len(data.addresses)
    rows = "rows not counted" if data.num_examples is None else f"{count(data.num_examples)} rows"
    return f"{rows} in {files} file{'' if files == 1 else 's'}"


def _labels(batch: Batch, data: Dataset) -> str:
    means = batch.labels.mean(axis=0)
    shown = (
        f"{mean:.1%} are {name}" for name, mean in zip(data.schema.labels.names, means.tolist(), strict=True)
    )
    return ", ".join(shown)


def _constant_labels(split: str, batch: Batch, data: Dataset) -> list[str]:
    least, most = batch.labels.min(axis=0), batch.labels.max(axis=0)
    same = zip(data.schema.labels.names, (least == most).tolist(), least.tolist(), strict=True)
    return [
        f"label {name!r} is {value:g} in all of the first {count(batch.num_examples)} examples of {split}"
        for name, constant, value in same
        if constant
    ]


def _sampled(train: Dataset) -> tuple[Growth, list[str]]:
    """Reads the first examples: their ids, and what is unusual about features."""
    schema, growth, notes = train.schema, Growth(train.schema), []
    seen = {feature.name: [0, 0, set()] for feature in schema.sparse}  # ids, missing ones, some values
    largest = np.zeros(len(schema.numeric))
    for batch in train.in_order():
        growth.add(batch)
        for place, feature in enumerate(schema.sparse):
            ids = batch.ids[batch.ids_of(place)]
            tally = seen[feature.name]
            tally[0] += len(ids)
            tally[1] += int(np.count_nonzero(ids == NULL_ID))
            if len(tally[2]) < 2:
                tally[2].update(np.unique(ids)[:2].tolist())
        if batch.numeric.size:
            largest = np.fmax(largest, np.abs(batch.numeric).max(axis=0, initial=0.0))
        if growth.num_examples >= SAMPLE_EXAMPLES:
            break
    for name, (num_ids, missing, values) in seen.items():
        if not num_ids:
            notes.append(f"feature {name!r} has no id in the first {count(growth.num_examples)} examples")
        elif missing > MANY_MISSING * num_ids:
            notes.append(
                f"feature {name!r} is missing in {missing / num_ids:.0%} of the first {count(growth.num_examples)} examples"
            )
        elif len(values) == 1:
            notes.append(
                f"feature {name!r} has one id in all of the first {count(growth.num_examples)} examples: it teaches nothing"
            )
    for feature, value in zip(schema.numeric, largest.tolist(), strict=True):
        if value > LARGE and "standardize" not in feature.transform:
            notes.append(
                f'feature {feature.name!r} reaches {value:.3g}: transform = ["log1p", "standardize"] keeps inputs small'
            )
    return growth, notes


def _show_tables(sparse: SparseSpec, growth: Growth, total: float | None) -> float:
    """Prints a line for each table; returns the bytes of all."""
    known = "the data" if total is not None else "these alone, as nobody has counted the data"
    click.echo(
        f"rows of tables, estimated from the first {count(growth.num_examples)} examples, after an epoch of {known}:"
    )
    held, evictions = 0.0, {table.name: table.eviction for table in sparse.schema.tables}
    for group in sparse.groups():
        description = row_layout(group.spec, 0, 1).description
        for table in group.spec.tables:
            rows = growth.rows(table.name, total or growth.num_examples)
            most = getattr(evictions[table.name], "max_rows", None)
            rows = rows if most is None else min(rows, most)
            taken = sum(loaded_bytes(description, round(rows)).values())
            held += taken
            click.echo(f"  {table.name}: dim {group.spec.dim}, {short(rows)} rows, {size(taken)}")
    return held
