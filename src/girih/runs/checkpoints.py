"""The checkpoints that a trainer makes while it fits: written beside training, the best one remembered."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from girih import checkpoint
from girih.checkpoint import Content
from girih.comm.group import TrainerGroup
from girih.runs.background import BackgroundTasks
from girih.runs.stats import Spans


class RunCheckpoints:
    """One at a time, each begun between two steps.

    Args:
        run: the run's directory; None keeps them in a temporary one until :meth:`close`.
        keep: how many of the latest stay, beside the best.
        ranks: this trainer among all: rank 0 writes the checkpoint, the others their rows into it.
    """

    def __init__(self, run: Path | None, keep: int, ranks: TrainerGroup | None = None) -> None:
        self._run, self._keep, self._ranks = run, keep, ranks or TrainerGroup()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._writing = BackgroundTasks("girih-checkpoint")
        self._latest: Path | None = None  # of exactly what the trainer holds now
        self._best: Path | None = None

    @property
    def root(self) -> Path:
        """Where they lie."""
        if self._run is not None:
            return self._run / "checkpoints"
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="girih-best-")
        return Path(self._temporary.name)

    def begin(self, content: Callable[[], Content], best_step: int | None, spans: Spans) -> None:
        """Begins a checkpoint, which is written while training goes on, once an earlier one is done.

        Raises:
            StorageFullError: the disk is full; nothing is left behind. So does :meth:`settle`.
        """
        with spans("wait for checkpoint"):
            self.settle(wait=True)
        with spans("checkpoint"):
            root = Path(self._ranks.broadcast(str(self.root) if self._ranks.first else None))
            now = content()
            done = functools.partial(self._note, root, best_step)
            moved = self._ranks.broadcast(self._latest != root / checkpoint.name_of(now.step))
            if not self._ranks.first:
                beside = checkpoint.SaveBeside(now, rows=moved)
                self._writing.submit(beside.write, lambda _: None)
            elif not moved:
                done(checkpoint.save_manifest(root, now))
            else:
                self._writing.submit(checkpoint.Save(root, now).write, done)

    def settle(self, *, wait: bool = False) -> None:
        """Notes those that are written, or with ``wait`` all; raises what went wrong."""
        self._writing.settle(wait=wait)

    def forget_latest(self) -> None:
        """Rows or parameters move: the latest is no longer what the trainer holds."""
        self._latest = None

    def set_best(self, path: Path) -> None:
        """Of an earlier run that goes on."""
        self._best = path

    def best(self, step: int | None) -> Path:
        """The one that was best, which is of this step.

        Raises:
            CheckpointError: it is gone.
        """
        best = self._best or checkpoint.find(self.root, step=step) if self._ranks.first else ""
        return Path(self._ranks.broadcast(str(best)))

    def close(self) -> None:
        """Waits for what is being written, and ends."""
        try:
            self._writing.close()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def _note(self, root: Path, best_step: int | None, path: Path) -> None:
        self._latest = path
        if best_step is not None and path.name == checkpoint.name_of(best_step):
            self._best = path
        checkpoint.rotate(root, self._keep, best_step)
