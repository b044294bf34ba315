"""Callbacks that receive training events."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from girih.errors import ConfigError

Record = Mapping[str, Any]


class Callback(Protocol):
    """Receives every record of a run, in the trainer process of rank 0, between two steps.

    Any object with these methods will do; a subclass overrides only those it needs.
    An exception raised by a callback stops the run.
    """

    def on_plan(self, plan: Record) -> None:
        """Before the first step: the plan, as ``plan.json`` has it."""
        return

    def on_metrics(self, record: Record) -> None:
        """Receives a training line of ``metrics.jsonl``: ``step``, ``examples``, ``loss``, ``rows`` and more."""
        return

    def on_evaluation(self, record: Record) -> None:
        """Receives an evaluation line of ``metrics.jsonl``: ``step``, ``split``, ``auc``, ``logloss`` and more."""
        return

    def on_end(self, summary: Record | None) -> None:
        """Receives ``summary.json`` once, at the very end; None if the run was stopped early."""
        return


class TensorBoard(Callback):
    """Writes training records as ``train/<name>`` and evaluations as ``<split>/<name>``, by step.

    Args:
        directory: where the event files go; created if missing. A resumed run may use the directory of the
            stopped one: TensorBoard then hides the events written after the checkpoint.

    Raises:
        ConfigError: tensorboard is not installed, or the directory cannot be written.
    """

    _NOT_DRAWN = frozenset({"step", "examples", "epoch", "elapsed_s"})

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard(...) needs a package that is not installed; pip install tensorboard"
            ) from None
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{directory}: cannot hold TensorBoard's files ({error.strerror}); give one to write in"
            ) from None
        self._make_writer = SummaryWriter
        self._writer: Any = None

    def on_metrics(self, record: Record) -> None:
        """Writes the numbers of a training line."""
        self._write("train", record)

    def on_evaluation(self, record: Record) -> None:
        """Writes the numbers of an evaluation line."""
        self._write(str(record["split"]), record)

    def on_end(self, summary: Record | None) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, prefix: str, record: Record) -> None:
        step = int(record["step"])
        if self._writer is None:  # the first record tells from which step on older events are void
            self._writer = self._make_writer(str(self._directory), purge_step=step)
        for name, value in record.items():
            if name not in self._NOT_DRAWN and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{prefix}/{name}", value, step)
