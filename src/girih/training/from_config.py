"""A trainer made of a config file, for programs and notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from girih.config.file import RunConfig
from girih.errors import ConfigError
from girih.report.comparing import flat
from girih.report.progress import Progress
from girih.report.record import masked
from girih.runs.callbacks import Callback, Record
from girih.trainer import Trainer
from girih.training.planning import joined


@dataclass
class _KeepsConfig(Callback):
    """Writes a run's ``config.toml`` once the run begins, when its directory is known to be its own.

    Once alone: a run that was scaled goes on with a new plan, and the file has its new counts by then.
    """

    run: Path
    settings: RunConfig
    is_written: bool = field(default=False, init=False)

    def on_plan(self, plan: Record) -> None:
        """See :class:`Callback`."""
        if not self.is_written:
            self.settings.write(self.run)
            self.is_written = True


def trainer_of(
    path: Path,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    strategy: str | None,
    run: str | os.PathLike[str] | None,
    callbacks: Sequence[Callback],
    progress: bool,
) -> Trainer:
    """See :meth:`girih.Trainer.from_config`."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides = {overrides!r}: expected a list or a mapping, as in [{overrides!r}]")
    directory = None if run is None else Path(run)
    settings = RunConfig.load(path, overrides=overrides, strategy=strategy, run=directory)
    data = settings.datasets()
    bar = Progress(settings.most_examples(data["train"]))
    callbacks = [*callbacks, bar] if progress else list(callbacks)
    if directory is not None:
        callbacks = [*callbacks, _KeepsConfig(directory, settings)]
    cluster = joined(settings.strategy, settings.cluster)
    trainer = settings.trainer(run=directory, callbacks=callbacks, cluster=cluster)
    trainer.data = data
    for callback in callbacks if cluster.ranks.first else ():
        if isinstance(callback, Callback):
            callback.on_config(flat(masked(settings.with_absolute_paths())))
    if progress and cluster.ranks.first:
        trainer.showing = bar
    return trainer
