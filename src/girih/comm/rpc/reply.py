"""A call that was made, and what will come of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from girih.comm.rpc.frames import Frame
from girih.errors import WireTimeout

_LOG = logging.getLogger(__name__)


class Reply:
    """The answer to one call, once it is there.

    Attributes:
        address, kind: what was called.
        made_s: when. deadline_s: when it is given up.
    """

    __slots__ = (
        "_callbacks",
        "_done",
        "_error",
        "_frame",
        "_lock",
        "address",
        "deadline_s",
        "kind",
        "made_s",
    )

    def __init__(self, address: str, kind: int, timeout_s: float | None) -> None:
        self.address = address
        self.kind = kind
        self.made_s = time.monotonic()
        self.deadline_s = math.inf if timeout_s is None else self.made_s + timeout_s
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Reply], None]] = []
        self._frame: Frame | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Frame:
        """The answer; its arrays are read-only views of what came.

        Raises:
            RemoteError: the other side failed.
            WireTimeout: it does not answer; or it did not within ``timeout_s``, and may yet.
            Lost: the process that was called was restarted.
            WireError: the client was closed.
        """
        if not self._done.wait(timeout_s):
            raise WireTimeout(
                f"{self.address}: kind {self.kind}: no answer within {timeout_s} s; it is still waited for"
            )
        if self._error is not None:
            raise self._error
        return self._frame  # type: ignore[return-value]  # one of both is there

    def on_done(self, callback: Callable[[Reply], None]) -> None:
        """Has the client's thread call back when it is done, or calls at once; the callback must be quick."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, result: Frame | Exception) -> None:
        """For the client's thread, once: from here on it is done."""
        with self._lock:
            if isinstance(result, Frame):
                self._frame = result
            else:
                self._error = result
            self._done.set()
        for callback in self._callbacks:
            try:
                callback(self)
            except Exception:
                _LOG.exception("%s: kind %d: a callback failed", self.address, self.kind)
        self._callbacks.clear()
