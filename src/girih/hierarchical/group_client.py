"""A trainer's client of the servers of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from girih.cluster.roles import RoleName, title
from girih.comm.registry import Registry
from girih.comm.registry.remote import connect_all
from girih.comm.rpc import Frame, Reply
from girih.comm.service import from_text
from girih.errors import GirihError, RemoteError, WireError, WireTimeout, named
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.wire import (
    PLAIN,
    Coders,
    Entry,
    GroupVerb,
    Wire,
    num_bytes,
    pack,
    pack_entries,
    unpack,
    unpack_entries,
)
from girih.telemetry.stats import Stats, StatsSnapshot

T = TypeVar("T")


class GroupClient:
    """Calls the servers of a group. Thread-safe.

    Args:
        parts: the parts of all servers.
        addresses: the addresses of the servers.
        first: the number of the group's first server among all group servers.
        registry: finds the new address of a restarted server.
        wire: the codecs of training steps.
        stats: counts bytes sent.
    """

    def __init__(
        self,
        parts: Sequence[ServerPart],
        addresses: Sequence[str],
        *,
        secret: bytes,
        first: int = 0,
        registry: Registry | None = None,
        wire: Wire = PLAIN,
        stats: Stats,
    ) -> None:
        self.wire, self._stats = wire, stats
        self._titles = [title(RoleName.GROUP_SERVER, first + index) for index in range(len(addresses))]
        self._clients = connect_all(
            RoleName.GROUP_SERVER, addresses, secret=secret, registry=registry, first=first
        )
        counts = [0] * len(addresses)
        self._places: dict[str, tuple[int, int]] = {}  # part → its server, and its number there
        for part in parts:
            self._places[part.name] = part.server, counts[part.server]
            counts[part.server] += 1

    def server_of(self, part: str) -> int:
        """The server that holds a part."""
        return self._places[part][0]

    def forward(
        self,
        called: tuple[int, int, int],
        part: str,
        inputs: Sequence[Tensor],
        needs: Sequence[bool],
        *,
        train: bool,
    ) -> Callable[[], tuple[list[Tensor], list[bool]]]:
        """Runs a part forward. Call the result to wait for the outputs, and for the flags of those with gradients.

        Args:
            called: net, batch, and number of the forward pass in it.
            needs: whether each input needs a gradient.
        """
        server, number = self._places[part]
        arrays = pack(inputs, self._clients[server].buffer, self.wire.forward(train=train))
        self._stats.sent("activations", num_bytes(arrays))
        fields = (*called, number, int(train))
        reply = self._clients[server].call(GroupVerb.FORWARD, fields, [np.array(needs, np.int8), *arrays])

        def outputs() -> tuple[list[Tensor], list[bool]]:
            has, *packed = self._answer(server, reply).arrays
            return [_tensor(each) for each in unpack(packed)], [bool(each) for each in has.tolist()]

        return outputs

    def backward(
        self, called: tuple[int, int, int], part: str, gradients: Sequence[Tensor | None], coders: Coders
    ) -> Callable[[], tuple[list[Tensor | None], str | None]]:
        """Runs the backward pass of a part. Call the result to wait for it.

        The result returns the gradients of the inputs, and the name of a parameter with a non-finite gradient, or
        None.

        Args:
            coders: the codecs of the gradients of the outputs.
        """
        server, _ = self._places[part]
        arrays = pack(gradients, self._clients[server].buffer, coders)
        self._stats.sent("dense", num_bytes(arrays))
        reply = self._clients[server].call(GroupVerb.BACKWARD, called, arrays)

        def result() -> tuple[list[Tensor | None], str | None]:
            name, *packed = self._answer(server, reply).arrays
            return unpack(packed), from_text(name)

        return result

    def ask(
        self,
        verb: GroupVerb,
        fields: Sequence[int] = (),
        arrays: Sequence[NDArray[Any]] = (),
        servers: Iterable[int] | None = None,
    ) -> list[Frame]:
        """Sends a request to servers (by default, all of them). Returns their answers when all have arrived."""
        asked = range(len(self._clients)) if servers is None else servers
        replies = [(server, self._clients[server].call(verb, fields, arrays)) for server in asked]
        return settled([partial(self._answer, server, reply) for server, reply in replies])

    def entries(self, *, with_optimizer: bool) -> Iterable[Entry]:
        """Parameters and buffers of all parts, and optimizer state."""
        for server in range(len(self._clients)):
            yield from self._entries(server, GroupVerb.STATE, int(with_optimizer))

    def put(self, entries: Sequence[Entry], names: Sequence[frozenset[str]]) -> None:
        """Sets parameters, buffers and optimizer state.

        Args:
            names: the names that each server holds.
        """
        for server, held in enumerate(names):
            self._send_entries(server, GroupVerb.RESTORE, [entry for entry in entries if entry[0] in held])

    def extra_state(self) -> Iterable[tuple[int, Entry]]:
        """Yields the state of each server besides parameters and optimizer, with the server. See :class:`GroupVerb`."""
        for server in range(len(self._clients)):
            for entry in self._entries(server, GroupVerb.EXTRA_STATE):
                yield server, entry

    def load_extra_state(self, server: int, entries: Sequence[Entry]) -> None:
        """The inverse of :meth:`extra_state` for one server."""
        self._send_entries(server, GroupVerb.LOAD_EXTRA_STATE, entries)

    def processes(self, *, spans: bool) -> dict[str, StatsSnapshot]:
        """Maps the title of each server to its ``Stats.snapshot``. The first group also reports the dense servers."""
        snapshots: dict[str, StatsSnapshot] = {}
        frames = self.ask(GroupVerb.STATS, (int(spans),))
        for name, frame in zip(self._titles, frames, strict=True):
            snapshots[name], of_dense_servers = from_text(frame.arrays[0])
            snapshots |= of_dense_servers
        return snapshots

    def close(self) -> None:
        """Disconnects from the servers. They drop the batches of this trainer."""
        for client in self._clients:
            client.close()

    def _entries(self, server: int, verb: GroupVerb, *fields: int) -> Iterable[Entry]:
        first, end = 0, 1
        while first < end:
            (frame,) = self.ask(verb, (first, *fields), servers=[server])
            first, end = frame.fields
            yield from unpack_entries(frame.arrays)

    def _send_entries(self, server: int, verb: GroupVerb, entries: Sequence[Entry]) -> None:
        """Sends entries in the necessary number of frames, and at least one frame."""
        begin = 0
        while not begin or begin < len(entries):
            fields = (int(not begin),) if verb == GroupVerb.RESTORE else ()
            count, arrays = pack_entries(entries[begin:], self._clients[server].buffer)
            self._stats.sent("dense", num_bytes(arrays))
            self.ask(verb, fields, arrays, [server])
            begin += max(1, count)

    def _answer(self, server: int, reply: Reply) -> Frame:
        try:
            return reply.wait()
        except RemoteError as error:
            raise named(str(error)) or RemoteError(f"{self._titles[server]}: {error}") from None
        except (WireError, WireTimeout) as error:
            raise type(error)(f"{self._titles[server]}: {error}") from None


def settled(waiting: Sequence[Callable[[], T]]) -> list[T]:
    """Waits for all, and returns their results. If some fail, raises the first error after all have ended."""
    results, failed = list[T](), None
    for wait in waiting:
        try:
            results.append(wait())
        except GirihError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return results


def _tensor(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise WireError(
            "a group server's answer lacks a requested tensor; expected the same version of girih on all hosts"
        )
    return tensor
