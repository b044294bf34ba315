"""The checkpoints that a trainer makes during ``fit``. Threads write them while training continues."""

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

MOST_WAITING = 4  # each task holds its inputs in memory


class BackgroundTasks:
    """A thread that runs tasks, and a queue of their results for the caller's thread. ``name`` is the thread's name."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, name)
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def submit(self, compute: Callable[[], object], tell: Callable[[object], None]) -> None:
        """Runs ``compute`` in the thread. :meth:`settle` passes the result to ``tell`` in the caller's thread."""
        while len(self._waiting) >= MOST_WAITING:
            self._tell_next()
        self._waiting.append((self._worker.submit(compute), tell))

    def settle(self, *, wait: bool = False) -> None:
        """Passes on the results that are ready, or with ``wait`` all results. Raises the error of a failed task."""
        while self._waiting and (wait or self._waiting[0][0].done()):
            self._tell_next()

    @property
    def is_idle(self) -> bool:
        """Returns whether no computation is running."""
        return all(future.done() for future, _ in self._waiting)

    @property
    def is_settled(self) -> bool:
        """Returns whether all results were passed on."""
        return not self._waiting

    def forget(self) -> None:
        """Drops the results that were not passed on yet."""
        self._waiting.clear()

    def close(self) -> None:
        """Passes on all results and ends the thread."""
        try:
            self.settle(wait=True)
        finally:
            self._worker.shutdown()

    def _tell_next(self) -> None:
        future, tell = self._waiting.popleft()
        tell(future.result())


class RunCheckpoints(StepHook):
    """The hook that writes checkpoints, one at a time. Each checkpoint begins between two steps.

    Args:
        context: the run. Each trainer writes its rows, and rank 0 writes the rest. Without a run directory and without
            ``dir``, checkpoints are in a temporary directory until :meth:`close`.
        content: returns the current content of a checkpoint.

    Attributes:
        saves: True if checkpoints stay after the run.
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
        self._latest: Storage | None = None  # the checkpoint of the current state, if there is one
        self._best: tuple[int, Storage] | None = None  # the best existing checkpoint, and its step
        self._num_given_up = 0

    @property
    def root(self) -> Storage:
        """The storage of the checkpoints."""
        if self._run is not None or self._options.dir is not None:
            return checkpoint.root_of(self._run or Path(), self._options.dir)
        if self._temporary is None:
            self._temporary = temporary_directory("best")
        return Storage.at(self._temporary.name)

    @property
    def is_idle(self) -> bool:
        """Returns whether no checkpoint is being written."""
        return self._writing.is_idle

    def due(self, state: RunState) -> bool:
        """True once after each ``every_steps``-th step."""
        is_due = self.saves and is_multiple(state.step, self._options.every_steps)
        return is_due and state.saved_step != state.step

    def run(self, state: RunState) -> None:
        """Begins a checkpoint and records it in the run's state."""
        state.saved_step = state.step
        self.begin(state)

    def begin(self, state: RunState) -> None:
        """Waits until an earlier checkpoint is written, and begins a checkpoint. Training continues during its write.

        Args:
            state: the state of the run, see :meth:`fall_back`.

        Raises:
            StorageFullError: the disk is full. No partial checkpoint stays. :meth:`settle` raises it too.
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
        """Records written checkpoints, or with ``wait`` all checkpoints. Raises the error of a failed checkpoint."""
        self._writing.settle(wait=wait)

    def save_last(self, state: RunState) -> None:
        """Writes the last checkpoint. If the write is given up, tries again. All trainers call it together."""
        given_up = True
        while given_up:
            before = self._num_given_up
            self.begin(state)
            self.settle(wait=True)
            given_up = self._ranks.broadcast(self._num_given_up > before)

    def fall_back(self, state: RunState) -> bool:
        """Sets the best step to the step of the best existing checkpoint, if the save of the best weights was given up.

        Later weights then only have to be better than this checkpoint. All trainers call it together.

        Returns:
            True if no row or parameter changed since, so that the best weights can still be saved.
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
                    f"the best weights so far, of step {state.best_step}, are in no checkpoint; the best are now {instead}"
                )
            state.best_step, state.best_value = best_step, best_value
        return is_now

    def newest(self) -> Storage:
        """The checkpoint of the current state. All trainers call it together, after a checkpoint was made.

        Raises:
            CheckpointError: no checkpoint was made.
        """
        url = self._ranks.broadcast(None if self._latest is None else self._latest.absolute().url)
        if url is None:
            raise CheckpointError(
                "the rows cannot move: their checkpoint is not complete; train with --resume"
            )
        return Storage(url)

    def mark_final(self, best_step: int | None) -> None:
        """Marks the checkpoint with the run's final weights: the last one, or under early stopping the best one."""
        place = self._latest if best_step is None else self.best(best_step)
        if self._ranks.first and place is not None:
            Manifest.read(place).marked(place, final=True)

    def unmark(self) -> None:
        """Removes the mark of the final weights, because the run continues."""
        for _, place in checkpoint.complete(self.root) if self._ranks.first else ():
            Manifest.read(place).marked(place, final=False)

    def forget_latest(self) -> None:
        """Forgets the latest checkpoint, because rows or parameters change."""
        self._latest = None

    def set_best(self, step: int, place: Storage) -> None:
        """Sets the best checkpoint to a checkpoint that was made before the run was resumed."""
        self._best = step, place

    def best(self, step: int | None) -> Storage:
        """Returns the best checkpoint, which must have this step.

        Raises:
            CheckpointError: the checkpoint no longer exists.
        """
        url = None
        if self._ranks.first:
            url = (checkpoint.find(self.root, step=step) if self._best is None else self._best[1]).url
        return Storage(self._ranks.broadcast(url))

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and ends the thread."""
        try:
            self._writing.close()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def _note(self, root: Storage, step: int, best_step: int | None, place: Storage | None) -> None:
        if place is None:
            self._num_given_up += 1
            say("a checkpoint was given up: an embedding server restarted while it was written")
            return
        if not self._ranks.first:
            return
        self._latest = place
        if step == best_step:
            self._best = step, place
        checkpoint.rotate(root, self._options.keep, None if self._best is None else self._best[0])


def _written(save: Save) -> Storage | None:
    """Waits until a checkpoint is written. Returns None if a process died and its rows for the checkpoint are lost."""
    try:
        return save.write()
    except Lost:
        return None
