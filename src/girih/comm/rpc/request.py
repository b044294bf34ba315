"""A client's request, as the server's handler gets it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import Frame, PackedFrame, Status
from girih.errors import WireError
from girih.kernels.buffers import Take

_MOST_ERROR_BYTES: Final = 1 << 16


class Request:
    """To be answered once, from any thread, at any later time.

    Attributes:
        frame: its arrays are read-only views; hold them as long as you like.
        client: the number of who asks.
        buffer: ``buffer(dtype, *shape)`` gives an array to fill that ``reply`` sends without a copy.
        answered: called once it is answered, by who answers, with the seconds since it came. Be quick.
    """

    __slots__ = ("_answer", "_came_s", "_open", "answered", "buffer", "client", "frame")

    def __init__(
        self, frame: Frame, client: int, answer: Callable[[int, PackedFrame], None], buffer: Take
    ) -> None:
        self.frame, self.client, self.buffer = frame, client, buffer
        self.answered: Callable[[float], None] | None = None
        self._answer = answer
        self._open = [True]
        self._came_s = time.perf_counter()

    def reply(self, fields: Sequence[int] = (), arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Answers. The arrays are given away: nobody may write to them again.

        Raises:
            WireError: it was answered before, or the frame is beyond the limits (which fails the request).
        """
        try:
            packed = PackedFrame(Frame(self.frame.kind, tuple(fields), tuple(arrays)))
        except WireError as error:
            self.fail(error)
            raise
        self._finish(Status.REPLY, packed)

    def fail(self, error: str | Exception) -> None:
        """Answers that it went wrong: ``RemoteError`` at the client.

        Raises:
            WireError: it was answered before.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        data = np.frombuffer(text.encode()[:_MOST_ERROR_BYTES], np.uint8)
        self._finish(Status.FAILED, PackedFrame(Frame(self.frame.kind, (), (data,))))

    def _finish(self, status: int, packed: PackedFrame) -> None:
        try:
            self._open.pop()  # one operation, so that only one thread succeeds
        except IndexError:
            raise WireError(f"kind {self.frame.kind}: this request was answered before") from None
        self._answer(status, packed)
        if self.answered is not None:
            self.answered(time.perf_counter() - self._came_s)
