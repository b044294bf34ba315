"""The dense half of a trainer with several nets that train at once, and with averaging in the background (HT §2.2).

Shapes: P numbers of all parameters together.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from girih.checkpoint.save import DenseState
from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.comm.rpc import Client
from girih.data.batch import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.deferred import Buffers, Gradients
from girih.dense.halves.replica import Replica, ReplicaComputed, begin_as_first
from girih.dense.options import spread_over
from girih.hierarchical.live_parts import SharedSteps, twin_of
from girih.hierarchical.shadow import Shadow, average_buffers, check_averaged
from girih.models.embeddings import Embeddings
from girih.telemetry.stats import DENSE_STALENESS, StatsSnapshot


class BorrowedNet(Replica):
    """A net of a half that has several. It computes one batch at a time."""

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: ReplicaComputed | None = None, *, last: bool = True
    ) -> ReplicaComputed:
        """See :class:`Replica`. After a failure, nobody applies the batch."""
        try:
            return super().compute(batch, embeddings, onto, last=last)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drops a failed batch."""


class HogwildNet(BorrowedNet):
    """One net of a half. Its Parameter objects are separate, but their memory may be shared with other nets.

    Attributes:
        num_before: writes that were done when the net began to read.
    """

    num_before = 0

    def __init__(self, spec: DenseSpec, half: HogwildReplica) -> None:
        super().__init__(spec)
        self._half = half

    def abandon(self) -> None:
        """See :class:`BorrowedNet`. Afterwards the net is free again."""
        self._half.give_back(self)

    def take_step(self, vote: Vote, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """See :class:`Replica`. Other nets may step at the same time. Afterwards the net is free again."""
        named = zip(self.named_parameters, gradients, strict=True)
        learning = {name for (name, _), gradient in named if gradient is not None}
        with self._half.stepping(self, learning, moves=not vote.known_refused):
            return super().take_step(vote, gradients, buffers)

    def take_state(self, other: HogwildNet) -> None:
        """Refers to the optimizer state of another net."""
        if self.optimizer is not None and other.optimizer is not None:
            for mine, theirs in zip(self.parameters, other.parameters, strict=True):
                self.optimizer.state[mine] = other.optimizer.state[theirs]

    def follow(self, other: HogwildNet) -> None:
        """Copies the options of another net's optimizer, which a schedule moves."""
        if self is other or self.optimizer is None or other.optimizer is None:
            return
        for group, theirs in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})
        # otherwise torch warns that a schedule moves an optimizer which never made a step
        other.optimizer._opt_called = True  # type: ignore[attr-defined]


class HogwildReplica:
    """One copy of the dense parameters per trainer. Several nets train on it, each in a thread.

    All copies start with rank 0's values. The first net computes with the module itself. A net is free again when its
    batch is applied or refused. If no net is free, a new one is made. With one copy, evaluations and checkpoints use
    the copy itself. With several copies, they use the result of the last :meth:`sync`: the parameters of the averaging
    algorithm, and the mean of the replicas' buffers. The replicas keep their own values.

    Args:
        nets: the number of threads that will compute on the copy.
        servers: the dense servers that average the copies; none if there is one copy.
        average_every_steps: steps of this trainer between two rounds.

    Attributes:
        module: the module to evaluate and save.
        first: the net whose optimizer a schedule moves, and whose state is saved.
        optimizer: the first net's; None if there are no parameters.
    """

    def __init__(
        self,
        spec: DenseSpec,
        ranks: TrainerGroup,
        *,
        nets: int,
        servers: Sequence[Client] = (),
        average_every_steps: int = 1,
    ) -> None:
        self._ranks = ranks
        self.module = spec.module
        begin_as_first(self.module, ranks)
        self._spec = replace(spec, module=copy.deepcopy(self.module)) if servers else spec
        self._num_nets = nets
        self.first = HogwildNet(self._spec, self)
        self._all = [self.first]
        self._free = deque(self._all)
        self._borrowing, self._counting, self._steps = threading.Lock(), threading.Lock(), SharedSteps()
        self._num_begun = self._num_done = 0  # numbers of writes
        self._staleness = spec.stats.histograms[DENSE_STALENESS]
        self._evaluated: Replica = Replica(spec) if servers else self.first
        self.optimizer = self.first.optimizer
        self._shadow: Shadow | None = None
        if servers:
            check_averaged(self.first.named_parameters)
            parameters = self.first.parameters
            self._shadow = Shadow(parameters, servers, ranks.rank, average_every_steps, spec.stats)
            self._begin_averaging(self._shadow)

    def compute(self, batch: Batch, embeddings: Embeddings, *, last: bool = True) -> ReplicaComputed:
        """Runs forward pass, loss and backward pass on a free net. Thread-safe. See :class:`Replica`."""
        return self._borrow().compute(batch, embeddings, last=last)

    def give_back(self, net: HogwildNet) -> None:
        """Makes a net free again."""
        self._free.append(net)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the model to evaluate."""
        return self._evaluated.predict(batch, embeddings)

    def sync(self) -> None:
        """Fetches the model of all replicas if there are several. No round is under way until the next step."""
        if self._shadow is None:
            return
        model = torch.from_numpy(self._shadow.meet()[0])
        with torch.no_grad():
            for parameter, part in spread_over(self._evaluated.parameters, model):
                parameter.copy_(part)
            for buffer, live in zip(self.module.buffers(), self.first.module.buffers(), strict=True):
                buffer.copy_(live)
            average_buffers(self.module.buffers(), self._ranks)

    def leave(self) -> None:
        """Announces that this trainer makes no step before the next :meth:`sync`. Rounds do not wait for it."""
        if self._shadow is not None:
            self._shadow.leave()

    def stats(self) -> dict[str, int]:
        """The largest number of other nets' writes between a net's read of the parameters and its write."""
        return {"staleness_max": max(self._staleness, default=0)}

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Statistics of the dense servers. Empty except on rank 0."""
        if self._shadow is None or not self._ranks.first:
            return {}
        return self._shadow.processes(spans=spans)

    def state(self) -> DenseState:
        """The state of the model to evaluate, with this replica's optimizer. See :class:`Replica`."""
        return {**self.first.state(), "model": self.module.state_dict()}

    def restore(self, state: DenseState) -> None:
        """The inverse of :meth:`state`, for all replicas and servers. All trainers call it while no net computes."""
        if self._shadow is not None:
            self._shadow.meet()  # so that no round adds to the restored parameters
        self.first.restore(state)
        for net in self._all[1:]:
            net.take_state(self.first)
        self._steps.forget()
        if self._shadow is not None:
            self.module.load_state_dict(state["model"])
            self._begin_averaging(self._shadow)

    def close(self) -> None:
        """Ends the averaging."""
        if self._shadow is not None:
            self._shadow.close()

    @contextmanager
    def stepping(self, net: HogwildNet, learning: Set[str], *, moves: bool) -> Iterator[None]:
        """Frames a step of a net, which is free again afterwards. A step that moves the parameters counts as a write.

        Args:
            learning: names of the parameters that have a gradient.
        """
        net.follow(self.first)
        try:
            if not moves:
                yield
                return
            with self._writing(net.num_before), self._steps.moving(learning):
                yield
        finally:
            self._free.append(net)
        if self._shadow is not None:
            self._shadow.stepped()

    def _borrow(self) -> HogwildNet:
        with self._borrowing:
            while not self._free or len(self._all) < self._num_nets:
                self._all.append(self._twin())
                self._free.append(self._all[-1])
            net = self._free.popleft()
        net.num_before = self._num_done
        return net

    def _twin(self) -> HogwildNet:
        """Makes another net over the same memory: that of parameters, of buffers, and of the optimizer's state."""
        self.first._set_mode(True)  # it may have predicted last, but the copy must train
        twin = HogwildNet(replace(self._spec, module=twin_of(self.first.module)), self)
        twin.take_state(self.first)
        return twin

    @contextmanager
    def _writing(self, num_before: int) -> Iterator[None]:
        """Counts a write, and the writes begun before it that were not done when its net began to read."""
        with self._counting:  # protects the counters, not the parameters
            self._staleness[self._num_begun - num_before] += 1
            self._num_begun += 1
        try:
            yield
        finally:
            with self._counting:
                self._num_done += 1

    def _begin_averaging(self, shadow: Shadow) -> None:
        if self._ranks.first:
            shadow.begin()
        self._ranks.barrier()
