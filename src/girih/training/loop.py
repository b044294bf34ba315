"""The training loop of one trainer process."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from girih.checkpoint.state import RunState
from girih.comm.group import TrainerGroup
from girih.config.train import EarlyStopping, TrainOptions, direction
from girih.data import Batch, Position
from girih.data.read_ahead import read_ahead
from girih.errors import NonFiniteError
from girih.metrics import Metrics, Scores
from girih.telemetry.stats import COMPILE, Spans
from girih.training.checkpoints import BackgroundTasks
from girih.training.evaluation import ProgressiveValidation
from girih.training.feeds import EpochStream, TrainingFeed
from girih.training.learning_rate import LearningRate
from girih.training.log import RunLog, is_logged
from girih.training.notes import Notes
from girih.training.publisher import Publisher
from girih.training.schedules import Step
from girih.training.session import Session


@dataclass
class Loop:
    """Trains until the data, the options or a request end it.

    Attributes:
        save: begins a checkpoint of the state as it stands; called between steps only.
        settle_saves: called after every step; raises what went wrong with a checkpoint that was begun.
        fall_back: called before an evaluation is compared with the best one, whose checkpoint may have been given up.
        feed: this trainer's share of the training data.
        score: scores the validation data (None comes on all ranks but the first), or None where there is none.
        ranks: this trainer among all; each step ends with what all agree on.
        staleness: counts the batches by theirs.
        look: called between two steps, before it is known whether the next one is made.
        publisher: knows when a segment is due; None publishes nothing. publish: begins one of the state as it stands.
    """

    session: Session
    feed: TrainingFeed
    learning_rate: LearningRate
    options: TrainOptions
    state: RunState
    log: RunLog
    save: Callable[[], None]
    settle_saves: Callable[[], None]
    fall_back: Callable[[], object]
    score: Callable[[], Scores | None] | None
    label_names: Sequence[str]
    ranks: TrainerGroup
    notes: Notes
    spans: Spans
    save_every_steps: int | None = None
    staleness: Counter[int] = field(default_factory=Counter)
    progressive: ProgressiveValidation | None = None
    look: Callable[[], None] = lambda: None
    publisher: Publisher | None = None
    publish: Callable[[], None] = lambda: None
    _unsettled: deque[tuple[Step[Position], RunState, float]] = field(default_factory=deque)
    _metrics: BackgroundTasks = field(default_factory=partial(BackgroundTasks, "girih-metrics"))

    def run(self, until_epoch: int) -> None:
        """Trains until so many epochs are done, or all stop.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite, under ``on_nonfinite = "stop"``.
        """
        while self.state.epoch < until_epoch and not self._finished():
            before = self.state.step
            with closing(self._batches()) as batches:
                self._meet_if_due()  # a meeting that a stop left undone
                try:
                    self._train_on(batches)
                except BaseException:
                    self.feed.close()  # who feeds may be gone, and would be waited for
                    raise
            nothing_new = self.state.step == before and not self._finished()  # in a stream
            if (self._epoch_is_read() or nothing_new) and not self.state.stopped_early:
                self._end_epoch()
        if self._is_behind(until_epoch) and not self.ranks.stopping:
            self._meet_if_due()
            if self._epoch_is_read():
                self._end_epoch()

    def is_finished(self, until_epoch: int) -> bool:
        """True after the last epoch or ``max_steps``, when the final evaluation has run."""
        is_done = self.state.epoch >= until_epoch or self._is_past()
        return is_done and not self._is_behind(until_epoch)

    def _is_behind(self, until_epoch: int) -> bool:
        """Whether a stop, or a pause, has kept an evaluation or the end of the epoch from following the last step."""
        if self.state.epoch >= until_epoch or self.state.stopped_early or not self._is_past():
            return False
        is_due = self.score is not None and self._every(self.options.evaluate_every_steps)
        return self._epoch_is_read() or (is_due and self.state.evaluated_step != self.state.step)

    def _train_on(self, batches: EpochStream) -> None:
        source: Iterator[tuple[Batch, Position]] = batches
        if self.state.step == 0:
            source = self.notes.first_epoch(batches, self.feed.data.batch_size)
        try:
            with closing(self._steps(source)) as steps:
                for step in steps:
                    self._account(step)
                    self._meet_if_due()
                    if self._finished() and not step.under_way:
                        break
        except BaseException:
            with suppress(NonFiniteError):
                self._settle(wait=True)
            raise
        self._settle(wait=True)

    def close(self) -> None:
        """Waits for the metrics that are still being computed, and tells them."""
        try:
            self._metrics.close()
        finally:
            self.feed.close()

    def _batches(self) -> EpochStream:
        if self._epoch_is_read():
            return read_ahead(())
        position = None if self.state.position is None else Position.from_dict(self.state.position)
        return self.feed.stream(self.state.epoch, position)

    def _epoch_is_read(self) -> bool:
        """After the last batch of an epoch, the position is the start of the next one."""
        return self.state.position is not None and self.state.position["epoch"] > self.state.epoch

    def _steps(self, batches: Iterator[tuple[Batch, Position]]) -> Generator[Step[Position], None, None]:
        schedule = self.session.schedule(
            self.spans.timed("read", self._up_to_last_step(batches)),
            self.session.sparse,
            self.session.dense,
            num_updates=self.state.num_updates,
            lr_scale=self.learning_rate.scale,
            spans=self.spans,
            may_begin=self._may_begin,
        )
        with closing(schedule) as steps:
            while True:
                start, before = time.perf_counter(), self.spans.totals_s.get(COMPILE, 0.0)
                step = next(steps, None)
                if step is None:
                    return
                compiling = self.spans.totals_s.get(COMPILE, 0.0) - before
                self.state.train_s += time.perf_counter() - start - compiling
                yield step

    def _up_to_last_step(self, batches: Iterator[tuple[Batch, Position]]) -> Iterator[tuple[Batch, Position]]:
        """The batches without those behind the last step, whose rows would be pulled, and made, for nothing."""
        most = self.options.max_steps
        return batches if most is None else islice(batches, max(0, most - self.state.step))

    def _account(self, step: Step[Position]) -> None:
        state = self.state
        state.step += 1
        state.examples += step.num_examples
        state.position = step.token.to_dict()
        state.staleness_max = max(state.staleness_max, step.staleness)
        state.staleness_sum += step.staleness
        self.staleness[step.staleness] += 1
        self.learning_rate.after("step")
        self._metrics.settle()
        self.settle_saves()
        self._unsettled.append((step, replace(state), self.learning_rate.scale()))
        self._settle()
        if self.progressive is not None and is_logged(state.step, self.options.log_every_steps):
            self.log.progressive(self.progressive.record(), self.state)
        self.log.trained(self.state)

    def _settle(self, *, wait: bool = False) -> None:
        """Takes note of what came of steps, of the last one where that is known, or waited for.

        Raises:
            NonFiniteError: a step was refused, under ``on_nonfinite = "stop"``; the state is that after it.
        """
        while self._unsettled and (wait or len(self._unsettled) > 1 or self._unsettled[0][0].outcome.known()):
            step, then, lr_scale = self._unsettled[0]
            self._wait_for(step)
            self._unsettled.popleft()
            if step.refused is not None:
                self.state.refused += 1
            then.refused = self.state.refused
            if step.refused is not None and self.options.on_nonfinite == "stop":
                self._unsettled.clear()  # later ones are told of no more; those of other nets may have moved both halves
                vars(self.state).update(vars(then))
                raise NonFiniteError(
                    f"step {then.step}: {step.refused}; nothing of it was applied. Lower the learning rate, clip gradients "
                    'with train.clip_norm, or skip such steps with train.on_nonfinite = "skip"'
                )
            self.log.step(step, then, lr_scale, partial(self._counters_after, step))

    def _counters_after(self, step: Step[Position]) -> Mapping[str, int]:
        """Those of the sparse half after a step, where it told them; else as they are now."""
        counters = step.outcome.facts().counters
        return self.session.sparse.stats().counters if counters is None else counters

    def _wait_for(self, step: Step[Position]) -> None:
        """Waits for what came of a step: it is time spent on training, of this step and of those launched after it."""
        if step.outcome.known():
            return
        start = time.perf_counter()
        with self.spans("wait for GPU"):
            step.outcome.facts()
        took = time.perf_counter() - start
        for state in (self.state, *(then for _, then, _ in self._unsettled)):
            state.train_s += took

    def _end_epoch(self) -> None:
        evaluates = self.score is not None and self.state.evaluated_step != self.state.step
        if self.publisher is not None and evaluates:
            self._publish(self.publisher)
        scores = self._measure() if evaluates else None
        if self.ranks.stopping:
            return
        self.state.epoch += 1
        position = self.state.position or {}
        # a stream's next epoch goes on where this one ends
        self.state.position = {**position, "epoch": self.state.epoch} if "offsets" in position else None
        self.learning_rate.after("epoch")
        self._record_metrics(scores)

    def _meet_if_due(self) -> None:
        """All trainers together evaluate and save a checkpoint."""
        if self._every(self.options.evaluate_every_steps) or self._every(self.save_every_steps):
            self._settle(wait=True)
        step = self.state.step
        evaluates = self._every(self.options.evaluate_every_steps) and self.state.evaluated_step != step
        if self.publisher is not None and (step >= self.publisher.next_step or evaluates):
            self._publish(self.publisher)
        if self._every(self.options.evaluate_every_steps) and self.state.evaluated_step != self.state.step:
            self._record_metrics(self._measure())
        if self._every(self.save_every_steps) and self.state.saved_step != self.state.step:
            self._save()

    def _publish(self, publisher: Publisher) -> None:
        """Publishes, when it is time or an evaluation comes, in which nothing else would be published."""
        self._settle(wait=True)
        self.session.detach_from_round()
        if self.ranks.rendezvous():
            self.publish()
        else:
            publisher.put_off()

    def _measure(self) -> Scores | None:
        """Scores of the validation data; None where there is none, or where a stop was requested meanwhile."""
        if self.score is None:
            return None
        self.session.detach_from_round()
        if not self.ranks.rendezvous():
            return None
        with self.spans("evaluate"):
            scores = self.score()
        if self.ranks.stopping:
            return None
        return Scores() if scores is None else scores  # of no examples, beside the rank that has all

    def _record_metrics(self, scores: Scores | None) -> None:
        """Computes metrics from scores: at once where training depends on them, else while it goes on."""
        if scores is None:
            return
        self.state.evaluated_step = self.state.step
        tell = partial(self.log.evaluation, "valid", state=replace(self.state))
        compute = partial(scores.result, self.label_names, self.options.rank_at, self.options.metrics)
        if self.options.early_stopping is None and self.learning_rate.metric is None:
            if self.ranks.first:
                self._metrics.submit(compute, tell)
            return
        with self.spans("evaluate"):
            local_metrics = compute().as_dict() if self.ranks.first else None
            metrics = Metrics.from_dict(self.ranks.broadcast(local_metrics))
        tell(metrics)
        self.learning_rate.after_evaluation(metrics.first)
        if self.options.early_stopping is not None:
            self._update_early_stopping(self.options.early_stopping, metrics)

    def _save(self) -> None:
        self._metrics.settle(wait=True)  # what a resumed run does not compute again must be on disk
        self.session.detach_from_round()
        if self.ranks.rendezvous():
            self.state.saved_step = self.state.step
            self.save()

    def _update_early_stopping(self, stopping: EarlyStopping, metrics: Metrics) -> None:
        self.fall_back()
        state, value = self.state, metrics.first.value(stopping.metric)
        sign = direction(stopping.metric, stopping.mode, "early_stopping")
        if value is not None and (
            state.best_value is None or sign * (value - state.best_value) > stopping.min_delta
        ):
            state.best_step, state.best_value, state.bad_evaluations = state.step, value, 0
            self._save()
            return
        state.bad_evaluations += 1
        state.stopped_early = state.bad_evaluations > stopping.patience

    def _finished(self) -> bool:
        self.look()
        self.ranks.poll_stop()
        return self._is_past() or self.ranks.stopping

    def _is_past(self) -> bool:
        past = self.options.max_steps is not None and self.state.step >= self.options.max_steps
        return past or self.state.stopped_early

    def _may_begin(self, number: int) -> bool:
        """Whether a batch, ``number`` behind the last step, may begin: none behind a step that is evaluated, saved or published."""
        if self.ranks.stopping:
            return False
        done, periods = self.state.step, (self.options.evaluate_every_steps, self.save_every_steps)
        ends = [(done // steps + 1) * steps for steps in periods if steps is not None]
        if self.publisher is not None and self.publisher.next_step > done:
            ends.append(self.publisher.next_step)
        return done + number <= min(ends, default=done + number)

    def _every(self, steps: int | None) -> bool:
        return steps is not None and self.state.step > 0 and self.state.step % steps == 0
