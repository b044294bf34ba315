"""A registry in another process: calls with one array, which is JSON in UTF-8."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.registry.entries import WAIT_S, LocalRegistry
from girih.comm.rpc import Client, Frame, Request, Server
from girih.comm.service import dialer
from girih.comm.transports.sockets import SocketListener
from girih.errors import RemoteError, WireError, WireTimeout

PATIENCE_S: Final = 10.0
"""A registry that cannot be reached is called for so long."""
_VERBS: Final = ("set", "get", "wait", "check", "add", "compare_set", "delete")


def serve(registry: LocalRegistry, secret: bytes, listener: SocketListener) -> Server:
    """Answers :class:`RemoteRegistry` until the server is closed."""
    work = _RegistryWork(registry)
    return Server(listener, work.on_request, secret=secret, incarnation=0, gone=work.forget)


class _RegistryWork:
    """The work of the server, by its thread; a wait has one of its own, until its client is gone."""

    def __init__(self, registry: LocalRegistry) -> None:
        self._registry = registry
        self._gone: defaultdict[int, threading.Event] = defaultdict(threading.Event)  # of clients that waited

    def on_request(self, request: Request) -> None:
        """Answers a request."""
        verb, *arguments = _unpacked(request.frame)
        if verb == "wait":  # for long, while others ask
            waits = partial(self._registry.wait, is_given_up=self._gone[request.client].is_set)
            threading.Thread(
                target=_answer, args=(waits, request, arguments), name="girih-registry", daemon=True
            ).start()
            return
        if verb not in _VERBS:
            request.fail(
                ValueError(f"{verb!r} is not asked of a registry; expected one of {', '.join(_VERBS)}")
            )
            return
        _answer(getattr(self._registry, verb), request, arguments)

    def forget(self, client: int) -> None:
        """Ends the waits of a client that is gone, which would last for ever."""
        if client in self._gone:
            self._gone.pop(client).set()
            self._registry.wake()


def _answer(verb: Callable[..., object], request: Request, arguments: Sequence[object]) -> None:
    try:
        reply = {"is": verb(*arguments)}
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

    def _ask(self, *asked: object) -> Any:
        try:
            reply = _unpacked(self._client.call(0, (), (_packed(asked),)).wait())
        except (WireError, WireTimeout, RemoteError) as error:
            raise WireError(f"the registry cannot be reached, or failed: {error}") from None
        if "timeout" in reply:
            raise WireTimeout(reply["timeout"])
        return reply["is"]


def _packed(message: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(message).encode(), np.uint8)


def _unpacked(frame: Frame) -> Any:
    return json.loads(bytes(frame.arrays[0]))
