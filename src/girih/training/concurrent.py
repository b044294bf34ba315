"""The schedule of concurrent nets: each takes a batch, and another one once that is applied (HT §2.2)."""

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
    """Several nets train on one set of dense parameters, each on batches of its own.

    Batches are taken in turn, and told in turn. A net waits for its rows, computes, sends their gradients, moves the dense
    parameters, and is free for another batch once its rows' update is applied: so at most ``nets`` − 1 batches are read but
    not yet applied when a batch is read, and with one net each batch sees all updates before it. Dense parameters are read
    and moved without a lock: how many writes of others come in between is measured, and not bounded.

    The sparse half is called by one thread at a time.

    Attributes:
        nets: batches that are trained on at once, each by a thread.
    """

    nets: int

    def __call__(
        self,
        batches: Batches[Token],
        halves: JoinedHalves,
        may_begin: MayBegin = always,
    ) -> Generator[Step[Token], None, None]:
        """Yields a batch's step once it and all before it are applied; closed early, it waits for the batches under way."""
        halves, spans = replace(halves, turn=threading.Lock()), halves.spans
        under_way, finished = deque[Future[Step[Token]]](), SimpleQueue[Future[Step[Token]]]()
        reading: Iterator[tuple[Batch, Token]] | None = iter(batches)
        failed: Exception | None = None
        num_at_work, working = 0, Busy()

        def train(item: tuple[Batch, Token], pulled: Pulled) -> Step[Token]:
            """Trains on a batch whose rows are on their way; returns once its update is applied."""
            with working.working(1 / self.nets):
                try:
                    with spans("wait for rows"):
                        embeddings = pulled.wait()
                    computed = halves.dense.compute(item[0], embeddings)
                except BaseException:
                    with halves.turn, suppress(WireError):  # what broke off the connection is raised
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
                    )  # before others begin: a rate may move with it
                    continue
                while reading is not None and num_at_work < self.nets and may_begin(len(under_way) + 1):
                    try:
                        item = next(reading, None)
                        if item is None:
                            reading = None
                            break
                        begun = pool.submit(train, item, halves.pull(item[0]))
                    except Exception as error:  # raised behind the steps before it
                        reading, failed = None, error
                        break
                    begun.add_done_callback(finished.put)
                    under_way.append(begun)
                    num_at_work += 1
                if num_at_work:
                    with waiting(working):
                        done = finished.get()
                    if done.exception() is not None:
                        reading = None  # it is raised in its turn
                    num_at_work -= 1
                elif not under_way:
                    if failed is not None:
                        raise failed
                    return


@contextmanager
def _thread_pool(nets: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for the nets, which share the threads that torch computes with: if each net took all cores, they would wait for each other.

    torch counts them for each thread, and for those that begin later: what held before holds again at the end.
    """
    before = torch.get_num_threads()

    def share() -> None:
        torch.get_num_threads()  # the first call of a thread takes the number for all
        torch.set_num_threads(max(1, before // nets))

    try:
        with ThreadPoolExecutor(nets, "girih-net", share if nets > 1 else None) as pool:
            yield pool
    finally:
        if nets > 1:
            torch.set_num_threads(before)
