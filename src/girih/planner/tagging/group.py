"""A group of trainers and group servers (HT §3.1), as the cost model sees it: frozen facts."""

from __future__ import annotations

import math
from typing import Annotated

from girih.config.bounds import Bounds, Count, NonNegative, Positive
from girih.config.options import Options
from girih.planner.operators import Edge


class Device(Options):
    """One trainer, or one group server.

    Attributes:
        cores: that it can keep busy at once: those of its machine, or fewer where it has fewer threads.
        flops_per_s: of one core, for operators that were not measured.
        bytes_per_s: that it can send, and as many that it can receive meanwhile; None bounds nothing.
        memory_bytes: for parameters, their optimizer's state and activations; None bounds nothing.
    """

    cores: Positive = 1.0
    flops_per_s: Positive
    bytes_per_s: Positive | None = None
    memory_bytes: Positive | None = None


class CodecCost(Options):
    """The cost of one way to write tensors for the wire.

    Attributes:
        number_bytes: of each number that is sent. row_bytes: beside them, of each vector along the last dimension.
        share: of a message's numbers, how many are sent.
        encode_s_per_byte, decode_s_per_byte: core-seconds per byte of float32. For float32 itself they are those of a plain copy.
    """

    name: str
    number_bytes: Positive = 4.0
    row_bytes: NonNegative = 0.0
    share: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    encode_s_per_byte: NonNegative = 0.0
    decode_s_per_byte: NonNegative = 0.0

    @property
    def kept(self) -> float:
        """Bytes that a sender keeps per byte of float32: what top-k left out, before the step under way and with it (error feedback)."""
        return 2.0 if self.name == "topk" else 0.0

    def packed_bytes(self, rows: int, numbers: int) -> float:
        """Bytes of a message of so many numbers in so many rows, as ``Codec.packed_bytes`` of :mod:`girih.comm.codecs` has them."""
        return self.number_bytes * math.ceil(self.share * numbers) + self.row_bytes * rows

    def sent_bytes(self, edge: Edge, batch_size: int) -> float:
        """Bytes per example of what an edge sends for a batch: as it is where it would become no smaller."""
        plain = edge.bytes_per_example
        if not edge.number_bytes or not plain:
            return plain
        numbers = round(plain * batch_size / edge.number_bytes)
        packed = self.packed_bytes(max(1, round(edge.rows_per_example * batch_size)), numbers) / batch_size
        return min(plain, packed)


FLOAT32 = CodecCost(name="float32")
AVERAGED = 4.0
"""Copies of the parameters that averaging takes: the model that is evaluated; in a round, what is sent, what is answered, and that as one."""


class WireCost(Options):
    """The costs of the codecs between trainers and group servers: of activations, forward, and of their gradients, backward."""

    activations: CodecCost = FLOAT32
    gradients: CodecCost = FLOAT32


class HierarchicalGroup(Options):
    """One group; all groups of a run are alike.

    Attributes:
        trainers: of this group. nets: that each of them runs at once.
        batch_size: examples of one net's step.
        servers: the group servers; none where trainers keep the dense half.
        trainer_cpu_s: core-seconds per example that a trainer has to do beside the net: batches, embeddings, the loss.
        trainer_sent_bytes, trainer_received_bytes: per example, beside the group's own: embeddings in, ids and gradients out.
        parameter_copies: bytes that a byte of parameters takes with one gradient and its optimizer's state: 4 for Adam.
        update_s_per_byte: core-seconds that the optimizer takes for a byte of parameters, in each net's step.
        request_s: core-seconds that a request with its answer takes at both ends, however little it carries.
        byte_s: core-seconds that a byte on the wire takes at both ends together, its codec left out.
        average_every_examples: examples of the group between two averagings with the dense servers; None where there is none.
        cores: core-seconds per second that all devices of the group have together; None where each has its own.
    """

    trainers: Count
    nets: Count = 1
    batch_size: Count
    trainer: Device
    servers: tuple[Device, ...] = ()
    wire: WireCost = WireCost()
    trainer_cpu_s: NonNegative = 0.0
    trainer_sent_bytes: NonNegative = 0.0
    trainer_received_bytes: NonNegative = 0.0
    parameter_copies: Annotated[float, Bounds(1)] = 1.0
    update_s_per_byte: NonNegative = 0.0
    request_s: NonNegative = 0.0
    byte_s: NonNegative = 0.0
    average_every_examples: Positive | None = None
    cores: Positive | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """One of the trainers, which are alike, then the servers."""
        return (self.trainer, *self.servers)

    def nets_on(self, device: int) -> int:
        """Nets that compute on a device at once: on a server, those of all trainers. Devices are numbered as in ``devices``."""
        return self.nets * self.trainers if device else self.nets

    def held_copies(self, device: int) -> float:
        """Bytes that a byte of parameters takes on a device; see :func:`held_copies`."""
        averaged = self.average_every_examples is not None
        return held_copies(self.parameter_copies, self.nets_on(device), averaged=averaged)


def held_copies(parameter_copies: float, nets: int, *, averaged: bool) -> float:
    """Bytes that a byte of parameters takes where it is moved: itself and its optimizer's state, once; a gradient for each net, from its
    backward pass until it is applied; what averaging keeps.

    Args:
        parameter_copies: see :class:`HierarchicalGroup`; less than 2 is of an optimizer that was not measured, and counts no state.
        nets: that compute on it at once. averaged: whether there are other copies.
    """
    return max(2.0, parameter_copies) - 1 + nets + (AVERAGED if averaged else 0.0)


def gigabytes(size: float) -> str:
    """A size for people."""
    return f"{size / 1e9:,.3g} GB"
