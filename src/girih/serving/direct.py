"""Requests for predictions answered as soon as their last byte is there, by the connection that received them.

Of a request of 135 kB uvicorn makes a task that waits for its body piece by piece, and stops reading in between: that takes as long as a fourth of
predicting. All other requests, and those that are out of the ordinary, go uvicorn's way to the same application.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from girih.serving.app import INFER, Server
from girih.serving.protocol import JSON_LENGTH

_JSON_LENGTH = JSON_LENGTH.lower().encode()
_OUT_OF_THE_ORDINARY = {b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"}


class DirectProtocol(HttpToolsProtocol):
    """A connection to a server of predictions.

    Attributes:
        serving: the server, of a class of its own for each: see :func:`direct`.
    """

    serving: ClassVar[Server]
    _path: Any = None
    """The path of the request whose body comes, as it was matched; None where uvicorn has it."""
    _is_ending = False

    def on_headers_complete(self) -> None:
        """Takes a request for predictions; leaves others to uvicorn."""
        self._path = self._taken()
        if self._path is None:
            super().on_headers_complete()
        self._pieces: list[bytes] = []

    def on_body(self, body: bytes) -> None:
        """Keeps a piece of a body."""
        if self._path is None:
            super().on_body(body)
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Answers."""
        if self._path is None:
            super().on_message_complete()
            return
        path, self._path = self._path, None
        json_length = next(
            (value.decode("latin-1") for name, value in self.headers if name == _JSON_LENGTH), None
        )
        response = self.serving.answer(path["name"], path["version"], json_length, b"".join(self._pieces))
        self._pieces = []
        keeps = self.parser.should_keep_alive() and not self._is_ending
        self.transport.write(_message(response, self.server_state.default_headers, keeps=keeps))
        if not keeps:
            self.transport.close()
        self.on_response_complete()

    def shutdown(self) -> None:
        """Ends, once a request that is under way is answered."""
        self._is_ending = True
        if self._path is None:
            super().shutdown()

    def _taken(self) -> Any:
        """The path of a request that is answered here."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy or self.flow.write_paused or self.root_path or self.limit_concurrency is not None:
            return None
        if self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        length = b""
        for name, value in self.headers:
            if name == b"content-length":
                length = value
            elif name in _OUT_OF_THE_ORDINARY:
                return None
        if not length.isdigit() or int(length) > self.serving.most_bytes or b"%" in self.url:
            return None
        return INFER.fullmatch(self.url.decode("latin-1"))


def direct(server: Server) -> type[DirectProtocol]:
    """The class of connections to a server, for uvicorn."""

    class Protocol(DirectProtocol):
        serving = server

    return Protocol


def _message(response: Response, headers: list[tuple[bytes, bytes]], *, keeps: bool) -> bytes:
    """An answer whole, so that one call of the system sends it."""
    status = response.status_code
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [b"%s: %s" % header for header in (*headers, *response.raw_headers)]
    if not keeps:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"", bytes(response.body)])
