"""One trainer's run: its session, its state, and the files that it writes. The public ``Trainer`` uses it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from girih import checkpoint
from girih.checkpoint import CheckpointOptions, Storage
from girih.checkpoint.load import LoadedCheckpoint, load
from girih.checkpoint.parts import PartReader
from girih.checkpoint.save import Content
from girih.checkpoint.state import RunState
from girih.cluster.roles import RoleName
from girih.config.train import TrainOptions
from girih.data import Dataset, NormalizationStats, Position
from girih.errors import ConfigError, RunDirectoryError
from girih.files.whole import write_whole
from girih.kernels.cpu import ahead
from girih.kernels.cpu.jit import warm_up
from girih.lifecycle.compiling import Compiling
from girih.lifecycle.inheriting import Inherited, put_parameters, rows_that_fit
from girih.lifecycle.planning import Calibrated, RunPlanner
from girih.lifecycle.rescaling import Rescaling, Scaling, rescaled
from girih.lifecycle.run_state import Normalizing, TrainerState, extra_state
from girih.metrics import Metrics
from girih.models.loss import is_over_batch
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.publishing.log import PublishOptions
from girih.publishing.segment import SegmentVersion
from girih.runs import scale_requests
from girih.runs.callbacks import Callback
from girih.runs.directory import TRAINED, remove_summary, repeated_from
from girih.store.clock import notes_of_future, refuse_expired
from girih.strategies.strategy import Strategy, note_on_rows
from girih.telemetry.peer_status import PeerStatus
from girih.telemetry.stats import COMPILE, LiveNumber, Spans, StatsSnapshot
from girih.telemetry.status_file import ProcessId
from girih.training.checkpoints import BackgroundTasks, RunCheckpoints
from girih.training.evaluation import ProgressiveValidation, Scoring
from girih.training.learning_rate import LearningRate
from girih.training.log import FirstSteps, RunLog, rewind
from girih.training.loop import Evaluation, Loop
from girih.training.notes import Notes
from girih.training.publisher import Publisher
from girih.training.session import RunContext, Session
from girih.training.summary import Events, features_of, summarize, timelines, write_timeline


@dataclass(kw_only=True)
class OpenRun:
    """Opens, restores, reports and closes the run of a trainer. All trainers call its methods together.

    Attributes:
        saving: interval and place of checkpoints.
        publishing: place and interval of segments. None turns publishing off.
        plan: None until the session opens, unless the user gave a plan.
        calibrated: see :class:`RunPlanner`.
        where: the config file, named in errors, or None if there is none.
        session: None until it opens.
        resumed: whether the run continues from a checkpoint.
        restarts_all: whether the run stopped to restart all processes in other numbers.
        trainer_state: the state that a checkpoint saves.
        scoring: evaluates the current weights.
    """

    context: RunContext
    strategy: Strategy
    facts: Facts
    options: TrainOptions
    saving: CheckpointOptions
    callbacks: Sequence[Callback]
    plan: Plan | None
    calibrated: Calibrated | None
    where: str | None
    publishing: PublishOptions | None = None
    session: Session | None = None
    resumed: bool = False
    restarts_all: bool = False
    _log: RunLog | None = None
    _read: LoadedCheckpoint | None = None
    """The checkpoint from which rows were loaded only for reading."""
    _compiled_in_steps_s: float = 0.0
    _loaders: Mapping[str, StatsSnapshot] = field(default_factory=dict)
    _ended_loaders: dict[str, StatsSnapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks, dense, schema = self.context.ranks, self.context.dense, self.facts.schema
        self.ranks = ranks
        self.notes = Notes(ranks, schema.labels.names, is_over_batch(dense.module))
        self.compiling = Compiling(self.notes.log)
        self.trainer_state = TrainerState(
            schema=schema,
            options=self.options,
            ranks=ranks,
            dense=dense,
            normalizing=Normalizing(schema, ranks),
            progressive=None
            if dense.scored is None
            else ProgressiveValidation(dense.scored, ranks, schema.labels),
        )
        self.scoring = Scoring(self._ready, ranks, self.options, schema.labels, self.notes)
        self.context.stats.watch(self.live)
        self.planning = RunPlanner(self.context, self.facts, self.notes, self.plan, self.calibrated)
        self.rescaling = Rescaling(self.context, self.strategy, self.facts, held=self.plan is not None)
        self.metrics = BackgroundTasks("girih-metrics")
        self.checkpoints = RunCheckpoints(self.saving, self.context, self._saved_content)
        self.publisher = None
        if self.publishing is not None:
            self.publisher = Publisher(self.publishing, self.context, self._version, self.checkpoints)

    @property
    def state(self) -> RunState:
        """The counters of the run's progress."""
        return self.trainer_state.state

    def opened(self) -> tuple[Plan, Session]:
        """The plan and the session.

        Raises:
            ConfigError: the session is not open yet.
        """
        if self.session is None or self.plan is None:
            raise ConfigError("this trainer has no tables yet; fit, load or evaluate first")
        return self.plan, self.session

    def open(self, train: Dataset | None = None, earlier: Plan | None = None) -> Session:
        """Plans and builds the session, once."""
        if self.session is not None:
            return self.session
        try:
            sparse = self.context.sparse
            self.compiling.for_rows(sparse)
            plan = self.planning.plan(self.strategy, train, earlier)
            self.compiling.for_wire(plan)
            self.context = replace(self.context, sparse=sparse.following(plan))
            if self.publisher is not None:
                self.compiling(ahead.publishing())
                if sparse.store.on_gpu:  # changes of rows in GPU memory are not recorded
                    raise ConfigError(
                        f"publish: store.tiers = {list(sparse.store.tiers or ())}: rows in GPU memory cannot be published; set"
                        " store.tiers = ['dram']"
                    )
            self.session = self.strategy.build(plan, self.context)
            self.context.stats.watch(self.session.sparse.live)
            if (note := note_on_rows(self.strategy, self.facts, sparse.store)) is not None:
                self.notes.log(note)
            if self.context.dense.compile:
                self.notes.log("the first step compiles the dense half, which can take some minutes")
            warm_up()  # otherwise the first step takes a third of a second longer, and is measured
        except ConfigError as error:
            if self.where is None:
                raise
            raise ConfigError(f"{self.where}: {error}") from None
        self.plan = plan
        if not self.ranks.first and plan.seeds.get("dropout") == "per_rank":
            torch.manual_seed(self.options.seed + self.ranks.rank)
        self.trainer_state.learning_rate = LearningRate(self.session.optimizer, self.options.lr_schedule)
        return self.session

    def ready(self, train: Dataset) -> tuple[Session, NormalizationStats]:
        """Makes all preparations for the first batch: opens the session, and measures the normalization."""
        return self.open(train), self.trainer_state.normalizing.of(train)

    def restore(self, place: Storage, train: Dataset | None = None, *, resume: bool = False) -> None:
        """Restores rows, parameters and normalization from a checkpoint. If that fails, nothing changes.

        Args:
            train: the data to train on next, for a plan that depends on it.
            resume: also restore step, position and random state.
        """
        loaded = load(place, self.facts.schema)
        earlier = None if loaded.plan is None else Plan.from_dict(loaded.plan, place.url)
        session = self.open(train, earlier)
        if resume:
            self.trainer_state.check(loaded)
        self.checkpoints.forget_latest()
        self.compiling(ahead.loading())
        rows_stay = resume and self.context.processes.rows_stayed
        newest = self._newest_uses(loaded) if resume and not rows_stay else None
        loaded.put(sparse=None if rows_stay else session.sparse, dense=session.dense, newest=newest)
        self._read = None if resume else loaded
        self.trainer_state.normalizing.stats = loaded.normalization
        if resume:
            self._go_on(loaded, earlier)

    def inherit(self, place: Storage, train: Dataset | None = None) -> Inherited:
        """Starts with the parts of another run's checkpoint that fit. See ``Trainer.init_from``."""
        loaded, inherited = load(place, None), Inherited(place.url)
        session = self.open(train)
        self.compiling(ahead.loading())
        groups = self.context.sparse.groups()
        reader = rows_that_fit(loaded, groups, inherited)
        newest = {name: used for name, used in self._newest_uses(loaded).items() if name in inherited.rows}
        session.sparse.load(replace(reader, newest=newest), step=0)
        put_parameters(loaded, session.dense, inherited)
        self.trainer_state.normalizing.inherit(loaded, inherited, train)
        self.trainer_state.inherited = place.url
        return inherited

    def content(self) -> Content:
        """Returns the content of a checkpoint made now."""
        return self.trainer_state.content(*self.opened())

    def _saved_content(self) -> Content:
        """Returns the content of a checkpoint.

        Waits until no segment holds the rows, and until all metrics are on disk for a resumed run.
        """
        self.metrics.settle(wait=True)
        if self.publisher is not None:
            self.publisher.wait_copied()
        return self.content()

    def _newest_uses(self, loaded: LoadedCheckpoint) -> Mapping[str, int]:
        """Returns the time of the newest use of each table that counts seconds, over all trainers.

        Logs times in the future.
        """
        reader = PartReader(loaded.place, loaded.shards)
        newest: Mapping[str, int] = self.ranks.broadcast(reader.newest_uses() if self.ranks.first else None)
        for line in notes_of_future(newest):
            self.notes.log(line)
        return newest

    def _go_on(self, loaded: LoadedCheckpoint, earlier: Plan | None) -> None:
        """Continues the run of a checkpoint.

        Restores the dense half's extra state if the net is spread in the same way as in the earlier plan.
        """
        plan, session = self.opened()
        self.trainer_state.go_on(loaded, plan)
        if self.state.best_step is not None:
            best = checkpoint.find(loaded.place.parent, step=self.state.best_step)
            self.checkpoints.set_best(self.state.best_step, best)
        self.resumed = True
        self._log = None  # a new log drops the records after this state
        if session.stateful is not None and earlier is not None and plan.spreads_as(earlier):
            session.stateful.load_extra_state(extra_state(loaded.random, self.ranks.rank))
        elif any(extra_state(loaded.random, rank) for rank in range(len(loaded.random))):
            self.notes.log(
                "the random state of group servers and top-k's unsent values are dropped, since the net is spread differently in"
                f" {loaded.place.name}: dropout masks will differ"
            )

    def summary(self, metrics: Metrics | None, duration_s: float) -> dict[str, object]:
        """Returns the content of ``summary.json``."""
        (plan, session), progressive = self.opened(), self.trainer_state.progressive
        sparse, dense = session.sparse.stats(), session.dense
        loaders = {**self._ended_loaders, **self._loaders}
        optional = {
            "plan": dict(plan.predicted) or None,
            "init_from": self.trainer_state.inherited,
            "progressive": None if progressive is None else progressive.metrics(),
            "published": None if self.publisher is None else dict(self.publisher.counts),
        }
        facts = {
            "strategy": self.strategy.name,
            "trainers": self.ranks.size,
            "precision": self.options.precision,
            "dense_forward": self.options.dense_forward,
            "seed": self.options.seed,
            "model": self.facts.model.name,
            "dense_parameters": self.facts.model.num_parameters,
            "duration_s": duration_s,
            "compile_s": self.compiling.seconds + self._compiled_in_steps_s,
            "restarts": self.context.processes.restarts,
            "scalings": []
            if self.context.directory is None
            else scale_requests.history(self.context.directory),
            **_predicted_speed(plan, None if self._log is None else self._log.first_steps, self.state),
            **{name: value for name, value in optional.items() if value is not None},
            "dense_staleness_max": dense.stats()["staleness_max"],
            "features": features_of(self.facts.schema, sparse, self.scoring.features),
        }
        return summarize(
            self.state,
            metrics,
            facts,
            ranks=self.ranks,
            stats=self.context.stats,
            sparse=sparse,
            processes=[*loaders.values(), *sparse.processes.values(), *dense.processes().values()],
        )

    def open_log(self) -> RunLog:
        """Opens the log of records."""
        if self._log is None:
            path = None if self.context.directory is None else self.context.directory / "metrics.jsonl"
            if path is not None:
                state, mark = self.state, path.with_name(TRAINED)
                rewind(path, state)  # drops records that a restarted or resumed run writes again
                state.repeated_examples = repeated_from(mark, state.examples, state.repeated_examples)
            others = None
            if self.context.directory is not None:
                identity = ProcessId(RoleName.TRAINER, self.ranks.rank)
                others = PeerStatus(self.context.directory, identity, lambda: self.ranks.unsynchronized)
            progressive = self.trainer_state.progressive
            self._log = RunLog(path, self.callbacks, self.options.log_every_steps, others, progressive)
        return self._log

    def close(self) -> None:
        """Waits for writes in progress, and frees the tables' memory."""
        self.context.stats.unwatch()
        with contextlib.ExitStack() as closing:  # each one is closed, even if another one raises
            if self.session is not None:
                closing.callback(self.session.dense.close)
                closing.callback(self.session.sparse.close)
            if self._log is not None:
                closing.callback(self._log.close)
            closing.callback(self.checkpoints.close)
            closing.callback(self.metrics.close)
            if self.publisher is not None:
                closing.callback(self.publisher.close)

    def live(self) -> dict[str, LiveNumber]:
        """Returns numbers for :meth:`girih.telemetry.stats.Stats.watch`: steps, this trainer's examples, and refused
        steps.
        """
        state = self.state
        return {
            "steps": state.step,
            "examples": state.examples / self.ranks.size,
            "refused": state.refused,
        }

    def _note(self, log: RunLog, *, failed: bool = False) -> None:
        """Writes the records and the timeline of the steps so far."""
        stats, (_, session) = self.context.stats, self.opened()
        sparse, dense = session.sparse, session.dense
        log.flush(
            self.state,
            self.trainer_state.learning_rate.scale(),
            None if failed else lambda: sparse.stats().counters,
        )
        if failed:
            processes: dict[str, Events] = {f"trainer {self.ranks.rank}": stats.spans.events()}
        else:
            others = {**sparse.stats(spans=True).processes, **dense.processes(spans=True)}
            processes = timelines(self.ranks, stats, {**self._loaders, **others})
        if self.context.directory is not None:
            write_timeline(self.context.directory / "timeline.json", processes, stats.spans.totals_s)

    def _version(self, step: int) -> SegmentVersion:
        return self.trainer_state.version(step, self.opened()[1])

    def _ready(self) -> tuple[Session, NormalizationStats]:
        return self.open(), self.trainer_state.normalizing.known()


class TrainingRun(OpenRun):
    """A run that is trained. All trainers call its methods together."""

    def check(self, train: Dataset) -> None:
        """Checks that the directory has no other run, and that data fit a loaded position and negatives."""
        if train.negatives is not None and not self.notes.compared:
            raise ConfigError(
                f"negatives: the loss of {self.facts.model.name} does not compare examples with each other, so negatives"
                " without a user would count as false clicks; leave them out, or use model 'retrieval'"
            )
        if self.checkpoints.saves and self.ranks.first and not self.resumed and self.state.step == 0:
            earlier = checkpoint.latest(self.checkpoints.root)
            if earlier is not None:
                place = self.context.directory or earlier.parent
                raise RunDirectoryError(
                    f"{place}: holds an earlier run ({earlier.name}); name another directory, delete this one, or"
                    f" continue it with trainer.load({str(place)!r}) before fit"
                )
        if self.state.position is not None:
            position = Position.from_dict(self.state.position)
            train.batches(position.epoch, position)

    def fit(self, train: Dataset, valid: Dataset | None, epochs: int) -> bool:
        """Trains for ``epochs`` more epochs, see ``Trainer.fit``. Returns whether a request to stop ended training."""
        state = self.state
        if epochs and state.stopped_early:  # the user asks to continue anyway
            state.stopped_early, state.bad_evaluations = False, 0
        if self._read is not None:
            groups = self.context.sparse.groups()
            refuse_expired(self._newest_uses(self._read), (t for group in groups for t in group.spec.tables))
            self._read = None
        until = self.ranks.broadcast(state.epoch + epochs)
        self._ended_loaders = {}
        if self.checkpoints.saves and state.step:
            self.checkpoints.unmark()
            if self.context.directory is not None:
                remove_summary(self.context.directory)
        try:
            scaling = self._fit(train, valid, until)
            while scaling is not None and not scaling.restarts_all:
                self._rescale(scaling)
                scaling = self._fit(train, valid, until, resuming=True)
            self.restarts_all = scaling is not None
            stopped = self.ranks.stopping
            if scaling is None:
                self.rescaling.refuse_late()
        finally:
            self.ranks.forget_stop()
        if self.checkpoints.saves and not stopped and not self.restarts_all:
            self.checkpoints.mark_final(state.best_step)
        if state.best_step is not None and not stopped:
            self.restore(self.checkpoints.best(state.best_step))
        if self.publisher is not None and not self.restarts_all:
            step = state.step if state.best_step is None or stopped else state.best_step
            self.publisher.finish(step)
        return stopped

    def final_metrics(self) -> Metrics | None:
        """Returns metrics of the final weights on validation data, on the first trainer only.

        They exist if training evaluated these weights.
        """
        step = self.state.step if self.state.best_step is None else self.state.best_step
        return None if self._log is None else self._log.evaluations.get(step)

    def end(self, summary: dict[str, object] | None, error: BaseException | None = None) -> None:
        """Ends every callback, even if another one raises.

        Args:
            summary: None if the run was stopped, or failed.
            error: the exception that ended the run.
        """
        with contextlib.ExitStack() as ending:
            for callback in reversed(self.callbacks):
                if isinstance(error, Exception) and isinstance(callback, Callback):
                    ending.callback(callback.on_error, error)
                else:
                    ending.callback(callback.on_end, summary)

    def _rescale(self, scaling: Scaling) -> None:
        """Continues with other numbers of processes. Trainers have already stopped for the change."""
        step = self.state.step
        if self.publisher is not None:
            self.publisher.settle(wait=True)  # processes that write a segment may be about to end
        self._ended_loaders |= {
            f"{title}, until step {step}": snapshot for title, snapshot in self._loaders.items()
        }
        saved = self.checkpoints.newest() if scaling.rows_move else None
        if saved is not None:
            self.compiling(ahead.loading())
        with self.context.stats.spans("scale"):
            self.strategy, self.plan, self.session = rescaled(
                scaling, self.strategy, *self.opened(), self.context, saved, self.state.num_updates
            )
        self.plan = self.planning.priced(self.plan, self.strategy)
        if self._log is not None:
            self._log.first_steps = FirstSteps(since=step)
        self.rescaling.done(scaling)
        self.ranks.end_pause()

    def _fit(
        self, train: Dataset, valid: Dataset | None, until_epoch: int, *, resuming: bool = False
    ) -> Scaling | None:
        """Trains until ``until_epoch`` epochs are done, or all trainers stop.

        Returns the scaling for which they stopped, if any.

        Args:
            resuming: whether this ``fit`` has already trained.
        """
        self.checkpoints.forget_latest()
        session, normalization = self.ready(train)
        trainer_state = self.trainer_state
        if trainer_state.progressive is not None and trainer_state.state.step == 0:
            trainer_state.progressive.restore(None)  # passes measured for the plan do not count
        self._loaders = {}
        if not resuming:
            self.context.stats.spans = Spans()
        compiled_s = self.context.stats.spans.totals_s.get(COMPILE, 0.0)
        log = self.open_log()
        feed = session.feed.train(train, normalization)
        try:
            self._write_plan(log, session)
        except BaseException:
            feed.close()
            raise
        self.rescaling.follow(self.strategy, self.opened()[0])
        evaluation = None if valid is None else self._evaluation(valid, log)
        hooks = (log, evaluation, self.publisher, self.checkpoints, self.rescaling)
        if self.publisher is not None:
            self.publisher.begin(self.state.step)
        loop = Loop(
            session=session,
            context=self.context,
            feed=feed,
            learning_rate=trainer_state.learning_rate,
            options=self.options,
            state=trainer_state.state,
            log=log,
            notes=self.notes,
            hooks=[hook for hook in hooks if hook is not None],
            evaluation=evaluation,
        )
        try:
            with self.context.stats.busy.working():
                loop.run(until_epoch)
            session.detach_from_round()
            session.sparse.sync()  # resent messages may need this trainer's loader
            self.ranks.finish()  # other trainers may still need the loaders
            self._loaders = feed.stats()
            loop.close()
            self.checkpoints.settle(wait=True)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                loop.close()
                self._note(log, failed=True)
            self.metrics.forget()  # drops the metrics of this fit if one raised
            with contextlib.suppress(Exception):
                self.checkpoints.settle(wait=True)
            with contextlib.suppress(Exception):
                session.feed.end_training()
            raise
        finally:
            self._compiled_in_steps_s += self.context.stats.spans.totals_s.get(COMPILE, 0.0) - compiled_s
        session.sync()  # raises errors of the last updates
        self.ranks.barrier()  # a slower trainer may still read
        session.feed.end_training()
        self._note(log)
        scaling = self.rescaling.agreed(is_finished=loop.is_finished(until_epoch))
        best_is_lost = self.checkpoints.fall_back(self.state)
        if best_is_lost or (self.checkpoints.saves and (scaling is None or scaling.needs_checkpoint)):
            self.checkpoints.save_last(self.state)
        if scaling is not None:
            self.rescaling.begin(scaling, self.state.step)
        return scaling

    def _evaluation(self, valid: Dataset, log: RunLog) -> Evaluation:
        return Evaluation(
            scoring=self.scoring,
            data=valid,
            context=self.context,
            options=self.options,
            learning_rate=self.trainer_state.learning_rate,
            log=log,
            metrics=self.metrics,
            checkpoints=self.checkpoints,
            publisher=self.publisher,
        )

    def _write_plan(self, log: RunLog, session: Session) -> None:
        """Writes the plan and reports it to callbacks."""
        log.begin(self.state, session.sparse.stats().counters)
        plan = self.opened()[0].to_dict()
        if self.context.directory is not None:
            write_whole(self.context.directory / "plan.json", json.dumps(plan, indent=1) + "\n")
        for callback in self.callbacks:
            callback.on_plan(plan)


def _predicted_speed(plan: Plan, first: FirstSteps | None, state: RunState) -> dict[str, object]:
    """Returns ``predicted_samples_per_s`` and its source, a calibration or the first steps.

    Returns None and the reason if the speed is unknown.
    """
    speed = plan.predicted.get("speed")
    if speed is not None:
        return {"predicted_samples_per_s": speed["samples_per_s"], "predicted_from": speed["from"]}
    predicted, reason = (None, None) if first is None else first.predicted(state)
    return {"predicted_samples_per_s": predicted, "predicted_from": reason}
