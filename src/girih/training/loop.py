"""The training loop of one trainer process, and the evaluations between its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from girih.checkpoint.state import RunState
from girih.config.train import EarlyStopping, TrainOptions, direction
from girih.data import Batch, Dataset, Position
from girih.data.read_ahead import read_ahead
from girih.errors import NonFiniteError
from girih.metrics import Metrics, Scores
from girih.telemetry.stats import COMPILE, STALENESS
from girih.training.checkpoints import BackgroundTasks, RunCheckpoints
from girih.training.evaluation import Scoring
from girih.training.feeds import EpochStream, TrainingFeed
from girih.training.learning_rate import LearningRate
from girih.training.log import RunLog
from girih.training.notes import Notes
from girih.training.publisher import Publisher
from girih.training.schedules import JoinedHalves, Step
from girih.training.session import RunContext, Session, StepHook, is_multiple


@dataclass(kw_only=True)
class Evaluation(StepHook):
    """Evaluates validation data, and applies the metrics to the learning rate and early stopping.

    Attributes:
        metrics: the thread that computes metrics during training, if training does not depend on them.
        publisher: publishes before an evaluation, because nothing can be published during an evaluation.
    """

    scoring: Scoring
    data: Dataset
    context: RunContext
    options: TrainOptions
    learning_rate: LearningRate
    log: RunLog
    metrics: BackgroundTasks
    checkpoints: RunCheckpoints
    publisher: Publisher | None

    def due(self, state: RunState) -> bool:
        """True once after each ``evaluate_every_steps``-th step."""
        return state.evaluated_step != state.step and is_multiple(
            state.step, self.options.evaluate_every_steps
        )

    def run(self, state: RunState) -> None:
        """Evaluates, and records the metrics."""
        self.record(self.score(state), state)

    def score(self, state: RunState) -> Scores | None:
        """Returns scores of the data, or None if a stop was requested meanwhile."""
        if self.publisher is not None:
            self.publisher.run(state)
        with self.context.stats.spans("evaluate"):
            scores = self.scoring.score(self.data)
        if self.context.ranks.stopping:
            return None
        return scores or Scores()  # rank 0 has the scores of all trainers

    def record(self, scores: Scores | None, state: RunState) -> None:
        """Computes metrics from scores: in this call if training depends on them, else in a thread."""
        if scores is None:
            return
        state.evaluated_step = state.step
        ranks = self.context.ranks
        note = partial(self.log.evaluation, state=replace(state))
        compute = partial(self.scoring.result, scores)
        if self.options.early_stopping is None and self.learning_rate.metric is None:
            if ranks.first:
                self.metrics.submit(compute, note)
            return
        with self.context.stats.spans("evaluate"):
            metrics = Metrics.from_dict(ranks.broadcast(ranks.first and compute().as_dict()))
        note(metrics)
        self.learning_rate.after_evaluation(metrics.first)
        if self.options.early_stopping is not None:
            self._stop_early(self.options.early_stopping, metrics, state)

    def settle(self, *, wait: bool = False) -> None:
        """Logs the metrics that are computed already. With ``wait``, waits for all metrics and logs them."""
        self.metrics.settle(wait=wait)

    def _stop_early(self, stopping: EarlyStopping, metrics: Metrics, state: RunState) -> None:
        """Saves the best weights so far. Stops training after too many evaluations without improvement."""
        self.checkpoints.fall_back(state)  # the checkpoint of the best weights may have been given up
        value = metrics.first.value(stopping.metric)
        sign = direction(stopping.metric, stopping.mode, "early_stopping")
        if value is not None and (
            state.best_value is None or sign * (value - state.best_value) > stopping.min_delta
        ):
            state.best_step, state.best_value, state.bad_evaluations = state.step, value, 0
            self.checkpoints.run(state)
            return
        state.bad_evaluations += 1
        state.stopped_early = state.bad_evaluations > stopping.patience


@dataclass(kw_only=True)
class Loop:
    """Trains until the data end, the options limit the training, or a stop is requested.

    Attributes:
        feed: this trainer's share of the training data.
        hooks: the hooks, which are asked after each step in this order.
        evaluation: the hook that also ends each epoch, or None if there are no validation data.
    """

    session: Session
    context: RunContext
    feed: TrainingFeed
    learning_rate: LearningRate
    options: TrainOptions
    state: RunState
    log: RunLog
    notes: Notes
    hooks: Sequence[StepHook]
    evaluation: Evaluation | None
    _unsettled: deque[tuple[Step[Position], RunState, float]] = field(default_factory=deque)

    def run(self, until_epoch: int) -> None:
        """Trains until this number of epochs is complete, or all trainers stop.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite, under ``on_nonfinite = "stop"``.
        """
        while self.state.epoch < until_epoch and not self._finished():
            before = self.state.step
            with closing(self._batches()) as batches:
                self._run_hooks()  # a stop may have prevented a hook that was due
                try:
                    self._train_on(batches)
                except BaseException:
                    self.feed.close()  # the loader may have ended, and a later call would wait for it
                    raise
            nothing_new = self.state.step == before and not self._finished()  # this can happen in a stream
            if (self._epoch_is_read() or nothing_new) and not self.state.stopped_early:
                self._end_epoch()
        if self._is_behind(until_epoch) and not self.context.ranks.stopping:
            self._run_hooks()
            if self._epoch_is_read():
                self._end_epoch()

    def is_finished(self, until_epoch: int) -> bool:
        """True after the last epoch or ``max_steps``, when the final evaluation has run."""
        is_done = self.state.epoch >= until_epoch or self._is_past()
        return is_done and not self._is_behind(until_epoch)

    def close(self) -> None:
        """Waits for all metrics that are still being computed, and logs them."""
        try:
            if self.evaluation is not None:
                self.evaluation.settle(wait=True)
        finally:
            self.feed.close()

    def _batches(self) -> EpochStream:
        if self._epoch_is_read():
            return read_ahead(())
        position = None if self.state.position is None else Position.from_dict(self.state.position)
        return self.feed.stream(self.state.epoch, position)

    def _train_on(self, batches: EpochStream) -> None:
        source: Iterator[tuple[Batch, Position]] = batches
        if self.state.step == 0:
            source = self.notes.first_epoch(batches, self.feed.data.batch_size)
        try:
            with closing(self._steps(source)) as steps:
                for step in steps:
                    self._account(step)
                    self._run_hooks()
                    if self._finished() and not step.under_way:
                        break
        except BaseException:
            with suppress(NonFiniteError):
                self._settle(wait=True)
            raise
        self._settle(wait=True)

    def _steps(self, batches: Iterator[tuple[Batch, Position]]) -> Generator[Step[Position], None, None]:
        """Trains on batches. No batch after the last step is pulled, because a pull creates rows."""
        spans, most = self.context.stats.spans, self.options.max_steps
        if most is not None:
            batches = islice(batches, max(0, most - self.state.step))
        halves = JoinedHalves(
            self.session.sparse, self.session.dense, self.state.num_updates, self.learning_rate.scale, spans
        )
        schedule = self.session.schedule(spans.timed("read", batches), halves, self._may_begin)
        with closing(schedule) as steps:
            while True:
                start, before = time.perf_counter(), spans.totals_s.get(COMPILE, 0.0)
                step = next(steps, None)
                if step is None:
                    return
                compiling = spans.totals_s.get(COMPILE, 0.0) - before
                self.state.train_s += time.perf_counter() - start - compiling
                yield step

    def _account(self, step: Step[Position]) -> None:
        state = self.state
        state.step += 1
        state.examples += step.num_examples
        state.position = step.token.to_dict()
        state.staleness_max = max(state.staleness_max, step.staleness)
        state.staleness_sum += step.staleness
        self.context.stats.histograms[STALENESS][step.staleness] += 1
        self.learning_rate.after("step")
        for hook in self.hooks:
            hook.settle()
        self._unsettled.append((step, replace(state), self.learning_rate.scale()))
        self._settle()

    def _run_hooks(self) -> None:
        """Runs the hooks that are due."""
        for hook in self.hooks:
            if hook.due(self.state):
                if not hook.pauses or self._meet():
                    hook.run(self.state)
                else:
                    hook.skip()

    def _meet(self) -> bool:
        """Waits for the outcome of all steps. Returns whether all trainers are at this step, and no trainer leaves."""
        self._settle(wait=True)
        self.session.detach_from_round()
        return self.context.ranks.rendezvous()

    def _end_epoch(self) -> None:
        """Evaluates at the end of an epoch, unless the last step was evaluated, and starts the next epoch."""
        scores = None
        if self.evaluation is not None and self.state.evaluated_step != self.state.step and self._meet():
            scores = self.evaluation.score(self.state)
        if self.context.ranks.stopping:
            return
        self.state.epoch += 1
        position = self.state.position or {}
        # The next epoch of a stream continues at the end of this epoch.
        self.state.position = {**position, "epoch": self.state.epoch} if "offsets" in position else None
        self.learning_rate.after("epoch")
        if self.evaluation is not None:
            self.evaluation.record(scores, self.state)

    def _settle(self, *, wait: bool = False) -> None:
        """Logs the outcomes of steps. The last outcome is included if it is known, or if ``wait`` is set.

        Raises:
            NonFiniteError: a step was refused under ``on_nonfinite = "stop"``. The state is the state after this step.
        """
        while self._unsettled:
            step, then, lr_scale = self._unsettled[0]
            if not step.outcome.known():
                if not wait and len(self._unsettled) == 1:
                    return
                self._wait_for(step)
            self._unsettled.popleft()
            refused = step.outcome.facts().refused
            self.state.refused += refused is not None
            then.refused = self.state.refused
            if refused is not None and self.options.on_nonfinite == "stop":
                self._unsettled.clear()  # later steps are not logged, but steps of other nets may have been applied
                vars(self.state).update(vars(then))
                raise NonFiniteError(
                    f"step {then.step}: {refused}; none of its updates were applied. Lower the learning rate, clip gradients "
                    'with train.clip_norm, or skip such steps with train.on_nonfinite = "skip"'
                )
            self.log.step(step, then, lr_scale, partial(self._counters_after, step))

    def _counters_after(self, step: Step[Position]) -> Mapping[str, int]:
        """Returns counters of the sparse half after a step if its outcome has them, else the current counters."""
        counters = step.outcome.facts().counters
        return self.session.sparse.stats().counters if counters is None else counters

    def _wait_for(self, step: Step[Position]) -> None:
        """Waits for the outcome of a step. The time counts as training of this step and of later steps in flight."""
        start = time.perf_counter()
        with self.context.stats.spans("wait for GPU"):
            step.outcome.facts()
        took = time.perf_counter() - start
        for state in (self.state, *(then for _, then, _ in self._unsettled)):
            state.train_s += took

    def _finished(self) -> bool:
        self.context.ranks.poll_stop()
        return self._is_past() or self.context.ranks.stopping

    def _is_past(self) -> bool:
        past = self.options.max_steps is not None and self.state.step >= self.options.max_steps
        return past or self.state.stopped_early

    def _epoch_is_read(self) -> bool:
        """Returns whether all batches of the epoch were read. The position is then the start of the next epoch."""
        return self.state.position is not None and self.state.position["epoch"] > self.state.epoch

    def _is_behind(self, until_epoch: int) -> bool:
        """Returns whether a stop or a pause prevented an evaluation, or the end of the epoch, after the last step."""
        if self.state.epoch >= until_epoch or self.state.stopped_early or not self._is_past():
            return False
        return self._epoch_is_read() or (self.evaluation is not None and self.evaluation.due(self.state))

    def _may_begin(self, number: int) -> bool:
        """Returns whether the batch ``number`` steps after the last step may begin. A hook that pauses prevents it."""
        if self.context.ranks.stopping:
            return False
        done = self.state.step
        between = (replace(self.state, step=step) for step in range(done + 1, done + number))
        return not any(hook.pauses and hook.due(state) for state in between for hook in self.hooks)
