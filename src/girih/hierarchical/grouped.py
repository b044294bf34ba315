"""The dense half of a trainer in a group: its parameters are on the servers of the group, which run parts of the net (HT §3.1).

The trainer drives the loop. It keeps operators without parameters, and sends the others' inputs to their servers,
forward and backward; several nets of it may be under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from girih.checkpoint.save import DenseState
from girih.comm.group.trainers import TrainerGroup, Vote
from girih.data.batch import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.deferred import Buffers, Gradients
from girih.dense.halves.replica import Replica, ReplicaComputed
from girih.errors import ConfigError, GirihError, NonFiniteError
from girih.hierarchical.graph import Partitioned, ServerPart
from girih.hierarchical.group_client import GroupClient
from girih.hierarchical.live_parts import CutParameters
from girih.hierarchical.optimizer_recipe import OptimizerRecipe, options_of, other_names
from girih.hierarchical.shadow import average_buffers, check_averaged
from girih.hierarchical.stage import BatchOnServers, Stage
from girih.hierarchical.wire import Entry, GroupVerb
from girih.models.embeddings import Embeddings
from girih.planner.operators import TRAINER
from girih.telemetry.stats import DENSE_STALENESS, StatsSnapshot


class GroupedReplica:
    """The trainer's partition of the net, and the way to the servers that have the rest.

    Methods but ``sync`` and ``restore``, which all trainers call together, may be called from several threads.

    Args:
        whole: the model and its optimizer, of which the parameters here are those of the last ``sync``, for the user.
        partitioned: the same net, cut into parts.
        group: the servers that hold them.
        leads: whether it is for this trainer, alone of its group, to restore the servers, and to tell what they count.
        averaged: whether there are other groups: then what is evaluated and saved is the model of all of them as it was at the
            last ``sync``.

    Attributes:
        optimizer: carries the learning rate schedule; its state is on the servers.
        names_on_servers: the parameters that learn, in the model's order, those in parts by their parts.

    Raises:
        ConfigError: an operator with parameters is in no part.
    """

    def __init__(
        self,
        whole: Replica,
        spec: DenseSpec,
        partitioned: Partitioned,
        group: GroupClient,
        ranks: TrainerGroup,
        *,
        leads: bool = True,
        averaged: bool = False,
    ) -> None:
        if averaged:
            check_averaged(whole.named_parameters)
        self.whole, self.optimizer = whole, whole.optimizer
        self.module = whole.module
        self._spec, self._partitioned, self._group, self._ranks = spec, partitioned, group, ranks
        self._leads, self._averaged = leads, averaged
        self._numbers = count()
        self._free: list[_PartitionedNet] = []
        self._known_by = other_names(self.module)
        self._splits = CutParameters(partitioned.traced.splits)
        parts_of = {split.parameter: split.parts for split in partitioned.traced.splits}
        names = [name for name, _ in whole.named_parameters]
        self.names_on_servers = [part for name in names for part in parts_of.get(name, (name,))]
        self.give_back(self._new())
        self._forget_state()
        for parameter in whole.parameters:
            parameter.grad = None  # what a loop of the user's has left
        self._begin_averaging()

    def compute(
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: ReplicaComputed | None = None,
        *,
        last: bool = True,
    ) -> ReplicaComputed:
        """Forward, loss, backward; gradients of parameters stay on the servers."""
        net = self._borrow() if onto is None else cast(_PartitionedNet, onto.half)
        try:
            computed = net.compute(batch, embeddings, onto, last=last)
            self._check_loss()
        except BaseException:
            net.abandon()
            raise
        return computed

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the live parameters; of those of the last ``sync`` where there are other groups."""
        net = self._borrow()
        try:
            return net.predict(batch, embeddings)
        finally:
            self.give_back(net)

    def sync(self) -> None:
        """All trainers' steps are applied; the parameters that are evaluated and saved are in the user's module."""
        self._ranks.barrier()
        self._meet()
        self._fetch(with_optimizer=False)
        average_buffers(self._own_buffers(), self._ranks)

    def leave(self) -> None:
        """Says that this trainer makes no step before the next :meth:`sync`, so that no round of groups waits for it."""
        if self._averaged:
            self._group.ask(GroupVerb.LEAVE)

    def stats(self) -> dict[str, int]:
        """Writes of other nets between a net's read of the parameters and its write, on any server of the group, at most."""
        stats = [
            each["histograms"].get(DENSE_STALENESS, {})
            for each in self._group.processes(spans=False).values()
        ]
        return {"staleness_max": max((int(value) for each in stats for value in each), default=0)}

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Title of each server of the group → its ``Stats.snapshot``; empty but on one trainer of the group."""
        return self._group.processes(spans=spans) if self._leads else {}

    def state(self) -> DenseState:
        """As :meth:`Replica.state`: gathered from the servers by one trainer of the group; others' has no optimizer state."""
        if self._leads:
            self._fetch(with_optimizer=True)
        state = self.whole.state()
        self._forget_state()
        return state

    def restore(self, state: DenseState) -> None:
        """The inverse of :meth:`state`, on all servers of the group; all trainers go on once all are restored."""
        self.whole.restore(state)
        self._meet()  # so that nothing is added to what is put there
        for net in self._free:
            net.streams.forget()
        if self._leads:
            self._group.put(
                self._entries(), [self._names_on(server) for server in range(self._num_servers())]
            )
        self._forget_state()
        self._ranks.barrier()
        self._begin_averaging()

    def extra_state(self) -> dict[str, Tensor]:
        """Returns the state besides :meth:`state` that a resumed run needs; empty on all trainers but one.

        The state of each server's random generator, where its parts draw; and what top-k has left out, if there is one net in all.
        Of several nets no run is like another, and what is left out is as long as the activations of each.
        """
        if not self._leads:
            return {}
        alone = self._ranks.size == 1 and len(self._free) == 1
        state: dict[str, Any] = {
            f"{server}/{name}" + ("" if key is None else f"/{key}"): value
            for server, (name, key, value) in self._group.extra_state()
            if key is None or alone
        }
        if alone:
            left = self._free[0].streams.left().items()
            state |= {f"{TRAINER}/{part}/{number}": torch.from_numpy(each) for (part, number), each in left}
        return state

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state`, for the same parts on the same servers."""
        of_servers: dict[int, list[Entry]] = {}
        for path, value in state.items():
            place, name, *key = path.split("/")
            if place == TRAINER:
                self._free[0].streams.put(name, int(key[0]), value.numpy())
            else:
                of_servers.setdefault(int(place), []).append((name, key[0] if key else None, value))
        for server, entries in of_servers.items():
            self._group.load_extra_state(server, entries)

    def close(self) -> None:
        """Leaves the servers."""
        self._group.close()

    def give_back(self, net: _PartitionedNet) -> None:
        """Takes back a net whose batch is done."""
        self._free.append(net)

    def _meet(self) -> None:
        """Has all groups meet, while none of them trains; all trainers go on together."""
        if self._averaged:
            if self._leads:
                self._group.ask(GroupVerb.MEET)
            self._ranks.barrier()

    def _begin_averaging(self) -> None:
        if self._averaged:
            if self._ranks.first:
                self._group.ask(GroupVerb.BEGIN)
            self._ranks.barrier()

    def _check_loss(self) -> None:
        """Refuses a loss that reads parameters: its gradients arrive here, while servers move what it does not see."""
        for name, parameter in self.whole.named_parameters:
            if parameter.grad is not None:
                parameter.grad = None
                raise ConfigError(
                    f"the model's loss reads parameter {name!r}, which group servers move; expected a loss of logits and of what"
                    " forward leaves for it; compute with the parameter in forward, or set servers_per_group = 0"
                )

    def _borrow(self) -> _PartitionedNet:
        try:
            net = self._free.pop()
        except IndexError:
            net = self._new()
        net.next_batch()
        return net

    def _new(self) -> _PartitionedNet:
        return _PartitionedNet(self, self._spec, self._partitioned, self._group, next(self._numbers))

    def _own_buffers(self) -> list[Tensor]:
        """Buffers of the model that trainers keep, each its own: running moments of operators without parameters."""
        on_servers = frozenset[str]().union(*map(self._names_on, range(self._num_servers())))
        return [buffer for name, buffer in self.module.named_buffers() if name not in on_servers]

    def _num_servers(self) -> int:
        return 1 + max((part.server for part in self._partitioned.parts), default=-1)

    def _names_on(self, server: int) -> frozenset[str]:
        held = [part.module for part in self._partitioned.parts if part.server == server]
        named = [name for module in held for name, _ in (*module.named_parameters(), *module.named_buffers())]
        return frozenset(self._known_by.get(name, name) for name in named)

    def _fetch(self, *, with_optimizer: bool) -> None:
        """Takes parameters, buffers and optimizer state from the servers."""
        named = dict(self.module.named_parameters())
        model = self.module.state_dict()
        for name, key, value in self._splits.joined(self._group.entries(with_optimizer=with_optimizer)):
            if key is not None and self.optimizer is not None:
                self.optimizer.state[named[name]][key] = value
            elif key is None and name in model:  # a graph has buffers that no checkpoint has
                model[name].copy_(value)

    def _entries(self) -> list[Entry]:
        """Returns the tensors of this trainer that :meth:`_fetch` takes."""
        entries: list[Entry] = [(name, None, value) for name, value in self.module.state_dict().items()]
        if self.optimizer is not None:
            for name, parameter in self.module.named_parameters():
                entries += [(name, key, value) for key, value in self.optimizer.state[parameter].items()]
        return self._splits.cut(entries)

    def _forget_state(self) -> None:
        if self.optimizer is not None:
            self.optimizer.state.clear()


class _PartitionedNet(Replica):
    """One of several nets of a trainer: its partition, and its batch on the servers."""

    def __init__(
        self, half: GroupedReplica, spec: DenseSpec, partitioned: Partitioned, group: GroupClient, number: int
    ) -> None:
        def exchange(stage: Stage) -> list[list[Tensor]]:
            return self.on_servers.exchange(stage)

        super().__init__(replace(spec, module=partitioned.trainer(exchange)))
        check_moved(self.module)
        self._kind = type(half.module)
        self._half, self._group, self._number = half, group, number
        self._batches = count()
        self.streams = group.wire.backward()
        self.next_batch()

    def next_batch(self) -> None:
        """From here on, what is sent is of another batch."""
        self.on_servers = BatchOnServers(self._group, self._number, next(self._batches), self.streams)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """See :class:`Replica`; what the nets share is in training mode again when it is done."""
        try:
            return super().predict(batch, embeddings)
        finally:
            self._set_mode(True)

    def take_step(self, vote: Vote, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """Moves the parameters on the servers, and returns once they have; or drops what is on the servers."""
        put_back = super().take_step(vote, gradients, buffers)
        if vote.known_refused:
            self.on_servers.discard()
        self._half.give_back(self)
        return put_back

    def move(self, gradients: Gradients) -> None:
        """Has the servers do their step."""
        optimizer = self._half.optimizer
        most = self._spec.clip_norm
        scale = 1.0 if most is None else self._clipping(most)
        self.on_servers.apply(options_of(optimizer), scale)
        if optimizer is not None:
            optimizer.step()  # of no gradients: a schedule wants to see one

    def _clipping(self, most: float) -> float:
        """The factor that clips gradients, as ``torch.nn.utils.clip_grad_norm_`` does, which takes the norm of norms too."""
        server_norms = self.on_servers.norms()
        norms = torch.tensor(
            [server_norms[name] for name in self._half.names_on_servers if name in server_norms]
        )
        return torch.clamp(most / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0).item()

    def abandon(self) -> None:
        """Drops a batch that failed; what cannot be told the servers now, they find out."""
        try:
            self.on_servers.discard()
        except GirihError:
            return

    def _refusal(self, embeddings: Embeddings) -> NonFiniteError | None:
        return self.on_servers.refusal


def recipe_of(whole: Replica, partitioned: Partitioned) -> OptimizerRecipe | None:
    """Returns the recipe by which group servers make their optimizers; see :meth:`OptimizerRecipe.of`.

    Raises:
        ConfigError: a part has a parameter that the model does not know.
    """
    parts_of = {split.parameter: split.parts for split in partitioned.traced.splits}
    known = {name for name, _ in whole.module.named_parameters(remove_duplicate=False)}
    known |= {name for parts in parts_of.values() for name in parts}
    for part in partitioned.parts:
        for name, parameter in part.module.named_parameters():
            if parameter.requires_grad and name not in known:
                raise ConfigError(
                    f"part {part.name!r} has a parameter {name!r}, which the model has not, so that no optimizer would move it;"
                    " expected one of the model's; set servers_per_group = 0"
                )
    return OptimizerRecipe.of(whole.optimizer, whole.module, parts_of)


def check_moved(partition: nn.Module) -> None:
    """Refuses a net of which trainers would keep parameters.

    Raises:
        ConfigError: names the operator.
    """
    for name, _ in partition.named_parameters():
        operator = name.rpartition(".")[0] or "the model"
        raise ConfigError(
            f"operator {operator!r} has a parameter, {name!r}, and stays on the trainers: expected all operators that have"
            " parameters on group servers; make it a module of its own that torch.fx can trace, or set servers_per_group = 0"
        )


def parts_on(partitioned: Partitioned, server: int) -> Sequence[ServerPart]:
    """The parts of one server, in the order in which :class:`GroupClient` numbers them."""
    return [part for part in partitioned.parts if part.server == server]
