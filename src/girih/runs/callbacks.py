"""Callbacks that receive training events."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, runtime_checkable

from girih.errors import ConfigError

Record = Mapping[str, object]
_NOT_DRAWN = frozenset({"step", "examples", "epoch", "elapsed_s"})
_MOST_PARAMS, _MOST_IN_PARAM = 100, 6000
"""Limits of MLflow: parameters in a request, and characters of a parameter."""


@runtime_checkable
class Callback(Protocol):
    """Receives every record of a run, in the trainer process of rank 0, between two steps.

    A subclass overrides only the methods that it needs. An object of another class needs ``on_plan``, ``on_metrics``,
    ``on_evaluation`` and ``on_end``. An exception raised by a callback stops the run.

    Examples:
        Give a callback to a trainer: ``girih.Trainer(model, callbacks=[Losses()])``.

        >>> import girih
        >>> class Losses(girih.Callback):
        ...     def on_metrics(self, record):
        ...         print(f"step {record['step']}: loss {record['loss']:.2f}")
        >>> Losses().on_metrics({"step": 50, "loss": 0.6931})
        step 50: loss 0.69
    """

    def on_config(self, options: Record) -> None:
        """Receives the config's options by dotted name, secrets masked, before everything else. Needs a config.

        Args:
            options: such as ``{"train.epochs": 3}``.
        """
        return

    def on_plan(self, plan: Record) -> None:
        """Receives ``plan.json`` before training begins, and again if the plan changes, for example by scaling."""
        return

    def on_metrics(self, record: Record) -> None:
        """Receives a training line of ``metrics.jsonl``: ``step``, ``examples``, ``loss``, ``rows`` and more.

        Args:
            record: name → value. ``elapsed_s`` is the seconds of the run so far, and ``rss_bytes`` the resident memory of its
                processes, in bytes.
        """
        return

    def on_evaluation(self, record: Record) -> None:
        """Receives an evaluation line of ``metrics.jsonl``: ``step``, ``split``, ``auc``, ``logloss`` and more.

        Args:
            record: name → number, or the name of the data for ``split``. An undefined metric is None.
        """
        return

    def on_end(self, summary: Record | None) -> None:
        """Receives ``summary.json`` once, at the very end; None if the run was stopped early."""
        return

    def on_error(self, error: BaseException) -> None:
        """Receives the exception that ended the run, instead of ``on_end``. By default calls ``on_end(None)``."""
        self.on_end(None)


class _Tracker(Callback):
    """Sends the numbers of records to another program."""

    _options: Record = MappingProxyType({})

    def on_config(self, options: Record) -> None:
        """Keeps the options for the plan."""
        self._options = options

    def on_evaluation(self, record: Record) -> None:
        """Handles an evaluation line in the same way. The names of its numbers have the split as prefix."""
        self.on_metrics(record)


class TensorBoard(_Tracker):
    """Writes training records as ``train/<name>`` and evaluations as ``<split>/<name>``, by step.

    Args:
        directory: for the event files; created if missing. A resumed run may use the directory of the
            stopped one: TensorBoard then hides the events written after the checkpoint.

    Raises:
        ConfigError: tensorboard is not installed, or the directory cannot be written.

    Examples:
        >>> import girih
        >>> board = girih.TensorBoard("logs")
        >>> board.on_metrics({"step": 50, "loss": 0.69})
        >>> board.on_end(None)
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._make_writer = _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{directory}: cannot hold TensorBoard's files ({error.strerror}); give one to write in"
            ) from None
        self._writer: Any = None

    def on_metrics(self, record: Record) -> None:
        """Writes the numbers of a line."""
        step = record["step"]
        if self._writer is None:  # TensorBoard hides older events from the first record's step on
            self._writer = self._make_writer(str(self._directory), purge_step=step)
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, summary: Record | None) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(_Tracker):
    """Logs records to MLflow by step, named as in :class:`TensorBoard`; final metrics as ``final/<name>``.

    In names, ``@`` becomes ``_at_``. Records go to the active run, else to a new run, at ``MLFLOW_TRACKING_URI`` or ``mlflow.set_tracking_uri``. The options
    of the config become parameters of the run. A resumed run keeps its parameters.

    Args:
        params: more parameters, for example ``{"lr": 0.1}``; they replace options of the same name.

    Raises:
        ConfigError: mlflow is not installed. Methods also raise it if MLflow refused the values, or if its server does
            not answer.

    Examples:
        >>> import girih
        >>> tracker = girih.MLflow(params={"owner": "ads"})
        >>> trainer = girih.Trainer(model, callbacks=[tracker])  # doctest: +SKIP
    """

    def __init__(self, params: Record | None = None) -> None:
        self._client, self._params = _imported("mlflow", "MLflow", "mlflow"), dict(params or {})

    def on_plan(self, plan: Record) -> None:
        """Begins MLflow's run, unless one is active, and logs its parameters: options, ``params`` and the strategy."""
        run = self._client.active_run()
        if run is None:
            run = self._call("start_run")
            print(
                f"girih: MLflow: run {run.info.run_id} at {self._client.get_tracking_uri()}", file=sys.stderr
            )
        params: dict[str, str] = {}
        for key, value in {**self._options, "strategy": plan["strategy"], **self._params}.items():
            name, text = _mlflow_name(key), str(value)
            while name in params:
                name += "_"
            params[name] = text if len(text) <= _MOST_IN_PARAM else f"{text[: _MOST_IN_PARAM - 3]}..."
        items = [item for item in params.items() if item[0] not in run.data.params]
        for begin in range(0, len(items), _MOST_PARAMS):
            self._call("log_params", dict(items[begin : begin + _MOST_PARAMS]))

    def on_metrics(self, record: Record) -> None:
        """Logs the numbers of a line."""
        self._log(_numbers(record), step=record["step"])

    def on_end(self, summary: Record | None) -> None:
        """Logs the summary and ends MLflow's run."""
        if summary is not None:
            self._log(_final_numbers(summary))
        self._call("end_run", "KILLED" if summary is None else "FINISHED")

    def on_error(self, error: BaseException) -> None:
        """Ends MLflow's run as failed."""
        self._call("end_run", "FAILED")

    def _log(self, numbers: Mapping[str, float], **step: object) -> None:
        self._call("log_metrics", {_mlflow_name(name): value for name, value in numbers.items()}, **step)

    def _call(self, function: str, *values: object, **step: object) -> Any:
        try:
            return getattr(self._client, function)(*values, **step)
        except self._client.exceptions.MlflowException as error:
            reason = " ".join(str(error).split()).partition(". ")[0][:300]
            raise ConfigError(
                f"MLflow: {reason}; set MLFLOW_TRACKING_URI to a server, or to file:./mlruns together with MLFLOW_ALLOW_FILE_STORE=true"
            ) from None


class WandB(_Tracker):
    """Logs records to Weights & Biases by step, named as in :class:`TensorBoard`; final metrics to its summary.

    They go to the run that is active when training begins, else to a new run.
    The options of girih's config are added to the run's config, except names that it already has.

    Args:
        options: arguments of ``wandb.init`` for a new run.

    Raises:
        ConfigError: wandb is not installed.

    Examples:
        >>> import girih
        >>> tracker = girih.WandB(project="ads", tags=["daily"])  # doctest: +SKIP
        >>> trainer = girih.Trainer(model, callbacks=[tracker])  # doctest: +SKIP
    """

    def __init__(self, **options: object) -> None:
        self._client, self._init = _imported("wandb", "WandB", "wandb"), options

    def on_plan(self, plan: Record) -> None:
        """Begins the run, unless one is active, and adds options and the strategy to its config."""
        run = self._client.run or self._client.init(**self._init)
        options = {**self._options, "strategy": plan["strategy"]}
        run.config.update({name: value for name, value in options.items() if name not in run.config})
        # an evaluation may come after training lines of later steps
        run.define_metric("*", step_metric="step")

    def on_metrics(self, record: Record) -> None:
        """Logs the numbers of a line."""
        self._client.run.log({**_numbers(record), "step": record["step"]})

    def on_end(self, summary: Record | None) -> None:
        """Writes the final metrics to the run's summary and ends the run."""
        if summary is not None:
            self._client.run.summary.update(_final_numbers(summary))
        self._client.finish(exit_code=130 if summary is None else 0)

    def on_error(self, error: BaseException) -> None:
        """Ends the run as failed."""
        self._client.finish(exit_code=1)


def _imported(module: str, callback: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{callback}(...) needs a package that is not installed; pip install 'girih[{package}]'"
        ) from None


def number_of(record: Record, name: str) -> float:
    """Returns a number that each record of its kind has."""
    value = record[name]
    if not isinstance(value, int | float):
        raise TypeError(f"{name} = {value!r}: expected a number")
    return value


def _numbers(record: Record, prefix: str | None = None) -> dict[str, float]:
    """Returns a record's numbers as ``prefix/name``. The default prefix is the split of the line, or ``train``."""
    return {
        f"{prefix or record.get('split', 'train')}/{name}": value
        for name, value in record.items()
        if name not in _NOT_DRAWN and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _final_numbers(summary: Record) -> dict[str, float]:
    """Returns the numbers of a summary as ``final/name``, and those of each label as ``final/label/name``."""
    numbers = _numbers(summary, "final")
    by_label = summary.get("by_label", {})
    for label, metrics in by_label.items() if isinstance(by_label, dict) else ():
        numbers |= _numbers(metrics, f"final/{label}")
    return numbers


def _mlflow_name(name: str) -> str:
    """Returns a name that MLflow accepts, with room to make it unique."""
    return re.sub(r"[^\w.\- /]|^/|/(?=[/.]|$)", "_", name[:200].replace("@", "_at_"))
