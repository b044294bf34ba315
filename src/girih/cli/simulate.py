"""``girih simulate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from girih.app.run_config import RunConfig
from girih.cli import cli, note
from girih.cli.plan import GBIT
from girih.cli.words import PATH, config_options
from girih.errors import ConfigError
from girih.files.whole import write_whole
from girih.planner.calibration import Calibration
from girih.planner.simulator.hosts import Hosts
from girih.planner.simulator.prediction import Prediction
from girih.planner.simulator.run import Span
from girih.report.text import short
from girih.strategies.strategy import price

MOST_ROWS = 12
"""Resources that are shown, the busiest first."""


@cli.command()
@config_options
@click.option(
    "--hosts", "hosts_file", metavar="HOSTS.toml", type=PATH, required=True, help="The hosts, as [[hosts]]."
)
@click.option(
    "--calibration", "calibrated", metavar="FILE", type=PATH, required=True, help="A file of girih calibrate."
)
@click.option(
    "--steps", type=click.IntRange(4), default=40, show_default=True, help="Steps of each trainer in a run."
)
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True, help="Runs, for the spread.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides all random numbers.")
@click.option("--json", "out", metavar="FILE", type=PATH, help="Write the result there.")
@click.option(
    "--timeline", metavar="FILE", type=PATH, help="Write a timeline for Perfetto (ui.perfetto.dev)."
)
def simulate(
    config_file: Path,
    overrides: tuple[str, ...],
    strategy: str | None,
    hosts_file: Path,
    calibrated: Path,
    steps: int,
    runs: int,
    seed: int,
    out: Path | None,
    timeline: Path | None,
) -> int:
    """Predict the speed of a run on other hosts, step by step: throughput, staleness, queues and the bottleneck."""
    settings = RunConfig.load(config_file, overrides=overrides, strategy=strategy)
    hosts = Hosts.read(hosts_file)
    calibration = Calibration.read(calibrated).spread(sum(each.count for each in hosts.hosts))
    fastest = max(each.gbit for each in hosts.hosts)  # operators are placed for links between hosts
    _, net = settings.planned_net(calibration.over(fastest * GBIT))
    facts = settings.facts_by(calibration, net)(settings.strategy)
    settings.strategy.plan(facts)
    options = {"steps": steps, "runs": runs, "seed": seed, "keeps_spans": timeline is not None}
    prediction = price(settings.strategy, facts, hosts, **options)
    if prediction is None:
        raise ConfigError(
            f"strategy {settings.strategy.name!r}: its speed is not predicted: on GPUs (name a device in {hosts_file} instead),"
            " compiled, or a strategy without step_graph"
        )
    if out is not None:
        write_whole(out, json.dumps(prediction.to_dict(), indent=1) + "\n")
    if timeline is not None:
        write_whole(timeline, json.dumps({"traceEvents": trace_events(prediction.simulated.spans)}))
        note(f"the timeline is in {timeline}; open it in ui.perfetto.dev")
    _show(prediction)
    return 0


def _show(prediction: Prediction) -> None:
    console, result = Console(highlight=False), prediction.simulated
    console.print(
        f"{short(result.samples_per_s)} samples/s, 80 % of runs from {short(result.samples_per_s_p10)} to"
        f" {short(result.samples_per_s_p90)}; bounded by {result.bottleneck}",
        soft_wrap=True,
    )
    console.print(f"staleness: {result.staleness_p50} (median), {result.staleness_p99} (99 %)")
    table = Table("resource", "in use", "mean queue")
    busiest = sorted(result.utilization.items(), key=lambda each: -each[1])
    for name, use in busiest[:MOST_ROWS]:
        table.add_row(name, f"{use:.0%}", f"{result.queues[name]:.2g}")
    console.print(table)
    for reason in result.extrapolated:
        console.print(f"extrapolated: {reason}", soft_wrap=True)


def trace_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Returns spans as complete events of Chrome's trace format. Times are microseconds."""
    names = sorted({each.process for each in spans})
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
        for number, name in enumerate(names)
    ]
    threads = {name: number for number, name in enumerate(sorted({each.name for each in spans}))}
    for each in spans:
        events.append(
            {
                "name": each.name,
                "ph": "X",
                "pid": names.index(each.process),
                "tid": threads[each.name],
                "ts": 1e6 * each.start_s,
                "dur": 1e6 * (each.end_s - each.start_s),
            }
        )
    return events
