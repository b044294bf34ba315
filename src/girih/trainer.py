"""The public trainer: a model, its tables and a strategy, ready to fit, evaluate and predict."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from girih import checkpoint
from girih.checkpoint import CheckpointOptions, Storage
from girih.checkpoint.load import Loaded, load
from girih.checkpoint.save import Content, Save
from girih.cluster import Cluster, start_loaders, start_roles
from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import Dataset, NormalizationStats, Position
from girih.dense.options import OptimizerFactory, optimizer_factory
from girih.errors import ConfigError, RunDirectoryError
from girih.metrics import Metrics, Scores
from girih.models import needs_of
from girih.optim import Adagrad, SparseOptimizer
from girih.runs.callbacks import Callback, TensorBoard
from girih.runs.checkpoints import RunCheckpoints
from girih.runs.directory import RunDirectory
from girih.runs.log import RunLog, rewind
from girih.runs.spans import Spans
from girih.runs.summary import summarize
from girih.runs.tally import Tally
from girih.runs.timeline import write_timeline
from girih.schema import Schema
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.strategies import Local, Strategy, place, plan
from girih.training import evaluation
from girih.training.arguments import device, expect, refuse_other_schema, schema_of
from girih.training.feeds import LOADER
from girih.training.learning_rate import LearningRate
from girih.training.loop import Loop
from girih.training.state import RunState


class Trainer:
    """Trains a model whose embeddings live in growing tables.

    Args:
        model: any module of ``forward(numeric[B, X], embeddings) -> logits[B, T]``.
        sparse_optimizer: of the tables that have none of their own; Adagrad(lr=0.01) where None.
        dense_optimizer: parameters → ``torch.optim`` optimizer; Adam(lr=1e-3) where None.
        first_order_optimizer: of first-order weights; the sparse optimizer where None.
        strategy: how training is interlaced.
        schema: taken from the model, where it has one.
        options: epochs, seed, precision and the like.
        store: where rows live. checkpoints: how often to save, when a ``run`` is given.
        run: a directory for metrics, checkpoints and the timeline; None writes nothing.
        callbacks: hear every record.
        cluster: the processes of the run, where they were started already; else under ``torchrun`` those that
            it started. Of several trainers only rank 0 writes and calls back.

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
    ) -> None:
        expect("model", model, nn.Module, "a torch.nn.Module, as girih.models.DeepFM(schema)")
        expect("sparse_optimizer", sparse_optimizer, SparseOptimizer | None, "one of girih.optim")
        expect("first_order_optimizer", first_order_optimizer, SparseOptimizer | None, "one of girih.optim")
        expect("strategy", strategy, Strategy | None, "a strategy, as girih.Local()")
        expect("schema", schema, Schema | None, "a girih.Schema")
        expect("options", options, TrainOptions | None, "girih.TrainOptions(...)")
        expect("store", store, StoreOptions | None, "girih.StoreOptions(...)")
        expect("checkpoints", checkpoints, CheckpointOptions | None, "girih.CheckpointOptions(...)")
        if dense_optimizer is not None and not callable(dense_optimizer):
            raise ConfigError(
                f"dense_optimizer: a {type(dense_optimizer).__name__}; expected a function of parameters, "
                "as lambda params: torch.optim.Adam(params, lr=1e-3)"
            )
        self.model = model
        self.schema = schema_of(model, schema)
        self.options = options or TrainOptions()
        self.strategy = strategy or Local()
        self.checkpoints = checkpoints or CheckpointOptions()
        if self.options.gauc_by is not None:
            evaluation.feature_index(self.schema, self.options.gauc_by)
        self._cluster = cluster or self._join()
        self._ranks = self._cluster.context.ranks
        try:
            self._begin(dense_optimizer, run, callbacks)
            self._spec = SparseSpec(
                schema=self.schema,
                needs=needs_of(model, self.schema),
                optimizer=sparse_optimizer or Adagrad(),
                first_order_optimizer=first_order_optimizer,
                store=store or StoreOptions(),
                seed=self.options.seed,
            )
            start_roles(self._cluster, self.strategy, self._spec)
            # last, when nothing can fail any more: it takes memory
            self.sparse = self.strategy.sparse_half(self._spec, self._cluster.context)
            self._tally = Tally(self._ranks, self.sparse, self.dense)
        except BaseException:
            self._cluster.close(failed=True)
            raise

    def _join(self) -> Cluster:
        if isinstance(self.strategy, Local):
            return Cluster(TrainerGroup())
        return Cluster.join(self.strategy.trainers, lockstep=self.strategy.lockstep)

    def _begin(
        self,
        dense_optimizer: OptimizerFactory | None,
        run: str | os.PathLike[str] | RunDirectory | None,
        callbacks: Sequence[Callback],
    ) -> None:
        self.dense = self.strategy.dense_half(
            self.model,
            dense_optimizer or optimizer_factory({"name": "adam"}),
            self._cluster.context,
            precision=self.options.precision,
            device=device(self.options.device, self._ranks.rank),
            clip_norm=self.options.clip_norm,
        )
        if not self._ranks.first:
            run, callbacks = None, ()
            if self.dense.own_dropout:
                torch.manual_seed(self.options.seed + self._ranks.rank)
        self.learning_rate = LearningRate(self.dense.optimizer, self.options.lr_schedule)
        self.state = RunState()
        self.moments: NormalizationStats | None = None
        self.spans = Spans()
        self.stopped = False
        self._opened = None if isinstance(run, RunDirectory | None) else RunDirectory(Path(run), resume=True)
        directory = run if isinstance(run, RunDirectory) else self._opened
        self._run = None if directory is None else directory.path
        self._saves = bool(self._ranks.broadcast(self._run is not None or self.checkpoints.dir is not None))
        self._run_checkpoints = RunCheckpoints(
            self._run, self.checkpoints.keep, self._ranks, directory=self.checkpoints.dir
        )
        self._callbacks = list(callbacks)
        if self.options.tensorboard and self._ranks.first:
            if self._run is None:
                raise ConfigError("tensorboard = true needs a run directory; give Trainer(run=...)")
            self._callbacks.append(TensorBoard(self._run / "tensorboard"))
        self._placing: dict[str, Any] | None = None  # what it rests on, once features are placed
        self._plan: dict[str, Any] = {}
        self._log: RunLog | None = None
        self._resumed = False
        self._cluster.show_in(self._run)

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
                self._fit(train, valid, epochs)
            self.stopped = self._ranks.stopping
        except KeyboardInterrupt:
            self.stopped = True
            raise
        finally:
            self._ranks.forget_stop()
        if self.state.best_step is not None and not self.stopped:
            self._restore(self._run_checkpoints.best(self.state.best_step))
        return self.state

    def _fit(self, train: Dataset, valid: Dataset | None, epochs: int) -> None:
        self._plan = plan(self.strategy, self.dense, self._place(train), train.batch_size)
        if self.moments is None:
            self.moments = self._measure(train)
        self.spans = Spans()
        self.dense.spans = self.spans
        self._tally.loaders = {}
        start_loaders(self._cluster, self.strategy, self._spec, train)
        log = self._open_log()
        log.begin(self.state, self.sparse.counters())
        data = self.sparse.columns_of(train)
        feed = self.strategy.feed(data, self.moments.narrowed(data.schema), self._cluster.context)
        for callback in self._callbacks if self._plan else ():
            callback.on_plan(self._plan)
        loop = Loop(
            sparse=self.sparse,
            dense=self.dense,
            schedule=self.strategy.schedule,
            learning_rate=self.learning_rate,
            options=self.options,
            state=self.state,
            feed=feed,
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
            self._tally.loaders = feed.told()
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
        self._cluster.end(LOADER)
        self._note(log)
        if self._saves:
            self._begin_save()
            self._run_checkpoints.settle(wait=True)

    def _place(self, train: Dataset | None = None, kept: dict[str, Any] | None = None) -> dict[str, Any]:
        """Decides once which trainer has which features, where they are spread by features."""
        if self._placing is None:
            context = self._cluster.context
            self._placing = place(
                self.strategy, self.sparse, self.dense, self._spec, context, train=train, kept=kept
            )
        return self._placing

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
        if self._saves and self._ranks.first and not self._resumed and self.state.step == 0:
            earlier = checkpoint.latest(self._run_checkpoints.root)
            if earlier is not None:
                raise RunDirectoryError(
                    f"{self._run or earlier.parent}: holds an earlier run ({earlier.name}); name another, or load it first"
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
        self._place()
        with self._cluster.explaining():
            scores = self._score(data)
        if self._ranks.stopping:
            self._ranks.forget_stop()
            raise KeyboardInterrupt
        own = None if scores is None else scores.result(self.schema.labels.names).as_dict()
        return Metrics.from_dict(self._ranks.broadcast(own))

    def predictions(self, data: Dataset) -> Iterator[tuple[Any, NDArray[np.float32]]]:
        """Each batch in order, with its probabilities float32[B, T].

        Raises:
            ConfigError: as :meth:`evaluate`, but labels may be missing.
        """
        self._check("data", data, labels=False)
        self._place()
        for batch, logits in evaluation.logits_of(data.in_order(), self.sparse, self.dense, self._moments()):
            yield batch, torch.sigmoid(logits.double()).float().numpy()

    def predict(self, data: Dataset) -> NDArray[np.float32]:
        """Probabilities of all examples in order, float32[examples, T]."""
        parts = [probabilities for _, probabilities in self.predictions(data)]
        return np.concatenate(parts) if parts else np.empty((0, len(self.schema.labels.names)), np.float32)

    def save(self, directory: str | os.PathLike[str]) -> Path | str:
        """Writes a checkpoint ``directory/step-…``, in any fsspec address too; returns its path, or address."""
        self._place()
        self._run_checkpoints.settle(wait=True)
        saved = Save(Storage.at(directory), self._content(), self._ranks).write()
        return saved.local or saved.url

    def load(self, directory: str | os.PathLike[str], *, resume: bool = True) -> None:
        """Takes rows and parameters from a checkpoint, or from a run: its latest.

        Args:
            resume: go on from its step, position and random state too; else only evaluate and predict: of a run
                under early stopping, with its best weights.

        Raises:
            CheckpointError: none there, a damaged one, or one of another schema, model or optimizer.
        """
        path = checkpoint.find(directory)
        if not resume:
            best = checkpoint.Manifest.read(path).state["run"]["best_step"]
            is_run = best is not None and Storage.at(directory) != path
            self._restore(checkpoint.find(path.parent, step=best) if is_run else path)
            return
        loaded = self._restore(path)
        state = loaded.state
        self.state = RunState.from_dict(state["run"])
        if self.options.early_stopping is None:  # no best weights to come back to
            self.state.best_step, self.state.best_value, self.state.stopped_early = None, None, False
        if self.state.best_step is not None:
            self._run_checkpoints.set_best(checkpoint.find(path.parent, step=self.state.best_step))
        self.learning_rate.restore(state["learning_rate"])
        self._set_random(loaded.random)
        self._resumed = True
        self._log = None  # the next one drops the records that come after this state

    def request_stop(self) -> None:
        """Has ``fit`` return after the step under way, a checkpoint written, or ``evaluate`` raise.

        Callable from a signal handler, a callback or another thread; of several trainers, on any.
        """
        self._ranks.request_stop()

    def summary(self, metrics: Metrics | None, *, duration_s: float) -> dict[str, Any]:
        """What ``summary.json`` holds; ``metrics`` are those of the final weights. All trainers call it."""
        summed = self._tally.summed(self.state)
        return summarize(
            self.state,
            metrics,
            counters=self.sparse.counters(),
            num_rows=sum(self.sparse.rows().values()),
            phases_s=self.spans.totals_s,
            wire_bytes=summed.pop("wire_bytes"),
            staleness=summed.pop("staleness"),
            facts={
                "strategy": self.strategy.name,
                "trainers": self._ranks.size,
                "precision": self.options.precision,
                "seed": self.options.seed,
                "model": type(self.model).__name__,
                "dense_parameters": sum(p.numel() for p in self.model.parameters()),
                "dense_staleness_max": self.dense.staleness_max,
                "duration_s": duration_s,
                **({"plan": self._plan} if self._plan else {}),
                **summed,
            },
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
            closing.callback(self.dense.close)
            closing.callback(self.sparse.close)
            closing.callback(self._run_checkpoints.close)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

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
                found = NormalizationStats.of(
                    train, stop_requested=lambda: self._ranks.stop_requested
                ).to_dict()
            except KeyboardInterrupt:
                stopped = True
        told = self._ranks.broadcast(found)
        if stopped or told is None:
            raise KeyboardInterrupt
        return NormalizationStats.from_dict(told, self.schema)

    def _note(self, log: RunLog, *, failed: bool = False) -> None:
        """Writes what was not yet written of the steps so far."""
        log.flush(self.state, self.learning_rate.scale(), None if failed else self.sparse.counters)
        processes = self._tally.timelines(self.spans, failed=failed)
        if self._run is not None:
            write_timeline(self._run / "timeline.json", processes, self.spans.totals_s)

    def _score(self, data: Dataset) -> Scores | None:
        """Scores a dataset, each trainer its shares; on rank 0 those of all, None on the others."""
        ranks = self._ranks
        self._meet()
        scores = evaluation.score(
            data,
            self.sparse,
            self.dense,
            self._moments(),
            gauc_by=self.options.gauc_by,
            part=(ranks.rank, ranks.size),
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

    def _meet(self) -> None:
        """Returns when what all trainers have sent is applied, and this one's parameters are the newest."""
        self.sparse.drain()
        self.dense.drain()
        self._ranks.barrier()
        self.dense.refresh()

    def _random(self) -> list[dict[str, Any]]:
        """The state of the random generators of each trainer, by rank; on rank 0 alone."""
        own = {"cpu": torch.get_rng_state().numpy()}
        if self.dense.device.type == "cuda":
            own |= {f"cuda:{n}": state.numpy() for n, state in enumerate(torch.cuda.get_rng_state_all())}
        gathered = self._ranks.gather_arrays(own) or []
        return [{name: torch.from_numpy(state) for name, state in each.items()} for each in gathered]

    def _set_random(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on with this trainer's own; one that was not there begins as at the start of a run."""
        rank = self._ranks.rank
        if not states or (rank >= len(states) and self.dense.own_dropout):
            torch.manual_seed(self.options.seed + rank)
            return
        own = states[rank if rank < len(states) else 0]
        torch.set_rng_state(own["cpu"])
        on_gpus = [state for name, state in own.items() if name != "cpu"]
        if on_gpus and self.dense.device.type == "cuda":
            torch.cuda.set_rng_state_all(on_gpus)

    def _restore(self, path: Storage) -> Loaded:
        self._run_checkpoints.forget_latest()
        self._place(kept=checkpoint.Manifest.read(path).state.get("placing"))
        loaded = load(path, schema=self.schema, sparse=self.sparse, dense=self.dense)
        state = loaded.state
        self.moments = (
            None if state["moments"] is None else NormalizationStats.from_dict(state["moments"], self.schema)
        )
        self.sparse.step = state["sparse_step"]
        return loaded

    def _moments(self) -> NormalizationStats:
        if self.moments is not None:
            return self.moments
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
        """What a checkpoint of now holds."""
        self._meet()
        return Content(
            step=self.state.step,
            schema=self.schema,
            state={
                "run": self.state.to_dict(),
                "learning_rate": self.learning_rate.state(),
                "moments": None if self.moments is None else self.moments.to_dict(),
                "sparse_step": self.sparse.step,
                "strategy": self.strategy.name,
                "placing": self._placing,
            },
            sparse=self.sparse,
            dense=self.dense,
            random=self._random(),
        )
