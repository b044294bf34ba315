"""Lines and tables of ``girih plan`` that tell predicted speeds, and where operators run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from girih.app.rank_strategies import StrategyEstimate, choose
from girih.planner.operators import OperatorGraph
from girih.planner.tagging.tag import Tagged
from girih.report.text import short, size


def offers_table(estimates: Sequence[StrategyEstimate], calibrated: str) -> None:
    """Prints every strategy with its predicted speed, or the reason why it has none, and the one to choose; on standard error."""
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
            times = [
                f"{1e3 * prediction.seconds[name]:.3g}" for name in ("cores", "one step after the other")
            ]
            speed = short(prediction.samples_per_s)
            table.add_row(label, str(entry.processes), speed, *times, prediction.bound)
    console = _console()
    console.print(f"predicted from {calibrated}, on one machine", soft_wrap=True)
    console.print(table)
    best, why = choose(estimates)
    name = "nothing" if best is None else best.label
    console.print(f"choose {name}: {why}", soft_wrap=True, markup=False)


def tagged_table(graph: OperatorGraph, tagged: Tagged) -> None:
    """Prints each operator with its device and why it is there, each device's utilisation, and what refinement moved."""
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
    """Standard error; wide where it is no terminal, so that tables in files can be read."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=140)
