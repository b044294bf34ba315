"""A call that was made, and what will come of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from girih.comm.rpc.frames import Frame
from girih.errors import WireTimeout
from girih.runs.busy import waiting


class Reply(Future[Frame]):
    """The answer to one call, once it is there. The client's thread calls back: be quick.

    Attributes:
        address, kind: what was called.
        made_s: when.
    """

    def __init__(self, address: str, kind: int) -> None:
        super().__init__()
        self.address, self.kind = address, kind
        self.made_s = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> Frame:
        """The answer; its arrays are read-only views of what came.

        Raises:
            RemoteError: the other side failed.
            WireTimeout: it does not answer; or it did not within ``timeout_s``, and may yet.
            Lost: the process that was called was restarted.
            WireError: the client was closed.
        """
        try:
            return self.result(timeout_s)
        except TimeoutError as error:
            if isinstance(error, WireTimeout):
                raise
            raise WireTimeout(
                f"{self.address}: kind {self.kind}: no answer within {timeout_s} s; it is still waited for"
            ) from None

    def result(self, timeout: float | None = None) -> Frame:
        """See :class:`Future`; who waits does no work meanwhile."""
        if self.done():
            return super().result()
        with waiting():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :class:`Future`; the same."""
        if self.done():
            return super().exception()
        with waiting():
            return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Frame]], object]) -> None:
        """Calls back once it is done, and drops ``fn`` then: that may hold this reply, and so the memory of its arrays."""
        held = [fn]
        super().add_done_callback(lambda reply: held.pop()(reply))

    def finish(self, result: Frame | Exception) -> None:
        """For the client's thread, once: from here on it is done."""
        if isinstance(result, Exception):
            self.set_exception(result)
        else:
            self.set_result(result)
