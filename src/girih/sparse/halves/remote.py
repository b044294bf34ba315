"""The sparse half of a trainer whose tables are in other processes: it asks embedding workers, which ask servers.

A dispatched batch has its ids at a worker already, under a sample number (Persia §4.1 steps 3, 5 and 6).

Shapes: B examples, G groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from girih.cluster.roles import RoleName
from girih.comm.context import RunContext
from girih.comm.group import TrainerGroup
from girih.comm.rpc import Client, Frame, Reply
from girih.data import Dataset
from girih.data.batch import Batch
from girih.errors import ConfigError
from girih.models.embeddings import Embeddings
from girih.sparse.groups.assemble import assemble
from girih.sparse.groups.group import as_leaves
from girih.sparse.service.codec import Codec
from girih.sparse.service.protocol import NO_TURN, Verb, answer, as_integer, as_text, from_text, writable
from girih.sparse.spec import SparseSpec

SERVER, WORKER = RoleName.EMBEDDING_SERVER, RoleName.EMBEDDING_WORKER
SAVE_S = 1800.0


class RemotePulled:
    """Embeddings on their way from a worker."""

    def __init__(
        self,
        batch: Batch,
        number: int,
        worker: Client | None,
        reply: Reply,
        half: RemoteSparse,
        *,
        train: bool,
    ) -> None:
        self.batch, self.number, self.worker = batch, number, worker
        self.staleness = 0
        self.leaves: list[Tensor] = []
        self._reply, self._groups, self._packets, self._train = reply, half.groups, half.packets, train
        self._embeddings: Embeddings | None = None

    def wait(self) -> Embeddings:
        """Blocks until they are here."""
        if self._embeddings is None:
            frame = answer(self._reply)
            self.staleness = frame.fields[0]
            self._embeddings = self._assemble(frame)
        return self._embeddings

    def _assemble(self, frame: Frame) -> Embeddings:
        whole = [o for group in self._groups for o in group.outputs if o.whole]
        count = len(frame.arrays) - len(whole)
        outputs = [writable(array) for array in self._packets.unpack_embeddings(frame.arrays[:count])]
        bounds = {int(o.features[0]): np.array(b) for o, b in zip(whole, frame.arrays[count:], strict=True)}
        self.leaves = as_leaves(outputs, train=self._train)
        leaves, first = [], 0
        for group in self._groups:
            leaves.append(self.leaves[first : first + len(group.outputs)])
            first += len(group.outputs)
        return assemble(self._groups, leaves, bounds.__getitem__)


class RemotePending:
    """An update, or a drop, on its way."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def done(self) -> bool:
        """Whether an answer is here."""
        return self._reply.done()

    def wait(self) -> None:
        """Blocks until it is applied."""
        answer(self._reply)


class RemoteSave:
    """Servers hold their rows as they were; each writes its files when asked."""

    def __init__(self, servers: Sequence[Client]) -> None:
        self._servers = servers
        self._written = False

    def write(self) -> dict[str, Any]:
        """Has all servers write, side by side."""
        self._written = True
        files: dict[str, Any] = {}
        for reply in [server.call(Verb.WRITE, (1,), timeout_s=SAVE_S) for server in self._servers]:
            files |= from_text(answer(reply).arrays[0])
        return files

    def close(self) -> None:
        """Ends what was not written."""
        if not self._written:
            for reply in [server.call(Verb.WRITE, (0,)) for server in self._servers]:
                answer(reply)


class RemoteSparse:
    """Tables in embedding servers, reached through embedding workers.

    Methods but for ``pull``, ``peek``, ``push``, ``drop`` and ``drain`` speak to the servers on rank 0 alone.
    """

    by_columns = False

    def __init__(self, spec: SparseSpec, packets: Codec, context: RunContext) -> None:
        self.step = 0
        self.groups = spec.groups()
        self.packets = packets
        self.wire_bytes: Counter[str] = Counter()
        self._ranks: TrainerGroup = context.ranks
        self._schema = spec.schema
        self._number = 0
        self._turn = 0
        self._pending: deque[RemotePending] = deque()
        self._workers = [context.connect(WORKER, index) for index in range(len(context.addresses[WORKER]))]
        self._servers = [
            context.connect(SERVER, index)
            for index in range(len(context.addresses[SERVER]) if context.ranks.first else 0)
        ]

    def columns_of(self, data: Dataset) -> Dataset:
        """All of them."""
        return data

    def pull(self, batch: Batch) -> RemotePulled:
        """Asks the worker that keeps the batch's ids for its embeddings.

        Raises:
            ConfigError: the batch was not dispatched.
        """
        if batch.share is None or batch.share.sample is None:
            raise ConfigError("this batch has its ids with it; expected one that a loader dispatched")
        place, sample = batch.share.sample
        worker = self._workers[place]
        number, self._number = self._number, self._number + 1
        reply = worker.call(Verb.PULL, (sample, self._ranks.rank, number, self.step + 1))
        return RemotePulled(batch, number, worker, reply, self, train=True)

    def peek(self, batch: Batch) -> RemotePulled:
        """Reads for evaluation; keys without a row give their initial value."""
        worker = self._workers[self._ranks.rank % len(self._workers)]
        arrays = self.packets.pack_ids(batch)
        self.wire_bytes["ids"] += sum(array.nbytes for array in arrays)
        reply = worker.call(Verb.PEEK, (batch.num_examples,), arrays)
        return RemotePulled(batch, 0, None, reply, self, train=False)

    def push(self, pulled: RemotePulled, lr_scale: float = 1.0) -> RemotePending:
        """Sends the gradients that the embeddings collected to the worker they came from."""
        self.step += 1
        while self._pending and self._pending[0].done():
            self._pending.popleft().wait()
        gradients = self.packets.pack_gradients(
            [None if leaf.grad is None else leaf.grad.contiguous().numpy() for leaf in pulled.leaves]
        )
        self.wire_bytes["gradients"] += sum(gradient.nbytes for gradient in gradients)
        fields = (*self._called(pulled), self._next_turn(), self.step, as_integer(lr_scale))
        return self._send(pulled, Verb.PUSH, fields, gradients)

    def refuse(self, pulled: RemotePulled) -> RemotePending:
        """Tells the worker, and the servers, that this step moves nothing."""
        return self._send(pulled, Verb.DROP, (*self._called(pulled), self._next_turn()), [])

    def drop(self, pulled: RemotePulled) -> RemotePending:
        """Tells the worker, and the servers, that this batch will not be trained on."""
        return self._send(pulled, Verb.DROP, (*self._called(pulled), NO_TURN), [])

    def drain(self) -> None:
        """Returns when all that this trainer has sent is applied."""
        while self._pending:
            self._pending.popleft().wait()

    def counters(self) -> Mapping[str, int]:
        """Sums over all servers, see ``Store.counters``, and ``rows``."""
        total: Counter[str] = Counter()
        for told in self._told_by_servers():
            total.update(told["store"])
        return total

    def rows(self) -> dict[str, int]:
        """Rows of each table."""
        total: Counter[str] = Counter()
        for told in self._told_by_servers():
            total.update(told["rows"])
        return dict(total)

    def told(self) -> dict[str, dict[str, Any]]:
        """What servers and workers count, by title."""
        if not self._ranks.first:
            return {}
        return {
            f"{name} {number}": from_text(answer(reply).arrays[0])
            for name, clients in ((SERVER, self._servers), (WORKER, self._workers))
            for number, reply in enumerate([client.call(Verb.COUNT) for client in clients])
        }

    def _told_by_servers(self) -> list[dict[str, Any]]:
        return [from_text(answer(r).arrays[0]) for r in [s.call(Verb.COUNT) for s in self._servers]]

    def begin_save(self, directory: Path) -> RemoteSave:
        """All servers take live snapshots, while no trainer has anything in flight."""
        self.drain()
        self._ranks.barrier()
        text = as_text(str(directory.resolve()))
        for reply in [server.call(Verb.SAVE, (), (text,)) for server in self._servers]:
            answer(reply)
        self._ranks.barrier()
        return RemoteSave(self._servers)

    def load(self, directory: Path, files: Mapping[str, Any]) -> None:
        """Replaces all rows by those of any number of shards."""
        text = as_text([str(directory.resolve()), dict(files)])
        for reply in [server.call(Verb.LOAD, (), (text,), timeout_s=SAVE_S) for server in self._servers]:
            answer(reply)
        self._ranks.barrier()

    def close(self) -> None:
        """Lets workers and servers go."""
        for client in (*self._workers, *self._servers):
            client.close()

    def _next_turn(self) -> int:
        """Batches trained on or refused before: the same on all trainers in step, however many each has read ahead."""
        turn, self._turn = self._turn, self._turn + 1
        return turn

    def _called(self, pulled: RemotePulled) -> tuple[int, int, int]:
        sample = pulled.batch.share.sample if pulled.batch.share is not None else None
        return (0 if sample is None else sample[1], self._ranks.rank, pulled.number)

    def _send(
        self, pulled: RemotePulled, verb: Verb, fields: tuple[int, ...], arrays: Sequence[Any]
    ) -> RemotePending:
        if pulled.worker is None:
            raise ConfigError("embeddings of an evaluation take no gradients")
        pending = RemotePending(pulled.worker.call(verb, fields, arrays))
        self._pending.append(pending)
        return pending
