"""Links and codecs as ``girih calibrate`` measured them: latency and bandwidth, seconds per byte. Frozen, JSON both ways.

A link is what messages go over: a collective of trainers, or a transport between two processes. A codec makes messages
smaller before that, and as large as they were behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from girih import config
from girih.config.bounds import Bounds, NonNegative, Positive
from girih.errors import ConfigError
from girih.planner.plan import read_json

VERSION = 1
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
    """

    latency_s: NonNegative
    bytes_per_s: Positive
    points: tuple[Point, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The links of one machine, and how fast it packs and unpacks.

    Attributes:
        trainers: how many measured the collectives together.
        backend: of collectives.
        machine: ``cores`` and whatever else tells it from others.
        links: all of ``LINKS``.
        codecs: by name, as in configs; none in files from before they were measured.
        version: of this layout.
    """

    trainers: Annotated[int, Bounds(2, 1024)]
    backend: Literal["gloo"] = "gloo"
    machine: Mapping[str, Any]
    links: Mapping[str, Link]
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        if set(self.links) != set(LINKS):
            raise ConfigError(f"links = {sorted(self.links)}: expected {sorted(LINKS)}")

    def to_dict(self) -> dict[str, Any]:
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
