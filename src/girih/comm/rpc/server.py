"""The server side. One thread receives requests and calls the handler. The thread that replies sends the reply."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import Frame, PackedFrame, Status, unpack
from girih.comm.rpc.poller import IN, LINGER_S, OUT, Poller, SessionLink
from girih.comm.rpc.transport import ConnectionLost, Listener, SilentPeer, Stranger, Welcome
from girih.errors import WireError
from girih.kernels.buffers import Take

_MOST_ERROR_BYTES: Final = 1 << 16


class Request:
    """A request that must be answered once, from any thread, at any later time.

    Attributes:
        frame: the content. Its arrays are read-only views, which you may keep for any time.
        client: the number of the client.
        buffer: ``buffer(dtype, *shape)`` returns an array to fill, which ``reply`` sends without a copy.
        answered: called by the answering thread with the seconds since the request arrived. It must be quick.
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
        """Answers the request. The caller must not write to the arrays afterwards.

        Raises:
            WireError: the request was answered before, or the answer exceeds the limits. In the second case, the
                request fails.
        """
        try:
            packed = PackedFrame(Frame(self.frame.kind, tuple(fields), tuple(arrays)))
        except WireError as error:
            self.fail(error)
            raise
        self._finish(Status.REPLY, packed)

    def fail(self, error: str | Exception) -> None:
        """Answers that the request failed. The client raises ``RemoteError``.

        Raises:
            WireError: the request was answered before.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        data = np.frombuffer(text.encode()[:_MOST_ERROR_BYTES], np.uint8)
        self._finish(Status.FAILED, PackedFrame(Frame(self.frame.kind, (), (data,))))

    def _finish(self, status: int, packed: PackedFrame) -> None:
        try:
            self._open.pop()  # one operation, so that only one thread succeeds
        except IndexError:
            raise WireError(f"kind {self.frame.kind}: the request was already answered") from None
        self._answer(status, packed)
        if self.answered is not None:
            self.answered(time.perf_counter() - self._came_s)


_LOG = logging.getLogger(__name__)
_MOST_TOLD: Final = 100


class Strangers(dict[Stranger, float]):
    """The peers that connected to a server but have not proved yet that they know the secret, in the order of arrival.

    Each peer has a deadline for the proof.

    Args:
        address: the server's address.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._reported_hosts: set[str] = set()

    def find_expired(self, now: float) -> list[Stranger]:
        """Returns the peers whose deadline has passed."""
        return [stranger for stranger, until_s in self.items() if now > until_s]

    def first_to_leave(self) -> Stranger:
        """Returns the peer to drop first: the longest-waiting peer of the host with the most peers.

        So one host with many connections cannot keep out other hosts.
        """
        crowds = Counter(stranger.origin for stranger in self)
        crowd = crowds.most_common(1)[0][0]
        return next(stranger for stranger in self if stranger.origin == crowd)

    def log_refusal(self, stranger: Stranger, why: object) -> None:
        """Logs the first refusal of each host as a warning, for up to 100 hosts."""
        origin, said = stranger.origin, "%s: refused a connection from %s, which changes nothing: %s%s"
        known = origin in self._reported_hosts or len(self._reported_hosts) >= _MOST_TOLD
        if known or isinstance(why, SilentPeer):
            _LOG.debug(said, self._address, origin, why, "")
            return
        self._reported_hosts.add(origin)
        others = "there" if len(self._reported_hosts) < _MOST_TOLD else "anywhere"
        _LOG.warning(said, self._address, origin, why, f"; further refusals from {others} are not logged")


_MOST_AT_ONCE: Final = 64  # the most messages that the thread handles before it checks the files
_TIDY_S: Final = 0.25
_STRANGER_S: Final = 5.0  # the time for the handshake
_MOST_STRANGERS: Final = 256
_SESSION_S: Final = 120.0  # a client without a connection for this time is forgotten
_MOST_UNSENT_BYTES: Final = 1 << 26
"""The server does not read messages of a client while more bytes of answers than this wait for the client."""
_MOST_KEPT_BYTES: Final = 1 << 32
"""The server forgets a client if more bytes of answers than this wait for the client."""
CROWD: Final = "it said nothing while many others came"
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server(Poller):
    """Answers clients until it is closed. ``listen`` returns it. Answers from before the end are still sent.

    Attributes:
        address: the address that clients connect to.
        incarnation: see ``listen``.
        num_refused: the number of peers that did not prove in time that they know the secret.
    """

    def __init__(
        self,
        listener: Listener,
        handler: Callable[[Request], None],
        *,
        secret: bytes,
        incarnation: int,
        gone: Callable[[int], None] | None = None,
        patience_s: float | None = None,
    ) -> None:
        super().__init__(listener.address)
        self.incarnation, self.num_refused = incarnation, 0
        self._listener, self._handler, self._secret = listener, handler, secret
        self._gone, self._patience_s = gone, patience_s
        self._strangers = Strangers(listener.address)
        self._peers: dict[int, SessionLink] = {}  # by number
        self._ready: deque[SessionLink] = deque()  # links that may have messages, served in turn
        self._greedy: deque[SessionLink] = deque()  # links for which too many answers wait
        self._accepting = False
        self._tidy_s = 0.0
        self._thread.start()

    def _turn(self) -> None:
        if time.monotonic() >= self._tidy_s:
            self._tidy()
            self._tidy_s = time.monotonic() + _TIDY_S
        self._wait(0.0 if self._ready else _TIDY_S)
        while self._greedy:
            self._drop_greedy(self._greedy.popleft())
        handled = 0
        while self._ready and handled < _MOST_AT_ONCE and not self._closing:
            self._receive(self._ready.popleft())
            handled += 1

    def _end(self, why: str) -> None:
        end_s = time.monotonic() + LINGER_S
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        for peer in self._peers.values():
            self._detach(peer, max(0.0, end_s - time.monotonic()))

    def _tidy(self) -> None:
        """Resumes listening after a pause, and drops peers and clients whose time is over."""
        now = time.monotonic()
        for stranger in self._strangers.find_expired(now):
            self._refuse(stranger, "no proof in time that it knows the secret")
        patience_s = _SESSION_S if self._patience_s is None else self._patience_s
        for peer in list(self._peers.values()):
            if peer.connection is None and now - peer.lost_s > patience_s:
                self._forget(peer)
        if not self._accepting:
            self._accepting = True
            self._selector.register(self._listener, IN, self._accept)

    def _accept(self, _: int) -> None:
        """Accepts new connections. If there are too many strangers, drops one. Pauses if file descriptors run out."""
        try:
            for _ in range(_MOST_AT_ONCE):
                stranger = self._listener.accept()
                if stranger is None:
                    return
                self._selector.register(stranger, IN, partial(self._admit, stranger))
                self._strangers[stranger] = time.monotonic() + _STRANGER_S
                if len(self._strangers) > _MOST_STRANGERS:
                    self._refuse(self._strangers.first_to_leave(), CROWD)
            return
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:  # only this one connection failed
                return
            if self._strangers:
                self._refuse(self._strangers.first_to_leave(), CROWD)
                return
            _LOG.warning("%s: cannot take connections now: %s", self.address, error)
        self._accepting = False
        self._selector.unregister(self._listener)

    def _admit(self, stranger: Stranger, _: int) -> None:
        """Admits a peer that proves that it knows the secret, to its old session or to a new session."""
        if stranger not in self._strangers:  # refused after the system reported that its file is readable
            return
        try:
            hello = stranger.read_hello(self._secret)
            if hello is None:
                return
            peer = self._peers.get(hello.session) or SessionLink(secrets.randbits(63) | 1, self._stuck)
            self._detach(peer)  # the old connection broke, but this side has not noticed it yet
            welcome = Welcome(self.incarnation, peer.number, peer.received)
            connection = stranger.welcome(self._secret, welcome)
        except Exception as error:  # a bad message of a stranger must only end its connection
            self._refuse(stranger, error)
            return
        self._peers[peer.number] = peer
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        with peer.lock:
            self._attach(peer, connection, hello.received if hello.session == peer.number else 0)

    def _refuse(self, stranger: Stranger, why: object) -> None:
        self.num_refused += 1
        self._strangers.log_refusal(stranger, why)
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()

    def _on_readable(self, session: SessionLink) -> None:
        if session not in self._ready:
            self._ready.append(session)

    def _receive(self, peer: SessionLink) -> None:
        """Receives and handles one message of a peer."""
        if self._holds_back(peer):
            return
        try:
            parts = None if peer.connection is None else peer.connection.receive()
            if parts is None:
                return
            header, frame = unpack(parts)
            with peer.lock:
                is_new = peer.on_message(header)
        except Exception as error:  # a bad message must only end its connection
            self.num_damaged += not isinstance(error, ConnectionLost)
            _LOG.debug("%s: %s", self.address, error)
            self._detach(peer)
            return
        del parts  # so that this memory can be reused before the next message arrives
        self._ready.append(peer)
        if header.status == Status.GOODBYE:
            self._detach(peer)
            self._forget(peer)
        elif header.status == Status.REQUEST and is_new:
            answer, buffer = partial(self._answer, peer, header.number), partial(self._buffer, peer)
            self._call(Request(frame, peer.number, answer, buffer))

    def _holds_back(self, peer: SessionLink) -> bool:
        """Returns whether the client must receive answers before the server reads more requests from the client.

        ``_flush`` resumes reading.
        """
        with peer.lock:
            if peer.connection is None or peer.kept_bytes <= _MOST_UNSENT_BYTES or peer.flush():
                return False
            self._watch(peer, OUT)
        return True

    def _drop_greedy(self, peer: SessionLink) -> None:
        if peer.number in self._peers:
            _LOG.warning(
                "%s: a client left %s bytes of answers, more than %s; its session is dropped",
                self.address, f"{peer.kept_bytes:,}", f"{_MOST_KEPT_BYTES:,}",
            )  # fmt: skip
            self._detach(peer)
            self._forget(peer)

    def _forget(self, peer: SessionLink) -> None:
        """Drops the session of a client that left for good."""
        with peer.lock:
            peer.end()
        if self._peers.pop(peer.number, None) is not None and self._gone is not None:
            self._gone(peer.number)

    def _call(self, request: Request) -> None:
        try:
            self._handler(request)
        except Exception as error:
            try:
                request.fail(error)
            except WireError:
                kind = request.frame.kind
                _LOG.exception("%s: the handler of kind %d failed after it replied", self.address, kind)

    def _answer(self, peer: SessionLink, number: int, status: int, packed: PackedFrame) -> None:
        """Sends an answer. Callable from any thread."""
        with peer.lock:
            peer.send(status, number, packed)
            if peer.kept_bytes > _MOST_KEPT_BYTES:
                self._greedy.append(peer)
                self._wakeup.ask()
