"""The calibration of a machine: its links, its codecs, and the work of training steps. ``girih calibrate`` measures it.

A link is a collective of trainers, or a transport between two processes. A codec compresses messages before sending and
restores them afterwards. Work is the core time that rows, examples and steps take. The classes here are frozen, and can
be written as JSON and read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from girih import config
from girih.config import options
from girih.config.bounds import Bounds, NonNegative, Positive
from girih.errors import ConfigError
from girih.planner.plan import read_json

VERSION = 3
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
)
LINKS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, "tcp", "shared")
AGAIN = "measure again with girih calibrate"

Point = tuple[Annotated[int, Bounds(1)], Positive]
"""The size of a message in bytes, and the first decile of the measured times in seconds."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link, as in the formulas of DES §3.2.3: a message of S bytes takes α + S / C.

    Attributes:
        latency_s: α.
        bytes_per_s: C.
        points: the measurements that α and C are fitted to.
        message_cpu_s, byte_cpu_s: core-seconds of both ends together, per message and per byte sent.
    """

    latency_s: NonNegative
    bytes_per_s: Positive
    points: tuple[Point, ...] = ()
    message_cpu_s: NonNegative = 0.0
    byte_cpu_s: NonNegative = 0.0

    def cpu_s(self, messages: float, sent_bytes: float) -> float:
        """Returns core-seconds of a number of messages with a total of ``sent_bytes``."""
        return messages * self.message_cpu_s + sent_bytes * self.byte_cpu_s


Links = Mapping[str, Link]
"""Name, one of ``LINKS`` → link."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """The time of a codec of activations or gradients on one core, per byte of the float32 message.

    Attributes:
        pack_s_per_byte, unpack_s_per_byte: times to encode and to decode a message of 1 MiB. With error feedback, they
            include the sums of errors.
    """

    pack_s_per_byte: Positive
    unpack_s_per_byte: Positive


@dataclass(frozen=True, slots=True)
class Rate:
    """Core-seconds of one call on the ids of an embedding group. They grow linearly with the ids and their numbers.

    An id has D numbers.

    Attributes:
        call_s: seconds of a call without ids.
        id_s: seconds per id.
        number_s: seconds per number of an id.
    """

    call_s: NonNegative
    id_s: NonNegative
    number_s: NonNegative

    def seconds(self, ids: float, dim: int, calls: float = 1.0) -> float:
        """Returns ``calls · call_s + ids · id_s + ids · D · number_s``."""
        return calls * self.call_s + ids * self.id_s + ids * dim * self.number_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Core-seconds, on one core, of the work that does not depend on the model.

    Attributes:
        lookup: the time to find unique keys, look up their rows, and pool them.
        updates: name of a sparse optimizer → the time to add up the gradients of each key, and to update the rows.
        example_s, value_s: per example read from Parquet, and per id or number in it.
        step_s: per step, without lookups, row updates and the passes of the model.
        products: width of a layer → operations per second of its forward and backward pass on one core.
    """

    lookup: Rate
    updates: Mapping[str, Rate]
    example_s: NonNegative
    value_s: NonNegative
    step_s: NonNegative
    products: tuple[tuple[Annotated[int, Bounds(1)], Positive], ...]

    @property
    def flops_per_s(self) -> float:
        """The median speed of the measured products."""
        return sorted(speed for _, speed in self.products)[len(self.products) // 2]


@dataclass(frozen=True, slots=True)
class Overhead:
    """The part of a step's time that its measured parts do not explain.

    Causes are Python code between the parts, handovers between threads, and cold caches. Both rates are for one
    trainer's share of a step, linear in its ids. girih fits them to short runs of the strategy.

    Attributes:
        work: core-seconds of all processes.
        path: seconds of the step that do not overlap with other work.
    """

    work: Rate
    path: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The calibration of one machine: its links, its codecs, and the work of steps.

    Attributes:
        trainers: number of trainers that measured the collectives together.
        backend: the backend of collectives.
        machine: ``cores``, and other properties that identify it.
        links: all of ``LINKS``.
        codecs: name as in configs → speed.
        work: the work of steps. If None, girih can predict communication but no speed.
        overheads: calibration key of a strategy → the overhead of its steps.
        machines: number of equal machines that run together; see :meth:`spread`.
        version: version of the file format.
    """

    trainers: Annotated[int, Bounds(2, 1024)]
    backend: Literal["gloo"] = "gloo"
    machine: Mapping[str, Any]
    links: Mapping[str, Link]
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    work: StepWork | None = None
    overheads: Mapping[str, Overhead] = field(default_factory=dict)
    machines: Annotated[int, Bounds(1)] = 1
    version: int = VERSION

    def __post_init__(self) -> None:
        if set(self.links) != set(LINKS):
            raise ConfigError(f"links = {sorted(self.links)}: expected {sorted(LINKS)}")
        if "cores" in self.machine:
            options.integer("machine.cores", self.machine["cores"], 1, 1 << 20)
        if self.work is not None and not self.work.products:
            raise ConfigError("work.products is empty; expected a speed for each width")

    @property
    def cores(self) -> int:
        """Cores of all machines. An old calibration without ``cores`` counts its trainers."""
        return self.machines * int(self.machine.get("cores", self.trainers))

    def over(self, bytes_per_s: float) -> Calibration:
        """Returns this calibration with slower links. No link carries more than ``bytes_per_s`` in each direction."""
        slower = {
            name: replace(link, bytes_per_s=min(link.bytes_per_s, bytes_per_s))
            for name, link in self.links.items()
        }
        return replace(self, links=slower)

    def spread(self, machines: int) -> Calibration:
        """Returns the calibration of several machines like this one.

        Processes and their work are spread evenly over the machines.
        """
        return replace(self, machines=machines)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Reads a calibration from a file of ``girih calibrate``.

        Raises:
            MissingFileError: the file does not exist.
            ConfigError: the file is not a calibration, or has another version.
        """
        mapping = read_json(path, "girih calibrate writes one")
        version = mapping.get("version") if isinstance(mapping, dict) else None
        if version != VERSION:
            raise ConfigError(f"{path}: version = {version!r}: expected {VERSION}; {AGAIN}")
        try:
            calibration: Calibration = config.build(cls, mapping, str(path))
        except ConfigError as error:
            raise ConfigError(f"{error}; {AGAIN}") from None
        return calibration
