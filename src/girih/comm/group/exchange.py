"""AllToAllv with message sizes that follow from counts: the requests of trainers to each other, and the answers.

First each rank sends every other rank a few counts, for example how many keys of each group it will request. All
message sizes in both directions follow from these counts, for the sender, the relays and the receiver.

Shapes: P ranks, C counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.collectives import Collectives, await_work

Counts = NDArray[np.int64]
Sizes = Callable[[Counts], Counts]
"""Counts, int64[..., C] → the length of each message in numbers, int64[...]."""


@dataclass(frozen=True)
class Passage:
    """The counts or sizes of one exchange that this rank needs. All ranks send along it in the same order.

    Attributes:
        sent, received: [P, ...], of this rank's messages to each rank, and of each rank's messages to this one.
        outgoing: host that this rank is a relay for → [R, S, ...], from each rank here to each rank there.
        incoming: host that this rank is a relay for → [S, R, ...], from each rank there to each rank here.
    """

    sent: Counts
    received: Counts
    outgoing: Mapping[int, Counts] = field(default_factory=dict)
    incoming: Mapping[int, Counts] = field(default_factory=dict)

    def there(self, sizes: Sizes) -> Passage:
        """Returns the sizes of messages in the direction of the counts."""
        outgoing = {host: sizes(counts) for host, counts in self.outgoing.items()}
        incoming = {host: sizes(counts) for host, counts in self.incoming.items()}
        return Passage(sizes(self.sent), sizes(self.received), outgoing, incoming)

    def back(self, sizes: Sizes) -> Passage:
        """Returns the sizes of messages in the opposite direction."""
        there = self.there(sizes)
        outgoing = {host: each.T for host, each in there.incoming.items()}
        incoming = {host: each.T for host, each in there.outgoing.items()}
        return Passage(there.received, there.sent, outgoing, incoming)


class DirectExchange:
    """Sends messages between all ranks directly: each rank sends one message to each other rank."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._relayed: dict[
            int, tuple[int, int]
        ] = {}  # host that this rank is a relay for → ranks here and there

    def send_counts(self, counts: Counts) -> Passage:
        """Sends each rank its counts, int64[P, C], none negative. C is the same on all ranks.

        Returns:
            These counts, and the counts that each rank sent to this one. The sizes of later messages follow from them.
        """
        size, num_counts = counts.shape
        alike = np.full(size, num_counts)
        outgoing = {host: np.full(shape, num_counts) for host, shape in self._relayed.items()}
        incoming = {host: each.T for host, each in outgoing.items()}
        received, *passed = self.move(
            torch.from_numpy(counts.reshape(-1)), Passage(alike, alike, outgoing, incoming)
        )
        out_counts, in_counts = (
            {host: numbers.numpy().reshape(*shapes[host].shape, -1) for host, numbers in messages.items()}
            for messages, shapes in zip(passed, (outgoing, incoming), strict=True)
        )
        return Passage(counts, received.numpy().reshape(counts.shape), out_counts, in_counts)

    def begin(self, sent: Tensor, sizes: Passage) -> Callable[[], Tensor]:
        """Begins to move the parts of a flat tensor to the ranks. The returned function ends this and returns the received parts."""
        return self._ranks.begin_exchange(sent, sizes.sent.tolist(), sizes.received.tolist())

    def move(self, sent: Tensor, sizes: Passage) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
        """Moves the parts of a flat tensor to the ranks in turn.

        Returns:
            The parts that arrived here. Then the messages that this rank passed on, by host: to other hosts, and from
            other hosts. The order is that of :class:`Passage`.
        """
        return self.begin(sent, sizes)(), {}, {}


_Pieces = Sequence[Tensor]
_TAG = 0


class BetweenHosts(DirectExchange):
    """An exchange that groups messages by host.

    Args:
        hosts: the name of each rank's host, the same on all ranks.

    Attributes:
        num_messages: messages that this rank has sent to other hosts.
    """

    def __init__(self, ranks: Collectives, hosts: Sequence[str]) -> None:
        super().__init__(ranks)
        self.num_messages = 0
        names = list(dict.fromkeys(hosts))
        self._members = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
        self._host = names.index(hosts[ranks.rank])
        self._local_ranks = self._members[self._host]
        self._relays: dict[int, list[int]] = {rank: [] for rank in self._local_ranks}
        for host in range(len(names)):
            if host != self._host:
                self._relays[self._relay(self._host, host)].append(host)
        here = len(self._local_ranks)
        self._relayed = {host: (here, len(self._members[host])) for host in self._relays[ranks.rank]}

    def begin(self, sent: Tensor, sizes: Passage) -> Callable[[], Tensor]:
        """See :class:`DirectExchange`: all is done at the end."""
        return lambda: self.move(sent, sizes)[0]

    def move(self, sent: Tensor, sizes: Passage) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
        """See :class:`DirectExchange`."""
        own, members, mine = self._local_ranks, self._members, self._relays[self._ranks.rank]
        parts = _split(sent, sizes.sent.tolist())
        direct = self._swap(
            sent,
            {rank: [parts[rank], *(parts[to] for to in self._beyond(rank))] for rank in own},
            {
                rank: [
                    int(sizes.received[rank]),
                    *(n for host in mine for n in sizes.outgoing[host][i].tolist()),
                ]
                for i, rank in enumerate(own)
            },
        )
        found = {rank: pieces[0] for rank, pieces in direct.items()}
        outgoing, first = {}, 1
        for host in mine:
            behind = first + len(members[host])
            outgoing[host] = torch.cat([piece for rank in own for piece in direct[rank][first:behind]])
            first = behind
        peers = {host: self._relay(host, self._host) for host in mine}
        crossed = self._swap(
            sent,
            {peers[host]: [message] for host, message in outgoing.items()},
            {peers[host]: sizes.incoming[host].reshape(-1).tolist() for host in mine},
        )
        passed = self._swap(
            sent,
            {
                rank: [each for host in mine for each in crossed[peers[host]][i :: len(own)]]
                for i, rank in enumerate(own)
            },
            {rank: [int(sizes.received[origin]) for origin in self._beyond(rank)] for rank in own},
        )
        for rank in own:
            found |= dict(zip(self._beyond(rank), passed[rank], strict=True))
        incoming = {host: torch.cat(list(crossed[peers[host]])) for host in mine}
        return torch.cat([found[rank] for rank in range(self._ranks.size)]), outgoing, incoming

    def _relay(self, host: int, other: int) -> int:
        """Returns the rank of ``host`` that relays the messages between its ranks and the ranks of ``other``."""
        members = self._members[host]
        return members[(other - (other > host)) % len(members)]

    def _beyond(self, rank: int) -> list[int]:
        """Returns the ranks of other hosts that a rank of this host relays messages for."""
        return [each for host in self._relays[rank] for each in self._members[host]]

    def _swap(
        self, like: Tensor, sent: Mapping[int, _Pieces], sizes: Mapping[int, Sequence[int]]
    ) -> dict[int, _Pieces]:
        """Sends pieces to some ranks, one message each. Returns the pieces from the ranks that ``sizes`` names."""
        here, group = self._ranks.rank, self._ranks.process_group
        came: dict[int, _Pieces] = {}
        messages, works = [], []
        for rank, lengths in sizes.items():
            if rank == here:
                came[rank] = sent[rank]
                continue
            message = like.new_empty(sum(lengths))
            if message.numel():
                works.append(group.recv([message], rank, _TAG))
            came[rank] = _split(message, lengths)
        for rank, pieces in sent.items():
            size = sum(piece.numel() for piece in pieces)
            if rank != here and size:
                messages.append(torch.cat(list(pieces)))  # kept until it is sent
                works.append(group.send(messages[-1:], rank, _TAG))
                self.num_messages += rank not in self._local_ranks
        for work in works:
            await_work(work)
        return came


def _split(flat: Tensor, sizes: Sequence[int]) -> _Pieces:
    return torch.split(flat, list(sizes)) if sizes else ()
