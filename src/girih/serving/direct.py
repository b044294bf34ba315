"""Connections of a server. Each reads requests within limits, and answers a request when its last byte has arrived.

All requests go through this module, for every path, method and encoding. So no request avoids the limits. A connection
keeps only the headers that it needs, and the bodies of requests for predictions. It counts and discards all other
bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from http import HTTPStatus
from re import Match
from typing import cast
from urllib.parse import unquote

import httptools
from starlette.responses import Response

from girih.serving.app import INFER, InferenceServer
from girih.serving.limits import DRAIN_S, Clients
from girih.serving.protocol import JSON_LENGTH

LINGER_S = 1.0
"""Seconds in which a refused client may read its answer. The connection discards everything that the client sends
meanwhile.
"""
KEEP_ALIVE_S = 5.0
"""Seconds that a connection stays open after an answer."""
_LOG = logging.getLogger(__name__)
_JSON_LENGTH = JSON_LENGTH.lower().encode()
_KEPT = {b"content-length", b"content-encoding", b"transfer-encoding", b"expect", _JSON_LENGTH}
_BLANK_LINE = b"\r\n\r\n"
_PIECE = 1 << 12
_MOST_HEADERS = 1000


class ClientConnection(asyncio.BufferedProtocol):
    """A connection to a server of predictions.

    Args:
        serving: computes the answers.
        clients: all connections of the process.

    Attributes:
        held: bytes of memory that it holds.
        begun: the time at which its request began.
        deadline: the time at which it expires.
    """

    def __init__(self, serving: InferenceServer, clients: Clients) -> None:
        self._serving, self._clients, self._options = serving, clients, clients.options
        self._parser = httptools.HttpRequestParser(self)
        self._is_ending = self._is_over = self._is_answered = False
        self._num_discarded = self.held = 0
        self.begun = self.deadline = 0.0
        self._forget_request()

    def _forget_request(self) -> None:
        self._url, self._headers, self._body, self._unread = b"", dict[bytes, bytes](), bytearray(), b""
        self._infer: Match[str] | None = None
        self._tail, self._num_headers = b"", 0
        self._kept_bytes = self._head_bytes = self._body_bytes = self._body_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the connection, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # see resume_writing
        self._restart(self._options.request_timeout)
        if not self._clients.add(self):
            self.refuse("connections", "too many connections are open; try again later")
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Releases its memory."""
        self._is_over = True
        self._forget_request()
        del self._parser  # the parser refers to this connection, and cyclic garbage stays for a long time
        self._clients.remove(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer for the next bytes.

        All connections share this buffer, because each connection takes its bytes out at once.
        """
        return self._clients.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the received bytes."""
        if self._is_over:
            self._num_discarded += nbytes
            if self._num_discarded > self._options.max_bytes:
                self._transport.abort()
            return
        if self._is_idle():
            self._restart(self._options.request_timeout)
        self._read(self._clients.buffer[:nbytes])

    def _read(self, data: memoryview) -> None:
        """Reads up to the end of one request. Other connections may read before this one reads its next request."""
        self._is_answered = False
        while data and not (self._is_answered or self._is_over):
            size = self._next_size(data)
            if self._head_bytes > self._options.max_header_bytes:
                self.refuse("headers", f"headers of more than {self._options.max_header_bytes:,} bytes")
                break
            try:
                if self._body_left and self._parser.should_upgrade():  # the parser then takes no body
                    self.on_body(data[:size])
                    self.on_message_complete()
                else:
                    self._parser.feed_data(data[:size])
            except httptools.HttpParserUpgrade as upgrade:  # ignored, as HTTP allows
                size = upgrade.args[0]
            except httptools.HttpParserError as error:
                if isinstance(error, httptools.HttpParserCallbackError):
                    _LOG.exception("a request failed")
                if not self._is_over:
                    self.refuse("http", f"cannot read the request: {error}"[:200])
            data = data[size:]
        self._unread = b"" if self._is_over else bytes(data)
        self._settle()

    def _next_size(self, data: memoryview) -> int:
        """Returns the size of the next piece for the parser. A piece ends where a request may end."""
        if self._body_left:
            return min(self._body_left, len(data))
        piece = self._tail + data[: min(_PIECE, self._options.max_header_bytes // 2)].tobytes()
        head, line, _ = piece.partition(_BLANK_LINE)
        size = len(head) + len(line) - len(self._tail)
        self._tail = b"" if line else piece[1 - len(_BLANK_LINE) :]
        self._head_bytes += size
        return size

    def _settle(self) -> None:
        """Updates the bytes that it holds. Continues with the next request when the client has read all answers."""
        waiting = self._transport.get_write_buffer_size()
        held = self._kept_bytes + self._head_bytes + len(self._body) + len(self._unread) + waiting
        if held != self.held:
            self._clients.hold(self, held)
        if self._is_over:
            return
        if self._is_answered:
            is_idle = self._is_idle() and not waiting
            self._restart(KEEP_ALIVE_S if is_idle else self._options.request_timeout)
        if not waiting and not self._unread:
            self._transport.resume_reading()
            return
        self._transport.pause_reading()
        if not waiting:
            asyncio.get_running_loop().call_soon(self._read, memoryview(self._unread))

    def resume_writing(self) -> None:
        """Notes that the client has read all answers."""
        self._is_answered = True
        self._settle()

    def on_url(self, url: bytes) -> None:
        """Keeps a piece of the path."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header that matters."""
        self._num_headers += 1
        if self._num_headers > _MOST_HEADERS and not self._is_over:
            self.refuse("headers", f"more than {_MOST_HEADERS:,} headers")
        if (name := name.lower()) in _KEPT:
            self._headers.setdefault(name, value)

    def on_headers_complete(self) -> None:
        """Refuses a request that is too large, or whose body is compressed."""
        if self._is_over:
            return
        self._kept_bytes, self._head_bytes = self._head_bytes, 0
        self._body_left = int(self._headers.get(b"content-length", 0))
        encoding = self._headers.get(b"content-encoding", b"identity").decode("latin-1")
        if self._parser.get_method() == b"POST":
            self._infer = INFER.fullmatch(self._path())
        if self._body_left > self._options.max_bytes:
            self.refuse("size", str(self._serving.too_large(self._body_left)))
        elif self._infer is not None and encoding != "identity":
            self.refuse("http", str(self._serving.compressed(encoding)))
        elif self._parser.should_upgrade() and b"transfer-encoding" in self._headers:
            self.refuse("http", "Upgrade with a body in chunks: expected no Upgrade, or a Content-Length")
        elif self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes | memoryview) -> None:
        """Keeps a piece of a body of a request for predictions."""
        self._head_bytes = 0
        self._body_left = max(0, self._body_left - len(body))
        self._body_bytes += len(body)
        if self._infer is not None:
            self._body += body
        if self._body_bytes > self._options.max_bytes and not self._is_over:
            self.refuse("size", str(self._serving.too_large(self._body_bytes)))

    def on_message_complete(self) -> None:
        """Answers the request."""
        if self._is_over or (self._body_left and self._parser.should_upgrade()):
            return
        method, length = self._parser.get_method().decode(), self._headers.get(_JSON_LENGTH)
        if self._infer is None:
            response = self._serving.describe(method, self._path())
        else:
            json_length = length if length is None else length.decode("latin-1")
            response = self._serving.answer(
                self._infer["name"], self._infer["version"], json_length, self._body
            )
        self._forget_request()
        self._is_answered = True
        is_kept = self._parser.should_keep_alive() and self._parser.get_http_version() != "1.0"
        self._is_over = self._is_ending or not is_kept
        self._send(response, has_body=method != "HEAD")
        if self._is_over:
            self._restart(self._options.request_timeout)
            self._transport.close()

    def _path(self) -> str:
        url = self._url.partition(b"?")[0].partition(b"#")[0].decode("latin-1")
        path = url if url.startswith("/") else "/" + url.partition("://")[2].partition("/")[2]  # for proxies
        return unquote(path)

    def _send(self, response: Response, *, has_body: bool = True) -> None:
        """Sends a whole answer, in one system call."""
        status = response.status_code
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()), self._clients.date]
        lines += [b"%s: %s" % header for header in response.raw_headers]
        if self._is_over:
            lines.append(b"connection: close")
        self._transport.write(b"\r\n".join([*lines, b"", bytes(response.body) if has_body else b""]))

    def refuse(self, reason: str, text: str) -> None:
        """Answers with an error, then closes the connection. A client that does not read its answers gets no error."""
        can_answer = not (self._is_over or self._transport.get_write_buffer_size())
        self._is_over = True
        self._forget_request()
        if can_answer:
            self._send(self._serving.refuse(reason, text))
            self._restart(LINGER_S)
            self._transport.resume_reading()
            with suppress(OSError):  # the client is gone
                self._transport.write_eof()
        if self._is_ending or not can_answer:
            self._transport.abort()
        self._clients.hold(self, 0)

    def expire(self) -> None:
        """Ends a connection whose deadline has passed."""
        if self._is_idle():
            self._transport.abort()
        else:
            self.refuse("time", f"no whole request in {self._options.request_timeout:g} seconds")

    def shutdown(self) -> None:
        """Ends the connection when the request in progress is answered."""
        self._is_ending = True
        self.deadline = min(self.deadline, time.monotonic() + DRAIN_S - 1)
        if self._is_idle():
            self._transport.close()

    def _is_idle(self) -> bool:
        """True if no byte of a request has arrived."""
        return not (self._url or self._head_bytes or self._unread)

    def _restart(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
