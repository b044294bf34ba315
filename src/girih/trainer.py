"""The public trainer: a model, its tables and a strategy, ready to fit, evaluate and predict."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from girih import checkpoint
from girih.checkpoint import CheckpointOptions, Content
from girih.cluster import Cluster
from girih.config.train import TrainOptions
from girih.data import Dataset, NormalizationStats, Position
from girih.dense.half import DenseHalf
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError, RunDirectoryError
from girih.metrics import Metrics, Scores
from girih.optim import SparseOptimizer
from girih.planner.plan import Plan
from girih.runs.callbacks import Callback, TensorBoard
from girih.runs.checkpoints import RunCheckpoints
from girih.runs.directory import RunDirectory
from girih.runs.files import write_whole
from girih.runs.log import RunLog, rewind
from girih.runs.stats import Spans, Stats
from girih.runs.summary import summarize
from girih.runs.timeline import write_timeline
from girih.runs.totals import timelines, totals
from girih.schema import Schema
from girih.sparse.half import SparseHalf
from girih.sparse.options import StoreOptions
from girih.strategies import Local, Strategy, roles_of
from girih.strategies.planning import decide, facts_of
from girih.training import evaluation, random_state
from girih.training.arguments import expect, refuse_other_schema, schema_of
from girih.training.context import RunContext
from girih.training.learning_rate import LearningRate
from girih.training.loop import Loop
from girih.training.session import Session
from girih.training.specs import dense_spec, sparse_spec
from girih.training.state import RunState


class Trainer:
    """Trains a model whose embeddings live in growing tables.

    The session, which has tables and processes, opens with the first ``fit``, ``evaluate``, ``predict`` or ``load``.

    Args:
        model: any module of ``forward(numeric[B, X], embeddings) -> logits[B, T]``.
        sparse_optimizer: for tables that have none of their own; Adagrad(lr=0.01) where None.
        dense_optimizer: parameters → ``torch.optim`` optimizer; Adam(lr=1e-3) where None.
        first_order_optimizer: for first-order weights; the sparse optimizer where None.
        strategy: how training is interlaced: one of girih's, or any object with ``plan`` and ``build``.
        schema: taken from the model, where it has one.
        options: epochs, seed, precision and the like.
        store: where rows live. checkpoints: how often to save, when a ``run`` is given.
        run: a directory for metrics, checkpoints and the timeline; None writes nothing.
        callbacks: receive every record.
        cluster: an existing cluster to join. By default, the ranks started by ``torchrun``. With several trainers
            only rank 0 writes and calls back.
        plan: the plan to hold, instead of one that the strategy makes.

    Raises:
        ConfigError: options that do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparse_optimizer: SparseOptimizer | None = None,
        dense_optimizer: OptimizerFactory | None = None,
        first_order_optimizer: SparseOptimizer | None = None,
        strategy: Strategy | None = None,
        schema: Schema | None = None,
        options: TrainOptions | None = None,
        store: StoreOptions | None = None,
        checkpoints: CheckpointOptions | None = None,
        run: str | os.PathLike[str] | RunDirectory | None = None,
        callbacks: Sequence[Callback] = (),
        cluster: Cluster | None = None,
        plan: Plan | None = None,
    ) -> None:
        expect("model", model, nn.Module, "a torch.nn.Module, as girih.models.DeepFM(schema)")
        expect("sparse_optimizer", sparse_optimizer, SparseOptimizer | None, "one of girih.optim")
        expect("first_order_optimizer", first_order_optimizer, SparseOptimizer | None, "one of girih.optim")
        expect("strategy", strategy, Strategy | None, "a strategy, as girih.Local()")
        expect("schema", schema, Schema | None, "a girih.Schema")
        expect("options", options, TrainOptions | None, "girih.TrainOptions(...)")
        expect("store", store, StoreOptions | None, "girih.StoreOptions(...)")
        expect("checkpoints", checkpoints, CheckpointOptions | None, "girih.CheckpointOptions(...)")
        expect("plan", plan, Plan | None, "a plan, as girih plan prints it")
        if dense_optimizer is not None and not callable(dense_optimizer):
            raise ConfigError(
                f"dense_optimizer: a {type(dense_optimizer).__name__}; expected a function of parameters, "
                "as lambda params: torch.optim.Adam(params, lr=1e-3)"
            )
        self.model = model
        self.schema = schema_of(model, schema)
        self.options = options or TrainOptions()
        self.strategy: Strategy = strategy or Local()
        self.checkpoints = checkpoints or CheckpointOptions()
        if self.options.gauc_by is not None:
            evaluation.feature_index(self.schema, self.options.gauc_by)
        self._cluster = cluster or Cluster.join(self.strategy.trainers)
        self._ranks = self._cluster.ranks
        try:
            self._context = self._context_of(sparse_optimizer, first_order_optimizer, dense_optimizer, store)
            self._facts = facts_of(self._context.sparse, self._context.dense, self._ranks.size)
            self.strategy.plan(self._facts)  # what it refuses, it refuses now
            LearningRate(None, self.options.lr_schedule)
            self._session: Session | None = None
            self._pinned, self.plan = plan, plan
            self._begin(run, callbacks)
            self._cluster.prepare(roles_of(self.strategy))
        except BaseException:
            self._cluster.close(failed=True)
            raise

    def _context_of(
        self,
        sparse_optimizer: SparseOptimizer | None,
        first_order_optimizer: SparseOptimizer | None,
        dense_optimizer: OptimizerFactory | None,
        store: StoreOptions | None,
    ) -> RunContext:
        stats = Stats()
        spec = sparse_spec(
            self.model, self.schema, self.options, store, sparse_optimizer, first_order_optimizer
        )
        dense = dense_spec(self.model, self.options, dense_optimizer, stats, self._ranks.rank)
        return RunContext(
            ranks=self._ranks,
            sparse=spec,
            dense=dense,
            processes=self._cluster,
            stats=stats,
            seed=self.options.seed,
        )

    def _begin(
        self, run: str | os.PathLike[str] | RunDirectory | None, callbacks: Sequence[Callback]
    ) -> None:
        if not self._ranks.first:
            run, callbacks = None, ()
        self.state = RunState()
        self.normalization: NormalizationStats | None = None
        self.stopped = False
        self._opened = None if isinstance(run, RunDirectory | None) else RunDirectory(Path(run), resume=True)
        directory = run if isinstance(run, RunDirectory) else self._opened
        self._run = None if directory is None else directory.path
        self._saves = bool(self._ranks.broadcast(self._run is not None))
        self._run_checkpoints = RunCheckpoints(self._run, self.checkpoints.keep, self._ranks)
        self._callbacks = list(callbacks)
        if self.options.tensorboard and self._ranks.first:
            if self._run is None:
                raise ConfigError("tensorboard = true needs a run directory; give Trainer(run=...)")
            self._callbacks.append(TensorBoard(self._run / "tensorboard"))
        self._log: RunLog | None = None
        self._resumed = False
        self._loaders: Mapping[str, Mapping[str, Any]] = {}
        self._cluster.show_in(self._run)

    @property
    def session(self) -> Session:
        """The halves, and how they are joined and fed.

        Raises:
            ConfigError: it is not open yet.
        """
        if self._session is None:
            raise ConfigError("this trainer has no tables yet; fit, load or evaluate first")
        return self._session

    @property
    def sparse(self) -> SparseHalf:
        """The sparse half of the session."""
        return self.session.sparse

    @property
    def dense(self) -> DenseHalf:
        """The dense half of the session."""
        return self.session.dense

    @property
    def spans(self) -> Spans:
        """Phases of the run in this process."""
        return self._context.stats.spans

    def _open(self, train: Dataset | None = None, earlier: Plan | None = None) -> Session:
        """Plans and builds, once; called by all trainers together."""
        if self._session is not None:
            return self._session
        self.plan = decide(
            self.strategy,
            self._facts,
            self._ranks,
            self._context.sparse,
            train=train,
            earlier=earlier,
            pinned=self._pinned,
        )
        if self._run is not None:
            write_whole(self._run / "plan.json", json.dumps(self.plan.to_dict(), indent=1) + "\n")
        self._session = self.strategy.build(self.plan, self._context)
        if not self._ranks.first and self.plan.seeds.get("dropout") == "per_rank":
            torch.manual_seed(self.options.seed + self._ranks.rank)
        self.learning_rate = LearningRate(self._session.optimizer, self.options.lr_schedule)
        return self._session

    def fit(self, train: Dataset, valid: Dataset | None = None, *, epochs: int | None = None) -> RunState:
        """Trains for ``epochs`` more epochs (the options' number where None), the one under way counted in.

        Under early stopping the best weights are put back at the end. ``stopped`` says whether
        :meth:`request_stop` ended it.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; names the step.
            ConfigError: data of another schema, or no ``valid`` where the options need it.
            DataError: a bad row or a damaged file.
            RunDirectoryError: the run directory holds an earlier run that was not loaded.
        """
        epochs = self.options.epochs if epochs is None else epochs
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
            raise ConfigError(f"epochs = {epochs!r}: expected an integer of at least 0")
        self.check(train, valid)
        self._run_checkpoints.forget_latest()
        if epochs and self.state.stopped_early:  # asked to go on all the same
            self.state.stopped_early, self.state.bad_evaluations = False, 0
        try:
            with self._cluster.explaining():
                self._fit(self._open(train), train, valid, epochs)
            self.stopped = self._ranks.stopping
        except KeyboardInterrupt:
            self.stopped = True
            raise
        finally:
            self._ranks.forget_stop()
        if self.state.best_step is not None and not self.stopped:
            self._restore(self._run_checkpoints.best(self.state.best_step))
        return self.state

    def _fit(self, session: Session, train: Dataset, valid: Dataset | None, epochs: int) -> None:
        if self.normalization is None:
            self.normalization = self._measure(train)
        self._context.stats.spans = Spans()
        self._loaders = {}
        log = self._open_log()
        feed = session.feed.train(train, self.normalization)
        log.begin(self.state, session.sparse.stats().store)
        for callback in self._callbacks:
            callback.on_plan(self._planned().to_dict())
        loop = Loop(
            session=session,
            feed=feed,
            learning_rate=self.learning_rate,
            options=self.options,
            state=self.state,
            log=log,
            save=self._begin_save,
            settle_saves=self._run_checkpoints.settle,
            score=None if valid is None else lambda: self._score(valid),
            label_names=self.schema.labels.names,
            save_every_steps=self.checkpoints.every_steps if self._saves else None,
            ranks=self._ranks,
            spans=self.spans,
        )
        try:
            loop.run(self.state.epoch + epochs)
            self._ranks.finish()  # others may need the loaders still
            self._loaders = feed.stats()
            loop.close()
            self._run_checkpoints.settle(wait=True)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                loop.close()
                self._note(log, failed=True)
            with contextlib.suppress(Exception):
                self._run_checkpoints.settle(wait=True)
            raise
        self._ranks.barrier()  # one that is behind still reads
        session.feed.end_training()
        self._note(log)
        if self._saves:
            self._begin_save()
            self._run_checkpoints.settle(wait=True)

    def check(self, train: Dataset, valid: Dataset | None = None) -> None:
        """Refuses what :meth:`fit` would refuse, but writes nothing.

        Raises:
            ConfigError: data of another schema, data in which a loaded position has no meaning, or no
                ``valid`` where the options need it.
        """
        self._check("train", train)
        if valid is not None:
            self._check("valid", valid)
        elif (needing := self.options.needs_valid) is not None:
            raise ConfigError(f"{needing} needs validation data; set data.valid, or give fit(train, valid)")
        if self._run is not None and not self._resumed and self.state.step == 0:
            earlier = checkpoint.latest(self._run / "checkpoints")
            if earlier is not None:
                raise RunDirectoryError(
                    f"{self._run}: holds an earlier run ({earlier.name}); name another, or load it first"
                )
        if self.state.position is not None:
            position = Position.from_dict(self.state.position)
            train.batches(position.epoch, position)

    def evaluate(self, data: Dataset) -> Metrics:
        """Exact metrics of every label.

        Raises:
            ConfigError: data of another schema or without labels, or a feature that only ``fit`` can standardize.
            NonFiniteError: the model returned NaN or infinity.
            KeyboardInterrupt: :meth:`request_stop` was called meanwhile.
        """
        self._check("data", data)
        with self._cluster.explaining():
            self._open()
            scores = self._score(data)
        if self._ranks.stopping:
            self._ranks.forget_stop()
            raise KeyboardInterrupt
        own = None if scores is None else scores.result(self.schema.labels.names).as_dict()
        return Metrics.from_dict(self._ranks.broadcast(own))

    def predictions(self, data: Dataset) -> Iterator[tuple[Any, NDArray[np.float32]]]:
        """Each batch in order, with its probabilities float32[B, T].

        Raises:
            ConfigError: see :meth:`evaluate`; labels may be missing.
        """
        self._check("data", data, labels=False)
        session = self._open()
        for batch, logits in evaluation.logits_of(data, session, self._normalization(), whole=True):
            yield batch, torch.sigmoid(logits.double()).float().numpy()

    def predict(self, data: Dataset) -> NDArray[np.float32]:
        """Probabilities of all examples in order, float32[examples, T]."""
        parts = [probabilities for _, probabilities in self.predictions(data)]
        return np.concatenate(parts) if parts else np.empty((0, len(self.schema.labels.names)), np.float32)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a checkpoint ``directory/step-…``; it has that name only when it is complete."""
        self._open()
        self._run_checkpoints.settle(wait=True)
        if not self._ranks.first:
            checkpoint.SaveBeside(self._content()).write()
            return Path(directory) / checkpoint.name_of(self.state.step)
        return checkpoint.Save(Path(directory), self._content()).write()

    def load(
        self, directory: str | os.PathLike[str], *, resume: bool = True, train: Dataset | None = None
    ) -> None:
        """Takes rows and parameters from a checkpoint, or from a run: its latest.

        Args:
            resume: go on from its step, position and random state too; else only evaluate and predict: of a run
                under early stopping, with its best weights.
            train: the data that training goes on with, for a plan that depends on it.

        Raises:
            CheckpointError: none there, a damaged one, or one of another schema, model or optimizer.
        """
        path = checkpoint.find(Path(directory))
        if not resume:
            best = checkpoint.Manifest.read(path).state["run"]["best_step"]
            is_run = best is not None and Path(directory) != path
            self._restore(checkpoint.find(path.parent, step=best) if is_run else path)
            return
        state = self._restore(path, train)
        self.state = RunState.from_dict(state["run"])
        if self.options.early_stopping is None:  # no best weights to come back to
            self.state.best_step, self.state.best_value, self.state.stopped_early = None, None, False
        if self.state.best_step is not None:
            self._run_checkpoints.set_best(checkpoint.find(path.parent, step=self.state.best_step))
        self.learning_rate.restore(state["learning_rate"])
        random_state.restore(state["random"], self._ranks.rank)
        self._resumed = True
        self._log = None  # the next one drops the records that come after this state

    def request_stop(self) -> None:
        """Has ``fit`` return after the step under way, a checkpoint written, or ``evaluate`` raise.

        Callable from a signal handler, a callback or another thread; on any of several trainers.
        """
        self._ranks.request_stop()

    def summary(self, metrics: Metrics | None, *, duration_s: float) -> dict[str, Any]:
        """What ``summary.json`` holds; ``metrics`` are those of the final weights. All trainers call it."""
        stats, plan = self.sparse.stats(), self._planned()
        facts = {
            "strategy": self.strategy.name,
            "trainers": self._ranks.size,
            "precision": self.options.precision,
            "seed": self.options.seed,
            "model": type(self.model).__name__,
            "dense_parameters": self._facts.model.num_parameters,
            "duration_s": duration_s,
            **({"plan": dict(plan.predicted)} if plan.predicted else {}),
        }
        return summarize(
            self.state,
            metrics,
            counters=stats.store,
            num_rows=sum(stats.rows.values()),
            phases_s=self.spans.totals_s,
            totals=totals(self._ranks, self._context.stats, stats, self.dense, self._loaders, self.state),
            facts=facts,
        )

    def end(self, summary: dict[str, Any] | None) -> None:
        """Tells callbacks that the run is over."""
        self._open_log().end(summary)

    def close(self, *, failed: bool = False) -> None:
        """Gives the tables' memory and the run directory back, and ends the processes of the run."""
        with contextlib.ExitStack() as closing:  # each is closed, whatever another one raises
            if self._opened is not None:
                closing.callback(self._opened.close)
            closing.push(lambda kind, *_: self._cluster.close(failed=failed or kind is not None))
            if self._session is not None:
                closing.callback(self._session.dense.close)
                closing.callback(self._session.sparse.close)
            closing.callback(self._run_checkpoints.close)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _planned(self) -> Plan:
        if self.plan is None:
            raise ConfigError("this trainer has no plan yet; fit, load or evaluate first")
        return self.plan

    def _check(self, what: str, data: Dataset, *, labels: bool = True) -> None:
        expect(what, data, Dataset, "a girih.Dataset, as girih.read_parquet(paths, schema) makes")
        refuse_other_schema(what, data.schema, self.schema)
        if labels and not data.with_labels:
            raise ConfigError(f"{what}: read without labels; expected with_labels=True")

    def _measure(self, train: Dataset) -> NormalizationStats:
        """Rank 0 reads what is to be standardized, and tells the others."""
        found, stopped = None, False
        if self._ranks.first:
            try:
                measured = NormalizationStats.of(train, stop_requested=lambda: self._ranks.stop_requested)
                found = measured.to_dict()
            except KeyboardInterrupt:
                stopped = True
        told = self._ranks.broadcast(found)
        if stopped or told is None:
            raise KeyboardInterrupt
        return NormalizationStats.from_dict(told, self.schema)

    def _note(self, log: RunLog, *, failed: bool = False) -> None:
        """Writes what was not yet written of the steps so far."""
        sparse = self.session.sparse
        log.flush(self.state, self.learning_rate.scale(), None if failed else lambda: sparse.stats().store)
        own = self._context.stats
        if failed:
            processes = {f"trainer {self._ranks.rank}": own.spans.events()}
        else:
            processes = timelines(self._ranks, own, {**self._loaders, **sparse.stats(spans=True).processes})
        if self._run is not None:
            write_timeline(self._run / "timeline.json", processes, own.spans.totals_s)

    def _score(self, data: Dataset) -> Scores | None:
        """Scores a dataset, each trainer its shares; on rank 0 those of all, None on the others."""
        ranks, session = self._ranks, self.session
        session.sync()
        ranks.barrier()
        scores = evaluation.score(
            data,
            session,
            self._normalization(),
            gauc_by=self.options.gauc_by,
            stop_requested=ranks.stop_together if ranks.size > 1 else lambda: ranks.stopping,
        )
        if ranks.size == 1:
            return scores
        gathered = ranks.gather_arrays(scores.arrays())
        if gathered is None:
            return None
        scores = Scores()
        for arrays in gathered:
            scores.merge(Scores.from_arrays(arrays))
        return scores

    def _restore(self, path: Path, train: Dataset | None = None) -> dict[str, Any]:
        self._run_checkpoints.forget_latest()
        plan = checkpoint.Manifest.read(path).state.get("plan")
        session = self._open(train, None if plan is None else Plan.from_dict(plan, str(path)))
        state = checkpoint.load(path, schema=self.schema, sparse=session.sparse, dense=session.dense)
        kept = state["normalization"]
        self.normalization = None if kept is None else NormalizationStats.from_dict(kept, self.schema)
        return state

    def _normalization(self) -> NormalizationStats:
        if self.normalization is not None:
            return self.normalization
        empty = NormalizationStats.empty(self.schema)
        if empty.features:
            raise ConfigError(
                f"feature {empty.features[0]!r} is standardized by the training data: fit or load first"
            )
        return empty

    def _open_log(self) -> RunLog:
        if self._log is None:
            path = None if self._run is None else self._run / "metrics.jsonl"
            if path is not None and self._resumed:
                rewind(path, self.state)
            self._log = RunLog(path, self._callbacks, self.options.log_every_steps)
        return self._log

    def _begin_save(self) -> None:
        self._run_checkpoints.begin(self._content, self.state.best_step, self.spans)

    def _content(self) -> Content:
        """What a checkpoint of now holds; called by all trainers together."""
        session = self.session
        session.sync()
        self._ranks.barrier()
        return Content(
            step=self.state.step,
            schema=self.schema,
            state={
                "run": self.state.to_dict(),
                "learning_rate": self.learning_rate.state(),
                "normalization": None if self.normalization is None else self.normalization.to_dict(),
                "random": random_state.gather(self._ranks, self._context.dense.device),
                "plan": self._planned().to_dict(),
            },
            sparse=session.sparse,
            dense=session.dense,
        )
