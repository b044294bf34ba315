"""A group of trainers and group servers (HT §3.1), as frozen facts for the cost model."""

from __future__ import annotations

import math
from typing import Annotated

from girih.config.bounds import Bounds, Count, NonNegative, Positive
from girih.config.options import Options
from girih.planner.operators import Edge


class Device(Options):
    """One trainer, or one group server.

    Attributes:
        cores: number of cores that the device can keep busy: at most those of its machine, and at most its threads.
        flops_per_s: speed of one core, for operators that were not measured.
        bytes_per_s: speed of sending. The device can receive at the same speed meanwhile. None means no limit.
        memory_bytes: memory for parameters, optimizer state and activations; None means no limit.
    """

    cores: Positive = 1.0
    flops_per_s: Positive
    bytes_per_s: Positive | None = None
    memory_bytes: Positive | None = None


class CodecCost(Options):
    """The cost of a codec for tensors on the wire.

    Attributes:
        number_bytes: bytes per sent number. row_bytes: additional bytes per vector along the last dimension.
        share: fraction of a message's numbers that are sent.
        encode_s_per_byte, decode_s_per_byte: core-seconds per byte of float32. The codec float32 only copies.
    """

    name: str
    number_bytes: Positive = 4.0
    row_bytes: NonNegative = 0.0
    share: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    encode_s_per_byte: NonNegative = 0.0
    decode_s_per_byte: NonNegative = 0.0

    @property
    def kept(self) -> float:
        """Bytes that a sender keeps per byte of float32.

        With error feedback, top-k keeps the unsent values from before the step and those of the current step.
        """
        return 2.0 if self.name == "topk" else 0.0

    def packed_bytes(self, rows: int, numbers: int) -> float:
        """Returns the bytes of a message of numbers in rows, the same as ``Codec.packed_bytes`` of :mod:`girih.comm.codecs`."""
        return self.number_bytes * math.ceil(self.share * numbers) + self.row_bytes * rows

    def sent_bytes(self, edge: Edge, batch_size: int) -> float:
        """Returns the bytes per example that an edge sends for a batch.

        The tensor is sent unchanged if the codec does not make it smaller.
        """
        plain = edge.bytes_per_example
        if not edge.number_bytes or not plain:
            return plain
        numbers = round(plain * batch_size / edge.number_bytes)
        packed = self.packed_bytes(max(1, round(edge.rows_per_example * batch_size)), numbers) / batch_size
        return min(plain, packed)


FLOAT32 = CodecCost(name="float32")
AVERAGED = 4.0
"""Copies of the parameters for averaging.

One copy is the evaluated model. A round also needs the sent values, the answered values and the joined answers.
"""


class WireCost(Options):
    """The codecs between trainers and group servers: for activations in the forward pass, and their gradients in the
    backward pass.
    """

    activations: CodecCost = FLOAT32
    gradients: CodecCost = FLOAT32


class HierarchicalGroup(Options):
    """One group. All groups of a run are equal.

    Attributes:
        trainers: number of trainers. nets: number of nets per trainer.
        batch_size: examples in one net's step.
        servers: the group servers; none if trainers keep the dense half.
        trainer_cpu_s: core-seconds per example of a trainer for batches, embeddings and the loss, without the net.
        trainer_sent_bytes: bytes of gradients and ids per example that a trainer sends out of the group.
        trainer_received_bytes: bytes of embeddings per example that it receives from outside.
        parameter_copies: memory for parameters, one gradient and optimizer state, divided by the memory for parameters.
            With Adam this is 4.
        update_s_per_byte: core-seconds of the optimizer per byte of parameters, in each net's step.
        request_s: core-seconds at both ends for a request and its answer, for any size.
        byte_s: core-seconds at both ends per byte on the wire, without the codec.
        average_every_examples: examples of the group between two rounds of averaging. None without averaging.
        cores: core-seconds per second of all devices of the group together, or None if devices share no cores.
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
        """One trainer, because all trainers are equal, then the servers."""
        return (self.trainer, *self.servers)

    def nets_on(self, device: int) -> int:
        """Returns the number of nets that compute on a device in parallel. A server computes the nets of all trainers.

        Args:
            device: the index in :attr:`devices`.
        """
        return self.nets * self.trainers if device else self.nets

    def held_copies(self, device: int) -> float:
        """Returns the memory that parameters need on a device, divided by their size. See :func:`held_copies`."""
        averaged = self.average_every_examples is not None
        return held_copies(self.parameter_copies, self.nets_on(device), averaged=averaged)


def held_copies(parameter_copies: float, nets: int, *, averaged: bool) -> float:
    """Returns the memory that parameters need on their device, divided by their size.

    A device keeps the parameters and the optimizer state once. It keeps a gradient for each net from its backward pass
    until the update. It also keeps the copies for averaging.

    Args:
        parameter_copies: see :class:`HierarchicalGroup`. Below 2, the optimizer was not measured. Then no optimizer
            state counts.
        nets: number of nets that compute on the device in parallel. averaged: True if there are other copies.
    """
    return max(2.0, parameter_copies) - 1 + nets + (AVERAGED if averaged else 0.0)


def gigabytes(size: float) -> str:
    """Formats a size for people."""
    return f"{size / 1e9:,.3g} GB"
