"""The checkpoints that a trainer makes while it fits: written beside training, the best one remembered."""

from __future__ import annotations

import functools
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from girih import checkpoint
from girih.checkpoint import CheckpointOptions, Manifest, Storage
from girih.checkpoint.save import Content, Save, save_manifest
from girih.checkpoint.state import RunState
from girih.errors import CheckpointError, Lost
from girih.processes.segments import temporary_directory
from girih.training.notes import say
from girih.training.session import RunContext, StepHook, is_multiple

MOST_WAITING = 4  # each holds what it computes from


class BackgroundTasks:
    """One thread, called ``name``, that computes, and a queue of what is to be told of it."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, name)
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def submit(self, compute: Callable[[], object], tell: Callable[[object], None]) -> None:
        """Computes in the thread; ``tell`` gets the result in :meth:`settle`, by the caller's thread."""
        while len(self._waiting) >= MOST_WAITING:
            self._tell_next()
        self._waiting.append((self._worker.submit(compute), tell))

    def settle(self, *, wait: bool = False) -> None:
        """Tells what is ready, or with ``wait`` everything; what a computation raised is raised here."""
        while self._waiting and (wait or self._waiting[0][0].done()):
            self._tell_next()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being computed."""
        return all(future.done() for future, _ in self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether all results were told."""
        return not self._waiting

    def forget(self) -> None:
        """Drops what waits to be told."""
        self._waiting.clear()

    def close(self) -> None:
        """Settles everything and ends the thread."""
        try:
            self.settle(wait=True)
        finally:
            self._worker.shutdown()

    def _tell_next(self) -> None:
        future, tell = self._waiting.popleft()
        tell(future.result())


class RunCheckpoints(StepHook):
    """One at a time, each begun between two steps.

    Args:
        context: each trainer writes its rows, rank 0 what makes them a checkpoint. Without a run's directory, and without ``dir``,
            they are in a temporary one until :meth:`close`.
        content: of now.

    Attributes:
        saves: whether they stay after the run.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        context: RunContext,
        content: Callable[[], Content],
    ) -> None:
        self._options, self._content = options, content
        self._run, self._ranks, self._stats = context.directory, context.ranks, context.stats
        self.saves = bool(self._ranks.broadcast(self._run is not None or options.dir is not None))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._writing = BackgroundTasks("girih-checkpoint")
        self._latest: Storage | None = None  # of exactly what the trainer holds now
        self._best: tuple[int, Storage] | None = None  # the best one that is there, and its step
        self._num_given_up = 0

    @property
    def root(self) -> Storage:
        """The storage in which they lie."""
        if self._run is not None or self._options.dir is not None:
            return checkpoint.root_of(self._run or Path(), self._options.dir)
        if self._temporary is None:
            self._temporary = temporary_directory("best")
        return Storage.at(self._temporary.name)

    @property
    def is_idle(self) -> bool:
        """Whether none is being written."""
        return self._writing.is_idle

    def due(self, state: RunState) -> bool:
        """After each ``every_steps``-th step, once."""
        is_due = self.saves and is_multiple(state.step, self._options.every_steps)
        return is_due and state.saved_step != state.step

    def run(self, state: RunState) -> None:
        """Begins a checkpoint that the run notes in its state."""
        state.saved_step = state.step
        self.begin(state)

    def begin(self, state: RunState) -> None:
        """Begins a checkpoint, which is written while training goes on, once an earlier one is done.

        Args:
            state: of the run, as :meth:`fall_back` takes it.

        Raises:
            StorageFullError: the disk is full; nothing is left behind. So does :meth:`settle`.
        """
        with self._stats.spans("wait for checkpoint"):
            self.settle(wait=True)
        self.fall_back(state)
        with self._stats.spans("checkpoint"):
            root = Storage(self._ranks.broadcast(self.root.url if self._ranks.first else None))
            now = self._content()
            done = functools.partial(self._note, root, now.step, state.best_step)
            if self._ranks.broadcast(self._latest != root / checkpoint.name_of(now.step)):
                self._writing.submit(functools.partial(_written, Save(root, now, self._ranks)), done)
            else:
                done(save_manifest(root, now, self._ranks))

    def settle(self, *, wait: bool = False) -> None:
        """Notes those that are written, or with ``wait`` all; raises what went wrong."""
        self._writing.settle(wait=wait)

    def save_last(self, state: RunState) -> None:
        """Writes the last one; again if it was given up. Called by all trainers."""
        given_up = True
        while given_up:
            before = self._num_given_up
            self.begin(state)
            self.settle(wait=True)
            given_up = self._ranks.broadcast(self._num_given_up > before)

    def fall_back(self, state: RunState) -> bool:
        """Has the best weights be those of an earlier step where the best step's are in no checkpoint; called by all trainers.

        So it is where their save was given up. From there on whatever is better than the earlier ones is the best again, and saved.

        Returns:
            Whether nothing moved since, so that they can be saved still.
        """
        if state.best_step is None:
            return False
        best: tuple[bool, int | None, float | None] | None = None
        is_there = self._best is not None and self._best[0] == state.best_step
        if self._ranks.first and not is_there and self._writing.is_settled:
            kept = RunState() if self._best is None else Manifest.read(self._best[1]).run
            best = state.step == state.best_step, kept.best_step, kept.best_value
        best = self._ranks.broadcast(best)
        if best is None:
            return False
        is_now, best_step, best_value = best
        if not is_now:
            if self._ranks.first:
                instead = "the next ones" if best_step is None else f"those of step {best_step}"
                say(
                    f"the best weights so far, of step {state.best_step}, are in no checkpoint; the best now are {instead}"
                )
            state.best_step, state.best_value = best_step, best_value
        return is_now

    def newest(self) -> Storage:
        """The one of exactly what the trainer holds now, on all trainers; called by them where one was made.

        Raises:
            CheckpointError: none was.
        """
        url = self._ranks.broadcast(None if self._latest is None else self._latest.absolute().url)
        if url is None:
            raise CheckpointError(
                "the rows cannot move: their checkpoint is not complete; train with --resume"
            )
        return Storage(url)

    def mark_final(self, best_step: int | None) -> None:
        """Marks the last one, or under early stopping the best one, as that with the run's final weights."""
        place = self._latest if best_step is None else self.best(best_step)
        if self._ranks.first and place is not None:
            Manifest.read(place).marked(place, final=True)

    def unmark(self) -> None:
        """Takes the mark away: the run goes on."""
        for _, place in checkpoint.complete(self.root) if self._ranks.first else ():
            Manifest.read(place).marked(place, final=False)

    def forget_latest(self) -> None:
        """Rows or parameters move: the latest is no longer what the trainer holds."""
        self._latest = None

    def set_best(self, step: int, place: Storage) -> None:
        """Sets the best checkpoint, that of an earlier run that goes on."""
        self._best = step, place

    def best(self, step: int | None) -> Storage:
        """The one that was best, which is of this step.

        Raises:
            CheckpointError: it is gone.
        """
        url = None
        if self._ranks.first:
            url = (checkpoint.find(self.root, step=step) if self._best is None else self._best[1]).url
        return Storage(self._ranks.broadcast(url))

    def close(self) -> None:
        """Waits for what is being written, and ends."""
        try:
            self._writing.close()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def _note(self, root: Storage, step: int, best_step: int | None, place: Storage | None) -> None:
        if place is None:
            self._num_given_up += 1
            say("a checkpoint was given up: an embedding server came back meanwhile")
            return
        if not self._ranks.first:
            return
        self._latest = place
        if step == best_step:
            self._best = step, place
        checkpoint.rotate(root, self._options.keep, None if self._best is None else self._best[0])


def _written(save: Save) -> Storage | None:
    """The checkpoint, written; None where the rows as they were when it began are gone with a process."""
    try:
        return save.write()
    except Lost:
        return None
