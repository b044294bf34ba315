"""A registry in another process: calls with one array, which is JSON in UTF-8."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.endpoints import dialer
from girih.comm.registry.entries import WAIT_S, LocalRegistry
from girih.comm.rpc import Client, Frame, Request, Server
from girih.comm.transports.sockets import SocketListener
from girih.errors import RemoteError, WireError, WireTimeout

PATIENCE_S: Final = 10.0
"""A registry that cannot be reached is called for so long."""
_VERBS: Final = ("set", "get", "wait", "check", "add", "compare_set", "delete")


def serve(registry: LocalRegistry, secret: bytes, listener: SocketListener) -> Server:
    """Answers :class:`RemoteRegistry` until the server is closed."""
    return Server(listener, partial(_hear, registry), secret=secret, incarnation=0)


def _hear(registry: LocalRegistry, request: Request) -> None:
    verb, *arguments = _unpacked(request.frame)
    if verb == "wait":  # for long, while others ask
        threading.Thread(
            target=_answer, args=(registry, request, verb, arguments), name="girih-registry", daemon=True
        ).start()
    else:
        _answer(registry, request, verb, arguments)


def _answer(registry: LocalRegistry, request: Request, verb: str, arguments: list[Any]) -> None:
    try:
        if verb not in _VERBS:
            raise ValueError(f"{verb!r} is not asked of a registry; expected one of {', '.join(_VERBS)}")
        reply = {"is": getattr(registry, verb)(*arguments)}
    except WireTimeout as error:
        reply = {"timeout": str(error)}
    except Exception as error:
        request.fail(error)
        return
    request.reply((), (_packed(reply),))


class RemoteRegistry:
    """A registry in another process; it travels to further ones of the run by pickle.

    What it raises when the registry is gone, or does not know the secret, is ``WireError``.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address, self._secret = address, secret
        # not by ``connect``: when a run fails, its clients are aborted, but its registry is needed still
        self._client = Client(dialer, address, secret=secret, timeout_s=PATIENCE_S, resolve=None)

    def __reduce__(self) -> tuple[type[RemoteRegistry], tuple[str, bytes]]:
        return RemoteRegistry, (self.address, self._secret)

    def set(self, key: str, value: str) -> None:
        """See :class:`Registry`."""
        self._ask("set", key, value)

    def get(self, key: str) -> str | None:
        """See :class:`Registry`."""
        value: str | None = self._ask("get", key)
        return value

    def wait(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """See :class:`Registry`."""
        self._ask("wait", list(keys), timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`Registry`."""
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """See :class:`Registry`."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See :class:`Registry`."""
        return str(self._ask("compare_set", key, expected, desired))

    def delete(self, key: str) -> bool:
        """See :class:`Registry`."""
        return bool(self._ask("delete", key))

    def close(self) -> None:
        """Whoever waits gets ``WireError``."""
        self._client.close()

    def _ask(self, *asked: Any) -> Any:
        try:
            reply = _unpacked(self._client.call(0, (), (_packed(asked),)).wait())
        except (WireError, WireTimeout, RemoteError) as error:
            raise WireError(f"the registry cannot be reached, or failed: {error}") from None
        if "timeout" in reply:
            raise WireTimeout(reply["timeout"])
        return reply["is"]


def _packed(message: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(message).encode(), np.uint8)


def _unpacked(frame: Frame) -> Any:
    return json.loads(bytes(frame.arrays[0]))
