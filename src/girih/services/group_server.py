"""A group server: parts of the dense net, which the nets of all trainers of a group run and move (HT §3.1).

Requests are done side by side, by as many threads as there are nets: torch's operators leave the interpreter to others
while they compute. So the servers of a group work on different batches at once (pipeline parallelism, HT §3.1.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.cluster.roles import RoleName
from girih.comm.peers import connect_all
from girih.comm.rpc import Request
from girih.comm.service import as_text, attempt, from_text, listen, timers
from girih.dense.accel import process_settings
from girih.dense.accel.arithmetic import arithmetic
from girih.dense.accel.process_settings import keep_freed_memory
from girih.errors import GirihError, WireError
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.graph.operator_costs import draws
from girih.hierarchical.live_parts import Entry, LiveParts
from girih.hierarchical.open_batches import ForwardCall, OpenBatch, OpenBatches
from girih.hierarchical.optimizer_recipe import OptimizerRecipe
from girih.hierarchical.shadow import Shadow
from girih.hierarchical.wire import (
    MOST_ENTRIES,
    MOST_ENTRY_BYTES,
    PLAIN,
    RANDOM,
    GroupVerb,
    Wire,
    num_bytes,
    pack,
    unpack,
)
from girih.kernels.cpu import ahead
from girih.telemetry.busy import waiting
from girih.telemetry.stats import Stats

PATIENCE_S = 40.0
"""The work that a trainer left is kept so long while there is no connection to it: as long as it tries to connect again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedWith:
    """The averaging of a server's parameters with those that the same server of other groups has.

    Attributes:
        servers: where the dense servers listen.
        group: the number of this server's. place: the server's number in it.
        every_steps: writes of all nets from one round to the next.
        trainers: of the group.
    """

    servers: Sequence[str]
    group: int
    place: int
    every_steps: int
    trainers: int = 1


@dataclass
class GroupServer:
    """One server of a group.

    Attributes:
        parts: those that it holds, with their initial weights.
        index: which of all group servers.
        recipe: of the optimizer of the whole model.
        num_nets: nets of all trainers of the group, which may ask at once.
        precision, forward: see :class:`girih.dense.half.DenseSpec`.
        wire: how training steps write tensors.
        address: where to listen; see :func:`girih.comm.service.listen`.
        averaging: None where there is one group.
        seed: of dropout here, from the start of the process on, unless LOAD_EXTRA_STATE brings the state of an earlier one.
        patience_s: see ``PATIENCE_S``.
    """

    parts: Sequence[ServerPart]
    index: int
    recipe: OptimizerRecipe | None
    num_nets: int
    address: str
    secret: bytes
    precision: str = "float32"
    forward: str = "float32"
    wire: Wire = PLAIN
    averaging: AveragedWith | None = None
    seed: int = 0
    patience_s: float = PATIENCE_S
    incarnation: int = 0
    name: str = RoleName.GROUP_SERVER
    stats: Stats = field(default_factory=Stats, repr=False, compare=False)

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        process_settings.defer_dynamo()
        if self.wire.packs:
            ahead.make_ready(ahead.packing_tensors())  # on a machine that no trainer is on
        torch.manual_seed(self.seed)
        keep_freed_memory()
        with ThreadPoolExecutor(max(2, self.num_nets), "girih-net") as pool:
            work = _GroupServerWork(self, pool)
            with (
                closing(work),
                listen(
                    work.handle,
                    address=self.address,
                    secret=self.secret,
                    incarnation=self.incarnation,
                    gone=work.forget,
                    patience_s=self.patience_s,
                ) as server,
            ):
                ready(server.address)
                stop.wait()


class _GroupServerWork:
    """The work of a server, by the threads of a pool."""

    def __init__(self, role: GroupServer, pool: ThreadPoolExecutor) -> None:
        self._verbs = {
            GroupVerb.FORWARD: self._forward, GroupVerb.BACKWARD: self._backward, GroupVerb.APPLY: self._apply,
            GroupVerb.DISCARD: self._discard, GroupVerb.STATE: self._state, GroupVerb.RESTORE: self._restore, GroupVerb.STATS: self._send_stats,
            GroupVerb.BEGIN: self._begin_averaging, GroupVerb.MEET: self._meet, GroupVerb.LEAVE: self._leave,
            GroupVerb.EXTRA_STATE: self._send_extra_state, GroupVerb.LOAD_EXTRA_STATE: self._load_extra_state, GroupVerb.NORMS: self._norms,
        }  # fmt: skip
        self._index = role.index
        self._names = [part.name for part in role.parts]
        self._drawing = frozenset(number for number, part in enumerate(role.parts) if draws(part.module))
        self._drawn: dict[
            tuple[int, int], threading.Event
        ] = {}  # of client and net: whether its last draw is done
        self._live = LiveParts(role.parts, role.recipe, averaged=role.averaging is not None)
        self._shadow: Shadow | None = None
        self._num_trainers = 1 if role.averaging is None else role.averaging.trainers
        self._leaving: set[int] = set()  # trainers that make no step before the next meeting
        self._lock = threading.Lock()  # of those
        self._pool = pool
        self._arithmetic = partial(
            arithmetic, torch.device("cpu"), precision=role.precision, forward=role.forward
        )
        self._batches = OpenBatches(
            self._live,
            role.wire,
            role.stats,
            server=f"{RoleName.GROUP_SERVER} {role.index}",
            patience_s=role.patience_s,
        )
        self._wire = role.wire
        self._stats = role.stats
        self._timers = timers(self._verbs, self._stats)
        self._share = 1 / role.num_nets  # of one net, which has a thread of its own
        if role.averaging is not None:
            its = role.averaging
            servers = connect_all(RoleName.DENSE_SERVER, its.servers, secret=role.secret)
            self._shadow = Shadow(
                self._live.moving(), servers, its.group, its.every_steps, self._stats, its.place
            )

    def close(self) -> None:
        """Ends the averaging."""
        if self._shadow is not None:
            self._shadow.close()

    def handle(self, request: Request) -> None:
        """Takes a request in."""
        request.answered = self._timers.get(request.frame.kind)
        work: Callable[[], None] = partial(self._verbs[GroupVerb(request.frame.kind)], request)
        if request.frame.kind == GroupVerb.FORWARD and self._drawing:
            work = self._in_turn(request, work)
        self._pool.submit(self._run, request, work)

    def _run(self, request: Request, work: Callable[[], None]) -> None:
        with self._stats.busy.working(self._share):
            attempt(request, work)

    def _in_turn(self, request: Request, work: Callable[[], None]) -> Callable[[], None]:
        """Has forward passes of one net that draw random numbers do so in the order in which they came: else no run would be like another."""
        net, _, _, part, train = request.frame.fields
        if not train or part not in self._drawing:
            return work
        before, done = self._drawn.get((request.client, net)), threading.Event()
        self._drawn[request.client, net] = done

        def in_turn() -> None:
            if before is not None:
                with waiting():
                    before.wait()
            try:
                work()
            finally:
                done.set()

        return in_turn

    def forget(self, client: int) -> None:
        """Drops what a client left that does not come back."""
        self._batches.forget(client)
        for net in [net for net in self._drawn if net[0] == client]:
            del self._drawn[net]

    def _forward(self, request: Request) -> None:
        net, number, call, part, train = request.frame.fields
        needs, *packed = request.frame.arrays
        inputs, key = unpack(packed), (request.client, net, number)
        with self._batches.computing(key) if train else nullcontext() as batch:
            has, arrays = self._outputs(request, batch, call, part, inputs, needs.tolist())
        self._stats.sent("activations", num_bytes(arrays))
        request.reply((), (has, *arrays))

    def _outputs(
        self,
        request: Request,
        batch: OpenBatch | None,
        call: int,
        part: int,
        inputs: Sequence[Tensor | None],
        needs: Sequence[int],
    ) -> tuple[NDArray[np.int8], list[NDArray[Any]]]:
        """The outputs of a part, packed, and which of them have gradients; what its backward pass needs is kept with the batch."""
        modules = self._live.evaluated if batch is None else batch.net.modules
        with self._stats.spans("part forward"), torch.set_grad_enabled(batch is not None):
            for tensor, wanted in zip(inputs, needs, strict=True):
                if tensor is not None and wanted and batch is not None:
                    tensor.requires_grad_()
            with self._arithmetic(), self._naming(part, inputs):
                outputs = list(modules[part](*inputs))
            arrays = pack(outputs, request.buffer, self._wire.forward(train=batch is not None))
        has = np.array([output.requires_grad for output in outputs], np.int8)
        if batch is not None:
            batch.calls[call] = ForwardCall(part, inputs, outputs)
        return has, arrays

    @contextmanager
    def _naming(self, part: int, inputs: Sequence[Tensor | None]) -> Iterator[None]:
        """Has what goes wrong in a part name it, and what it was given."""
        try:
            yield
        except GirihError:
            raise
        except Exception as error:
            shapes = ", ".join(
                "none" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}" for tensor in inputs
            )
            described = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"part {self._names[part]!r}, given {shapes}: {described}") from error

    def _backward(self, request: Request) -> None:
        net, number, call = request.frame.fields
        batch = self._batches.known((request.client, net, number))
        gradients_of = unpack(request.frame.arrays)
        if call not in batch.calls:
            raise WireError(
                f"call {call} of batch {number}; expected one that was computed and has no gradients yet"
            )
        call_state = batch.calls.pop(call)
        with self._stats.spans("part backward"):
            try:
                pairs = zip(call_state.outputs, gradients_of, strict=True)
                used = [(output, gradient) for output, gradient in pairs if gradient is not None]
                torch.autograd.backward([output for output, _ in used], [gradient for _, gradient in used])
            except Exception:
                batch.calls[call] = call_state  # gradients that do not fit its outputs have moved nothing
                raise
            name = batch.net.nonfinite()
            gradients = [tensor.grad if tensor is not None else None for tensor in call_state.inputs]
            arrays = pack(gradients, request.buffer, batch.streams.of(self._names[call_state.part]))
        self._stats.sent("dense", num_bytes(arrays))
        request.reply((), (as_text(name), *arrays))

    def _norms(self, request: Request) -> None:
        net, number = request.frame.fields
        request.reply((), (as_text(self._batches.known((request.client, net, number)).net.norms()),))

    def _apply(self, request: Request) -> None:
        net, number = request.frame.fields
        options, scale = from_text(request.frame.arrays[0])
        with (
            self._batches.applying((request.client, net, number)) as (batch, staleness),
            self._stats.spans("part apply"),
        ):
            self._live.move(batch.net, options, scale)
        if self._shadow is not None:
            self._shadow.stepped()
        request.reply((staleness,))

    def _discard(self, request: Request) -> None:
        net, number = request.frame.fields
        self._batches.discard((request.client, net, number))
        request.reply()

    def _state(self, request: Request) -> None:
        first, with_optimizer = request.frame.fields
        self._send_entries(request, first, self._live.entries(with_optimizer=bool(with_optimizer)))

    def _send_extra_state(self, request: Request) -> None:
        entries: list[Entry] = [(RANDOM, None, torch.get_rng_state())] if self._drawing else []
        for net, streams in self._batches.streams_of(request.client).items():
            left = streams.left().items()
            entries += [(part, f"{net}.{number}", torch.from_numpy(state)) for (part, number), state in left]
        self._send_entries(request, request.frame.fields[0], entries)

    def _load_extra_state(self, request: Request) -> None:
        value: Any
        for name, key, value in _entries_of(request.frame.arrays):
            if key is None:
                torch.set_rng_state(value)
                continue
            net, number = map(int, key.split("."))
            streams = self._batches.streams(request.client, net)
            streams.put(name, number, value.numpy().copy())  # the frame's memory goes
        request.reply()

    def _send_entries(self, request: Request, first: int, entries: Sequence[Entry]) -> None:
        """Answers as many entries as a frame may have."""
        described, tensors, size = [], list[Tensor](), 0
        for name, key, value in entries[first : first + MOST_ENTRIES]:
            is_tensor = isinstance(value, Tensor)
            if isinstance(value, Tensor):
                if tensors and size + value.nbytes > MOST_ENTRY_BYTES:
                    break
                tensors.append(value)
                size += value.nbytes
            described.append((name, key, is_tensor, None if is_tensor else value))
        arrays = pack(tensors, request.buffer)
        self._stats.sent("dense", num_bytes(arrays))
        request.reply((first + len(described), len(entries)), (as_text(described), *arrays))

    def _restore(self, request: Request) -> None:
        (is_first,), entries = request.frame.fields, _entries_of(request.frame.arrays)
        self._live.check(entries)
        if is_first:
            self._live.forget_optimizer_state()
            self._batches.forget_left_out()
        self._live.put(entries)
        request.reply()

    def _send_stats(self, request: Request) -> None:
        spans = bool(request.frame.fields[0])
        snapshot = {**self._batches.snapshot(spans=spans), "parts": self._names}
        shadow = self._shadow.processes(spans=spans) if self._shadow is not None and self._index == 0 else {}
        request.reply((), (as_text((snapshot, shadow)),))

    def _begin_averaging(self, request: Request) -> None:
        if self._shadow is not None:
            self._shadow.begin()
        request.reply()

    def _meet(self, request: Request) -> None:
        if self._shadow is not None:
            model, moments = self._shadow.meet(self._live.moments())
            self._live.publish(torch.from_numpy(model), torch.from_numpy(moments))
            self._leaving.clear()
        request.reply()

    def _leave(self, request: Request) -> None:
        """Rounds wait for this group no longer once all its trainers stand still: until then its parameters move."""
        with self._lock:
            self._leaving.add(request.client)
            all_stand = len(self._leaving) == self._num_trainers
        if all_stand and self._shadow is not None:
            self._shadow.leave()
        request.reply()


def _entries_of(arrays: Sequence[NDArray[Any]]) -> list[Entry]:
    """The entries of a frame of RESTORE or LOAD_EXTRA_STATE."""
    described, *packed = arrays
    tensors = iter(unpack(packed))
    return [
        (name, key, next(tensors) if is_tensor else value)
        for name, key, is_tensor, value in from_text(described)
    ]
