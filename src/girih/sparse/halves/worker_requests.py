"""Requests of one batch to the embedding worker that keeps its ids. They are repeated if the worker restarts.

A killed worker restarts empty. The loader sends its ids again, and the trainer repeats the request without a reply. A
repeated read has no further effect, and servers apply a push once, by its number. Other trainers may wait for this
trainer's part of a step. So a thread does all of this, even while the trainer waits for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from numpy.typing import NDArray

from girih.comm.rpc import Client, Frame, Reply
from girih.comm.service import answer
from girih.errors import GirihError, Lost


class RetryingRequests:
    """Makes the requests of a batch, one after the other.

    Args:
        workers: all workers. sample: the number of the worker that has the ids, and the number under which it keeps
            them.
        again: see :class:`girih.data.batch.Share`; None if a request has its ids with it.
        pool: runs work that waits.
    """

    def __init__(
        self,
        workers: Sequence[Client],
        sample: tuple[int, int],
        again: Callable[[], tuple[int, int]] | None,
        pool: Executor,
    ) -> None:
        self._workers, self._sample, self._again, self._pool = workers, sample, again, pool
        self._last: Future[Frame] | None = None

    def ask(
        self, kind: int, fields: Sequence[int] = (), arrays: Sequence[NDArray[Any]] = (), *, ids: bool = True
    ) -> Future[Frame]:
        """Sends a request once the request before has a reply. Never waits.

        The returned future raises the error of the other process.

        Args:
            fields: the integers after the number of the sample.
            ids: True if the worker needs the ids.
        """
        answered: Future[Frame] = Future()
        before, self._last = self._last, answered
        send = partial(self._send, answered, partial(self._call, kind, fields, arrays), ids)
        if before is None or before.done():
            send()
        else:
            before.add_done_callback(lambda _: send())
        return answered

    def _call(self, kind: int, fields: Sequence[int], arrays: Sequence[NDArray[Any]]) -> Reply:
        place, number = self._sample
        return self._workers[place].call(kind, (number, *fields), arrays)

    def _send(self, answered: Future[Frame], call: Callable[[], Reply], ids: bool) -> None:
        try:
            reply = call()
        except GirihError as error:
            answered.set_exception(error)
            return
        reply.add_done_callback(lambda _: self._on_reply(answered, reply, call, ids))

    def _on_reply(self, answered: Future[Frame], reply: Reply, call: Callable[[], Reply], ids: bool) -> None:
        """Handles a reply, in the client's thread."""
        try:
            answered.set_result(answer(reply))
        except Lost as error:
            try:
                self._pool.submit(self._send_again, answered, call, ids)
            except RuntimeError:  # the pool is closed, because the trainer ends
                answered.set_exception(error)
        except Exception as error:
            answered.set_exception(error)

    def _send_again(self, answered: Future[Frame], call: Callable[[], Reply], ids: bool) -> None:
        try:
            if ids and self._again is not None:
                self._sample = self._again()
        except Exception as error:
            answered.set_exception(error)
            return
        self._send(answered, call, ids)
