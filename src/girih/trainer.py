"""The public trainer: a model, its tables and a strategy, ready to fit, evaluate and predict."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch import nn

from girih import checkpoint, config
from girih.checkpoint import CheckpointOptions, Storage
from girih.checkpoint.save import Save
from girih.checkpoint.state import RunState
from girih.cluster.cluster import Cluster
from girih.cluster.roles import RoleName
from girih.comm.group import TrainerGroup
from girih.config.train import MetricsOptions, ScheduleOptions, Steps, TrainOptions
from girih.data import Batch, Dataset
from girih.dense.accel.process_settings import limit_primitive_caches
from girih.dense.half import DenseHalf
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError
from girih.lifecycle.inheriting import Inherited
from girih.lifecycle.planning import Calibrated, facts_of, joined
from girih.lifecycle.run import TrainingRun
from girih.metrics import Metrics
from girih.optim import SparseOptimizer
from girih.planner.plan import Plan
from girih.publishing.log import PublishOptions
from girih.runs.callbacks import Callback, TensorBoard
from girih.runs.directory import RunDirectory
from girih.schema import Schema
from girih.sparse.half import SparseHalf
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.strategies import Strategy
from girih.strategies.local import Local
from girih.telemetry.stats import Spans, Stats
from girih.telemetry.status_file import ProcessId, StatusTarget, StatusWriter
from girih.training import evaluation
from girih.training.learning_rate import LearningRate
from girih.training.session import RunContext
from girih.training.specs import (
    check_metrics,
    dense_spec,
    expect,
    expect_data,
    gpu_of,
    schema_of,
    sparse_spec,
)
from girih.training.summary import summary_line

_EXPECTED = {
    "model": "a torch.nn.Module, as girih.models.DeepFM(schema)",
    "sparse_optimizer": "one of girih.optim",
    "first_order_optimizer": "one of girih.optim",
    "dense_optimizer": "a function of parameters, as lambda params: torch.optim.Adam(params, lr=1e-3)",
    "strategy": "a strategy, as girih.Hybrid() for 'hybrid', or an instance of a subclass of girih.strategies.Strategy",
    "schedule": "girih.ScheduleOptions(...)",
    "schema": "a girih.Schema",
    "options": "girih.TrainOptions(...)",
    "store": "girih.StoreOptions(...)",
    "checkpoints": "girih.CheckpointOptions(...)",
    "plan": "a plan, as girih plan prints it",
    "metrics": "girih.config.train.MetricsOptions(...)",
    "publish": "girih.PublishOptions(to=...)",
}
"""Arguments of a trainer → their types in words."""


class _RunView:
    """The state, plan, halves and phases of a trainer's run."""

    _run: TrainingRun

    @property
    def state(self) -> RunState:
        """The state of the run: its progress."""
        return self._run.state

    @property
    def plan(self) -> Plan | None:
        """The plan. None until the session opens, unless the argument ``plan`` is set."""
        return self._run.plan

    @property
    def sparse(self) -> SparseHalf:
        """The sparse half of the open session.

        Raises:
            ConfigError: no session is open; ``fit``, ``load`` and ``evaluate`` open it.
        """
        return self._run.opened()[1].sparse

    @property
    def dense(self) -> DenseHalf:
        """The dense half of the open session.

        Raises:
            ConfigError: no session is open; ``fit``, ``load`` and ``evaluate`` open it.
        """
        return self._run.opened()[1].dense

    @property
    def spans(self) -> Spans:
        """Phases of the run in this process, with their seconds."""
        return self._run.context.stats.spans

    @property
    def learning_rate(self) -> LearningRate:
        """The schedule of the learning rates of the open session.

        Raises:
            ConfigError: no session is open; ``fit``, ``load`` and ``evaluate`` open it.
        """
        self._run.opened()
        return self._run.trainer_state.learning_rate

    @property
    def restarts_all(self) -> bool:
        """True if the last ``fit`` stopped so that its launcher restarts all processes, in other numbers."""
        return self._run.restarts_all


class _Predictor(_RunView):
    """Evaluates and predicts with the weights of a run."""

    schema: Schema
    data: Mapping[str, Dataset]
    _cluster: Cluster
    _evaluated: tuple[str, Metrics] | None = None
    """The name of the data evaluated since the last fit, and its metrics."""

    def evaluate(self, data: Dataset | None = None) -> Metrics:
        """Returns exact metrics of every label.

        Args:
            data: examples with labels; None takes the test data of the config, or else its validation data.

        Raises:
            ConfigError: data of another schema or without labels, or a feature that only ``fit`` can standardize.
            NonFiniteError: the model returned NaN or infinity.
            KeyboardInterrupt: :meth:`request_stop` was called meanwhile.
        """
        if data is None:
            data = self._configured("test", "valid")
        expect_data("data", data, self.schema)
        with self._cluster.explaining():
            metrics = self._run.scoring.evaluate(data)
        names = (name for name, split in self.data.items() if split is data)
        if self._evaluated is None or self._evaluated[0] != "test":
            self._evaluated = next(names, Path(data.addresses[0]).name), metrics
        return metrics

    def _configured(self, *splits: str) -> Dataset:
        """Returns the first of some splits that the config has."""
        data = next((self.data[split] for split in splits if split in self.data), None)
        if data is None:
            raise ConfigError(
                f"no {' or '.join(splits)} data: give a Dataset, or use Trainer.from_config with data.{splits[0]} set"
            )
        return data

    def predictions(self, data: Dataset) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
        """Yields each batch in order, with its predictions float32[B, T]. Labels may be missing.

        A prediction is a probability, or the plain output for a label with mse or huber loss.

        Raises:
            ConfigError: data of another schema, or a feature that only ``fit`` can standardize.
            NonFiniteError: the model returned NaN or infinity.
        """
        expect_data("data", data, self.schema, labels=False)
        with self._cluster.explaining():
            session, normalization = self._run.scoring.ready()
            yield from evaluation.predictions(data, session, normalization, self.schema.labels.losses)

    def predict(self, data: Dataset) -> NDArray[np.float32]:
        """Returns the predictions for all examples in order, float32[n, T] for n examples and T labels.

        Raises:
            ConfigError, NonFiniteError: see :meth:`predictions`.
        """
        parts = [probabilities for _, probabilities in self.predictions(data)]
        return np.concatenate(parts) if parts else np.empty((0, len(self.schema.labels.names)), np.float32)

    def outputs(self, data: Dataset) -> NDArray[np.float32]:
        """Returns the model's outputs for all n examples in order, float32[n, ...]: logits, or towers side by side.

        Raises:
            ConfigError: data of another schema, no examples, or a strategy that computes parts of the model elsewhere.
        """
        expect_data("data", data, self.schema, labels=False)
        with self._cluster.explaining():
            outputs = evaluation.outputs_of(data, *self._run.scoring.ready())
            parts = [output.numpy() for _, output in outputs]
        if not parts:
            raise ConfigError("outputs: the data have no examples")
        return np.concatenate(parts)


class _Reporter(_Predictor):
    """Stops a run, summarizes it, and reports its end."""

    _ranks: TrainerGroup
    _start: float
    _directory: RunDirectory | None
    _ended: bool | None = None
    """None before the first fit."""
    _error: BaseException | None = None
    """The error of the last fit."""

    def request_stop(self) -> None:
        """Stops ``fit`` after its current step, with a checkpoint, or stops ``evaluate``, which raises.

        A signal handler, a callback or another thread may call this method, on any of several trainers.
        """
        self._ranks.request_stop()

    def summary(self, metrics: Metrics | None = None, *, duration_s: float | None = None) -> dict[str, Any]:
        """Returns the content of ``summary.json``. All trainers must call it.

        Args:
            metrics: of the final weights. By default the metrics that :meth:`evaluate` returned since the last ``fit``:
                on the test data of a config if there are any, else the latest. Without an evaluation, the metrics of
                the validation data in ``fit``.
            duration_s: wall-clock seconds of the run; None is the time since this trainer was made.
        """
        split, latest = self._evaluated or ("valid", self._run.final_metrics())
        metrics = metrics or latest
        with self._cluster.explaining():
            summary = self._run.summary(metrics, duration_s or time.perf_counter() - self._start)
        summary["evaluated_on"] = split if metrics is latest is not None else None
        summary["skipped_rows"] = {n: data.num_skipped for n, data in self.data.items() if data.num_skipped}
        return summary

    def end(self, summary: dict[str, object] | None, error: BaseException | None = None) -> None:
        """Ends the run: writes ``summary.json`` and calls ``on_end`` of callbacks. A second call does nothing.

        Args:
            summary: the result of :meth:`summary`; None if the run was stopped or failed.
            error: the reason for a failure, for ``on_error`` of callbacks.
        """
        if not self._ended:
            self._ended = True
            if summary is not None and self._directory is not None:
                self._directory.write_summary(summary)
            self._run.end(summary, error)


class Trainer(_Reporter, contextlib.AbstractContextManager["Trainer"]):
    """Trains a model whose embeddings are in growing tables.

    The session, with its tables and processes, opens with the first ``fit``, ``evaluate``, ``predict`` or ``load``.

    Args:
        model: any module of ``forward(numeric[B, X], embeddings) -> logits[B, T]``.
        sparse_optimizer: for tables without their own optimizer; None is Adagrad(lr=0.01).
        dense_optimizer: parameters → ``torch.optim`` optimizer; None is Adam(lr=1e-3).
        first_order_optimizer: for first-order weights; None is the sparse optimizer.
        strategy: a strategy of girih, or an instance of your own subclass of :class:`girih.strategies.Strategy`.
        schedule: packing, interleaving and prefetching.
        schema: by default the schema of the model.
        options: epochs, seed, precision and similar options.
        store: the memory of rows.
        checkpoints: the interval of checkpoints, if there is a ``run``.
        run: a directory for metrics, checkpoints and the timeline; None writes nothing.
        callbacks: receive every record.
        cluster: an existing cluster to join. By default, the ranks started by ``torchrun``. With several trainers, only
            rank 0 writes and calls back.
        plan: the plan to use, instead of the strategy's own plan.
        calibrated: the calibrated machine, to predict training examples per second; None predicts nothing.
        where: config file, named in errors.
        metrics: the endpoint at which each process of the run serves its metrics; None serves none.
        publish: where and how often ``fit`` publishes segments that servers follow; None publishes nothing.

    Attributes:
        data: the datasets of a config by split; empty without a config.
        showing: a context around the training in ``fit``: the progress bar of a config's trainer.

    Raises:
        ConfigError: options that contradict each other.

    Examples:
        >>> import girih
        >>> import pyarrow as pa
        >>> schema = girih.Schema([girih.Categorical(name="user", dim=4)], labels="clicked")
        >>> data = girih.read_arrow(pa.table({"user": [7, 8], "clicked": [1, 0]}), schema)
        >>> model = girih.models.DNN(schema, hidden=[8])
        >>> options = girih.TrainOptions(epochs=2, seed=1)
        >>> with girih.Trainer(
        ...     model, sparse_optimizer=girih.optim.Adam(), options=options, run="run"
        ... ) as trainer:
        ...     state = trainer.fit(data)
        ...     print(
        ...         state.step,
        ...         trainer.evaluate(data).num_examples,
        ...         trainer.predict(data).shape,
        ...     )
        2 2 (2, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparse_optimizer: SparseOptimizer | None = None,
        dense_optimizer: OptimizerFactory | None = None,
        first_order_optimizer: SparseOptimizer | None = None,
        strategy: Strategy | None = None,
        schedule: ScheduleOptions | None = None,
        schema: Schema | None = None,
        options: TrainOptions | None = None,
        store: StoreOptions | None = None,
        checkpoints: CheckpointOptions | None = None,
        run: str | os.PathLike[str] | RunDirectory | None = None,
        callbacks: Sequence[Callback] = (),
        cluster: Cluster | None = None,
        plan: Plan | None = None,
        calibrated: Calibrated | None = None,
        where: str | None = None,
        metrics: MetricsOptions | None = None,
        publish: PublishOptions | None = None,
    ) -> None:
        arguments = locals()
        kinds = get_type_hints(Trainer.__init__) | {"dense_optimizer": Callable | None}
        for name, description in _EXPECTED.items():
            expect(name, arguments[name], kinds[name], description)
        self.model = model
        self.schema = schema_of(model, schema)
        limit_primitive_caches(self.schema)
        self.options = (options or TrainOptions()).with_functions()
        self.strategy: Strategy = strategy or Local()
        expect("strategy.name", self.strategy.name or None, str, "a name for plans and summaries")
        check_metrics(self.options, self.schema)
        if self.options.gauc_by is not None:
            evaluation.feature_index(self.schema, self.options.gauc_by)
        self.stopped, self._closed, self._start = False, False, time.perf_counter()
        self.data: Mapping[str, Dataset] = {}
        self.showing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._opened: RunDirectory | None = None
        self._cluster = cluster or joined(self.strategy)
        self._ranks = self._cluster.ranks
        try:
            path = run.path if isinstance(run, RunDirectory) else None if run is None else Path(run)
            shared = self._ranks.broadcast(path and str(path.absolute()))
            shown_in = shared and Path(shared)  # the directory of the first trainer
            store = (store or StoreOptions()).within(shown_in)
            context = self._context(store, dense_optimizer, (sparse_optimizer, first_order_optimizer))
            facts = facts_of(context.sparse, context.dense, self._ranks.size, schedule)
            self.strategy.plan(facts)  # raises the strategy's errors early
            if not self._ranks.first:
                run, callbacks = None, ()
            elif self.options.tensorboard and run is None:
                raise ConfigError("tensorboard = true needs a run directory; give Trainer(run=...)")
            if not isinstance(run, RunDirectory | None):
                run = self._opened = RunDirectory(Path(run), resume=True)
            self._directory, directory = run, None if run is None else run.path
            if self.options.tensorboard and directory is not None:
                callbacks = [*callbacks, TensorBoard(directory / "tensorboard")]
            self._run = TrainingRun(
                context=replace(context, directory=directory),
                strategy=self.strategy,
                facts=facts,
                options=self.options,
                saving=checkpoints or CheckpointOptions(),
                callbacks=callbacks,
                plan=plan,
                calibrated=calibrated,
                where=where,
                publishing=publish,
            )
            self._reports = bool(self._ranks.broadcast(directory is not None or bool(callbacks)))
            self._cluster.show_in(directory, metrics)
            self._cluster.prepare(self.strategy.roles)
            identity = ProcessId(RoleName.TRAINER, self._ranks.rank, self._cluster.incarnation)
            target = StatusTarget(shown_in, metrics or MetricsOptions())
            self._status_writer = StatusWriter(identity, context.stats, target)
        except BaseException:
            if self._opened is not None:
                self._opened.close()
            self._cluster.close(failed=True)
            raise

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        overrides: Sequence[str] | Mapping[str, object] = (),
        *,
        strategy: str | None = None,
        run: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> Trainer:
        """Makes the trainer of a config file, as in ``girih train``, with its data, which ``fit()`` and ``evaluate()``
        use.

        Args:
            path: the config file.
            overrides: as in ``--set``, ``["train.epochs=2"]``, or a mapping of values, ``{"train.epochs": 2}``.
            strategy: the name of a strategy, which replaces ``[strategy]`` whole, before the overrides.
            run: the run directory. It gets a ``config.toml``, so that every command can read it. None writes nothing.
            callbacks: receive every record.
            progress: shows progress: a bar in notebooks and terminals, lines elsewhere.

        Raises:
            ConfigError: anything unknown, missing or of the wrong type.
            MissingFileError: the config or a file of the data does not exist.
            DataError: a file of the data does not fit the schema.
            RunDirectoryError: the run directory is not empty, or cannot be written.
        """
        from girih.app.run_config import RunConfig

        if isinstance(overrides, str):
            raise ConfigError(
                f"overrides = {overrides!r}: expected a list or a mapping, as in [{overrides!r}]"
            )
        directory = None if run is None else Path(run)
        settings = RunConfig.load(Path(path), overrides=overrides, strategy=strategy, run=directory)
        return settings.trainer_with_data(directory, callbacks, progress=progress)

    def _context(
        self,
        store: StoreOptions,
        dense_optimizer: OptimizerFactory | None,
        sparse_optimizers: tuple[SparseOptimizer | None, SparseOptimizer | None],
    ) -> RunContext:
        """Makes the live objects that the halves need.

        Args:
            sparse_optimizers: of rows, and of first-order weights.
        """
        stats, rank = Stats(), self._ranks.rank
        dense = dense_spec(self.model, self.schema, self.options, dense_optimizer, stats, rank)
        optional = (*sparse_optimizers, gpu_of(dense.device, rank))
        sparse = sparse_spec(self.model, self.schema, self.options, store, *optional)
        return RunContext(ranks=self._ranks, sparse=sparse, dense=dense, processes=self._cluster, stats=stats)

    def __repr__(self) -> str:
        session, rows = self._run.session, None
        if session is not None and not self._closed and isinstance(session.sparse, LocalSparse):
            rows = session.sparse.stats().rows if self._ranks.size == 1 else None
        return summary_line(self, self.model, self.state.step, self.schema, rows)

    def fit(
        self, train: Dataset | None = None, valid: Dataset | None = None, *, epochs: int | None = None
    ) -> RunState:
        """Trains the model, and evaluates it at the end of each epoch if there is ``valid``.

        With early stopping, the best weights are restored at the end. ``stopped`` says whether :meth:`request_stop`
        ended the training.

        Args:
            train: examples with labels; None takes the training and validation data of :meth:`from_config`.
            valid: examples to evaluate; None evaluates nothing.
            epochs: number of epochs to train, including an unfinished epoch; None takes ``epochs`` of the options.

        Returns:
            The state of the run: steps, examples, epochs, seconds of training.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; names the step.
            ConfigError: data of another schema, or no ``valid`` although the options need it.
            DataError: a bad row or a damaged file.
            RunDirectoryError: the run directory holds an earlier run that was not loaded.
        """
        epochs = self.options.epochs if epochs is None else epochs
        config.build(Steps, epochs, "epochs")
        if train is None:
            train, valid = self._configured("train"), valid or self.data.get("valid")
        self.check(train, valid)
        self._ended, self._error, self._evaluated = False, None, None
        with self._cluster.explaining(), self.showing:
            try:
                self.stopped = self._run.fit(train, valid, epochs)
            except BaseException as error:
                self.stopped, self._error = isinstance(error, KeyboardInterrupt), error
                raise
        return self.state

    def check(self, train: Dataset, valid: Dataset | None = None) -> None:
        """Raises the errors that :meth:`fit` would raise before it trains, but writes nothing.

        Args:
            train: examples with labels.
            valid: examples to evaluate, if any.

        Raises:
            ConfigError: data of another schema, data that does not fit a loaded position, or no ``valid`` although the
                options need it.
        """
        expect_data("train", train, self.schema)
        if valid is not None:
            expect_data("valid", valid, self.schema)
        elif (needing := self.options.needs_valid) is not None:
            raise ConfigError(f"{needing} needs validation data; set data.valid, or give fit(train, valid)")
        self._run.check(train)

    def rehearse(self, train: Dataset, valid: Dataset | None = None) -> None:
        """Does everything that :meth:`fit` does before its first step, and computes the loss of the first batch. Updates
        and writes nothing, but uses random numbers.

        Args:
            train: examples with labels.
            valid: examples to evaluate, if any.

        Raises:
            ConfigError, DataError: as in :meth:`fit`.
        """
        self.check(train, valid)
        with self._cluster.explaining():
            session, normalization = self._run.ready(train)
            batch = normalization.apply(train.first())
            session.dense.compute(batch, session.sparse.peek(batch).wait())

    def save(self, directory: str | os.PathLike[str]) -> Path | str:
        """Writes a checkpoint ``directory/step-…``. All trainers must call this method.

        Args:
            directory: a directory, or any other fsspec address.

        Returns:
            The path of the checkpoint, or its address if it is not local.

        Raises:
            StorageFullError: the disk is full.
        """
        run = self._run
        with self._cluster.explaining():
            run.open()
            run.checkpoints.settle(wait=True)
            content = run.content()
            content = replace(content, state={**content.state, "by_hand": True})
            saved = Save(Storage.at(directory), content, self._ranks).write()
        return saved.local or saved.url

    def load(
        self, directory: str | os.PathLike[str], *, resume: bool = True, train: Dataset | None = None
    ) -> None:
        """Takes rows and parameters from a checkpoint, or from the latest checkpoint of a run.

        Args:
            directory: a run directory, a directory or address of checkpoints, or one checkpoint.
            resume: also continue from its step, position and random state. Otherwise only evaluate and predict; a run
                with early stopping then gives its best weights.
            train: the data of the continued training, for a plan that depends on the data.

        Raises:
            MissingFileError: there is no such directory.
            CheckpointError: no checkpoint, a damaged one, or one of another schema, model or optimizer. This trainer is
                then unchanged; with several processes, some may have replaced their rows.
        """
        self._evaluated = None
        path = checkpoint.find(directory) if resume else checkpoint.final_of(directory)[0]
        with self._cluster.explaining():
            self._run.restore(path, train if resume else None, resume=resume)

    def init_from(self, directory: str | os.PathLike[str], *, train: Dataset | None = None) -> Inherited:
        """Begins with the weights of another run: rows by table, dense parameters by name and shape.

        The weights are final if the other run has ended. Everything else starts new: steps, data position, the dense
        optimizer, and features and tables that the other run does not have. The model, its features, dims, optimizers
        and strategy may differ. Call this method before any training.

        Args:
            directory: the other run directory, its checkpoints, or one checkpoint.
            train: the training data, for a plan that depends on it, and for an evaluation before ``fit``. It serves to
                measure standardized features that the other run does not have; otherwise ``fit`` measures them.

        Returns:
            The weights that were taken, and those that were not, with reasons; ``lines()`` describes them.

        Raises:
            MissingFileError: there is no such directory.
            CheckpointError: no checkpoint, or a damaged one.
            ConfigError: this trainer has trained already.
        """
        if self.state.step:
            raise ConfigError(
                f"init_from: this trainer is at step {self.state.step}; expected one that has trained nothing"
            )
        with self._cluster.explaining():
            return self._run.inherit(checkpoint.final_of(directory)[0], train)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the run by :meth:`end`, frees the tables' memory and the run directory, and ends the processes of the
        run.

        Leaving a ``with`` block does the same. A stopped run has no summary. If the last ``fit`` failed, or ``error``
        is set, there is no summary either, and callbacks get ``on_error``.

        Args:
            error: the reason for a failure outside ``fit``, for ``on_error`` of callbacks.
        """
        self._closed, failure = True, error or self._error
        with contextlib.ExitStack() as closing:  # all are closed, even if one raises
            if self._opened is not None:
                closing.callback(self._opened.close)
            closing.push(lambda kind, *_: self._cluster.close(failed=error is not None or kind is not None))
            closing.callback(self._run.close)
            closing.callback(self._status_writer.close)
            if self._ended is False and self._reports:
                # if the run failed, its first error is the one to report
                with contextlib.suppress(*[Exception] if failure else []):
                    self.end(None if failure or self.stopped else self.summary(), failure)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
