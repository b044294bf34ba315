"""``girih demo``: a first run on a generated click log, and its AUC compared with the best possible AUC.

The log's click probabilities are known by construction. Their AUC on the test clicks is the ceiling: no model can
exceed it, except by luck.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pyarrow.parquet as pq

from girih.cli import cli, run
from girih.cli.show import mixed_table, screen
from girih.cli.words import PATH
from girih.data.click_log import click_log
from girih.errors import ConfigError
from girih.metrics import Scores

SIGNALLED = 130
"""The status of a command that a signal ended."""
CONFIG = Path(__file__).with_name("demo.toml")
CARDINALITY = 20_000
PART_ROWS = 100_000
FEWEST = 1_000
"""The fewest examples to train on. The test data, a tenth as many examples, still has an AUC."""


class Best(NamedTuple):
    """The metrics of the true probabilities on the test data."""

    auc: float
    logloss: float


@cli.command()
@click.argument("directory", type=PATH, default="demo-run")
@click.option(
    "--examples", "num_examples", metavar="N", type=click.IntRange(min=FEWEST), default=1_000_000, show_default=True,
    help="Examples to train on.",
)  # fmt: skip
@click.pass_context
def demo(context: click.Context, directory: Path, num_examples: int) -> int:
    """Train on a generated click log, and compare AUC with the best possible one.

    Everything is written below DIRECTORY (default: demo-run). An earlier demo there is replaced,
    unless something was changed or added.
    """
    config = directory / "config.toml"
    _empty(directory)
    (directory / "data").mkdir(parents=True)
    shutil.copyfile(CONFIG, config)
    click.echo(f"making a click log of {num_examples:,} examples …", err=True)
    best = make_log(directory / "data", num_examples)
    own_process, start = bool(context.find_root().obj), time.perf_counter()
    status = run(["train", str(config), "--run", str(directory / "run")], own_process=own_process)
    seconds = time.perf_counter() - start
    if status == 0:
        drawn = run(["report", str(directory / "run")])  # prints one line if drawing fails
        _show(directory, best, seconds)
        status = drawn if drawn == SIGNALLED else 0
    return status


def make_log(directory: Path, num_examples: int) -> Best:
    """Writes Parquet files: train, and valid and test with a tenth of the examples each.

    Returns the best possible metrics on test.
    """
    start, num_other = 0, num_examples // 10
    for part in range(0, num_examples, PART_ROWS):
        rows = min(PART_ROWS, num_examples - part)
        table, _ = click_log(rows, start=start, cardinality=CARDINALITY)
        pq.write_table(table, directory / f"train-{part // PART_ROWS:03d}.parquet")
        start += rows
    for name in ("valid", "test"):
        table, probabilities = click_log(num_other, start=start, cardinality=CARDINALITY)
        pq.write_table(table, directory / f"{name}.parquet")
        start += num_other
    scores = Scores()
    logits = np.log(probabilities) - np.log1p(-probabilities)
    scores.add(logits[:, None].astype(np.float32), table["click"].to_numpy()[:, None].astype(np.float32))
    found = scores.result(["click"])
    return Best(found.auc or 0.0, found.logloss or 0.0)


def _empty(directory: Path) -> None:
    """Removes the files of an earlier demo, and nothing else.

    Raises:
        ConfigError: the directory holds files that belong, or may belong, to the user.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is a file; name a directory")
    found = {each.name: each for each in sorted(directory.iterdir())}
    for name, each in found.items():
        if not _is_left_alone(each):
            raise ConfigError(
                f"{directory}: holds {name}, which is not from an earlier demo, or was changed; name another directory"
            )
    if found and not {"config.toml", "data"} <= found.keys():
        raise ConfigError(f"{directory}: holds {', '.join(found)}, no earlier demo; name another directory")
    for name in found.keys() & {"data", "run"}:
        shutil.rmtree(found[name])


def _is_left_alone(path: Path) -> bool:
    """Returns whether a path looks as a demo left it."""
    if path.name == "config.toml":
        return path.is_file() and path.read_bytes() == CONFIG.read_bytes()
    return path.name in ("data", "run") and path.is_dir() and not path.is_symlink()


def _show(directory: Path, best: Best, seconds: float) -> None:
    """Prints the model's test metrics, the ceiling, and the paths of all files."""
    summary = json.loads((directory / "run" / "summary.json").read_text())
    table = mixed_table("test data the model never saw", "", "AUC", "logloss")
    table.add_row("DeepFM, one epoch", f"{summary['auc']:.4f}", f"{summary['logloss']:.4f}")
    table.add_row("best possible (true probabilities)", f"{best.auc:.4f}", f"{best.logloss:.4f}")
    console = screen()
    console.print(table)
    seconds -= summary["compile_s"]  # only in the first run on this machine
    console.print(f"{summary['num_rows']:,} rows appeared as their ids were seen; trained in {seconds:.0f} s")
    for name, text in (
        ("config.toml", "the config: change it, and run girih train yourself"),
        ("run/report.html", "curves, calibration, timeline: open it in a browser"),
        ("run/summary.json", "every number"),
        ("run/checkpoints", "the model"),
    ):
        if (directory / name).exists():
            console.print(f"  {directory / name}  {text}", soft_wrap=True)
