"""The dense half of a trainer of which several nets train at once, and which averages with others in the background (HT §2.2).

Shapes: P numbers of all parameters together.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from girih.checkpoint.save import DenseState
from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.comm.rpc import Client
from girih.data.batch import Batch
from girih.dense.half import DenseSpec, Outcome
from girih.dense.halves.replica import Replica, ReplicaComputed
from girih.hierarchical.live_parts import SharedSteps, spread_over, twin_of
from girih.hierarchical.shadow import Shadow, average_buffers, check_averaged
from girih.models.embeddings import Embeddings
from girih.telemetry.stats import DENSE_STALENESS, StatsSnapshot


class HogwildNet(Replica):
    """One net; its Parameters are its own, their memory may be others' too."""

    def twin(self, spec: DenseSpec) -> HogwildNet:
        """Another net over the same memory: that of parameters, of buffers, and of the optimizer's state."""
        self._set_mode(True)  # it may have predicted last, and the copy is to train
        twin = HogwildNet(replace(spec, module=twin_of(self.module)))
        twin.take_state(self)
        return twin

    def take_state(self, other: HogwildNet) -> None:
        """Keeps optimizer state where another net has it now."""
        if self.optimizer is not None and other.optimizer is not None:
            for mine, theirs in zip(self.parameters, other.parameters, strict=True):
                self.optimizer.state[mine] = other.optimizer.state[theirs]

    def follow(self, other: HogwildNet) -> None:
        """Takes the options of another net's optimizer, which a schedule moves."""
        if self is other or self.optimizer is None or other.optimizer is None:
            return
        for group, theirs in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})
        # else torch warns that a schedule moves an optimizer which never made a step
        other.optimizer._opt_called = True  # type: ignore[attr-defined]


class Nets:
    """Nets on the parameters of one module; ``compute`` and what it returns may be used from several threads.

    The first net computes with the module itself. A net is free again once its batch is applied or refused; where none is
    free, one more is made.

    Args:
        count: nets that are made before the first batch.
        stepped: called after each step that moved the parameters, by the thread that made it.

    Attributes:
        first: the net whose optimizer a schedule moves, and whose state is saved.
    """

    def __init__(self, spec: DenseSpec, count: int, stepped: Callable[[], None] = lambda: None) -> None:
        self._spec, self._count, self._stepped = spec, count, stepped
        self.first = HogwildNet(spec)
        self._all = [self.first]
        self._free = deque(self._all)
        self._borrowing, self._counting, self._steps = threading.Lock(), threading.Lock(), SharedSteps()
        self._num_begun = self._num_done = 0  # writes
        self._staleness = spec.stats.histograms[DENSE_STALENESS]

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: NetComputed | None = None, *, last: bool = True
    ) -> NetComputed:
        """Forward, loss, backward on a free net; see :class:`~girih.dense.halves.replica.Replica`."""
        if onto is None:
            net, num_before, earlier = self._borrow(), self._num_done, None
        else:
            net, num_before, earlier = onto.net, onto.num_before, onto.computed
        try:
            computed = net.compute(batch, embeddings, earlier, last=last)
        except BaseException:
            self._give_back(net)
            raise
        return NetComputed(computed, net, self, num_before)

    def apply(self, computed: NetComputed, vote: Vote) -> Outcome:
        """Moves the parameters by a net's gradients, beside other nets that do; or drops the gradients."""
        net, gradients = computed.net, computed.computed.gradients
        net.follow(self.first)
        named = zip(net.named_parameters, gradients, strict=True)
        learning = {name for (name, _), gradient in named if gradient is not None}
        try:
            if vote.known_refused:
                return computed.computed.apply(vote)
            with self._writing(computed.num_before), self._steps.moving(learning):
                outcome = computed.computed.apply(vote)
        finally:
            self._give_back(net)
        self._stepped()
        return outcome

    def restore(self, state: DenseState) -> None:
        """See :class:`~girih.dense.halves.replica.Replica`; while no net is at work."""
        self.first.restore(state)
        for net in self._all[1:]:
            net.take_state(self.first)
        self._steps.forget()

    def staleness_max(self) -> int:
        """The most writes of other nets between a net's read and its write."""
        return max(self._staleness, default=0)

    def _borrow(self) -> HogwildNet:
        with self._borrowing:
            while not self._free or len(self._all) < self._count:
                self._all.append(self.first.twin(self._spec))
                self._free.append(self._all[-1])
            return self._free.popleft()

    def _give_back(self, net: HogwildNet) -> None:
        with self._borrowing:
            self._free.append(net)

    @contextmanager
    def _writing(self, num_before: int) -> Iterator[None]:
        """Counts a write, and those that were begun before it and not yet done when its net began to read."""
        with self._counting:  # of what is counted, not of what is written
            self._staleness[self._num_begun - num_before] += 1
            self._num_begun += 1
        try:
            yield
        finally:
            with self._counting:
                self._num_done += 1


@dataclass(eq=False)
class NetComputed:
    """Loss and gradients of a batch, and the net that they are of; see :class:`girih.dense.half.Computed`.

    Attributes:
        num_before: writes that were done when the net began to read.
    """

    computed: ReplicaComputed
    net: HogwildNet
    nets: Nets
    num_before: int

    @property
    def vote(self) -> Vote:
        """The vote on the step."""
        return self.computed.vote

    def apply(self, vote: Vote) -> Outcome:
        """One optimizer step, beside other nets' steps. A step that is refused puts buffers back as the net began with them."""
        return self.nets.apply(self, vote)


class HogwildReplica:
    """One copy of the dense parameters, for each trainer; all begin as rank 0's.

    What is evaluated and saved is the copy itself where there is one. Of several it is what :meth:`sync` brought last: the
    parameters as the averaging algorithm has them, and the mean of the replicas' buffers. The replicas keep their own.

    Args:
        nets: threads that will compute on the copy.
        servers: those that average the copies; none where there is one copy.
        average_every_steps: steps of this trainer from one round to the next.

    Attributes:
        module: the one that is evaluated and saved.
        optimizer: the one that a schedule moves; the nets follow it. None where there are no parameters.
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
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            ranks.broadcast_tensor(tensor.detach())
        self._shadow: Shadow | None = None
        live = copy.deepcopy(self.module) if servers else self.module
        self._nets = Nets(replace(spec, module=live), nets, self._stepped)
        self._evaluated: Replica = Replica(spec) if servers else self._nets.first
        self.optimizer = self._nets.first.optimizer
        if servers:
            check_averaged(self._nets.first.named_parameters)
            parameters = self._nets.first.parameters
            self._shadow = Shadow(parameters, servers, ranks.rank, average_every_steps, spec.stats)
            self._begin_averaging(self._shadow)

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: NetComputed | None = None, *, last: bool = True
    ) -> NetComputed:
        """Forward, loss, backward, in any thread; see :class:`~girih.hierarchical.hogwild.Nets`."""
        return self._nets.compute(batch, embeddings, onto, last=last)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the model that is evaluated."""
        return self._evaluated.predict(batch, embeddings)

    def sync(self) -> None:
        """Brings the model of all replicas here, where there are several; no round is under way until the next step."""
        if self._shadow is None:
            return
        model = torch.from_numpy(self._shadow.meet()[0])
        with torch.no_grad():
            for parameter, part in spread_over(self._evaluated.parameters, model):
                parameter.copy_(part)
            for buffer, live in zip(self.module.buffers(), self._nets.first.module.buffers(), strict=True):
                buffer.copy_(live)
            average_buffers(self.module.buffers(), self._ranks)

    def leave(self) -> None:
        """Says that this trainer makes no step before the next :meth:`sync`, so that no round waits for it."""
        if self._shadow is not None:
            self._shadow.leave()

    def stats(self) -> dict[str, int]:
        """Writes of other nets between a net's read of the parameters and its write, at most."""
        return {"staleness_max": self._nets.staleness_max()}

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Statistics of the dense servers; empty but on rank 0."""
        if self._shadow is None or not self._ranks.first:
            return {}
        return self._shadow.processes(spans=spans)

    def state(self) -> DenseState:
        """The state of the model that is evaluated, with this replica's optimizer; see :class:`~girih.dense.halves.replica.Replica`."""
        return {**self._nets.first.state(), "model": self.module.state_dict()}

    def restore(self, state: DenseState) -> None:
        """The inverse of :meth:`state`, for every replica and the servers; all trainers call it together."""
        if self._shadow is not None:
            self._shadow.meet()  # so that nothing is added to what is put here
        self._nets.restore(state)
        if self._shadow is not None:
            self.module.load_state_dict(state["model"])
            self._begin_averaging(self._shadow)

    def close(self) -> None:
        """Ends the averaging."""
        if self._shadow is not None:
            self._shadow.close()

    def _stepped(self) -> None:
        if self._shadow is not None:
            self._shadow.stepped()

    def _begin_averaging(self, shadow: Shadow) -> None:
        if self._ranks.first:
            shadow.begin()
        self._ranks.barrier()
