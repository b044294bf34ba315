"""Sparse halves whose shards are spread over the trainers.

Keys go to the rank that owns them, and rows come back, by AllToAllv. Every trainer reads and updates its rows for the
batches of all trainers, once for each key. The result is the same as in one process that has the whole batch (PICASSO
§III-A). All trainers call all methods, in the same order.

Shapes: R ranks, G groups, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that all
ranks ask of this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import BetweenHosts, DirectExchange
from girih.comm.group.trainers import Numbers, Vote
from girih.data.batch import Batch
from girih.errors import ConfigError, NonFiniteError
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.half import SparseStats
from girih.sparse.halves.group_messages import Coming, GroupMessages, RowCodec
from girih.sparse.halves.row_updates import Inverses, nonfinite_feature, nonfinite_gradient, numbers_on
from girih.sparse.halves.sharded import Arrival, ShardedHalf
from girih.sparse.routing.key_router import RoutedKeys
from girih.sparse.routing.routed_group import (
    Asked,
    CpuRoutedGroup,
    CpuServed,
    GroupTraffic,
    IncomingRows,
    KeyCounts,
    RoutedGroup,
    Served,
    ServedRows,
)
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import ASKED_KEYS, PACED_KEYS, SERVED_ROWS, Stats

if TYPE_CHECKING:
    from girih.sparse.halves.gpu_counters import DeferredCounts

GroupNumbers = Sequence[int]
"""The numbers of groups that share a message."""


@dataclass(eq=False)
class KeyRequest(Generic[Asked, Served]):
    """The keys of one batch.

    Attributes:
        groups: the keys of each group.
        served: True once all ranks have sent the keys to their owners.
        ready: the event after which all of this is ready for other streams of a GPU.
        brought: done once the rows have been brought in from tiers below a GPU; None if nothing brings them in.
    """

    groups: list[GroupTraffic[Asked, Served]]
    served: bool = False
    ready: torch.cuda.Event | None = None
    brought: Future[None] | None = None


class ExchangingSparse(ShardedHalf[KeyRequest[Asked, Served], GroupTraffic[Asked, Served]]):
    """Base of the halves whose shards are spread evenly over the trainers, on any device.

    If several micro-batches need a key, the key travels with the first of them.

    Args:
        threaded: True sends the messages of a step over separate connections, because gloo allows only one thread for
            each connection.
        micro_batches, ahead: see :class:`ShardedHalf`.

    Attributes:
        routed: the groups on their device. Subclasses set this, ``messages``, ``sets`` and ``key_sets``.
        messages: sends and receives keys, rows and gradients.
        sets: the groups whose rows share a message, in order. key_sets: the groups whose keys share a message.
        first_tables: the number of each group's first table among all tables.
    """

    routed: Sequence[RoutedGroup[Asked, Served]]
    messages: GroupMessages
    sets: Sequence[GroupNumbers]
    key_sets: Sequence[GroupNumbers]

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        stats: Stats | None,
        *,
        micro_batches: int,
        ahead: bool,
        threaded: bool,
    ) -> None:
        groups = spec.groups()
        shards = LocalShards(
            groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size, gpu=spec.gpu
        )
        super().__init__(groups, shards, micro_batches=micro_batches, ahead=ahead)
        self.ranks, self._stats = ranks, stats or Stats()
        self._part = ranks.split(range(ranks.size)) if ranks.size > 1 and threaded else None
        self._tables = [table.name for group in groups for table in group.spec.tables]
        ends = np.cumsum([0, *(len(group.spec.tables) for group in groups)]).tolist()
        self.first_tables: Sequence[int] = ends[:-1]
        self._asked_of_all = 0  # in the steps whose outcome the host knows

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> KeyRequest[Asked, Served]:
        """Finds the keys of a batch, and sends them to their owners.

        Each owner finds the unique keys among the requests of all ranks.
        """
        request = self.ask(batch, parts, train=train)
        self.send_keys(request, train=train)
        return request

    def ask(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> KeyRequest[Asked, Served]:
        """Finds the keys of a batch, and sends each rank its number of keys. Waits until the keys are found."""
        if not self.routed:  # the model has only numeric features
            return KeyRequest([], served=True)
        asked = [group.ask(batch, parts, train=train) for group in self.routed]
        counts = torch.cat([numbers.flatten(1) for _, numbers in asked], dim=1)
        passage = self.messages.send_counts(self.on_host(counts), train=train)
        traffic: list[GroupTraffic[Asked, Served]] = []
        first = 0
        for number, (group, (keys, numbers)) in enumerate(zip(self.routed, asked, strict=True)):
            columns = slice(first, first + numbers[0].numel())
            asks, asked_here = (
                KeyCounts(item[:, columns].reshape(numbers.shape))
                for item in (passage.sent, passage.received)
            )
            message, dim = group.message(keys, asks, asked_here), group.group.spec.dim
            traffic.append(GroupTraffic(number, dim, message, passage, first, asks, asked_here, keys))
            first = columns.stop
        return KeyRequest(traffic)

    def send_keys(self, request: KeyRequest[Asked, Served], *, train: bool) -> None:
        """Sends keys to their owners, unless this is done. Finds the unique keys that all ranks ask of this rank."""
        if request.served:
            return

        def send(numbers: GroupNumbers) -> Coming:
            return self.messages.send_keys([request.groups[g] for g in numbers], train=train)

        for numbers, came in zip(self.key_sets, self.messages.in_order(send, self.key_sets), strict=True):
            members = [request.groups[g] for g in numbers]
            for traffic, keys in zip(members, self.messages.received_keys(members, came), strict=True):
                traffic.served = self.routed[traffic.number].serve(traffic, keys, train=train)
        request.served = True

    def fetch(self, request: KeyRequest[Asked, Served]) -> None:
        """See :class:`ShardedHalf`."""
        for group, traffic in zip(self.routed, request.groups, strict=True):
            group.fetch(traffic.served)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        request: KeyRequest[Asked, Served] | None = None,
        *,
        train: bool,
    ) -> Generator[Arrival[GroupTraffic[Asked, Served]], None, None]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        traffic = (self.find(batch, parts, train=train) if request is None else request).groups
        rows: dict[int, ServedRows] = {}
        coming: dict[int, IncomingRows] = {}

        def send(message: tuple[int, GroupNumbers]) -> Coming:
            part, numbers = message
            for g in numbers if part == 0 else ():
                rows[g] = self.routed[g].read(traffic[g].served, step, train=train)
                coming[g] = self.routed[g].incoming(traffic[g].keys, batch)
            return self.messages.send_rows([traffic[g] for g in numbers], rows, part, train=train)

        num_messages = traffic[0].asks.counts.shape[1] if traffic else 0
        arrivals = self.messages.in_order(send, product(range(num_messages), self.sets))
        for part, examples in enumerate(parts):
            for numbers in self.sets:
                if part < num_messages:
                    members = [traffic[g] for g in numbers]
                    for g, first, came in self.messages.received_rows(members, rows, part, next(arrivals)):
                        coming[g].take(first, came)
                for g in numbers:
                    coming[g].fill(examples)
            if not train:
                self._count_absent(batch, traffic)
            yield traffic, [output for g in range(len(traffic)) for output in coming[g].outputs]

    def update(
        self,
        batch: Batch,
        reads: list[GroupTraffic[Asked, Served]],
        gradients: Sequence[Gradients],
        step: int,
        lr_scale: float,
        vote: Vote,
    ) -> None:
        """Sends the gradients of rows to their owners. Owners apply the sum over all trainers, or nothing."""
        if not reads:
            with self.messages.waiting("vote", train=True):
                vote.cast(torch.tensor(False))
            return
        values: dict[int, Tensor] = {}
        sums: dict[int, Tensor] = {}
        bad_keys, bad_tables = (list[int | Tensor]([-1] * len(reads)) for _ in range(2))

        def send(numbers: GroupNumbers) -> Coming:
            for g in numbers:
                values[g], bad_keys[g] = self.routed[g].gradients(reads[g].keys, gradients[g], batch)
            return self.messages.send_gradients([reads[g] for g in numbers], values)

        for numbers, came in zip(self.sets, self.messages.in_order(send, self.sets), strict=True):
            received = self.messages.received_gradients([reads[g] for g in numbers], values, came)
            for g, of_ranks in zip(numbers, received, strict=True):
                sums[g], bad_tables[g] = self.routed[g].sum_gradients(reads[g].served, of_ranks)
        groups = list(zip(self.routed, reads, strict=True))
        num_unique = [group.num_unique(read.served) for group, read in groups]
        here = numbers_on(vote.loss.device, [*bad_keys, *bad_tables, *num_unique])
        keys_here, tables_here, unique_here = here.chunk(3)
        took_part = [float(any(gradient is not None for gradient in outputs)) for outputs in gradients]
        num_asked = float(reads[0].passage.received.sum())
        worst = tables_here.amax(0, keepdim=True)
        # four times each, so that each group's number is at a multiple of 16 bytes, as its kernel expects
        words = self.on_device(np.array([num_asked, *np.repeat(took_part, 4)])).to(here.device)
        with self.messages.waiting("vote", train=True):
            of_all = vote.cast((here[: 2 * len(reads)] >= 0).any(), torch.cat([worst, words]))
        if not vote.known_refused:
            # kernels expect -1 if they must update rows, and the number of a key otherwise
            flags = torch.where(vote.refused, 0.0, -of_all[:, 2:].amax(0)).to(sums[0].device, torch.int32)
            flags_of = flags.chunk(len(reads))
            for g, (group, read) in enumerate(groups):
                group.apply(read.served, sums[g], flags_of[g], step, lr_scale)
        inverses = [(group.group, group.inverse(read.keys)) for group, read in groups]
        counts = self.late_counts() if vote.deferred else None
        self._report(vote, batch, inverses, [keys_here, of_all[:, :2], unique_here], counts)

    def on_device(self, numbers: NDArray[np.float64]) -> Tensor:
        """Returns numbers on the device of the rows. Nothing waits for them."""
        return torch.from_numpy(numbers)

    def on_host(self, numbers: Tensor) -> NDArray[Any]:
        """Numbers of the device of rows, for which the host waits."""
        array: NDArray[Any] = numbers.numpy()
        return array

    def late_counts(self) -> DeferredCounts | None:
        """Returns the counters of all stores, which the host learns with the outcome of a step.

        Returns None if the host asks the stores instead.
        """
        return None

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Returns sums over all shards of all ranks, and how evenly the keys were spread over ranks."""
        local, total = super().stats(), self.ranks.sum_by_name
        balance = total({ASKED_KEYS: self._stats.counters[ASKED_KEYS]})
        self._asked_of_all = balance[ASKED_KEYS]
        balance[PACED_KEYS] = self._stats.counters[PACED_KEYS]
        return SparseStats(
            total(local.store), total(local.rows), balance=balance, features=total(local.features)
        )

    def close(self) -> None:
        """See :class:`ShardedHalf`. Also closes the connections to other trainers."""
        super().close()
        if self._part is not None:
            self._part.close()
        self.messages.close()

    def _count_absent(self, batch: Batch, reads: Sequence[GroupTraffic[Asked, Served]]) -> None:
        """Counts the ids of an evaluation that have no row. Waits for a GPU."""
        for group, read in zip(self.routed, reads, strict=True):
            flags = self.messages.send_absent(read, group.absent(read.served))
            inverse = self.on_host(torch.as_tensor(group.inverse(read.keys)))
            self.features.add_evaluation(batch, group.group, inverse, group.by_number(read.keys, flags))

    def _report(
        self,
        vote: Vote,
        batch: Batch,
        inverses: Inverses,
        numbers: Sequence[Tensor],
        counts: DeferredCounts | None = None,
    ) -> None:
        """Makes a vote report why the rows refuse a step, and how evenly keys were spread.

        Args:
            numbers: first float64[G]: for each group a key of this rank with a gradient that is not finite, or -1. Then
                [R, 2]: for each rank the number of a table with a sum that is not finite, or -1, and the number of keys
                asked of the rank. Then [G]: for each group the number of unique keys asked of this rank.
            counts: the counters of all stores; None if the host must ask the half.
        """
        num_groups, num_ranks = len(inverses), self.ranks.size
        of_ranks = slice(num_groups, num_groups + 2 * num_ranks)
        end = of_ranks.stop + num_groups

        def error_from(flat: Numbers) -> NonFiniteError | None:
            worst = int(max(flat[of_ranks][::2]))
            if (feature := nonfinite_feature(inverses, batch, flat[:num_groups])) or worst < 0:
                return nonfinite_gradient(feature)
            return NonFiniteError(f"a gradient of table {self._tables[worst]!r} is NaN or infinite")

        def counters_from(flat: Numbers) -> Mapping[str, int] | None:
            asked = flat[of_ranks][1::2]
            self._stats.counters[ASKED_KEYS] += int(asked[self.ranks.rank])
            self._stats.counters[SERVED_ROWS] += int(sum(flat[of_ranks.stop : end]))
            self._stats.counters[PACED_KEYS] += num_ranks * int(max(asked))
            self._asked_of_all += int(sum(asked))
            if counts is None:
                return None
            balance = {ASKED_KEYS: self._asked_of_all, PACED_KEYS: self._stats.counters[PACED_KEYS]}
            return {**counts.by_name(flat[end:]), **balance}

        parts = [*numbers, *(() if counts is None else (counts.numbers,))]
        vote.reported = torch.cat([part.reshape(-1) for part in parts])
        vote.error_from, vote.counters_from = error_from, counters_from


class CollectiveSparse(ExchangingSparse[RoutedKeys, CpuServed]):
    """Tables in the memory of hosts, with shards spread evenly over the trainers.

    Rows of several groups, and their gradients, travel in one message. Several interleaving groups follow each other
    (PICASSO §III-C, K-interleaving), and so do micro-batches (D-interleaving). While one message of rows is on the way,
    a thread looks up the rows of the next message and pools the rows of the message before.

    Args:
        hosts: the host of each trainer, by rank. With several hosts, some of which have several trainers, messages
            between hosts are grouped.
        float16_embeddings, float16_gradients: True sends rows, or their gradients, as float16 with one scale each.
        micro_batches, ahead: see :class:`ShardedHalf`.
        interleaving: names of the groups of each interleaving group, in order; empty puts all groups into one.
        excluded: names of the groups that go before all interleaving groups.

    Raises:
        ConfigError: interleaving and excluded groups together do not name every group once.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        stats: Stats | None = None,
        *,
        hosts: Sequence[str] = (),
        float16_embeddings: bool = False,
        float16_gradients: bool = False,
        micro_batches: int = 1,
        ahead: bool = False,
        interleaving: Sequence[Sequence[str]] = (),
        excluded: Sequence[str] = (),
    ) -> None:
        groups = spec.groups()
        self.sets = _numbered_sets([group.spec.name for group in groups], interleaving, excluded)
        self.key_sets = [range(len(groups))]
        several = micro_batches > 1 or len(self.sets) > 1
        super().__init__(
            spec, ranks, stats, micro_batches=micro_batches, ahead=ahead, threaded=several or ahead
        )
        between = self._part or ranks
        grouped = 1 < len(set(hosts)) < len(hosts)
        self.exchange = BetweenHosts(between, hosts) if grouped else DirectExchange(between)
        shards, threaded = self._shards, several and ranks.size > 1
        self.routed = [
            CpuRoutedGroup(group, stores, shards.pool, ranks.size, first)
            for group, stores, first in zip(groups, shards.stores, self.first_tables, strict=True)
        ]
        self.messages = GroupMessages(
            ranks,
            self.exchange,
            self._stats,
            counting=self.exchange,
            rows=RowCodec(float16_embeddings),
            gradients=RowCodec(float16_gradients),
            ahead=int(threaded),
            threaded=threaded,
        )


def _numbered_sets(
    names: Sequence[str], interleaving: Sequence[Sequence[str]], excluded: Sequence[str]
) -> list[list[int]]:
    """Returns the numbers of the groups whose rows travel together, in the order of their messages."""
    wanted = [
        part for part in (excluded, *(interleaving or [[n for n in names if n not in excluded]])) if part
    ]
    if sorted(name for part in wanted for name in part) != sorted(names):
        raise ConfigError(
            f"schedule: interleaving groups {[list(part) for part in interleaving]}, excluded {list(excluded)}; expected"
            f" each of the groups {', '.join(names)} once; plan again with girih plan"
        )
    return [[names.index(name) for name in part] for part in wanted]
