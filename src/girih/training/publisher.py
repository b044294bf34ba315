"""Publishing of a run: decides when to write segments, handles failures, and continues the log.

A segment begins between two steps, when all trainers meet. A thread writes it. If a segment is still being written when
the next segment is due, the next segment is skipped. The segment after it has its changes. So slow storage makes
segments rarer, but never delays training. A process writes a snapshot if it does not know the changes since the last
segment: in a new or restarted process, after rows were replaced, or after a segment that could not be written.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.checkpoint.state import RunState
from girih.checkpoint.storage import Storage
from girih.config import build
from girih.errors import CheckpointError, GirihError, UserError
from girih.files.sealed import open_file, parse, refusing
from girih.files.whole import write_whole
from girih.publishing.log import Log, PublishOptions
from girih.publishing.manifest import LogHead, Pointer
from girih.publishing.segment import Called, LogSegment, SegmentVersion, in_words
from girih.runs.directory import PUBLISHED
from girih.training.checkpoints import RunCheckpoints
from girih.training.notes import say
from girih.training.session import RunContext, StepHook

_MOST_WAIT_S = 60.0
_LAST_TRIES = 2
_APART = 1000
"""The distance between the segment numbers of two processes that found the same head.

So no process overwrites segments of the other process.
"""


@dataclass
class _LogHandle:
    """The place of this process in the log.

    Attributes:
        run: the run's name in the log.
        epoch: the epoch that this process claimed.
        number: the number before that of this process's next segment.
    """

    run: str
    epoch: int
    number: int


class Publisher(StepHook):
    """Publishes a run. All trainers call its methods together, except :meth:`settle` and :meth:`close`.

    Args:
        version: returns the current state, with the weights of a step.
        checkpoints: the run's checkpoints. While a checkpoint is being written, the rows cannot be copied.

    Attributes:
        next_step: the step after which the next segment is due.
        counts: on rank 0, the numbers of ``segments``, ``snapshots``, ``skipped`` and ``failed``.
    """

    def __init__(
        self,
        options: PublishOptions,
        context: RunContext,
        version: Callable[[int], SegmentVersion],
        checkpoints: RunCheckpoints,
    ) -> None:
        self.options, self._version, self._checkpoints = options, version, checkpoints
        self._run, self._ranks, self._stats = context.directory, context.ranks, context.stats
        self.next_step = 0
        self.counts: Counter[str] = Counter(segments=0, snapshots=0, skipped=0, failed=0)
        self._log = Log(Storage.at(options.to).absolute())
        self._threads = {n: ThreadPoolExecutor(1, f"girih-{n}") for n in ("segment", "snapshot")}
        self._opening: Future[_LogHandle] | None = None
        self._opened: _LogHandle | None = None
        self._writes: dict[str, tuple[Future[Any], LogSegment]] = {}  # segments in progress, by thread
        self._base: int | None = None  # the version to which the next segment can be applied
        self._head: LogHead | None = None
        self._heads = threading.Lock()
        self._is_superseded = False  # another run has taken over the log
        self._reported: dict[str, str] = {}  # errors, by thread
        self._tries, self._again_s = 0, 0.0
        self._interval, self._last = 1, (0, time.monotonic())
        self._published_step: int | None = None

    def begin(self, step: int) -> None:
        """Begins, or continues, to publish after a step."""
        self.next_step = self._multiple(step) if self.options.seconds is None else step + 1
        self._last = step, time.monotonic()
        if self._ranks.first:
            self._is_open()

    def due(self, state: RunState) -> bool:
        """True if the number of steps or of seconds between two segments has passed."""
        return state.step >= self.next_step

    def skip(self) -> None:
        """Postpones the next segment."""
        self.next_step += self._interval

    def run(self, state: RunState) -> None:
        """Begins a segment if there are changes to write.

        Raises:
            CheckpointError, StorageFullError: an earlier segment could not be written, under ``on_error = "stop"``.
        """
        step = state.step
        with self._stats.spans("publish"):
            plan = self._ranks.broadcast(self._plan(step) if self._ranks.first else None)
            self.next_step, self._interval = step + plan["ahead"], plan["interval"]
            if plan["number"] is not None:
                self._begin_segments(self._version(step), plan)
        self.settle()

    def finish(self, step: int) -> None:
        """Publishes the current state, with the weights of a step. Waits until it is published, or has failed.

        Raises:
            CheckpointError, StorageFullError: the segment could not be written, under ``on_error = "stop"``.
        """
        with self._stats.spans("publish"):
            for _ in range(_LAST_TRIES):
                self.settle(wait=True)
                last = self._ranks.broadcast(self._last_plan(step) if self._ranks.first else None)
                if last is None:
                    break
                current, plan = self._version(step), last["plan"]
                changed = plan["previous"] is None or self._ranks.any(
                    not current.sparse.knows_changes(plan["previous"])
                )
                if last["done"] and not changed:
                    break
                self._begin_segments(current, plan)
            self.settle(wait=True)
        if self._ranks.first and self._published_step != step:
            say(f"publish: the final state (step {step}) is not in {self._log.root}")

    def wait_copied(self) -> None:
        """Waits until a checkpoint may begin."""
        for _, segment in self._writes.values():
            segment.wait_copied()

    def settle(self, *, wait: bool = False) -> None:
        """Records written and failed segments. Under ``on_error = "stop"``, raises the error of a failed segment."""
        for future, _ in self._writes.values() if wait else ():
            future.exception()
        for name, (future, _) in list(self._writes.items()):
            if future.done():
                del self._writes[name]
                error = future.exception()
                if error is not None:
                    self._note_failure(error, name)
                elif self._ranks.first:
                    self._note_success(name)

    def close(self) -> None:
        """Waits until all segments in progress are written or have failed, and ends."""
        for thread in self._threads.values():
            thread.shutdown()

    def _plan(self, step: int) -> dict[str, object]:
        """Decides the next action of all trainers, and when the next segment is due."""
        rows_free = self._checkpoints.is_idle
        self.settle()
        rows_free = rows_free and "snapshot" not in self._writes  # a snapshot copies the rows too
        plan: dict[str, Any] = {"number": None, "free": rows_free, **self._next(step)}
        if not self._is_open() or self._is_superseded or time.monotonic() < self._again_s:
            return plan
        if "segment" in self._writes or (self._base is None and not rows_free):
            self.counts["skipped"] += 1
            if self.options.seconds is not None:
                plan["ahead"] = max(1, plan["interval"] // 8)
            return plan
        return plan | self._next_segment(rows_free)

    def _last_plan(self, step: int) -> dict[str, object] | None:
        """Decides the action of all trainers at the end. Returns None if the last segment has this step already."""
        self.settle()
        self._again_s = 0.0
        if self._opening is not None:
            self._opening.exception()
        if not self._is_open() or self._is_superseded:
            return None
        plan = {**self._next_segment(True), "free": True, **self._next(step)}
        return {"plan": plan | {"whole_too": False}, "done": self._published_step == step}

    def _next_segment(self, rows_free: bool) -> dict[str, object]:
        if self._opened is None:
            return {}
        number = self._opened.number + 1
        newest = 0 if self._head is None else self._head.snapshot.number
        due = self._base is not None and number - newest >= self.options.snapshot_every
        return {
            "number": number,
            "previous": self._base,
            "whole_too": due and rows_free,
            "run": self._opened.run,
            "epoch": self._opened.epoch,
        }

    def _begin_segments(self, current: SegmentVersion, plan: dict[str, Any]) -> None:
        previous = plan["previous"]
        if previous is not None and self._ranks.any(not current.sparse.knows_changes(previous)):
            previous = None
        if previous is None and not plan["free"]:  # only one save at a time can copy the rows
            self.counts["skipped"] += 1
            return
        self._submit("segment", current, plan, previous)
        if previous is not None and plan["whole_too"]:
            self._submit("snapshot", current, plan, None)

    def _submit(self, name: str, current: SegmentVersion, plan: dict[str, Any], previous: int | None) -> None:
        """Begins a segment, which a thread writes. If a trainer cannot begin, no trainer begins."""
        called = Called(number=plan["number"], previous=previous, run=plan["run"], epoch=plan["epoch"])
        failed: Exception | None = None
        segment: LogSegment | None = None
        try:
            segment = LogSegment(self._log, current, called, self._ranks)
        except (GirihError, OSError) as error:
            failed = error
        if self._opened is not None:
            self._opened.number = called.number
        if self._ranks.any(failed is not None):
            if segment is not None:
                segment.close()
            self._note_failure(failed or CheckpointError("another trainer could not begin a segment"), name)
            return
        if segment is None:
            return
        if name == "segment":
            self._base, self._published_step = called.number, current.step
        self._writes[name] = self._threads[name].submit(self._written, segment, previous is None), segment

    def _written(self, segment: LogSegment, whole: bool) -> None:
        """Writes a segment, and sets the head to it. Runs in a thread."""
        pointer = segment.write()
        if pointer is None:
            return
        with in_words(self._log.root):
            with self._heads:
                self._write_head(pointer, whole=whole)
            self.counts["snapshots" if whole else "segments"] += 1
            if whole:
                self._log.remove_old(self.options.keep)

    def _write_head(self, pointer: Pointer, *, whole: bool) -> None:
        opened, before, there = self._opened, self._head, None
        if opened is None:
            return
        with contextlib.suppress(CheckpointError):  # a damaged head is replaced
            there = self._log.head()
        if there is not None and (
            there.epoch > opened.epoch or (there.epoch == opened.epoch and there.run != opened.run)
        ):
            self._is_superseded = True
            raise CheckpointError(
                f"{self._log.root}: another run now publishes to this log ({there.run}); this run stops publishing"
            )
        newest = snapshot = pointer
        if before is not None:
            if pointer.number < before.newest.number or (
                pointer.number == before.newest.number and not whole
            ):
                newest = before.newest
            if not whole or pointer.number < before.snapshot.number:  # a later snapshot was written meanwhile
                snapshot = before.snapshot
        self._head = LogHead(
            run=opened.run, epoch=opened.epoch, newest=newest, snapshot=snapshot, written=time.time()
        )
        self._log.write_head(self._head)

    def _is_open(self) -> bool:
        """Returns whether the log is open. If not, opens it in a thread.

        If this fails, a later call tries again.
        """
        if self._opened is not None:
            return True
        if self._opening is None:
            if time.monotonic() >= self._again_s:
                self._opening = self._threads["segment"].submit(_open_log, self._log, self._run)
        elif self._opening.done():
            opening, self._opening = self._opening, None
            error = opening.exception()
            if error is None:
                self._opened = opening.result()
            else:
                self._note_failure(error, "segment")
        return self._opened is not None

    def _next(self, step: int) -> dict[str, int]:
        """Returns the step at which the next segment is due. Converts seconds to steps by the recent speed."""
        if self.options.seconds is None:
            return {"ahead": self._multiple(step) - step, "interval": self.options.every_steps or 1}
        (before, then), now = self._last, time.monotonic()
        interval = self._interval
        if step > before and now > then:
            interval = max(1, int(self.options.seconds * (step - before) / (now - then)))
        self._last = step, now
        return {"ahead": interval, "interval": interval}

    def _multiple(self, step: int) -> int:
        steps = self.options.every_steps or 1
        return (step // steps + 1) * steps

    def _note_success(self, name: str) -> None:
        self._tries, self._again_s = 0, 0.0
        if self._reported.pop(name, None) is not None:
            say(f"publish: {self._log.root}: publishing continues")

    def _note_failure(self, error: BaseException, name: str) -> None:
        """Schedules a retry with all rows after a failed segment. Reports the first failure until publishing works."""
        if name == "segment":
            self._base, self._published_step = None, None
        if not self._ranks.first:
            return
        self.counts["failed"] += 1
        self._tries += 1
        first = self.options.seconds or 1.0
        self._again_s = time.monotonic() + min(_MOST_WAIT_S, first * 2 ** min(self._tries - 1, 10))
        if not isinstance(error, GirihError | OSError):
            raise error
        reason = " ".join(str(error).split())
        if self.options.on_error == "stop":
            raise error if isinstance(error, UserError) else CheckpointError(reason)
        if self._reported.setdefault(name, reason) is reason:
            end = "" if self._is_superseded else "; training goes on, and publishing is tried again"
            say(f"publish: {reason}{end}")


def _open_log(log: Log, run: Path | None) -> _LogHandle:
    """Reads the state of the log, and claims the next free epoch for this process. Runs in a thread.

    Other processes may have claimed epochs without publishing anything yet. For each of these epochs, the segment
    numbers of this process begin 1,000 later, so that no two processes use the same number.
    """
    with in_words(log.root):
        try:
            there = log.head()
        except CheckpointError as error:
            say(f"{error}; a new head is written, with a number after all existing ones")
            there = None
        used = [n for whole in (False, True) for n in log.numbers(whole=whole)]
        newest = max(used, default=0) if there is None else there.newest.number
        name = _run_name(log, run)
        if there is not None and there.run != name:
            say(
                f"publish: {log.root} already has versions up to {newest}, from another run; this run adds newer versions, which servers follow; to keep the runs apart, change publish.to"
            )
        log.remove_unfinished(newest)
        epoch = first = 1 if there is None else there.epoch + 1
        claimant = uuid.uuid4().hex
        while not log.claim(epoch, claimant):
            time.sleep(random.uniform(0.0, 0.2))  # so that two processes do not collide again
            epoch += 1
        return _LogHandle(name, epoch, max([newest, *used]) + (epoch - first) * _APART)


def _run_name(log: Log, directory: Path | None) -> str:
    """Returns the name of this run for followers. It stays the same after a restart."""
    path = None if directory is None else directory / PUBLISHED
    if path is not None and path.is_file():
        # If the file is damaged, a new name is enough, because each process begins with a snapshot.
        with contextlib.suppress(UserError), open_file(path) as file, refusing(path, ""):
            return str(build(dict[str, str], parse(file.read()), "")["run"])
    name = uuid.uuid4().hex
    if path is not None:
        write_whole(path, json.dumps({"run": name, "to": log.root.url}) + "\n")
    return name
