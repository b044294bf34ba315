"""Messages between trainers: the keys, rows or gradients of several groups in one message, as tensors on any device.

A message to a rank has the rank's data of the first group, then of the next group, and so on. Rows that travel as
float16 are rounded. In one step all ranks see the same values of a row: if other ranks ask for it, the owner too uses
the rounded values. A row that only its owner asks for is not rounded, and neither are the owner's own gradients.

Shapes: R ranks, M micro-batches, W columns of a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from girih.comm.codecs import rows as row_codecs
from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import Counts, DirectExchange, Passage
from girih.kernels.buffers import Buffers
from girih.kernels.cpu.wire_codecs import KAPPA, SMALL
from girih.sparse.routing.routed_group import KEY_WORDS, GroupWays, KeyCounts, ServedRows
from girih.telemetry.busy import awaited
from girih.telemetry.stats import EXCHANGE_NS, Stats

Step = TypeVar("Step")
Coming = Callable[[], Tensor]
"""Returns a message that is on its way. On a GPU it returns early, and the current stream waits for the data."""
Layout = list[tuple[int, slice]]
"""The stretches of a message: for each, the index of its group among the message's groups, and its keys."""
_SCALE_HALVES = 2  # float16 numbers in the space of one float32


@dataclass(frozen=True, slots=True)
class RowCodec:
    """Encoding of rows.

    Attributes:
        float16: True encodes each row as float16 with its own scale, in 2·W + 4 bytes instead of 4·W. The loss is
            bounded by :func:`girih.comm.codecs.rows.shrink`.
    """

    float16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of encoded rows."""
        return torch.float16 if self.float16 else torch.float32

    def width(self, dim: int) -> int:
        """Returns how many numbers of :attr:`dtype` a packed row of ``dim`` numbers takes."""
        return dim + _SCALE_HALVES * self.float16

    def pack(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns float32[K, W] unchanged, or float16[K, W + 2] with the bits of the scale in the last two numbers.

        Args:
            out: memory for the float16 numbers.
        """
        if not self.float16:
            return rows
        num_rows, dim = rows.shape
        out = rows.new_empty((num_rows, self.width(dim)), dtype=self.dtype) if out is None else out
        if rows.device.type == "cpu":
            shrunk, factors = row_codecs.shrink(rows.numpy())
            halves, bits = torch.from_numpy(shrunk), torch.from_numpy(factors.view(np.float16))
        else:
            halves, scales = scaled_halves(rows)
            bits = scales.view(torch.float16)
        out[:, :dim], out[:, dim:] = halves, bits
        return out

    def unpack(self, packed: Tensor) -> Tensor:
        """Reverses :meth:`pack`. Returns float32[K, W]."""
        if not self.float16:
            return packed
        halves, scales = packed[:, :-_SCALE_HALVES], packed[:, -_SCALE_HALVES:]
        scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        if packed.device.type == "cpu":
            return torch.from_numpy(row_codecs.grow(halves.numpy(), scales.numpy()))
        return grown(halves, scales)


def scaled_halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Does the same as :func:`girih.comm.codecs.rows.shrink` on any device, with factors that fit into float32."""
    scales = torch.where(rows.isfinite(), rows, 0.0).abs().amax(dim=1, keepdim=True).clamp(min=SMALL)
    return (rows * (KAPPA / scales)).half(), scales


def grown(halves: Tensor, scales: Tensor) -> Tensor:
    """Reverses :func:`scaled_halves`."""
    return halves.float() * (scales * (1 / KAPPA))


class GroupMessages:
    """Sends and receives the messages of one trainer, each for several groups.

    Args:
        stats: counts bytes and seconds.
        counting: the exchange for counts, which are on the host.
        rows, gradients: the encodings of both.
        ahead: number of messages that are on the way while the next message is made.
        threaded: True exchanges rows and gradients in a separate thread, for messages that do not progress alone.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        exchange: DirectExchange,
        stats: Stats,
        *,
        counting: DirectExchange,
        rows: RowCodec,
        gradients: RowCodec,
        ahead: int,
        threaded: bool = False,
    ) -> None:
        self._ranks, self._exchange, self._counting, self._stats = ranks, exchange, counting, stats
        self._rows, self._gradients = rows, gradients
        self._ahead = ahead
        self._wire = ThreadPoolExecutor(1, "girih-exchange") if threaded else None
        self._buffers = Buffers()

    def close(self) -> None:
        """Ends the thread."""
        if self._wire is not None:
            self._wire.shutdown()

    @contextmanager
    def waiting(self, kind: str, *, train: bool) -> Iterator[None]:
        """Measures an exchange, until all ranks have joined it and all bytes have arrived.

        On a GPU, the host only launches exchanges, so this measures the time that it waits for a launched one.
        """
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._stats.spans.add(f"exchange {kind}", seconds, start)
        if train:
            self._stats.counters[EXCHANGE_NS] += round(1e9 * seconds)

    def in_order(self, send: Callable[[Step], Coming], steps: Iterable[Step]) -> Iterator[Tensor]:
        """Sends messages, and yields the received data of each, in order."""
        under_way: deque[Coming] = deque()
        for step in steps:
            under_way.append(send(step))
            while len(under_way) > self._ahead:
                yield under_way.popleft()()
        while under_way:
            yield under_way.popleft()()

    def send_counts(self, counts: Counts, *, train: bool) -> Passage:
        """Sends each rank the number of keys that it must serve, int64[R, ·], by group, micro-batch and table."""
        self._stats.sent("ids", counts.nbytes - counts[self._ranks.rank].nbytes)
        with self.waiting("ids", train=train):
            return self._counting.send_counts(counts)

    def send_keys(self, groups: Sequence[GroupWays], *, train: bool) -> Coming:
        """Sends keys of some groups to the ranks that own them."""
        sent = self._packed(groups, [group.message for group in groups])
        return self._send("ids", groups, [KEY_WORDS] * len(groups), sent, train=train)

    def received_keys(self, groups: Sequence[GroupWays], came: Tensor) -> list[Tensor]:
        """Returns the keys of each group that all ranks ask of this rank, int32[K, KEY_WORDS], by rank."""
        received: list[list[Tensor]] = [[] for _ in groups]
        layout = self._layout([group.asked for group in groups])
        for place, _, piece in _cut(came, layout, [KEY_WORDS] * len(groups)):
            received[place].append(piece)
        return [_joined(pieces) for pieces in received]

    def send_rows(
        self, groups: Sequence[GroupWays], rows: Mapping[int, ServedRows], part: int, *, train: bool
    ) -> Coming:
        """Sends the rows of some groups that a micro-batch is the first to need, to the ranks that asked for them."""
        codec, layout = self._rows, self._layout([group.asked for group in groups], part)
        widths = [codec.width(group.dim) for group in groups]
        size = sum(widths[place] * (keys.stop - keys.start) for place, keys in layout)
        sent = self._empty(groups[0].message.device, size)
        for place, keys, out in _cut(sent, layout, widths):
            if codec.float16:
                codec.pack(self._exact(groups[place], rows, keys), out)
            else:
                rows[groups[place].number].spread(keys.start, out)
        return self._send("embeddings", groups, widths, sent, back=True, part=part, train=train)

    def received_rows(
        self, groups: Sequence[GroupWays], rows: Mapping[int, ServedRows], part: int, came: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yields all received rows: number of a group, number of the first key, and rows from it on, float32[·, W]."""
        codec, rank = self._rows, self._ranks.rank
        layout = self._layout([group.asks for group in groups], part)
        for place, keys, piece in _cut(came, layout, [codec.width(group.dim) for group in groups]):
            group, unpacked = groups[place], codec.unpack(piece)
            own = group.asks.of_rank(rank, part)
            if codec.float16 and keys.start <= own.start and own.stop <= keys.stop:
                # a row that no other rank asks for is not rounded
                mine = unpacked[own.start - keys.start : own.stop - keys.start]
                served = group.asked.of_rank(rank, part)
                alone = rows[group.number].asked_once(served).unsqueeze(1)
                mine.copy_(torch.where(alone, self._exact(group, rows, served), mine))
            yield group.number, keys.start, unpacked

    def send_absent(self, group: GroupWays, absent: Tensor) -> Tensor:
        """Sends a flag for each key of a group that all ranks ask of this rank in an evaluation, uint8[K].

        Returns:
            uint8[U], the flags of the keys that this rank asked for.
        """
        return self._send("embeddings", [group], [1], absent, back=True, train=False)()

    def send_gradients(self, groups: Sequence[GroupWays], values: Mapping[int, Tensor]) -> Coming:
        """Sends gradients of some groups, float32[U, W], to the owners of their keys."""
        codec = self._gradients
        sent = self._packed(groups, [codec.pack(values[group.number]) for group in groups])
        return self._send("gradients", groups, [codec.width(group.dim) for group in groups], sent)

    def received_gradients(
        self, groups: Sequence[GroupWays], values: Mapping[int, Tensor], came: Tensor
    ) -> list[list[Tensor]]:
        """Returns the gradients of K keys of each group, from all ranks: consecutive pieces, float32[·, W]."""
        codec, rank = self._gradients, self._ranks.rank
        received: list[list[Tensor]] = [[] for _ in groups]
        layout = self._layout([group.asked for group in groups], own_apart=codec.float16)
        for place, keys, piece in _cut(came, layout, [codec.width(group.dim) for group in groups]):
            group = groups[place]
            if codec.float16 and keys == group.asked.of_rank(rank):  # own gradients stay exact
                received[place].append(values[group.number][group.asks.of_rank(rank)])
            else:
                received[place].append(codec.unpack(piece))
        return received

    def _layout(
        self, counts: Sequence[KeyCounts], part: int | None = None, *, own_apart: bool = False
    ) -> Layout:
        """Returns the stretches of a message of some groups: by rank, and for each rank by group.

        All keys of a single group are one stretch.

        Args:
            own_apart: True puts the keys of this rank into a separate stretch.
        """
        first, size = counts[0], self._ranks.size
        if len(counts) > 1 or (part is not None and first.counts.shape[1] > 1):
            return [(g, each.of_rank(rank, part)) for rank in range(size) for g, each in enumerate(counts)]
        own = first.of_rank(self._ranks.rank)
        inner = [own.start, own.stop] if own_apart else []
        return [(0, slice(*bounds)) for bounds in pairwise([0, *inner, first.bounds[-1]])]

    def _packed(self, groups: Sequence[GroupWays], matrices: Sequence[Tensor]) -> Tensor:
        """Returns a message with the data of each group for each key that this rank asks for."""
        layout = self._layout([group.asks for group in groups])
        return _joined([matrices[place][keys].reshape(-1) for place, keys in layout])

    def _exact(self, group: GroupWays, rows: Mapping[int, ServedRows], keys: slice) -> Tensor:
        """Returns the rows of some keys that are asked of this rank, float32[·, W], without rounding."""
        shape = (keys.stop - keys.start, group.dim)
        exact = torch.empty(shape, dtype=torch.float32, device=group.message.device)
        rows[group.number].spread(keys.start, exact)
        return exact

    def _empty(self, device: torch.device, size: int) -> Tensor:
        """Returns memory for a message of rows."""
        dtype = self._rows.dtype
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        return torch.from_numpy(self._buffers.take(np.uint8, size * dtype.itemsize)).view(dtype)

    def _send(
        self,
        kind: str,
        groups: Sequence[GroupWays],
        widths: Sequence[int],
        sent: Tensor,
        *,
        back: bool = False,
        part: int | None = None,
        train: bool = True,
    ) -> Coming:
        """Sends one message to each rank, with ``widths`` numbers for each key of the groups.

        Args:
            back: True sends it to the ranks that ask for keys; False sends it to the owners of the keys.
            part: the micro-batch of the keys; None is all micro-batches.
        """
        columns = [group.columns(part) for group in groups]

        def sizes(counts: Counts) -> Counts:
            of_groups = [w * counts[..., c].sum(axis=-1) for w, c in zip(widths, columns, strict=True)]
            total: Counts = sum(of_groups[1:], of_groups[0])
            return total

        passage = groups[0].passage
        moved = passage.back(sizes) if back else passage.there(sizes)
        num_others = int(moved.sent.sum() - moved.sent[self._ranks.rank])
        self._stats.sent(kind, sent.element_size() * num_others)

        def begin() -> Coming:
            end = self._exchange.begin(sent, moved)

            def wait() -> Tensor:
                with self.waiting(kind, train=train):
                    return end()

            return wait

        if self._wire is None or kind == "ids":
            return begin()
        return partial(awaited, self._wire.submit(lambda: begin()()))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts. On a CPU numpy does this, which takes less time."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].device.type == "cpu":
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
    return torch.cat(list(parts))


def _cut(message: Tensor, layout: Layout, widths: Sequence[int]) -> Iterator[tuple[int, slice, Tensor]]:
    """Yields each stretch of a message, and its data, [·, width]."""
    at = 0
    for place, keys in layout:
        end = at + widths[place] * (keys.stop - keys.start)
        yield place, keys, message[at:end].view(-1, widths[place])
        at = end
