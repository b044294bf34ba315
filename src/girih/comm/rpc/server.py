"""The answering side: one thread that receives and calls the handler; replies are sent by who gives them."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.comm.rpc import reply_cache
from girih.comm.rpc.channel import Channel
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
    Part,
    total_bytes,
    unpack,
)  # fmt: skip
from girih.comm.rpc.reply_cache import Memory
from girih.errors import WireError
from girih.kernels.buffers import Buffers

_LOG = logging.getLogger(__name__)
_MOST_AT_ONCE: Final = 64  # messages before it looks for new peers
_TIDY_S: Final = 5.0
_SILENT_S: Final = 3600.0  # a client without requests that is not heard of for so long is forgotten
_MOST_ERROR_BYTES: Final = 1 << 16
_NO_FRAME: Final = Packed(Frame(0), Limits(), False)


class Request:
    """What a client asks; to be answered once, from any thread, at any later time.

    Attributes:
        frame: its arrays are read-only views; hold them as long as you like.
        client: the number of who asks.
    """

    __slots__ = ("_number", "_open", "_peer", "_server", "client", "frame")

    def __init__(self, server: Server, peer: bytes, header: Header, frame: Frame) -> None:
        self._server = server
        self._peer = peer
        self._number = header.request
        self._open = [True]
        self.client = header.client
        self.frame = frame

    def reply(self, fields: Sequence[int] = (), arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Answers. The arrays are given away: nobody may write to them again.

        Raises:
            WireError: it was answered before, or the frame is beyond the limits (which fails the request).
        """
        frame = Frame(self.frame.kind, tuple(fields), tuple(arrays))
        try:
            packed = Packed(frame, self._server.limits, self._server.checksums)
        except WireError as error:
            self.fail(error)
            raise
        self._answer(REPLY, packed)

    def fail(self, error: str | Exception) -> None:
        """Answers that it went wrong: ``RemoteError`` at the client.

        Raises:
            WireError: it was answered before.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        data = np.frombuffer(text.encode()[:_MOST_ERROR_BYTES], np.uint8)
        self._answer(FAILED, Packed(Frame(self.frame.kind, (), (data,)), self._server.limits, False))

    def buffer(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """An array to fill that ``reply`` sends without a copy."""
        return self._server.buffer(self._peer, dtype, shape)

    def _answer(self, status: int, packed: Packed) -> None:
        try:
            self._open.pop()  # one operation, so that only one thread succeeds
        except IndexError:
            raise WireError(f"kind {self.frame.kind}: this request was answered before") from None
        self._server.answer(self._peer, self._number, status, packed)


class Server:
    """Answers clients until it is closed. Made by ``listen``.

    Attributes:
        address: what clients connect to.
        bytes_sent, bytes_received: of all messages, headers included; what is sent twice counts twice.
        num_refused: messages of peers that did not know the secret.
        num_damaged: messages that could not be read.
    """

    def __init__(
        self,
        channel: Channel,
        address: str,
        handler: Callable[[Request], None],
        *,
        secret: bytes,
        limits: Limits,
        checksums: bool,
    ) -> None:
        self.address = address
        self.limits = limits
        self.checksums = checksums
        self.bytes_sent = 0
        self.bytes_received = 0
        self.num_refused = 0
        self.num_damaged = 0
        self._channel = channel
        self._buffers = Buffers()
        self._handler = handler
        self._secret = secret
        self._clients: dict[bytes, Memory] = {}
        self._lock = threading.Lock()  # of the clients' memories and the channel
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"girih server {address}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Answers that were given are sent; then all is closed. Requests under way stay unanswered."""
        self._closing = True
        if threading.current_thread() is self._thread:
            return  # a handler may close its server: it ends after the handler
        self._channel.wake()
        self._thread.join()

    def buffer(self, peer: bytes, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """For ``Request.buffer``."""
        array = self._channel.buffer(peer, np.dtype(dtype), shape)
        return self._buffers.take(dtype, *shape) if array is None else array

    def answer(self, peer: bytes, number: int, status: int, packed: Packed) -> None:
        """For ``Request``, from any thread."""
        with self._lock:
            memory = self._clients.get(peer)
            if memory is not None and memory.answered(number, status, packed):
                self._send(peer, status, number, memory, packed)

    def _run(self) -> None:
        tidy_s = time.monotonic() + _TIDY_S
        try:
            while not self._closing:
                for _ in range(_MOST_AT_ONCE):
                    if self._closing or not self._take_message():
                        break
                if not self._closing:
                    self._channel.wait(tidy_s - time.monotonic())
                if time.monotonic() >= tidy_s:
                    with self._lock:
                        self._tidy()
                    tidy_s = time.monotonic() + _TIDY_S
        except Exception:  # the clients see that the connection ends
            _LOG.critical("%s: the server failed and is closed", self.address, exc_info=True)
        finally:
            with self._lock:
                self._clients.clear()
                self._channel.close()

    def _take_message(self) -> bool:
        """False if there was none."""
        try:
            with self._lock:
                message = self._channel.receive()
            if message is None:
                return False
            self.bytes_received += total_bytes(message[1])
            request = self._heard(*message)
        except WireError as error:
            self.num_damaged += 1
            _LOG.debug("%s: dropped %s", self.address, error)
            return True
        del message  # its memory may be wanted back before the next one comes
        if request is not None:
            self._handle(request)
        return True

    def _heard(self, peer: bytes, parts: list[Part]) -> Request | None:
        """Takes a message in; a request if it is a new one."""
        memory = self._clients.get(peer)
        if memory is None and total_bytes(parts) > _MOST_ERROR_BYTES:  # too long for a hello
            self.num_refused += 1
            return None
        header, frame = unpack(parts, self.limits)
        with self._lock:
            if header.status == HELLO:
                self._greet(peer, header, frame)
            elif memory is None or memory.client != header.client:
                self.num_refused += 1
            elif header.status == GOODBYE:
                self._forget(peer)
            else:
                memory.acknowledge(header.floor, _seen(frame) if header.status == SEEN else ())
                if header.status == REQUEST and self._is_new(peer, memory, header, frame):
                    return Request(self, peer, header, frame)
        return None

    def _handle(self, request: Request) -> None:
        try:
            self._handler(request)
        except Exception as error:
            try:
                request.fail(error)
            except WireError:
                kind = request.frame.kind
                _LOG.exception("%s: the handler of kind %d failed after it replied", self.address, kind)

    def _greet(self, peer: bytes, header: Header, frame: Frame) -> None:
        if len(frame.arrays) != 2 or not hmac.compare_digest(frame.arrays[0].tobytes(), self._secret):
            self.num_refused += 1
            return
        memory = self._clients.get(peer)
        if memory is None or memory.client != header.client:
            self._clients[peer] = memory = Memory(header.client, header.floor, self.limits)
        useful = self._channel.accept(peer, frame.arrays[1].tobytes())
        self._send(peer, WELCOME, 0, memory, Packed(Frame(0, (int(useful),)), self.limits, False))

    def _is_new(self, peer: bytes, memory: Memory, header: Header, frame: Frame) -> bool:
        """Whether a request is to be run; one that came before is answered as it was."""
        number = header.request
        state = memory.look(number)
        if state == reply_cache.UNDER_WAY:
            self._send(peer, WORKING, number, memory, _NO_FRAME)
        elif state == reply_cache.ANSWERED:
            self._send(peer, memory.replies[number][0], number, memory, memory.replies[number][1])
        elif state == reply_cache.FORGOTTEN:
            text = f"request {number} ran, and its reply is forgotten; raise Limits.most_reply_bytes".encode()
            packed = Packed(Frame(frame.kind, (), (np.frombuffer(text, np.uint8),)), self.limits, False)
            self._send(peer, FAILED, number, memory, packed)
        return state == reply_cache.NEW

    def _send(self, peer: bytes, status: int, number: int, memory: Memory, packed: Packed) -> None:
        parts = packed.parts(Header(status, number, memory.client, 0))
        self.bytes_sent += total_bytes(parts)
        self._channel.send(peer, parts)

    def _tidy(self) -> None:
        """Forgets clients that died without a goodbye."""
        now = time.monotonic()
        for peer, memory in list(self._clients.items()):
            silent = now - memory.heard_s > _SILENT_S and not memory.under_way
            if silent or self._channel.gone(peer):
                self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._clients.pop(peer, None)
        self._channel.forget(peer)


def _seen(frame: Frame) -> list[int]:
    if len(frame.arrays) != 1:
        raise WireError(f"a message of what was seen with {len(frame.arrays)} arrays; expected 1")
    return frame.arrays[0].reshape(-1).tolist()
