"""The work of one trainer of ``girih train``."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from girih import checkpoint, config
from girih.app.run_config import RunConfig
from girih.checkpoint import Storage
from girih.cli import note
from girih.cli.show import results, show_skipped
from girih.cluster.cluster import Cluster
from girih.cluster.launch import handle_signals
from girih.cluster.roles import RoleName
from girih.data import Dataset
from girih.errors import ConfigError
from girih.lifecycle.planning import Calibrated, joined
from girih.planner.plan import Plan
from girih.report.comparing import changed
from girih.report.progress import Progress
from girih.runs.directory import RunDirectory, read_summary, remove_summary
from girih.serving.opening import final_weights
from girih.telemetry.logs import logging_as
from girih.telemetry.status_file import ProcessId, StatusTarget
from girih.trainer import Trainer

_LOG = logging.getLogger(__name__)
MOST_CHANGES = 8
"""The number of changed options that a resumed run lists."""


def load_settings(
    config_file: Path,
    overrides: Sequence[str],
    strategy: str | None,
    run: Path,
    *,
    plan_file: Path | None,
    calibrated: Path | None,
) -> RunConfig:
    """Reads the files that the arguments of ``girih train`` name."""
    settings = RunConfig.load(config_file, overrides=overrides, strategy=strategy, run=run)
    return replace(
        settings,
        plan=None if plan_file is None else Plan.read(plan_file),
        calibrated=None if calibrated is None else Calibrated.read(calibrated),
    )


def train(
    settings: RunConfig, run_path: Path, *, resume: bool, init_from: str | None, own_process: bool
) -> int:
    """Trains as rank 0, which writes the run's files and messages, or as another rank. Returns the status.

    Args:
        own_process: True if the process was started only for this, and so keeps a log.
    """
    datasets = settings.datasets()
    if int(os.environ.get("RANK", "0")) and not settings.strategy.capabilities.standalone:
        with joined(settings.strategy, settings.cluster).running() as cluster:
            start = cluster.ranks.broadcast(None)
            if start is None:
                return 0
            newest, init = (None if at is None else Storage(at) for at in (start["newest"], start["init"]))
            with _logging(cluster, run_path) if own_process else nullcontext():
                return _train(settings, datasets, None, newest, cluster, init)
    with RunDirectory(run_path, resume=resume) as run:
        newest = checkpoint.latest(checkpoint.root_of(run.path, settings.checkpoint.dir)) if resume else None
        init = None if init_from is None or newest is not None else final_weights(init_from)[0]
        why = None if newest is None else _finished_because(newest, run_path, settings)
        if resume and newest is None:
            note(f"nothing to resume in {run_path}; starting afresh")
        with joined(settings.strategy, settings.cluster).running() as cluster:
            if cluster.ranks.broadcast(beginning(newest, init) if why is None else None) is None:
                click.echo(f"{run_path}: this run is finished ({why}); nothing to do")
                if others := other_options(run, settings):
                    note(f"other options, without effect on a finished run: {others}")
                return 0
            with _logging(cluster, run_path) if own_process else nullcontext():
                return _train(settings, datasets, run, newest, cluster, init)


def beginning(newest: Storage | None = None, init: Storage | None = None) -> dict[str, str | None]:
    """Returns the first message from the first trainer to the others: the checkpoint to resume, or to take weights
    from.
    """
    found = {"newest": newest, "init": init}
    return {name: None if place is None else place.absolute().url for name, place in found.items()}


@contextmanager
def _logging(cluster: Cluster, run: Path) -> Iterator[None]:
    """Keeps the log of this trainer. Standard error of the first trainer is the user's terminal."""
    rank = cluster.ranks.rank
    who, place = ProcessId(RoleName.TRAINER, rank, cluster.incarnation), StatusTarget(run.absolute())
    with logging_as(who, place, on_stderr=rank > 0):
        _LOG.info("began as process %d", os.getpid())
        try:
            yield
        except Exception:
            _LOG.info("ends with an error", exc_info=True)
            raise
        _LOG.info("ends")


def _fit(settings: RunConfig, trainer: Trainer) -> bool:
    """Trains the remaining epochs and evaluates. Returns whether a signal ended the training."""
    left = 0 if trainer.state.stopped_early else max(0, settings.train.epochs - trainer.state.epoch)
    try:
        trainer.fit(epochs=left)
        if not trainer.stopped and trainer.data.keys() & {"test", "valid"}:
            trainer.evaluate()
    except KeyboardInterrupt:
        return True
    return trainer.stopped


def _train(
    settings: RunConfig,
    datasets: dict[str, Dataset],
    run: RunDirectory | None,
    newest: Storage | None,
    cluster: Cluster,
    init: Storage | None = None,
) -> int:
    """Trains. Without a ``run``, as on trainers after the first, it writes and prints nothing.

    Args:
        newest: the checkpoint to resume. init: the checkpoint of another run, whose weights this run begins with.
    """
    train, epochs = datasets["train"], settings.train.epochs
    total = None if run is None else settings.most_examples(train)
    console = Console(file=io.StringIO()) if run is None else None
    with (
        Progress(total, console=console) as progress,
        nullcontext() if run is None else _showing_warnings(progress),
        settings.trainer(run=run, callbacks=[progress], cluster=cluster) as trainer,
    ):
        trainer.data = datasets
        if newest is not None:
            trainer.load(newest.url, train=train)
        elif init is not None:
            for line in trainer.init_from(init.url, train=train).lines():
                progress.message(line)
        trainer.check(train, datasets.get("valid"))
        if newest is not None:
            progress.message(f"resumed from {newest.name}")
        if run is not None:
            if newest is not None and (others := other_options(run, settings)):
                progress.message(f"resumed with other options: {others}")
            remove_summary(run.path)  # summary of the earlier part of this run
            settings.write(run.path)
        if newest is not None and trainer.state.epoch >= epochs:
            progress.message(f"train.epochs = {epochs} are done: nothing is left to train")
        elif epochs == 0:
            whose = "its initial weights" if init is None else "the weights that it begins with"
            progress.message(f"train.epochs = 0: nothing is trained; metrics are those of {whose}")
        with stopping(trainer, cluster):
            stopped = _fit(settings, trainer)
        if stopped:
            trainer.end(None)
            if run is not None and not trainer.restarts_all:
                again = f"girih train {run.config} --run {run.path} --resume"
                progress.message(f"stopped at step {trainer.state.step}; go on with: {again}")
            return 130
        if trainer.state.stopped_early:
            best = trainer.state.best_step
            whose = "its latest weights" if best is None else f"its weights of step {best}"
            progress.message(f"stopped early at step {trainer.state.step}; {whose} are the final ones")
        summary = trainer.summary()
        trainer.end(summary)
        if run is None:
            return 0
    results(summary, run.path)
    for name, data in datasets.items():
        show_skipped(data, name)
    return 0


class _ProgressLog(logging.Handler):
    """Shows the library's log messages as lines of the progress."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.message(self.format(record))


@contextmanager
def _showing_warnings(progress: Progress) -> Iterator[None]:
    logger, progress_log = logging.getLogger("girih"), _ProgressLog(progress)
    logger.addHandler(progress_log)
    try:
        yield
    finally:
        logger.removeHandler(progress_log)


def _finished_because(newest: Storage, run: Path, settings: RunConfig) -> str | None:
    """Returns the reason why nothing is left to train in a run, or None."""
    if read_summary(run) is None:
        return None
    state = checkpoint.Manifest.read(newest).run
    options = settings.train
    if state.stopped_early and options.early_stopping is not None:
        return f"early stopping ended it at step {state.step}"
    if state.epoch >= options.epochs:
        return f"{state.epoch} of {options.epochs} epochs are done"
    if options.max_steps is not None and state.step >= options.max_steps:
        return f"{state.step} of {options.max_steps} steps are done"
    return None


def other_options(run: RunDirectory, settings: RunConfig) -> str:
    """Returns the options that differ from the options of the run, in one line. Empty if none differs."""
    if not run.config.is_file():
        return ""
    try:
        before = config.read_toml(run.config, expanded=False)
    except ConfigError:  # damaged, and about to be replaced
        return ""
    changes = changed(before, settings.with_absolute_paths())
    more = [f"and {len(changes) - MOST_CHANGES} more"] if len(changes) > MOST_CHANGES else []
    return ", ".join([*changes[:MOST_CHANGES], *more])


@contextmanager
def stopping(trainer: Trainer, cluster: Cluster) -> Iterator[None]:
    """Ends the run after the current step at the first SIGINT or SIGTERM, and immediately at the second.

    If there is a launcher, the launcher handles the signals and tells this process.
    """
    stop = trainer.request_stop
    with cluster.handle_stop(stop) as told, nullcontext() if told else handle_signals(stop, once=True):
        yield
