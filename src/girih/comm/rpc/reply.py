"""A call that was made, and what will come of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from girih.comm.rpc.frames import Frame, Packed
from girih.errors import WireTimeout

_LOG = logging.getLogger(__name__)


class Reply:
    """What will be answered to one call."""

    __slots__ = ("_callbacks", "_done", "_error", "_frame", "_lock", "address", "deadline_s", "kind", "num_tries",
                 "number", "packed", "timeout_s")  # fmt: skip

    def __init__(self, address: str, number: int, kind: int, packed: Packed, timeout_s: float) -> None:
        self.address = address
        self.number = number
        self.kind = kind
        self.packed: Packed | None = packed
        self.timeout_s = timeout_s
        self.deadline_s = 0.0
        self.num_tries = 0
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
            WireError: the client was closed.
        """
        if not self._done.wait(timeout_s):
            raise WireTimeout(
                f"{self.address}: kind {self.kind}: no answer within {timeout_s} s, after {self.num_tries} tries;"
                " it is still waited for"
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

    def finish(self, frame: Frame | None, error: Exception | None) -> bool:
        """For the client: from here on it is done; whether there is somebody to call back."""
        with self._lock:
            self._frame, self._error = frame, error
            self.packed = None  # the memory of the arrays sent
            self._done.set()
            return bool(self._callbacks)

    def call_back(self) -> None:
        """For the client's thread, once."""
        for callback in self._callbacks:
            try:
                callback(self)
            except Exception:
                _LOG.exception("%s: kind %d: a callback failed", self.address, self.kind)
        self._callbacks.clear()
