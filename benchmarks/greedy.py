"""Greedy and slow HTTP clients, by kind, and the memory of the server that they ask."""

from __future__ import annotations

import gzip
import re
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path

MEGABYTE = 1 << 20
_PIECE = bytes(1 << 16)
_HOLD: Iterator[bytes] = repeat(b"")
_RETRY_S = 0.05
_BYTE_S = 0.02


def _head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: greedy", *lines, "", ""]).encode()


def _chunks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    return (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def half_header(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return chain(
        [b"POST " + infer.encode() + b" HTTP/1.1\r\nX: " + bytes(60_000).replace(b"\0", b"x")], _HOLD
    )


def endless_header(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return chain([b"GET / HTTP/1.1\r\n"], repeat(b"a:\r\n" * 4000))


def half_body(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    size = [100, 1 << 16, MEGABYTE, 15 * MEGABYTE][number % 4]
    return chain([_head(infer, f"Content-Length: {size + 1}")], repeat(_PIECE, size // len(_PIECE)), _HOLD)


def slow_body(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return chain([_head(infer, f"Content-Length: {MEGABYTE}"), bytes(150_000)], repeat(b" "))


def chunked_body(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return chain([_head(infer, "Transfer-Encoding: chunked")], _chunks(repeat(_PIECE, 15 * 16)), _HOLD)


def slow_chunks(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return chain(
        [_head(infer, "Transfer-Encoding: chunked")], _chunks(chain([_PIECE, _PIECE], repeat(b"ab")))
    )


def endless_trailer(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return chain(
        [_head(infer, "Transfer-Encoding: chunked"), b"2\r\n{}\r\n0\r\nX: "], repeat(b"x" * (1 << 14))
    )


def compressed(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    bomb = gzip.compress(bytes(8 * MEGABYTE))
    path = [infer, "/metrics"][number % 2]
    return chain([_head(path, "Content-Encoding: gzip", f"Content-Length: {len(bomb) + 1}"), bomb], _HOLD)


def other_path(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    head = _head(
        ["/metrics", "/v2", "/none", "/v2/models/none/infer"][number % 4], f"Content-Length: {15 * MEGABYTE}"
    )
    return chain([head], repeat(_PIECE, 14 * 16), _HOLD)


def upgrade(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    head = _head(infer, "Connection: Upgrade", "Upgrade: websocket", f"Content-Length: {15 * MEGABYTE}")
    return chain([head], repeat(_PIECE, 14 * 16), _HOLD)


def pipelined(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return repeat(b"GET /metrics HTTP/1.1\r\n\r\n" * 2000)


def unread_answers(infer: str, request: bytes, number: int) -> Iterator[bytes]:
    return repeat(request)


KINDS: dict[str, Callable[[str, bytes, int], Iterator[bytes]]] = {
    "half a header": half_header,
    "endless headers": endless_header,
    "half a body": half_body,
    "slow bodies": slow_body,
    "half a body, chunked": chunked_body,
    "slow chunks": slow_chunks,
    "endless trailers": endless_trailer,
    "compressed bodies": compressed,
    "bodies for other paths": other_path,
    "bodies with an upgrade": upgrade,
    "pipelined, answers not read": pipelined,
    "predictions, answers not read": unread_answers,
}


class _Client:
    """One greedy client, which connects again when it is refused."""

    def __init__(
        self, address: tuple[str, int], pieces: Callable[[], Iterator[bytes]], *, reads: bool
    ) -> None:
        self._address, self._pieces, self._reads = address, pieces, reads
        self._socket: socket.socket | None = None
        self._next_s = 0.0

    def act(self, now: float) -> bool:
        """Sends what it can; returns whether it could."""
        if now < self._next_s:
            return False
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=1)
                self._socket.setblocking(False)
                self._source, self._left = self._pieces(), memoryview(b"")
            if self._reads and not self._socket.recv(1 << 16):
                raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self.close(now)
            return False
        if not self._left:
            self._left = memoryview(next(self._source))
        if len(self._left) < 16:  # a slow client, or one that holds
            self._next_s = now + _BYTE_S
        try:
            self._left = self._left[self._socket.send(self._left) :]
        except BlockingIOError:
            return False
        except OSError:
            self.close(now)
            return False
        return True

    def close(self, now: float) -> None:
        """Closes, to connect again soon."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._next_s = None, now + _RETRY_S


def crowd(
    address: tuple[str, int], kinds: list[str], infer: str, request: bytes, clients: int, seconds: float
) -> None:
    """Has so many clients of these kinds ask for some seconds.

    Args:
        infer: the path for predictions. request: a whole request.
    """
    greedy = []
    for number in range(clients):
        kind = kinds[number % len(kinds)]
        pieces = partial(KINDS[kind], infer, request, number // len(kinds))
        greedy.append(_Client(address, pieces, reads=not kind.endswith("not read")))
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        if not sum(client.act(now) for client in greedy):
            time.sleep(0.005)
    for client in greedy:
        client.close(now)


def rss_megabytes(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
