"""``girih train``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from girih import checkpoint, config
from girih.cli import cli
from girih.cli.show import results, skipped
from girih.data import Dataset
from girih.data.options import Split
from girih.errors import ConfigError
from girih.kernels.cpu.jit import is_compiled
from girih.report.progress import Progress
from girih.runconfig import RunConfig
from girih.rundir import RunDirectory, read_summary
from girih.trainer import Trainer


@cli.command()
@click.argument("config_file", metavar="CONFIG.toml", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Override one value; repeatable."
)
@click.option(
    "--run", "run_path", metavar="DIR", type=click.Path(path_type=Path), help="Where the run is written."
)
@click.option("--resume", is_flag=True, help="Go on from the latest checkpoint in --run DIR.")
@click.option("--strategy", metavar="NAME", help="Replace [strategy] whole.")
def train(
    config_file: Path, overrides: tuple[str, ...], run_path: Path | None, resume: bool, strategy: str | None
) -> int:
    """Train the model of a config file."""
    if resume and run_path is None:
        raise ConfigError("--resume needs --run DIR, the directory of the run to go on with")
    settings = RunConfig.load(config_file, overrides=overrides, strategy=strategy)
    datasets = _open_data(settings)
    run_path = run_path or Path("runs", f"{config_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    with RunDirectory(run_path, resume=resume) as run:
        newest = checkpoint.latest(run.checkpoints)
        if newest is not None and _is_finished(newest, run_path, settings):
            click.echo(f"{run_path}: this run is finished; nothing to do")
            return 0
        return _train(settings, datasets, run, newest)


def _train(settings: RunConfig, datasets: dict[str, Dataset], run: RunDirectory, newest: Path | None) -> int:
    start = time.perf_counter()
    total = datasets["train"].num_examples
    with (
        Progress(None if total is None else total * settings.train.epochs) as progress,
        settings.trainer(run=run.path, callbacks=[progress]) as trainer,
    ):
        if newest is not None:
            trainer.load(newest)
        trainer.check(datasets["train"], datasets.get("valid"))
        config.write_toml(run.config, settings.with_absolute_paths())
        if newest is not None:
            progress.message(f"resumed from {newest.name}")
        if not is_compiled():
            progress.message("compiling kernels for this machine: once, about half a minute")
        final = datasets.get("test") or datasets.get("valid")
        with stopping(trainer):
            remaining = max(0, settings.train.epochs - trainer.state.epoch)
            trainer.fit(datasets["train"], datasets.get("valid"), epochs=remaining)
            metrics = None if final is None or trainer.stop_requested else trainer.evaluate(final)
        if trainer.stop_requested:
            trainer.end(None)
            progress.message(f"stopped at step {trainer.state.step}; go on with: --run {run.path} --resume")
            return 130
        summary = trainer.summary(metrics, duration_s=time.perf_counter() - start)
        summary["evaluated_on"] = None if final is None else ("test" if "test" in datasets else "valid")
        summary["skipped_rows"] = {
            name: data.num_skipped for name, data in datasets.items() if data.num_skipped
        }
        run.write_summary(summary)
        trainer.end(summary)
    results(summary, run.path)
    for name, data in datasets.items():
        skipped(data, name)
    return 0


def _open_data(settings: RunConfig) -> dict[str, Dataset]:
    splits: tuple[Split, ...] = ("train", "valid", "test")
    return {split: settings.dataset(split) for split in splits if getattr(settings.data, split) is not None}


def _is_finished(newest: Path, run: Path, settings: RunConfig) -> bool:
    if read_summary(run) is None:
        return False
    state = checkpoint.Manifest.read(newest).state["run"]
    options = settings.train
    steps_done = options.max_steps is not None and state["step"] >= options.max_steps
    return bool(state["epoch"] >= options.epochs or steps_done or state["stopped_early"])


@contextmanager
def stopping(trainer: Trainer) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run after the step under way; the second one at once."""
    previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.getsignal(number)
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
