"""The asking side: calls from any thread.

Who calls sends by itself. A thread of the client's own does the rest: it takes replies, sends again, calls back.
"""

from __future__ import annotations

import heapq
import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.comm.rpc.channel import SERVER, Channel
from girih.comm.rpc.frames import (
    FAILED,
    GOODBYE,
    HELLO,
    REPLY,
    REQUEST,
    SEEN,
    WELCOME,
    WORKING,
    Frame,
    Header,
    Limits,
    Packed,
    total_bytes,
    unpack,
)  # fmt: skip
from girih.comm.rpc.reply import Reply
from girih.errors import RemoteError, WireError, WireTimeout
from girih.kernels.buffers import Buffers

_LOG = logging.getLogger(__name__)
_SEEN_AFTER_S: Final = 0.02  # idle: then the server may forget the last replies
_MOST_GOT: Final = 64  # replies of which the server does not know that they came
_MOST_GOT_BYTES: Final = 1 << 22
_NO_FRAME: Final = Packed(Frame(0), Limits(), False)


class Client:
    """Calls one server. Made by ``connect``.

    Attributes:
        address: the server's.
        bytes_sent, bytes_received: of all messages, headers included.
        retried: requests that were sent again.
        num_damaged: messages that could not be read.
    """

    def __init__(
        self,
        channel: Channel,
        address: str,
        *,
        secret: bytes,
        limits: Limits,
        timeout_s: float,
        retries: int,
        checksums: bool,
    ) -> None:
        self.address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self.retried = 0
        self.num_damaged = 0
        self._channel = channel
        self._buffers = Buffers()
        self._limits = limits
        self._timeout_s = timeout_s
        self._retries = retries
        self._checksums = checksums
        self._number = secrets.randbits(64) | 1
        secret_and_offer = (np.frombuffer(secret, np.uint8), np.frombuffer(channel.offer(), np.uint8))
        self._hello = Packed(Frame(0, (), secret_and_offer), limits, True)
        self._lock = threading.Lock()  # of all below and the channel
        self._waiting: dict[int, Reply] = {}  # in the order of their numbers
        self._to_call_back: list[Reply] = []
        self._deadlines: list[tuple[float, int]] = []  # a heap; those of calls that moved on are skipped
        self._looks_s = 0.0  # when the client's thread will look at the deadlines
        self._must_greet = True
        self._num_sent = 0  # calls that were sent; their numbers are 1 to this
        self._got: list[int] = []  # whose replies came, which the server does not know yet
        self._got_bytes = 0
        self._tell_s = 0.0  # when to tell it
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"girih client {address}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(
        self,
        kind: int,
        fields: Sequence[int] = (),
        arrays: Sequence[NDArray[Any]] = (),
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Asks; from any thread, as often as you like before the first reply. Never waits.

        The arrays are given away: nobody may write to them again.

        Args:
            timeout_s: after so long without a sign it is sent again; see ``connect``.

        Raises:
            WireError: the frame is beyond the limits, or the client is closed.
        """
        packed = Packed(Frame(kind, tuple(fields), tuple(arrays)), self._limits, self._checksums)
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if self._closed:
                raise WireError(f"{self.address}: kind {kind}: the connection was closed on this side")
            self._greet()
            self._num_sent += 1
            reply = Reply(self.address, self._num_sent, kind, packed, wait_s)
            self._waiting[reply.number] = reply
            try:
                self._try(reply)
            except Exception as error:
                self._fail(error)
            if reply.deadline_s < self._looks_s or self._channel.gone(SERVER):
                self._look_now()
        return reply

    def buffer(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """An array to fill that ``call`` sends without a copy."""
        array = self._channel.buffer(SERVER, np.dtype(dtype), shape)
        return self._buffers.take(dtype, *shape) if array is None else array

    def close(self) -> None:
        """Calls that are not answered raise ``WireError``."""
        with self._lock:
            self._closed = True
        if threading.current_thread() is self._thread:
            return  # a callback may close its client: it ends after the callback
        self._channel.wake()
        self._thread.join()

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while not self._closed:
                with self._lock:
                    self._greet()
                    if self._failure is not None:
                        break
                    self._take_messages()
                    wait_s = self._look()
                self._call_back()
                if not self._closed:
                    self._channel.wait(wait_s)
            with self._lock:
                self._send(GOODBYE, 0, _NO_FRAME)
        except Exception as error:
            failure = error
            _LOG.exception("%s: the client failed and is closed", self.address)
        with self._lock:
            self._closed = True
            failure = failure or self._failure
            why = "the connection was closed on this side" + (f": {failure!r}" if failure else "")
            for reply in list(self._waiting.values()):
                self._finish(reply, None, WireError(f"{self.address}: kind {reply.kind}: {why}"))
            self._channel.close()
        self._call_back()

    def _greet(self) -> None:
        """The first message of all."""
        if self._must_greet:
            self._must_greet = False
            self._send(HELLO, 0, self._hello)

    def _fail(self, error: Exception) -> None:
        """Ends the client, whose thread then fails what is outstanding."""
        _LOG.error("%s: the client failed and is closed", self.address, exc_info=error)
        self._failure = error
        self._channel.wake()

    def _look_now(self) -> None:
        self._looks_s = 0.0
        self._channel.wake()

    def _call_back(self) -> None:
        while self._to_call_back:
            self._to_call_back.pop(0).call_back()

    def _finish(self, reply: Reply, frame: Frame | None, error: Exception | None) -> None:
        del self._waiting[reply.number]
        if reply.finish(frame, error):
            self._to_call_back.append(reply)
            if threading.current_thread() is not self._thread:
                self._channel.wake()

    def _try(self, reply: Reply) -> None:
        reply.num_tries += 1
        self._await(reply)
        if reply.packed is not None:
            self._send(REQUEST, reply.number, reply.packed)

    def _await(self, reply: Reply) -> None:
        reply.deadline_s = time.monotonic() + reply.timeout_s
        heapq.heappush(self._deadlines, (reply.deadline_s, reply.number))

    def _take_messages(self) -> None:
        """All that are there."""
        while True:
            try:
                message = self._channel.receive()
                if message is None:
                    break
                self.bytes_received += total_bytes(message[1])
                header, frame = unpack(message[1], self._limits)
                if header.client == self._number:
                    self._take(header, frame)
            except WireError as error:
                self.num_damaged += 1
                _LOG.debug("%s: dropped %s", self.address, error)
            message = frame = None  # type: ignore[assignment]  # the caller may drop its memory before the next comes

    def _take(self, header: Header, frame: Frame) -> None:
        if header.status == WELCOME:
            self._channel.accepted(bool(frame.fields and frame.fields[0]))
            return
        reply = self._waiting.get(header.request)
        if reply is None:  # a second answer, or one that came too late
            return
        if header.status == WORKING:
            reply.num_tries = 1
            self._await(reply)
            return
        self._got.append(header.request)
        self._got_bytes += sum(array.nbytes for array in frame.arrays)
        if header.status == REPLY:
            self._finish(reply, frame, None)
        elif header.status == FAILED:
            self._finish(reply, None, RemoteError(bytes(frame.arrays[0]).decode(errors="replace")))
        if not self._waiting:
            self._tell_s = time.monotonic() + _SEEN_AFTER_S
            if self._tell_s < self._looks_s:
                self._look_now()
        elif len(self._got) >= _MOST_GOT or self._got_bytes >= _MOST_GOT_BYTES:
            self._tell_seen()  # an old request keeps the floor down

    def _look(self) -> float | None:
        """Sends again what was not answered in time; returns for how many seconds there is nothing to do."""
        if self._waiting and self._channel.gone(SERVER):
            for reply in list(self._waiting.values()):
                self._give_up(reply, "the connection was lost, and nobody listens there any more")
        self._resend()
        wakes_s = self._deadlines[0][0] if self._deadlines else math.inf
        now = time.monotonic()
        if now < self._tell_s:  # also amid a call, so that its reply need not wake this thread
            wakes_s = min(wakes_s, self._tell_s)
        elif self._got and not self._waiting:
            self._tell_seen()
        self._looks_s = wakes_s
        return None if wakes_s == math.inf else max(0.0, wakes_s - now)

    def _resend(self) -> None:
        now = time.monotonic()
        greeted = False
        while self._deadlines and (
            self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._waiting
        ):
            deadline_s, number = heapq.heappop(self._deadlines)
            reply = self._waiting.get(number)
            if reply is None or reply.deadline_s != deadline_s:
                continue
            if reply.num_tries > self._retries:
                self._give_up(reply, f"no answer after {reply.num_tries} tries of {reply.timeout_s} s")
                continue
            if not greeted:  # it may have been the hello that was lost, or the server is another one now
                self._send(HELLO, 0, self._hello)
                greeted = True
            self.retried += 1
            self._try(reply)

    def _floor(self) -> int:
        return next(iter(self._waiting), self._num_sent + 1)

    def _tell_seen(self) -> None:
        """Lets the server forget replies."""
        seen = np.array(self._got, np.int64)
        self._got, self._got_bytes = [], 0
        self._send(SEEN, 0, Packed(Frame(0, (), (seen,)), self._limits, True))

    def _give_up(self, reply: Reply, why: str) -> None:
        error = f"{self.address}: kind {reply.kind}: {why}; is that process alive, and does it have the same secret?"
        self._finish(reply, None, WireTimeout(error))

    def _send(self, status: int, number: int, packed: Packed) -> None:
        floor = self._floor()
        if self._got and floor > max(self._got):
            self._got, self._got_bytes = [], 0
        parts = packed.parts(Header(status, number, self._number, floor))
        self.bytes_sent += total_bytes(parts)
        self._channel.send(SERVER, parts)
