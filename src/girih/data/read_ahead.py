"""A background thread that reads ahead, so that input and computation overlap."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from girih.telemetry.busy import Busy, waiting

T = TypeVar("T")

JOIN_S = 10.0


class ReadAhead(Iterator[T], Generic[T]):
    """Iterates in its own thread, up to ``depth`` items ahead of the consumer.

    An exception of the iterator is raised in the consumer, after the items before it. The thread stops when the
    iterator is closed early, or when its last reference is dropped. Only one thread may consume.

    Args:
        closed: an event that :meth:`close` sets. Items that wait for something can wait for it too.
    """

    def __init__(self, items: Iterable[T], depth: int = 4, closed: threading.Event | None = None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(1, depth))
        self._stop = closed or threading.Event()
        self._busy = Busy()
        words = (items, self._queue, self._stop, self._busy)
        self._thread = threading.Thread(target=_produce, args=words, name="girih-read-ahead", daemon=True)
        self._close = weakref.finalize(self, _shut, self._queue, self._stop, self._thread)
        self._thread.start()

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        with waiting(self._busy):
            item, error = self._queue.get()
        if error is not None:
            self.close()
            raise error
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stops the thread and waits for it. Drops the items that were read ahead."""
        self._close()

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_ahead(items: Iterable[T], depth: int = 4) -> ReadAhead[T]:
    """Starts reading up to ``depth`` items ahead, in a thread; see :class:`ReadAhead`.

    >>> with read_ahead([1, 2, 3], depth=2) as ahead:
    ...     list(ahead)
    [1, 2, 3]
    """
    return ReadAhead(items, depth)


def _produce(items: Iterable[object], out: queue.Queue[object], stop: threading.Event, busy: Busy) -> None:
    iterator: Iterable[object] = ()
    try:
        iterator = iter(items)
        with busy.working():
            for item in iterator:
                with waiting():
                    out.put((item, None))
                if stop.is_set():
                    return
        out.put((None, StopIteration()))
    except BaseException as error:  # any exception belongs to the consumer
        out.put((None, error))
    finally:
        if callable(close := getattr(iterator, "close", None)):
            close()


def _shut(out: queue.Queue[object], stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:  # makes room, so that a waiting producer sees the stop
            out.get_nowait()
    if thread is not threading.current_thread():
        thread.join(JOIN_S)
