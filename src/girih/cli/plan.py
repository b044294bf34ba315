"""``girih plan``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from girih.app.rank_strategies import StrategyEstimate, choose, offers
from girih.app.run_config import RunConfig
from girih.cli import cli, note
from girih.cli.words import MODEL, PATH, config_options
from girih.config.user_code import naming
from girih.errors import ConfigError
from girih.files.whole import write_whole
from girih.planner.calibration import Calibration
from girih.planner.operators import OperatorGraph
from girih.planner.plan import Plan
from girih.planner.tagging.tag import Tagged
from girih.report.picture import picture as drawn
from girih.report.text import count, short, size
from girih.store.accounting import row_bytes, tiered_row_bytes
from girih.store.rows.record import row_layout

MOST_GROUPS = 6
GBIT = 1e9 / 8  # bytes


@cli.command()
@config_options
@MODEL
@click.option("--out", metavar="FILE", type=PATH, help="Write the plan there instead.")
@click.option(
    "--calibration", "calibrated", metavar="FILE", type=PATH,
    help="Predict times, and samples/s of every strategy, by a file of girih calibrate.",
)  # fmt: skip
@click.option(
    "--machines",
    type=click.IntRange(1),
    metavar="COUNT",
    help="Predict for this number of machines like the calibrated one, with processes spread evenly; needs --calibration.",
)
@click.option(
    "--gbit",
    type=click.FloatRange(0, min_open=True),
    metavar="RATE",
    help="Predict for links of this many Gbit/s for each process and direction; needs --calibration.",
)
@click.option(
    "--picture", metavar="FILE.svg", type=PATH,
    help="Draw which operators group servers run, for hierarchical with servers_per_group.",
)  # fmt: skip
def plan(
    config_file: Path,
    overrides: tuple[str, ...],
    strategy: str | None,
    model_class: str | None,
    out: Path | None,
    calibrated: Path | None,
    machines: int | None,
    gbit: float | None,
    picture: Path | None,
) -> int:
    """Print the plan of a run as JSON, for girih train --plan FILE; a summary goes to standard error."""
    settings = RunConfig.load(config_file, overrides=[*overrides, *naming(model_class)], strategy=strategy)
    found: tuple[StrategyEstimate, ...] = ()
    calibration = _machines(calibrated, machines, gbit)
    decided, net = settings.planned_net(calibration)
    if calibration is not None:
        source = {"file": str(calibrated), "trainers": calibration.trainers}
        spread = {} if machines is None else {"machines": machines}
        marked: dict[str, object] = {"communication_from": source | spread}
        found = offers(settings.strategy, settings.facts_by(calibration, net))
        (own,) = (offer for offer in found if offer.is_configured)
        if own.prediction is not None:
            marked |= {"speed": {**own.prediction.to_dict(), "from": str(calibrated)}}
        decided = replace(decided, predicted={**decided.predicted, **marked})
    if picture is not None and net is None:
        raise ConfigError(
            f"--picture {picture}: all operators of {decided.strategy!r} run on trainers; expected strategy 'hierarchical' with"
            " servers_per_group of at least 1"
        )
    text = json.dumps(decided.to_dict(), indent=1)
    if out is None:
        click.echo(text)
    else:
        write_whole(out, text + "\n")
    roles = ", ".join(f"{count} × {role}" for role, count in decided.roles.items())
    note(f"{decided.strategy}: {roles}")
    for line in tier_lines(settings, decided):
        note(line)
    sent = decided.predicted.get("bytes", {})
    if total := decided.predicted.get("bytes_per_step"):
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in sent.items() if count)
        note(f"each step sends {size(total)} per trainer: {kinds}")
    if chosen := decided.predicted.get("wire"):
        note(f"between trainers and group servers: {chosen['why']}")
    _show_groups(decided)
    if calibration is not None:
        _show_times(decided, calibration, calibrated)
        offers_table(found, str(calibrated))
    if net is not None:
        tagged_table(net.graph, net.tagged)
        if picture is not None:
            write_whole(picture, drawn(net.graph, net.tagged))
            note(f"operators are drawn in {picture}")
    return 0


def _machines(file: Path | None, count: int | None, gbit: float | None) -> Calibration | None:
    """Returns the machines to predict speeds for, or None without a calibration."""
    if file is None:
        for name, value in (("machines", count), ("gbit", gbit)):
            if value is not None:
                raise ConfigError(
                    f"--{name} {value:g}: expected --calibration FILE too; girih calibrate writes one"
                )
        return None
    found = Calibration.read(file)
    if gbit is not None:
        found = found.over(gbit * GBIT)
    return found if count is None else found.spread(count)


def tier_lines(settings: RunConfig, decided: Plan) -> list[str]:
    """Returns one line per group about the memory of tiers. Empty if there is a single tier."""
    store = settings.store
    if store.tiers is None or not store.is_tiered:
        return []
    groups = settings.sparse().following(decided).groups()
    num_tables = sum(len(group.spec.tables) for group in groups)
    where = f", in {store.ssd_dir or 'tiers/ of the run directory'}" if store.on_ssd else ""
    lines = [f"tiers: {' above '.join(store.tiers)}{where}"]
    for group in groups:
        of_row = row_layout(group.spec, 0, 1)
        each, share = 4 * of_row.num_words, len(group.spec.tables) / num_tables
        of_all = (tiered_row_bytes if store.on_ssd else row_bytes)(of_row.description)
        hot = [
            f"{count(math.ceil(rows * share))} hot rows of {each} bytes, {size(math.ceil(rows * share) * each)} of"
            f" {'GPU ' if tier == 'gpu' else ''}memory"
            for tier, rows in store.hot_rows_of.items()
        ]
        lines.append(
            f"  {group.spec.name}: {', '.join(hot)};"
            f" {sum(of_all.values())} bytes for each row, hot or not, and its index"
        )
    return lines


def _show_groups(decided: Plan) -> None:
    volumes = decided.predicted.get("volumes", {})
    shown = []
    for group in decided.groups[:MOST_GROUPS]:
        tables = "1 table" if len(group["tables"]) == 1 else f"{len(group['tables'])} tables"
        shown.append(f"{group['name']} ({tables}, {volumes.get(group['name'], 0):,} numbers per step)")
    more = f" and {len(decided.groups) - MOST_GROUPS} more" if len(decided.groups) > MOST_GROUPS else ""
    note(f"groups of tables: {', '.join(shown)}{more}")
    interleaved = decided.predicted.get("interleaving")
    if interleaved is not None:
        sizes = ", ".join(f"{volume:,}" for volume in interleaved["volumes"])
        note(
            f"interleaving groups of {sizes} numbers per step, {interleaved['why']}; see schedule.interleaving"
        )
    if cut := decided.predicted.get("micro_batches"):
        number = decided.schedule["micro_batches"]
        note(f"micro-batches: {number} ({cut['why']}); see schedule.micro_batches")
    if ahead := decided.schedule.get("excluded"):
        note(f"ahead of all others: {', '.join(ahead)}")


def _show_times(decided: Plan, calibration: Calibration, file: Path | None) -> None:
    total = decided.predicted.get("communication_ms_per_step")
    if total is None:
        note(f"no communication time is predicted for {decided.strategy} with these options")
        return
    kinds = decided.predicted["communication_ms"].items()
    shown = ", ".join(f"{kind} {ms:.3g}" for kind, ms in kinds if ms)
    note(
        f"a step's communication takes {total:.3g} ms if nothing overlaps it: {shown or 'nothing is sent'}"
        f" (predicted from {file}, measured by {calibration.trainers} trainers)"
    )


def offers_table(estimates: Sequence[StrategyEstimate], calibrated: str) -> None:
    """Prints every strategy with its predicted speed, or why it has none, and the best choice, on standard error."""
    table = Table("strategy", "processes")
    for column in ("samples/s", "cores, ms a step", "path, ms a step"):
        table.add_column(column, justify="right")
    table.add_column("bounded by, or refused because", overflow="fold")
    for entry in sorted(estimates, key=lambda estimate: -estimate.samples_per_s):
        label = f"{entry.label} ← this config" if entry.is_configured else entry.label
        prediction = entry.prediction
        if prediction is None:
            table.add_row(label, str(entry.processes), "–", "–", "–", entry.refused)
        else:
            parts = prediction.fold
            work_s = sum(parts.work_s.values()) / prediction.cores
            times = [f"{1e3 * each:.3g}" for each in (work_s, sum(parts.path_s.values()))]
            speed = short(prediction.samples_per_s)
            table.add_row(label, str(entry.processes), speed, *times, prediction.bound)
    console = _console()
    console.print(f"predicted from {calibrated}, on one machine", soft_wrap=True)
    console.print(table)
    best, why = choose(estimates)
    name = "nothing" if best is None else best.label
    console.print(f"choose {name}: {why}", soft_wrap=True, markup=False)


def tagged_table(graph: OperatorGraph, tagged: Tagged) -> None:
    """Prints each operator with its device and the reason, each device's utilization, and the moves of refinement."""
    console = _console()
    table = Table("operator", "device", "parameters")
    table.add_column("why", overflow="fold")
    for operator in graph.operators:
        parameters = size(operator.parameter_bytes) if operator.parameter_bytes else ""
        name = f"{operator.name} ({operator.kind})"
        table.add_row(name, tagged.tagging[operator.name], parameters, tagged.reasons[operator.name])
    console.print(f"operators of a group, begun from {tagged.start!r}:", soft_wrap=True)
    console.print(table)
    for name, used in tagged.utilization.items():
        memory = f", memory {used.memory:.0%}" if used.memory else ""
        sizes = tagged.loads[name]
        console.print(
            f"{name}: CPU {used.cpu:.0%}, network {used.network:.0%}{memory}; sends {size(sizes.sent_bytes)} and receives"
            f" {size(sizes.received_bytes)} per example",
            soft_wrap=True,
        )
    if tagged.shared_cores is not None:
        console.print(
            f"all devices together: {tagged.shared_cores:.0%} of the cores that they share", soft_wrap=True
        )
    for move in tagged.moves:
        console.print(
            f"refinement moved {', '.join(move.operators)} from {move.source} to {move.target}:"
            f" {short(move.examples_per_s_before)} to {short(move.examples_per_s_after)} examples/s",
            soft_wrap=True,
        )
    if not tagged.moves:
        console.print("refinement moved nothing", soft_wrap=True)
    console.print(
        f"the group can do {short(tagged.examples_per_s)} examples/s, if nothing else bounds it",
        soft_wrap=True,
    )


def _console() -> Console:
    """Returns standard error. It is wide if it is not a terminal, so that tables in files can be read."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=140)
