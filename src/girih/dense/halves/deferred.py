"""A dense half on a GPU: the host learns the loss and the refusal of a step one step later.

A step that is refused is refused on the device: a flag there keeps rows and parameters where they are, and those of the steps
that were launched before the host learned of it. So no step waits for the GPU.

Shapes: P parameters with a gradient, R trainers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from girih.comm.group import TrainerGroup
from girih.comm.pinned import FromDevice
from girih.comm.rpc import Client, Frame, Reply
from girih.data.batch import Batch
from girih.dense.half import DenseSpec, PendingOutcome, ReadyOutcome
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.parameter_server import ParameterServer, ParameterServerReplica, ParameterVerb
from girih.dense.halves.replica import Buffers, Gradients, Replica
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings

Numbers = Sequence[float]
LOSS, REFUSES, STOPS = range(3)
"""Words of a trainer's ballot: its part of the step's loss, whether it refuses the step, whether it wants to stop behind it."""


class Update(Protocol):
    """The update of a step's rows, which is launched; see :class:`girih.sparse.halves.deferred.DeferredUpdate`.

    Attributes:
        refused: 0-d bool, on the device: the step moves nothing.
        reported: float64[K], on the device: the numbers that the host reads later.
    """

    @property
    def refused(self) -> Tensor: ...

    @property
    def reported(self) -> Tensor: ...

    @property
    def error_from(self) -> Callable[[Numbers], NonFiniteError | None]:
        """The error of the rows that refuse the step, from the reported numbers; None if they do not refuse it."""
        ...

    @property
    def counters_from(self) -> Callable[[Numbers], Mapping[str, int] | None]:
        """Counters after the step, from the reported numbers; None if the half must be asked. Called once, in the order of steps."""
        ...

    @property
    def rollback(self) -> Callable[[], None]:
        """Undoes on the host what the step changed there, once the host learns that it was refused."""
        ...


@dataclass(eq=False)
class DeferredComputed:
    """Loss and gradients of one batch, or of several micro-batches, as far as they are launched.

    Attributes:
        loss: 0-d, on the device: this trainer's part of the step's.
        refused: 0-d bool, on the device: a loss or gradient here is NaN or infinite, or a step before was refused.
        names, largest: P names, and float32[P], the largest absolute value of each gradient.
        embeddings: those of each micro-batch.
        ballots: float64[R, 3], those of all trainers, once they have voted.
    """

    half: DeferredReplica
    loss: Tensor
    refused: Tensor
    gradients: Gradients
    buffers: Buffers
    names: Sequence[str]
    largest: Tensor
    embeddings: Sequence[Embeddings]
    ballots: Tensor | None = None

    @property
    def reason(self) -> NonFiniteError:
        """Why the step is refused here: waits for the device."""
        loss, stopped, *largest = self._local_numbers().tolist()
        return self._explain(loss, stopped, largest) or NonFiniteError("this step is not refused")

    def agree(self, rows_refuse: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """The vote of all trainers on the step, launched; see :data:`girih.sparse.halves.deferred.Agree`."""
        ballot = self.half.ballot(self.loss, self.refused | rows_refuse)
        gathered = self.half.gathered(torch.cat([ballot, words]))
        self.ballots = gathered[:, : len(ballot)]
        return (self.ballots[:, REFUSES] > 0).any(), gathered[:, len(ballot) :]

    def apply(self) -> None:
        """One optimizer step, where no trainer refuses it."""
        none = self.loss.new_empty(0)
        refused, _ = self.agree(torch.zeros_like(self.refused), none)
        self.apply_masked(_NoRows(refused, none))

    def apply_masked(self, rows: Update) -> PendingOutcome:
        """One optimizer step, which moves nothing where that of the rows does not.

        Raises:
            LookupError: trainers have not voted on the step.
        """
        if self.ballots is None:
            raise LookupError("a step that nobody has voted on")
        parts = [self.ballots.reshape(-1), self._local_numbers(), rows.reported]
        ends = [len(parts[0]), len(parts[0]) + len(parts[1])]
        num_words = self.ballots.shape[1]
        put_back = self.half.move_masked(rows.refused, self.gradients, self.buffers)
        self.gradients, self.buffers = [], []

        def read(numbers: Numbers) -> ReadyOutcome:
            votes, local, of_rows = numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] :]
            ballots = [votes[first : first + num_words] for first in range(0, len(votes), num_words)]
            self.half.on_ballots(ballots)
            refusal = None
            if any(ballot[REFUSES] for ballot in ballots):
                loss, stopped, *largest = local
                refusal = (
                    self._explain(loss, stopped, largest, [ballot[LOSS] for ballot in ballots])
                    or rows.error_from(of_rows)
                    or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
                )
                put_back()
                rows.rollback()
            return ReadyOutcome(sum(ballot[LOSS] for ballot in ballots), refusal, rows.counters_from(of_rows))

        return PendingOutcome(torch.cat(parts), read, together=len(self.ballots) > 1)

    def discard(self) -> None:
        """Drops the gradients, and puts back the buffers that the forward pass moved."""
        for buffer, before in self.buffers:
            buffer.copy_(before)
        self.gradients, self.buffers = [], []

    def _local_numbers(self) -> Tensor:
        """float64[2 + P]: the loss, whether a step before was refused, the largest values."""
        parts = (self.loss.reshape(1), self.half.stopped.reshape(1), self.largest)
        return torch.cat([part.double() for part in parts])

    def _explain(
        self, loss: float, stopped: float, largest: Numbers, losses: Numbers = ()
    ) -> NonFiniteError | None:
        """Why the dense half refuses a step; None where it does not.

        Args:
            losses: those of all trainers.
        """
        if stopped:
            return NonFiniteError("a step before it was refused")
        if not math.isfinite(loss):
            features = (part.first_nonfinite() for part in self.embeddings)
            feature = next((each for each in features if each), None)
            named = f", and so is feature {feature!r}" if feature else ""
            return NonFiniteError(f"the loss is {loss}{named}")
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                return NonFiniteError(f"the loss of trainer {rank} is {value}")
        for name, value in zip(self.names, largest, strict=True):
            if not math.isfinite(value):
                return NonFiniteError(f"the gradient of dense parameter {name!r} is NaN or infinite")
        return None


@dataclass(frozen=True)
class _NoRows:
    """No rows beside a step."""

    refused: Tensor
    reported: Tensor

    @staticmethod
    def error_from(numbers: Numbers) -> None:
        """They refuse nothing."""

    @staticmethod
    def counters_from(numbers: Numbers) -> None:
        """Nor do they count."""

    @staticmethod
    def rollback() -> None:
        """No-op."""


class DeferredReplica(Replica):
    """One copy of the dense parameters, moved by decisions of the device; see the module.

    Attributes:
        stopped: 0-d bool, on the device: a step was refused, and the host does not know it yet.
    """

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__(spec)
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        self._begun: set[torch.nn.Parameter] = set()

    def compute(  # type: ignore[override]
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: DeferredComputed | None = None,
        *,
        last: bool = True,
    ) -> DeferredComputed:
        """Launches forward, loss and backward; see :class:`Replica`."""
        buffers = self._begin_step(onto)
        with self._phase("forward"):
            outputs = self._outputs(batch, embeddings, train=True)
            targets, share = self._targets(batch)
            self._score(outputs, targets)
            mean = self._mean_loss(outputs, targets) if self._has_loss(outputs) else None
        with self._phase("backward"):
            self._backward(outputs, mean, share)
            loss = outputs.new_zeros((), dtype=torch.float64)
            if mean is not None:
                loss = mean.detach().double() * share
            refused = ~torch.isfinite(loss)
            if onto is None:
                refused = refused | self.stopped
            else:
                loss, refused = onto.loss + loss, onto.refused | refused
            gradients = self._taken_gradients()
            largest = _largest(gradients, self.device) if last else loss.new_empty(0)
            refused = refused | ~torch.isfinite(largest).all()
        named = zip(self.named_parameters, gradients, strict=True)
        names = [name for (name, _), gradient in named if gradient is not None] if last else []
        all_embeddings = [embeddings] if onto is None else [*onto.embeddings, embeddings]
        return DeferredComputed(self, loss, refused, gradients, buffers, names, largest, all_embeddings)

    def ballot(self, loss: Tensor, refused: Tensor) -> Tensor:
        """float64[3]: what this trainer says of a step; see :data:`STOPS`."""
        return torch.stack([loss, refused.double(), torch.zeros_like(loss)])

    def gathered(self, words: Tensor) -> Tensor:
        """float64[R, K], the words of all trainers, float64[K] each: there is one."""
        return words.unsqueeze(0)

    def on_ballots(self, ballots: Sequence[Numbers]) -> None:
        """Reads the ballots of all trainers; does nothing for a single trainer."""

    def move_masked(self, refused: Tensor, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """One optimizer step, after clipping, which leaves all as it was where the flag is set.

        Returns:
            What the host is to do once it learns that the flag was set.
        """
        self.stopped.logical_or_(refused)
        for buffer, before in buffers:
            torch.where(refused, before, buffer, out=buffer)
        optimizer = self.optimizer
        if optimizer is None:
            return self._go_on
        learning = {p for p, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None}
        # whose state the optimizer makes in this step; or who knows what it keeps, and where
        if not learning <= self._begun or not _keeps_state_as_torch(optimizer):
            self._begun |= learning
            if not refused:
                self.move(gradients)
            return self._go_on
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # one kernel for the whole step, which reads the flag itself
            scaled: Any = optimizer
            scaled.grad_scale, scaled.found_inf = None, refused.float()
            try:
                self.move(gradients)
            finally:
                del scaled.grad_scale, scaled.found_inf
            return self._go_on
        kept, put_back = self._kept(optimizer)
        self.move(gradients)
        for tensor, before in kept:
            torch.where(refused, before, tensor, out=tensor)

        def go_on() -> None:
            put_back()
            self._go_on()

        return go_on

    def _kept(self, optimizer: torch.optim.Optimizer) -> tuple[Buffers, Callable[[], None]]:
        """Copies of parameters and state on the device; and what puts back the state that the host has."""
        tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        numbers = []
        for state in optimizer.state.values():
            tensors += [each for each in state.values() if isinstance(each, Tensor)]
            numbers.append((state, {k: v for k, v in state.items() if not isinstance(v, Tensor)}))
        kept = [(each, each.clone()) for each in tensors]
        there = self.device.type
        host = [(each, before) for each, before in kept if each.device.type != there]

        def put_back() -> None:
            for state, before in numbers:
                state.update(before)
            for tensor, copy in host:
                tensor.copy_(copy)

        return [pair for pair in kept if pair[0].device.type == there], put_back

    def _go_on(self) -> None:
        """Has steps move parameters again, once the host knows that one was refused."""
        self.stopped.zero_()


def _keeps_state_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that its steps move are parameters and the tensors and numbers of their states."""
    return type(optimizer).__module__.startswith(("torch.optim.", "girih."))


def _largest(gradients: Gradients, device: torch.device) -> Tensor:
    """float32[P]: of each gradient the largest absolute value; NaN where it has one."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return torch.empty(0, device=device)
    return torch.stack(torch._foreach_norm(present, math.inf))


_SELDOM = 1 << 30


class DeferredAllReducedReplica(AllReducedReplica, DeferredReplica):  # type: ignore[misc]
    """One copy of the dense parameters among equal ones, moved by decisions of the devices; see the module."""

    def _distributed(self, batch: Batch, embeddings: Embeddings) -> DistributedDataParallel:
        parallel = super()._distributed(batch, embeddings)
        # it waits for the GPU to measure a step
        parallel._set_ddp_runtime_logging_sample_rate(_SELDOM)  # type: ignore[no-untyped-call]
        return parallel

    def ballot(self, loss: Tensor, refused: Tensor) -> Tensor:
        """See :class:`DeferredReplica`."""
        stops = torch.full_like(loss, float(self.ranks.stop_requested))
        return torch.stack([loss, refused.double(), stops])

    def gathered(self, words: Tensor) -> Tensor:
        """See :class:`DeferredReplica`."""
        return self.ranks.all_gather(words)

    def on_ballots(self, ballots: Sequence[Numbers]) -> None:
        """Learns, as all trainers do at the same step, whether one of them wants to stop."""
        self.ranks.note_stops(sum(ballot[STOPS] for ballot in ballots))


@dataclass(frozen=True)
class _PendingSend:
    """A gradient that is sent once it is on the host, unless its step is refused."""

    sent: Future[Reply | None]

    def done(self) -> bool:
        """See :class:`~girih.dense.halves.parameter_server.Asked`."""
        if not self.sent.done() or self.sent.exception() is not None:
            return self.sent.done()
        reply = self.sent.result()
        return reply is None or reply.done()

    def wait(self) -> Frame | None:
        """See :class:`~girih.dense.halves.parameter_server.Asked`."""
        reply = self.sent.result()
        return None if reply is None else reply.wait()


class DeferredParameterServerReplica(ParameterServerReplica, DeferredReplica):
    """A copy of the dense parameters that a dense server moves; see the module, and :class:`ParameterServerReplica`."""

    kind_of_server = DeferredReplica

    def __init__(
        self, spec: DenseSpec, ranks: TrainerGroup, *, staleness: int, address: str, secret: bytes
    ) -> None:
        super().__init__(spec, ranks, staleness=staleness, address=address, secret=secret)
        self._lane = FromDevice(spec.device)
        self._departures = self._closing.enter_context(ThreadPoolExecutor(1, "girih-dense-gradients"))

    def move_masked(self, refused: Tensor, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """Has the server take a step, after clipping, or leaves all as it was where the flag is set; see :class:`DeferredReplica`."""
        self.stopped.logical_or_(refused)
        for buffer, before in buffers:
            torch.where(refused, before, buffer, out=buffer)
        if self._server is not None:
            return self._moved_here(self._server, refused, gradients)
        if self._client is not None:
            self._send_masked(self._client, refused, gradients)
        return self._go_on

    def _moved_here(
        self, server: ParameterServer, refused: Tensor, gradients: Gradients
    ) -> Callable[[], None]:
        half = server.replica
        put_back: list[Callable[[], None]] = []

        def move(parts: Gradients) -> None:
            if isinstance(half, DeferredReplica):
                put_back.append(half.move_masked(refused, parts, ()))

        flat, version = server.step(*self._flattened(gradients), self._version, move)
        self._set_parameters(flat, version)

        def go_on() -> None:
            if server.version == version:  # else the host's numbers are those of steps that others took since
                put_back[0]()
            self._go_on()

        return go_on

    def _send_masked(self, client: Client, refused: Tensor, gradients: Gradients) -> None:
        gradient, participating = self._flattened(gradients)
        coming, version = self._lane.begin([gradient, refused.float().reshape(1)]), self._version

        def send() -> Reply | None:
            with coming.arrived() as (flat, is_refused):
                if flat is None or is_refused is None or is_refused[0]:
                    return None
                copy = np.array(flat)
            self.stats_of_process.sent("dense", copy.nbytes)
            return client.call(ParameterVerb.STEP, (version,), (copy, participating))

        self._under_way.append(_PendingSend(self._departures.submit(send)))
        self._take_arrived(self._staleness)
