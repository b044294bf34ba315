"""A machine as ``girih calibrate`` measured it: links, codecs, and the work of training steps. Frozen, JSON both ways.

A link is what messages go over: a collective of trainers, or a transport between two processes. A codec makes messages
smaller before that, and as large as they were behind it. Work is what a core of the machine takes for rows, examples and steps.
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
"""Size in bytes, and the first decile of its times in seconds."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link as the formulas of DES §3.2.3 have it: a message of S bytes takes α + S / C.

    Attributes:
        latency_s: α.
        bytes_per_s: C.
        points: what both were fitted to.
        message_cpu_s, byte_cpu_s: core-seconds of both ends together, for each message and each byte that is sent, whoever waits.
    """

    latency_s: NonNegative
    bytes_per_s: Positive
    points: tuple[Point, ...] = ()
    message_cpu_s: NonNegative = 0.0
    byte_cpu_s: NonNegative = 0.0

    def cpu_s(self, messages: float, sent_bytes: float) -> float:
        """Core-seconds that messages take which have some bytes together."""
        return messages * self.message_cpu_s + sent_bytes * self.byte_cpu_s


Links = Mapping[str, Link]
"""Name, of ``LINKS`` → link."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """The time of one core for a codec of activations or gradients, per byte of the float32 message.

    Attributes:
        pack_s_per_byte, unpack_s_per_byte: of a message of 1 MiB; of error feedback its sums too.
    """

    pack_s_per_byte: Positive
    unpack_s_per_byte: Positive


@dataclass(frozen=True, slots=True)
class Rate:
    """Core-seconds of one call on the ids of an embedding group, which have D numbers each: a line in ids and in numbers.

    Attributes:
        call_s: however few the ids. id_s: of each id. number_s: of each of its D numbers.
    """

    call_s: NonNegative
    id_s: NonNegative
    number_s: NonNegative

    def seconds(self, ids: float, dim: int, calls: float = 1.0) -> float:
        """``calls · call_s + ids · id_s + ids · D · number_s``."""
        return calls * self.call_s + ids * self.id_s + ids * dim * self.number_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Core-seconds of the work that is the same for all models, on one core.

    Attributes:
        lookup: unique keys found, their rows looked up and pooled.
        updates: name of a sparse optimizer → gradients scattered to keys, and rows moved by it.
        example_s, value_s: an example read from Parquet, and each id or number that it has.
        step_s: a step, however little it is of, beside its calls of rows and the passes of the model.
        products: width of a layer → multiplications and additions per second of its forward and backward pass on one core.
    """

    lookup: Rate
    updates: Mapping[str, Rate]
    example_s: NonNegative
    value_s: NonNegative
    step_s: NonNegative
    products: tuple[tuple[Annotated[int, Bounds(1)], Positive], ...]

    @property
    def flops_per_s(self) -> float:
        """The middle of the speeds that products were measured at."""
        return sorted(speed for _, speed in self.products)[len(self.products) // 2]


@dataclass(frozen=True, slots=True)
class Overhead:
    """The part of a step that is none of its parts: Python between them, threads that hand over, caches gone cold.

    Both rates are for one trainer's share of a step, a line in its ids; found by short runs of the strategy itself.

    Attributes:
        work: core-seconds of all processes. path: seconds of what nothing overlaps.
    """

    work: Rate
    path: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The links of one machine, how fast it packs and unpacks, and what steps take it.

    Attributes:
        trainers: how many measured the collectives together.
        backend: of collectives.
        machine: ``cores`` and whatever else tells it from others.
        links: all of ``LINKS``.
        codecs: by name, as in configs.
        work: None where links alone are known, which predict communication and no speed.
        overheads: calibration key of a strategy → the time of its steps beyond that of their parts.
        machines: how many such machines there are; see :meth:`spread`.
        version: of this layout.
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
        """Cores of all machines; of one, as many as trainers where that was not written down."""
        return self.machines * int(self.machine.get("cores", self.trainers))

    def over(self, bytes_per_s: float) -> Calibration:
        """The same machine, with links that carry no more than ``bytes_per_s`` in each direction."""
        slower = {
            name: replace(link, bytes_per_s=min(link.bytes_per_s, bytes_per_s))
            for name, link in self.links.items()
        }
        return replace(self, links=slower)

    def spread(self, machines: int) -> Calibration:
        """Returns the calibration of so many machines like this one, over which processes and their work are spread evenly."""
        return replace(self, machines=machines)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """A calibration from a file of ``girih calibrate``.

        Raises:
            MissingFileError: no such file.
            ConfigError: not a calibration, or one of another version.
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
