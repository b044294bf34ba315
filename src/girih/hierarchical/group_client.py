"""The servers of one group, as a trainer calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.cluster.roles import RoleName, title
from girih.comm.registry import Registry
from girih.comm.registry.remote import connect_all
from girih.comm.rpc import Frame, Reply
from girih.comm.service import as_text, from_text
from girih.errors import GirihError, RemoteError, WireError, WireTimeout, named
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.live_parts import Entry
from girih.hierarchical.optimizer_recipe import OptimizerOptions
from girih.hierarchical.wire import (
    MOST_ENTRIES,
    MOST_ENTRY_BYTES,
    PLAIN,
    Coders,
    GroupVerb,
    Wire,
    num_bytes,
    pack,
    unpack,
)
from girih.telemetry.stats import Stats, StatsSnapshot

T = TypeVar("T")


class GroupClient:
    """Calls the servers of a group; from any thread.

    Args:
        parts: of all of them.
        addresses: where they listen.
        first: the number of the first of them among all group servers.
        registry: where one that came back is found.
        wire: how training steps write tensors.
        stats: where bytes sent are counted.
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
        self._every = range(len(addresses))
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
        """Has a part run; the outputs, and which of them have gradients, once they are waited for.

        Args:
            called: net, batch, and number of the forward pass in it.
            needs: which inputs want gradients.
        """
        server, number = self._places[part]
        arrays = pack(inputs, self._clients[server].buffer, self.wire.forward(train=train))
        self._stats.sent("activations", num_bytes(arrays))
        reply = self._call(
            server, GroupVerb.FORWARD, (*called, number, int(train)), [np.array(needs, np.int8), *arrays]
        )

        def outputs() -> tuple[list[Tensor], list[bool]]:
            has, *packed = self._answer(server, reply).arrays
            return [_tensor(each) for each in unpack(packed)], [bool(each) for each in has.tolist()]

        return outputs

    def backward(
        self, called: tuple[int, int, int], part: str, gradients: Sequence[Tensor | None], coders: Coders
    ) -> Callable[[], tuple[list[Tensor | None], str | None]]:
        """Has a part run backward; the gradients of its inputs, and a parameter whose gradient is not finite, if any.

        Args:
            coders: what writes the gradients of the outputs.
        """
        server, _ = self._places[part]
        arrays = pack(gradients, self._clients[server].buffer, coders)
        self._stats.sent("dense", num_bytes(arrays))
        reply = self._call(server, GroupVerb.BACKWARD, called, arrays)

        def result() -> tuple[list[Tensor | None], str | None]:
            name, *packed = self._answer(server, reply).arrays
            return unpack(packed), from_text(name)

        return result

    def norms(self, servers: Iterable[int], net: int, batch: int) -> dict[str, float]:
        """The norm of each gradient that a batch left on servers, by names in the whole model, or of parts of parameters."""
        norms: dict[str, float] = {}
        for frame in self._all(servers, GroupVerb.NORMS, (net, batch), []):
            norms |= from_text(frame.arrays[0])
        return norms

    def apply(
        self, servers: Iterable[int], net: int, batch: int, options: Sequence[OptimizerOptions], scale: float
    ) -> None:
        """Has what a batch left on servers, times ``scale``, moved in; returns once it is."""
        self._all(servers, GroupVerb.APPLY, (net, batch), [as_text((options, scale))])

    def discard(self, servers: Iterable[int], net: int, batch: int) -> None:
        """Has it dropped; returns once it is."""
        self._all(servers, GroupVerb.DISCARD, (net, batch), [])

    def entries(self, *, with_optimizer: bool) -> Iterable[Entry]:
        """Parameters and buffers of all parts, and optimizer state."""
        for server in self._every:
            yield from self._entries(server, GroupVerb.STATE, int(with_optimizer))

    def put(self, entries: Sequence[Entry], names: Sequence[frozenset[str]]) -> None:
        """Sets parameters, buffers and optimizer state.

        Args:
            names: of each server, those that it holds.
        """
        for server, held in enumerate(names):
            for number, frame in enumerate(_frames([entry for entry in entries if entry[0] in held])):
                self._load_entries(server, GroupVerb.RESTORE, (int(number == 0),), frame)

    def extra_state(self) -> Iterable[tuple[int, Entry]]:
        """Yields the state of each server besides parameters and optimizer, with the server; see :class:`GroupVerb`."""
        for server in self._every:
            for entry in self._entries(server, GroupVerb.EXTRA_STATE):
                yield server, entry

    def load_extra_state(self, server: int, entries: Sequence[Entry]) -> None:
        """The inverse of :meth:`extra_state` for one server."""
        for frame in _frames(entries):
            self._load_entries(server, GroupVerb.LOAD_EXTRA_STATE, (), frame)

    def processes(self, *, spans: bool) -> dict[str, StatsSnapshot]:
        """Title of a server → its ``Stats.snapshot``; with the first group, those of dense servers too."""
        snapshots: dict[str, StatsSnapshot] = {}
        frames = self._all(self._every, GroupVerb.STATS, (int(spans),), [])
        for server, frame in zip(self._every, frames, strict=True):
            snapshots[self._titles[server]], of_dense_servers = from_text(frame.arrays[0])
            snapshots |= of_dense_servers
        return snapshots

    def begin(self) -> None:
        """Has the averaging of groups begin with the parameters of this one."""
        self._all(self._every, GroupVerb.BEGIN, (), [])

    def meet(self) -> None:
        """Has the servers take the model of all groups to evaluate and save; returns once all groups have met."""
        self._all(self._every, GroupVerb.MEET, (), [])

    def leave(self) -> None:
        """Says that this trainer makes no step before the next meeting."""
        self._all(self._every, GroupVerb.LEAVE, (), [])

    def close(self) -> None:
        """Leaves the servers, which forget what this trainer left there."""
        for client in self._clients:
            client.close()

    def _entries(self, server: int, verb: GroupVerb, *fields: int) -> Iterable[Entry]:
        first, end = 0, 1
        while first < end:
            frame = self._answer(server, self._call(server, verb, (first, *fields), []))
            header, *packed = frame.arrays
            tensors = iter(unpack(packed))
            first, end = frame.fields
            for name, key, is_tensor, value in from_text(header):
                yield name, key, _tensor(next(tensors)) if is_tensor else value

    def _load_entries(
        self, server: int, verb: GroupVerb, fields: Sequence[int], entries: Sequence[Entry]
    ) -> None:
        header = [(n, k, isinstance(v, Tensor), None if isinstance(v, Tensor) else v) for n, k, v in entries]
        tensors = [value for _, _, value in entries if isinstance(value, Tensor)]
        arrays = [as_text(header), *pack(tensors, self._clients[server].buffer)]
        self._stats.sent("dense", num_bytes(arrays))
        self._answer(server, self._call(server, verb, fields, arrays))

    def _call(
        self, server: int, verb: GroupVerb, fields: Sequence[int], arrays: Sequence[NDArray[Any]]
    ) -> Reply:
        return self._clients[server].call(verb, fields, arrays)

    def _all(
        self, servers: Iterable[int], verb: GroupVerb, fields: Sequence[int], arrays: Sequence[NDArray[Any]]
    ) -> list[Frame]:
        replies = [(server, self._call(server, verb, fields, arrays)) for server in servers]
        return settled([lambda s=s, r=r: self._answer(s, r) for s, r in replies])  # type: ignore[misc]

    def _answer(self, server: int, reply: Reply) -> Frame:
        try:
            return reply.wait()
        except RemoteError as error:
            raise named(str(error)) or RemoteError(f"{self._titles[server]}: {error}") from None
        except (WireError, WireTimeout) as error:
            raise type(error)(f"{self._titles[server]}: {error}") from None


def settled(waiting: Sequence[Callable[[], T]]) -> list[T]:
    """Returns all results. If some fail, raises the first error after all have ended."""
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
            "a group server answered without a tensor that was asked for; expected the same version of girih on all hosts"
        )
    return tensor


def _frames(entries: Sequence[Entry]) -> Iterable[list[Entry]]:
    """Entries, as many together as a frame may have; one frame at least."""
    frame: list[Entry] = []
    size = 0
    for entry in entries:
        more = entry[2].nbytes if isinstance(entry[2], torch.Tensor) else 0
        if len(frame) == MOST_ENTRIES or (frame and size + more > MOST_ENTRY_BYTES):
            yield frame
            frame, size = [], 0
        frame.append(entry)
        size += more
    yield frame
