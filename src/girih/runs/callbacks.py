"""Callbacks that receive training events."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from girih.errors import ConfigError

Record = Mapping[str, Any]
_NOT_DRAWN = frozenset({"step", "examples", "epoch", "elapsed_s"})


class Callback(Protocol):
    """Receives every record of a run, in the trainer process of rank 0, between two steps.

    Any object with these methods will do; a subclass overrides only those it needs.
    An exception raised by a callback stops the run.
    """

    def on_plan(self, plan: Record) -> None:
        """Receives the plan, as ``plan.json`` has it, before training begins, and again where it goes on by another one, as a scaled run does."""
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
        for name, value in _numbers(prefix, record).items():
            self._writer.add_scalar(name, value, step)


class MLflow(Callback):
    """Logs records to MLflow by step, as :class:`TensorBoard` names them, and numbers of the summary as ``final/<name>``.

    They go to the run that is active, else to a new one, where ``MLFLOW_TRACKING_URI`` or ``mlflow.set_tracking_uri`` says.

    Args:
        params: what the run was started with, as ``{"lr": 0.1}``.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, params: Record | None = None) -> None:
        self._client, self._params = _imported("mlflow", "MLflow"), dict(params or {})

    def on_plan(self, plan: Record) -> None:
        """Logs the parameters, and the strategy."""
        self._client.log_params({**self._params, "strategy": plan["strategy"]})

    def on_metrics(self, record: Record) -> None:
        """Logs the numbers of a training line."""
        self._client.log_metrics(_numbers("train", record), step=int(record["step"]))

    def on_evaluation(self, record: Record) -> None:
        """Logs the numbers of an evaluation line."""
        self._client.log_metrics(_numbers(str(record["split"]), record), step=int(record["step"]))

    def on_end(self, summary: Record | None) -> None:
        """Logs the summary and ends MLflow's run."""
        self._client.log_metrics(_numbers("final", summary or {}))
        self._client.end_run("FINISHED" if summary is not None else "KILLED")


class WandB(Callback):
    """Logs records to Weights & Biases by step, as :class:`TensorBoard` names them; the summary goes to the run's summary.

    They go to the run that is active, else to a new one with the ``options`` of ``wandb.init``.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        client = _imported("wandb", "WandB")
        self._run = client.run or client.init(**options)

    def on_metrics(self, record: Record) -> None:
        """Logs the numbers of a training line."""
        self._run.log(_numbers("train", record), step=int(record["step"]))

    def on_evaluation(self, record: Record) -> None:
        """Logs the numbers of an evaluation line."""
        self._run.log(_numbers(str(record["split"]), record), step=int(record["step"]))

    def on_end(self, summary: Record | None) -> None:
        """Notes the summary and ends the run."""
        self._run.summary.update(_numbers("final", summary or {}))
        self._run.finish(exit_code=0 if summary is not None else 130)


def _imported(package: str, callback: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{callback}(...) needs a package that is not installed; pip install {package}"
        ) from None


def _numbers(prefix: str, record: Record) -> dict[str, float]:
    """The numbers of a record to draw, as ``prefix/name``."""
    return {
        f"{prefix}/{name}": value
        for name, value in record.items()
        if name not in _NOT_DRAWN and isinstance(value, int | float) and not isinstance(value, bool)
    }
