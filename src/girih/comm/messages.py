"""Contents of messages between processes, and the answers to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc import Client, Frame, Reply
from girih.errors import Lost, RemoteError, named


def as_text(value: Any) -> NDArray[np.uint8]:
    """JSON as an array."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_text(array: NDArray[Any]) -> Any:
    """The inverse of :func:`as_text`."""
    return json.loads(array.tobytes())


def as_integer(number: float) -> int:
    """The bits of a float64."""
    return int(np.float64(number).view(np.int64))


def as_float(bits: int) -> float:
    """The inverse of :func:`as_integer`."""
    return float(np.int64(bits).view(np.float64))


def answer(reply: Reply) -> Frame:
    """Waits for an answer; raises what the other process raised."""
    try:
        return reply.wait()
    except RemoteError as error:
        raise named(str(error)) or error from None


def answers(
    clients: Iterable[Client],
    kind: int,
    fields: Sequence[int] = (),
    arrays: Sequence[NDArray[Any]] = (),
    *,
    again: bool = False,
) -> list[Frame]:
    """Asks all of them the same, side by side; waits for their answers, and raises the first error once all are here.

    Args:
        again: asks one again that was restarted before it answered, for what may be done twice.
    """
    asked = [(client, client.call(kind, fields, arrays)) for client in clients]
    found: list[Frame] = []
    errors: list[Exception] = []
    for client, first in asked:
        try:
            reply = first
            while again and isinstance(reply.exception(), Lost):
                reply = client.call(kind, fields, arrays)
            found.append(answer(reply))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory as an array that may be written, as torch wants it.

    What comes over a wire is read-only, and is this process's alone.
    """
    return np.asarray(_Writable(array)) if not array.flags.writeable else array


class _Writable:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
