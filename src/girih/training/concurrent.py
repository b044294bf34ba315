"""The schedule of concurrent nets. Each net trains on a batch, and takes the next batch after its update (HT §2.2)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch

from girih.data.batch import Batch
from girih.errors import WireError
from girih.sparse.half import Pulled
from girih.telemetry.busy import Busy, waiting
from girih.training.schedules import Batches, JoinedHalves, MayBegin, Step, Token, always


@dataclass(frozen=True, slots=True)
class Concurrent:
    """Several nets train on one set of dense parameters, each on its own batches.

    Batches are taken and reported in order. A net waits for the rows of its batch, computes, sends the rows' gradients,
    and updates the dense parameters. It takes another batch when the update of its rows is applied. So when a batch is
    read, at most ``nets`` − 1 batches are read but not applied. With one net, each batch sees all earlier updates.
    Dense parameters are read and written without a lock. The number of writes by other nets between a net's read and
    its write is measured, but not bounded.

    One thread at a time calls the sparse half.

    Attributes:
        nets: the number of batches that are trained on at the same time, each in a thread.
    """

    nets: int

    def __call__(
        self,
        batches: Batches[Token],
        halves: JoinedHalves,
        may_begin: MayBegin = always,
    ) -> Generator[Step[Token], None, None]:
        """Yields the step of a batch when this batch and all earlier batches are applied.

        If closed early, waits for running batches.
        """
        halves, spans = replace(halves, turn=threading.Lock()), halves.spans
        under_way, finished = deque[Future[Step[Token]]](), SimpleQueue[Future[Step[Token]]]()
        reading: Iterator[tuple[Batch, Token]] | None = iter(batches)
        failed: Exception | None = None
        num_at_work, working = 0, Busy()

        def train(item: tuple[Batch, Token], pulled: Pulled) -> Step[Token]:
            """Trains on a batch whose rows are being fetched. Returns when its update is applied."""
            with working.working(1 / self.nets):
                try:
                    with spans("wait for rows"):
                        embeddings = pulled.wait()
                    computed = halves.dense.compute(item[0], embeddings)
                except BaseException:
                    with halves.turn, suppress(WireError):  # the error that broke the connection is raised
                        pulled.discard()
                    raise
                step, pending = halves.move(*item, pulled, computed)
                with spans("wait for update"):
                    pending.wait()
                return step

        with _thread_pool(self.nets) as pool:
            while True:
                if under_way and under_way[0].done():
                    step = under_way.popleft().result()
                    yield replace(
                        step, under_way=len(under_way)
                    )  # yielded before other batches begin, because the caller may change the learning rate
                    continue
                while reading is not None and num_at_work < self.nets and may_begin(len(under_way) + 1):
                    try:
                        item = next(reading, None)
                        if item is None:
                            reading = None
                            break
                        begun = pool.submit(train, item, halves.pull(item[0]))
                    except Exception as error:  # raised after the earlier steps were yielded
                        reading, failed = None, error
                        break
                    begun.add_done_callback(finished.put)
                    under_way.append(begun)
                    num_at_work += 1
                if num_at_work:
                    with waiting(working):
                        done = finished.get()
                    if done.exception() is not None:
                        reading = None  # the error is raised after the earlier steps
                    num_at_work -= 1
                elif not under_way:
                    if failed is not None:
                        raise failed
                    return


@contextmanager
def _thread_pool(nets: int) -> Iterator[ThreadPoolExecutor]:
    """Yields threads for the nets. Torch's threads are divided among the nets, so that nets do not wait for each other.

    Torch stores the number of its threads for each thread, and for new threads. At the end, the old number is restored.
    """
    before = torch.get_num_threads()

    def share() -> None:
        torch.get_num_threads()  # the first call in a thread adopts the number that was set for new threads
        torch.set_num_threads(max(1, before // nets))

    try:
        with ThreadPoolExecutor(nets, "girih-net", share if nets > 1 else None) as pool:
            yield pool
    finally:
        if nets > 1:
            torch.set_num_threads(before)
