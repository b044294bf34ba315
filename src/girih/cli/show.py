"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from girih.data import Dataset
from girih.planner.calibration import Calibration, Link, Rate, StepWork
from girih.planner.costs import link_s
from girih.report.comparing import TITLES, named_metrics
from girih.report.text import count, fraction, short, size

NUMBERS = {"AUC", "bytes", "dim", "left", "logloss", "rows", "step", "version"}
"""Columns of numbers."""
WIDE = 1000
"""Width of output to a file or another program, which no screen cuts."""


def screen() -> Console:
    """Returns standard output: as wide as its terminal, or else as wide as any table."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=WIDE)


def results(summary: Mapping[str, Any], run: Path) -> None:
    """Prints the results of a run and the path of its files."""
    console = screen()
    if summary["by_label"]:
        title = f"{summary['model']} · {summary['strategy']} · {run} · on {summary['evaluated_on']} data"
        metrics_table(summary["by_label"], title, ("auc", "gauc", "logloss", "calibration", "mae", "rmse"))
    else:
        console.print("no valid or test data was configured: nothing was evaluated")
    compiling = f", {summary['compile_s']:.1f} s of them compiling" if summary["compile_s"] else ""
    predicted = summary.get("predicted_samples_per_s")
    expected = (
        "" if predicted is None else f" ({short(predicted)} predicted from {summary['predicted_from']})"
    )
    console.print(
        f"{count(summary['num_examples'])} examples in {count(summary['steps'])} steps, "
        f"{short(summary['samples_per_s'])} samples/s{expected}, {count(summary['num_rows'])} rows, "
        f"{summary['duration_s']:.1f} s in all{compiling}",
        soft_wrap=True,
    )
    if "hit_ratio" in summary:
        shares = ", ".join(f"{tier} {share:.1%}" for tier, share in summary["hit_ratio"].items())
        read, written = (size(summary["store"][f"ssd_bytes_{done}"]) for done in ("read", "written"))
        console.print(f"rows were read from {shares}; {read} read from the SSD, {written} written")
    console.print(f"next: girih report {run}", soft_wrap=True)


def show_skipped(data: Dataset, source: str) -> None:
    """Prints the number of bad rows that the last pass over the data dropped, if any."""
    rows = data.skipped
    if rows.count:
        number = f"{count(rows.count)} bad {'row was' if rows.count == 1 else 'rows were'}"
        click.echo(f"{source}: {number} skipped, the first: {rows.first}", err=True)


def metrics_table(
    metrics: Mapping[str, Mapping[str, object]], title: str, names: Iterable[str] = TITLES
) -> None:
    """Prints some metrics of each label. In a narrow terminal, each metric is a row.

    Metrics that no label has are left out.
    """
    named = {label: named_metrics(values) for label, values in metrics.items()}
    metrics = {label: {**values, **named[label]} for label, values in metrics.items()}
    names = dict.fromkeys([*names, *(name for each in named.values() for name in each)])
    shown = [name for name in names if any(values.get(name) is not None for values in metrics.values())]
    rows = [("label", *(TITLES.get(name, name) for name in shown))]
    for label, values in metrics.items():
        told = ((count if name == "num_examples" else fraction)(values.get(name)) for name in shown)
        rows.append((label, *told))
    console = screen()
    console.print(title, highlight=False, soft_wrap=True)
    table = numbers_table(rows)
    in_full = Measurement.get(console, console.options.update(max_width=WIDE), table)
    console.print(table if in_full.maximum <= console.width else numbers_table(zip(*rows, strict=True)))


def numbers_table(*sections: Iterable[Sequence[str]]) -> Table:
    """Makes a table of numbers, with names in the first row and the first column. A line separates its sections."""
    table = Table()
    for section in sections:
        for row in section:
            if table.columns:
                table.add_row(*row)
                continue
            for name in row:
                table.add_column(name, justify="right" if table.columns else "left", overflow="fold")
        table.add_section()
    return table


def mixed_table(title: str, *columns: str) -> Table:
    """Makes an empty table. Columns of numbers are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    return table


def calibration_tables(calibration: Calibration) -> None:
    """Prints the results of ``girih calibrate``."""
    links_table(calibration)
    codecs_table(calibration)
    if calibration.work is not None:
        work_table(calibration.work)
    overheads_table(calibration)


def overheads_table(calibration: Calibration) -> None:
    """Prints the overhead of each strategy beyond the parts of its steps, for a trainer's share of a step."""
    table = Table()
    table.add_column("beyond its parts", no_wrap=True)
    for title in ("ms of a core, a share", "µs an id", "ms on the clock, a share", "µs an id"):
        table.add_column(title)
    for way, overhead in calibration.overheads.items():
        times = [f(r) for r in (overhead.work, overhead.path) for f in (_of_call, _of_id)]
        table.add_row(way, *times)
    screen().print(table)


def _of_call(rate: Rate) -> str:
    return f"{1e3 * rate.call_s:.3g}"


def _of_id(rate: Rate) -> str:
    return f"{1e6 * rate.id_s:.3g}"


def links_table(calibration: Calibration) -> None:
    """Prints the times of each link by size, and the fitted values."""
    links, num_trainers = calibration.links, calibration.trainers
    points = [("ms", *(name.replace("_", "\n") for name in links))]
    for row in zip(*(link.points for link in links.values()), strict=True):
        points.append((size(row[0][0]), *(f"{1e3 * seconds:.3f}" for _, seconds in row)))
    fitted = [
        ("α, ms", *(f"{1e3 * link.latency_s:.3f}" for link in links.values())),
        ("C, MiB/s", *(short(link.bytes_per_s / (1 << 20)) for link in links.values())),
        ("fit / measured", *(_misfit(name, link, num_trainers) for name, link in links.items())),
    ]
    cores = calibration.machine.get("cores")
    console = screen()
    console.print(f"{num_trainers} trainers on {cores} cores, {calibration.backend}", soft_wrap=True)
    console.print(numbers_table(points, fitted))


def codecs_table(calibration: Calibration) -> None:
    """Prints the speed of packing and unpacking of each codec."""
    table = Table("codec", "pack, MiB/s", "unpack, MiB/s")
    for name, speed in calibration.codecs.items():
        times = (speed.pack_s_per_byte, speed.unpack_s_per_byte)
        table.add_row(name, *(short(1 / seconds / (1 << 20)) for seconds in times))
    screen().print(table)


def work_table(work: StepWork) -> None:
    """Prints the time of one core for rows, reading, products and a step."""
    table = Table("µs of a core", "a call", "an id", "1,000 numbers")
    for name, rate in {"lookups": work.lookup, **work.updates}.items():
        table.add_row(name, *(f"{1e6 * each:.3g}" for each in (rate.call_s, rate.id_s, 1e3 * rate.number_s)))
    console = screen()
    console.print(table)
    speeds = ", ".join(f"{width} wide {short(speed)}FLOP/s" for width, speed in work.products)
    console.print(
        f"reading: {1e6 * work.example_s:.3g} µs an example, {1e6 * work.value_s:.3g} µs a value; a step"
        f" {1e3 * work.step_s:.3g} ms; layers on one core: {speeds}",
        soft_wrap=True,
    )


def _misfit(name: str, link: Link, num_trainers: int) -> str:
    """Returns the smallest and the largest ratio of a link's formula to its measured points."""
    ratios = [link_s(name, size_bytes, num_trainers, link) / seconds for size_bytes, seconds in link.points]
    return f"{min(ratios):.1f}–{max(ratios):.1f}"
