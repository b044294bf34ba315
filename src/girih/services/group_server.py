"""A group server: parts of the dense net, which the nets of all trainers of a group run and update (HT §3.1).

Each net has a thread, and the threads handle requests in parallel: torch's operators release the interpreter while they
compute. So the servers of a group work on different batches at the same time (pipeline parallelism, HT §3.1.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.cluster.roles import RoleName, title
from girih.comm.registry.remote import connect_all
from girih.comm.rpc import Request
from girih.comm.service import Meeting, Service, as_text, from_text
from girih.dense.accel import process_settings
from girih.dense.accel.arithmetic import arithmetic
from girih.dense.accel.process_settings import keep_freed_memory
from girih.errors import GirihError, WireError
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.graph.operator_costs import draws
from girih.hierarchical.live_parts import LiveParts
from girih.hierarchical.open_batches import ForwardCall, OpenBatch, OpenBatches
from girih.hierarchical.optimizer_recipe import OptimizerRecipe
from girih.hierarchical.shadow import Shadow
from girih.hierarchical.wire import (
    PLAIN,
    RANDOM,
    Entry,
    GroupVerb,
    Wire,
    num_bytes,
    pack,
    pack_entries,
    unpack,
    unpack_entries,
)
from girih.kernels.cpu import ahead
from girih.telemetry.busy import waiting

PATIENCE_S = 40.0
"""The time for which a disconnected trainer's work is kept: as long as the trainer tries to reconnect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedWith:
    """The averaging of a server's parameters with those of the same server of other groups.

    Attributes:
        servers: addresses of the dense servers.
        group: the number of this server's group. place: the server's number in the group.
        every_steps: writes of all nets between two rounds.
        trainers: number of trainers of the group.
    """

    servers: Sequence[str]
    group: int
    place: int
    every_steps: int
    trainers: int = 1


@dataclass(kw_only=True)
class GroupServer(Service):
    """One server of a group, which handles several requests at the same time.

    Attributes:
        parts: its parts, with their initial weights.
        recipe: the optimizer of the whole model.
        num_nets: nets of all trainers of the group, which may ask at the same time.
        precision, forward: see :class:`girih.dense.half.DenseSpec`.
        wire: the codecs of tensors in training steps.
        averaging: None for a single group.
        seed: the seed of dropout on this server, from the start of the process, unless LOAD_EXTRA_STATE restores an
            earlier state.
        patience_s: see ``PATIENCE_S``.
    """

    name = RoleName.GROUP_SERVER
    verbs = GroupVerb
    parts: Sequence[ServerPart]
    recipe: OptimizerRecipe | None
    num_nets: int
    precision: str = "float32"
    forward: str = "float32"
    wire: Wire = PLAIN
    averaging: AveragedWith | None = None
    seed: int = 0
    patience_s: float | None = PATIENCE_S

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """See :class:`Service`."""
        process_settings.defer_dynamo()
        if self.wire.packs:
            ahead.make_ready(ahead.packing_tensors())  # maybe no trainer of this host has compiled them
        torch.manual_seed(self.seed)
        keep_freed_memory()
        super().run(ready, stop)

    def open(self, closing: ExitStack) -> None:
        """See :class:`Service`."""
        self.num_threads, self.share = max(2, self.num_nets), 1 / self.num_nets
        self._names = [part.name for part in self.parts]
        self._drawing = frozenset(number for number, part in enumerate(self.parts) if draws(part.module))
        # by client and net: set when its last draw is done
        self._drawn: dict[tuple[int, int], threading.Event] = {}
        self._live_parts = LiveParts(self.parts, self.recipe, averaged=self.averaging is not None)
        # trainers that make no step before the next meeting
        self._leaving = Meeting[None](1 if self.averaging is None else self.averaging.trainers)
        self._lock = threading.Lock()  # guards ``_leaving``
        self._arithmetic = partial(
            arithmetic, torch.device("cpu"), precision=self.precision, forward=self.forward
        )
        self._batches = OpenBatches(
            self._live_parts,
            self.wire,
            self.stats,
            server=title(self.name, self.index),
            patience_s=self.patience_s or PATIENCE_S,
        )
        self._shadow: Shadow | None = None
        super().open(closing)
        if self.averaging is not None:
            its = self.averaging
            servers = connect_all(RoleName.DENSE_SERVER, its.servers, secret=self.secret)
            self._shadow = Shadow(
                self._live_parts.moving(), servers, its.group, its.every_steps, self.stats, its.place
            )
            closing.callback(self._shadow.close)  # closed before the threads that wait for it

    def handle(self, request: Request) -> None:
        """Accepts a request. Training passes of one net that draw random numbers run in the order of arrival."""
        if request.frame.kind == GroupVerb.FORWARD and self._drawing:
            net, _, _, part, train = request.frame.fields
            if train and part in self._drawing:
                before, done = self._drawn.get((request.client, net)), threading.Event()
                self._drawn[request.client, net] = done
                self.answer(request, partial(self._forward_in_turn, request, before, done))
                return
        super().handle(request)

    def _forward_in_turn(
        self, request: Request, before: threading.Event | None, done: threading.Event
    ) -> None:
        """Runs a forward pass after the previous one of its net, so that runs are reproducible."""
        if before is not None:
            with waiting():
                before.wait()
        try:
            self.on_forward(request)
        finally:
            done.set()

    def forget(self, client: int) -> None:
        """Drops the state of a client that does not come back."""
        self._batches.forget(client)
        for net in [net for net in self._drawn if net[0] == client]:
            del self._drawn[net]

    def on_forward(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        net, number, call, part, train = request.frame.fields
        needs, *packed = request.frame.arrays
        inputs, key = unpack(packed), (request.client, net, number)
        with self._batches.computing(key) if train else nullcontext() as batch:
            has, arrays = self._outputs(request, batch, call, part, inputs, needs.tolist())
        self.stats.sent("activations", num_bytes(arrays))
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
        """Returns a part's packed outputs, and which have gradients.

        The batch keeps the state for the backward pass.
        """
        modules = self._live_parts.evaluated if batch is None else batch.net.modules
        with self.stats.spans("part forward"), torch.set_grad_enabled(batch is not None):
            for tensor, wanted in zip(inputs, needs, strict=True):
                if tensor is not None and wanted and batch is not None:
                    tensor.requires_grad_()
            with self._arithmetic(), self._naming(part, inputs):
                outputs = list(modules[part](*inputs))
            arrays = pack(outputs, request.buffer, self.wire.forward(train=batch is not None))
        has = np.array([output.requires_grad for output in outputs], np.int8)
        if batch is not None:
            batch.calls[call] = ForwardCall(part, inputs, outputs)
        return has, arrays

    @contextmanager
    def _naming(self, part: int, inputs: Sequence[Tensor | None]) -> Iterator[None]:
        """Adds a part's name and the shapes of its inputs to errors."""
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

    def on_backward(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        net, number, call = request.frame.fields
        batch = self._batches.known((request.client, net, number))
        gradients_of = unpack(request.frame.arrays)
        if call not in batch.calls:
            raise WireError(
                f"call {call} of batch {number}; expected one that was computed and has no gradients yet"
            )
        call_state = batch.calls.pop(call)
        with self.stats.spans("part backward"):
            try:
                pairs = zip(call_state.outputs, gradients_of, strict=True)
                used = [(output, gradient) for output, gradient in pairs if gradient is not None]
                torch.autograd.backward([output for output, _ in used], [gradient for _, gradient in used])
            except Exception:
                batch.calls[call] = call_state  # gradients that do not fit the outputs have changed nothing
                raise
            name = batch.net.nonfinite()
            gradients = [tensor.grad if tensor is not None else None for tensor in call_state.inputs]
            arrays = pack(gradients, request.buffer, batch.streams.of(self._names[call_state.part]))
        self.stats.sent("dense", num_bytes(arrays))
        request.reply((), (as_text(name), *arrays))

    def on_norms(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        net, number = request.frame.fields
        request.reply((), (as_text(self._batches.known((request.client, net, number)).net.norms()),))

    def on_apply(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        net, number = request.frame.fields
        options, scale = from_text(request.frame.arrays[0])
        with (
            self._batches.applying((request.client, net, number)) as (batch, staleness),
            self.stats.spans("part apply"),
        ):
            self._live_parts.move(batch.net, options, scale)
        if self._shadow is not None:
            self._shadow.stepped()
        request.reply((staleness,))

    def on_discard(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        net, number = request.frame.fields
        self._batches.discard((request.client, net, number))
        request.reply()

    def on_state(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        first, with_optimizer = request.frame.fields
        self._send_entries(request, first, self._live_parts.entries(with_optimizer=bool(with_optimizer)))

    def on_extra_state(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        entries: list[Entry] = [(RANDOM, None, torch.get_rng_state())] if self._drawing else []
        for net, streams in self._batches.streams_of(request.client).items():
            left = streams.left().items()
            entries += [(part, f"{net}.{number}", torch.from_numpy(state)) for (part, number), state in left]
        self._send_entries(request, request.frame.fields[0], entries)

    def on_load_extra_state(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        value: Any
        for name, key, value in unpack_entries(request.frame.arrays):
            if key is None:
                torch.set_rng_state(value)
                continue
            net, number = map(int, key.split("."))
            streams = self._batches.streams(request.client, net)
            streams.put(name, number, value.numpy().copy())  # the frame's memory is freed
        request.reply()

    def _send_entries(self, request: Request, first: int, entries: Sequence[Entry]) -> None:
        """Answers with the largest number of entries that fits into a frame."""
        count, arrays = pack_entries(entries[first:], request.buffer)
        self.stats.sent("dense", num_bytes(arrays[1:]))
        request.reply((first + count, len(entries)), arrays)

    def on_restore(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        (is_first,), entries = request.frame.fields, unpack_entries(request.frame.arrays)
        self._live_parts.check(entries)
        if is_first:
            self._live_parts.forget_optimizer_state()
            self._batches.forget_left_out()
        self._live_parts.put(entries)
        request.reply()

    def snapshot(self, *, spans: bool) -> object:
        """See :class:`Service`. One group server also returns the statistics of the dense servers."""
        shadow = self._shadow.processes(spans=spans) if self._shadow is not None and self.index == 0 else {}
        return {**self._batches.snapshot(spans=spans), "parts": self._names}, shadow

    def on_begin(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        if self._shadow is not None:
            self._shadow.begin()
        request.reply()

    def on_meet(self, request: Request) -> None:
        """See :class:`GroupVerb`."""
        if self._shadow is not None:
            model, moments = self._shadow.meet(self._live_parts.moments())
            self._live_parts.publish(torch.from_numpy(model), torch.from_numpy(moments))
            self._leaving.end()
        request.reply()

    def on_leave(self, request: Request) -> None:
        """Ends the group's part in rounds when all its trainers have stopped. Until then its parameters change."""
        with self._lock:
            self._leaving.waiting[request.client] = None
            all_stand = self._leaving.is_complete
        if all_stand and self._shadow is not None:
            self._shadow.leave()
        request.reply()
