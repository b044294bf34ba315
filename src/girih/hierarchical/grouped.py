"""The dense half of a trainer in a group. The group's servers own its parameters and run parts of the net (HT §3.1).

The trainer drives the loop. It runs the operators without parameters. For the others, it sends their inputs to their
servers, forward and backward. Several nets of a trainer may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

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
from girih.hierarchical.hogwild import BorrowedNet
from girih.hierarchical.live_parts import CutParameters
from girih.hierarchical.optimizer_recipe import OptimizerRecipe, options_of, other_names
from girih.hierarchical.shadow import average_buffers, check_averaged
from girih.hierarchical.stage import BatchOnServers, Stage
from girih.hierarchical.wire import Entry, GroupVerb
from girih.models.embeddings import Embeddings
from girih.planner.operators import TRAINER
from girih.telemetry.stats import DENSE_STALENESS, StatsSnapshot


class GroupedReplica:
    """The trainer's partition of the net, with a client of the servers that own the rest.

    Several threads may call the methods, except ``sync`` and ``restore``, which all trainers call together.

    Args:
        whole: the user's model and its optimizer; its parameters have the values of the last ``sync``.
        partitioned: the same net, cut into parts.
        group: the servers that hold the parts.
        leads: whether this trainer restores the servers and reports their statistics; true for one trainer of each
            group.
        averaged: whether there are other groups. If so, evaluations and checkpoints use the model of all groups at the
            last ``sync``.

    Attributes:
        optimizer: carries the learning rate schedule; its state is on the servers.
        names_on_servers: the trainable parameters, in the model's order; split parameters by the names of their parts.

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
            parameter.grad = None  # drops gradients that the user's own loop left
        self._begin_averaging()

    def compute(self, batch: Batch, embeddings: Embeddings, *, last: bool = True) -> ReplicaComputed:
        """Runs forward pass, loss and backward pass. Gradients of parameters stay on the servers."""
        return self._borrow().compute(batch, embeddings, last=last)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the live parameters, or with other groups, of those at the last ``sync``."""
        net = self._borrow()
        try:
            return net.predict(batch, embeddings)
        finally:
            self.give_back(net)

    def sync(self) -> None:
        """Waits until all steps are applied. Copies the parameters to evaluate and save into the user's module."""
        self._ranks.barrier()
        self._meet()
        self._fetch(with_optimizer=False)
        average_buffers(self._own_buffers(), self._ranks)

    def leave(self) -> None:
        """Announces that this trainer makes no step before the next :meth:`sync`. Rounds do not wait for it."""
        if self._averaged:
            self._group.ask(GroupVerb.LEAVE)

    def stats(self) -> dict[str, int]:
        """The largest number of other nets' writes between a net's read and its write, on any server of the group."""
        stats = [
            each["histograms"].get(DENSE_STALENESS, {})
            for each in self._group.processes(spans=False).values()
        ]
        return {"staleness_max": max((int(value) for each in stats for value in each), default=0)}

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Maps each server's title to its ``Stats.snapshot``. Empty except on one trainer of the group."""
        return self._group.processes(spans=spans) if self._leads else {}

    def state(self) -> DenseState:
        """The same as :meth:`Replica.state`, gathered by one trainer of the group. Others lack optimizer state."""
        if self._leads:
            self._fetch(with_optimizer=True)
        state = self.whole.state()
        self._forget_state()
        return state

    def restore(self, state: DenseState) -> None:
        """The inverse of :meth:`state`, on all servers of the group. All trainers continue when all are restored."""
        self.whole.restore(state)
        self._meet()  # so that no round adds to the restored parameters
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
        """Returns the state besides :meth:`state` that a resumed run needs. Empty except on one trainer.

        It holds the state of each server's random generator if its parts draw random numbers. If there is only one
        net, it also holds the numbers that top-k left out. With several nets, no two runs are equal, and the numbers
        of each net are as many as its activations.
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
        """The inverse of :meth:`extra_state`, for the same parts on the same servers."""
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
        """Disconnects from the servers."""
        self._group.close()

    def give_back(self, net: _PartitionedNet) -> None:
        """Takes back a net when its batch has ended."""
        self._free.append(net)

    def _meet(self) -> None:
        """Makes all groups meet while none of them trains. All trainers continue together."""
        if self._averaged:
            if self._leads:
                self._group.ask(GroupVerb.MEET)
            self._ranks.barrier()

    def _begin_averaging(self) -> None:
        if self._averaged:
            if self._ranks.first:
                self._group.ask(GroupVerb.BEGIN)
            self._ranks.barrier()

    def check_loss(self) -> None:
        """Refuses a loss that reads parameters: its gradients are on the trainer, but servers move the parameters."""
        for name, parameter in self.whole.named_parameters:
            if parameter.grad is not None:
                parameter.grad = None
                raise ConfigError(
                    f"the model's loss reads parameter {name!r}, which group servers move; expected a loss of logits and of tensors"
                    " that forward leaves for it; use the parameter in forward, or set servers_per_group = 0"
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
        """Buffers of the model that each trainer keeps for itself: running moments of operators without parameters."""
        on_servers = frozenset[str]().union(*map(self._names_on, range(self._num_servers())))
        return [buffer for name, buffer in self.module.named_buffers() if name not in on_servers]

    def _num_servers(self) -> int:
        return 1 + max((part.server for part in self._partitioned.parts), default=-1)

    def _names_on(self, server: int) -> frozenset[str]:
        held = [part.module for part in self._partitioned.parts if part.server == server]
        named = [name for module in held for name, _ in (*module.named_parameters(), *module.named_buffers())]
        return frozenset(self._known_by.get(name, name) for name in named)

    def _fetch(self, *, with_optimizer: bool) -> None:
        """Copies parameters, buffers and optimizer state from the servers."""
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


class _PartitionedNet(BorrowedNet):
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
        """Starts a new batch on the servers."""
        self.on_servers = BatchOnServers(self._group, self._number, next(self._batches), self.streams)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """See :class:`Replica`. Afterwards, the modules that the nets share are in training mode again."""
        try:
            return super().predict(batch, embeddings)
        finally:
            self._set_mode(True)

    def take_step(self, vote: Vote, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """Moves the parameters on the servers and waits. If the step is refused, drops the batch on the servers."""
        put_back = super().take_step(vote, gradients, buffers)
        if vote.known_refused:
            self.on_servers.discard()
        self._half.give_back(self)
        return put_back

    def move(self, gradients: Gradients) -> None:
        """Makes the servers take their optimizer step."""
        optimizer = self._half.optimizer
        most = self._spec.clip_norm
        scale = 1.0 if most is None else self._clipping(most)
        self.on_servers.apply(options_of(optimizer), scale)
        if optimizer is not None:
            optimizer.step()  # without gradients: a learning rate schedule expects a step

    def _clipping(self, most: float) -> float:
        """The factor that clips gradients, computed from norms as in ``torch.nn.utils.clip_grad_norm_``."""
        server_norms = self.on_servers.norms()
        norms = torch.tensor(
            [server_norms[name] for name in self._half.names_on_servers if name in server_norms]
        )
        return torch.clamp(most / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0).item()

    def abandon(self) -> None:
        """Drops a failed batch. Servers that cannot be reached now drop it later."""
        with suppress(GirihError):
            self.on_servers.discard()

    def _refusal(self, embeddings: Embeddings) -> NonFiniteError | None:
        self._half.check_loss()
        return self.on_servers.refusal


def recipe_of(whole: Replica, partitioned: Partitioned) -> OptimizerRecipe | None:
    """Returns the recipe from which group servers make their optimizers. See :meth:`OptimizerRecipe.of`.

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
                    f"part {part.name!r} has a parameter {name!r}, which the model lacks, so that no optimizer would move it;"
                    " expected a parameter of the model; set servers_per_group = 0"
                )
    return OptimizerRecipe.of(whole.optimizer, whole.module, parts_of)


def check_moved(partition: nn.Module) -> None:
    """Refuses a net with parameters that would stay on trainers.

    Raises:
        ConfigError: names the operator.
    """
    for name, _ in partition.named_parameters():
        operator = name.rpartition(".")[0] or "the model"
        raise ConfigError(
            f"operator {operator!r} has a parameter, {name!r}, and stays on the trainers; expected all operators with"
            " parameters on group servers; move it into a module that torch.fx can trace, or set servers_per_group = 0"
        )


def parts_on(partitioned: Partitioned, server: int) -> Sequence[ServerPart]:
    """The parts of one server, in the order in which :class:`GroupClient` numbers them."""
    return [part for part in partitioned.parts if part.server == server]
