"""Positions in the data, and the order of an epoch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from girih import config
from girih.config.bounds import Bounds
from girih.errors import ConfigError
from girih.kernels.cpu.arrays import I64, U64
from girih.kernels.cpu.hashing import fill_stream

_Place = Annotated[int, Bounds(0, (1 << 62) - 1)]

Offsets = tuple[tuple[int, int], ...]
"""Partition and offset, by partition."""


class Cursor(NamedTuple):
    """The beginning of a unit: its place in the epoch's order and, in text files, its first byte and line.

    In a stream, ``part`` is the partition whose turn is next, and ``offsets`` holds the next offset of each partition.
    """

    part: int = 0
    byte: int = 0
    line: int = 0
    offsets: Offsets = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The start of the next batch.

    Attributes:
        epoch: after the last batch of an epoch, the next epoch.
        window: number of the window in this epoch that holds the next row.
        part: the place of the window's first unit in the epoch's order of row groups or text files.
        byte, line: the beginning of the window in a text file, in its decompressed text.
        row: number of rows of the window that earlier batches took.
        skipped: bad rows dropped before the window.
        offsets: in a stream, each partition's next offset at the beginning of the window. The epochs of a stream follow
            each other.
        order: 16 hex digits, a hash of everything that determines the order of rows. A position is valid only for its
            own order.
    """

    epoch: _Place = 0
    window: _Place = 0
    part: _Place = 0
    byte: _Place = 0
    line: _Place = 0
    row: _Place = 0
    skipped: _Place = 0
    order: str = ""
    offsets: Offsets = ()

    @property
    def cursor(self) -> Cursor:
        """The beginning of the window."""
        return Cursor(self.part, self.byte, self.line, self.offsets)

    def to_dict(self) -> dict[str, object]:
        """Returns a flat mapping that JSON can hold."""
        mapping = dataclasses.asdict(self)
        if self.offsets:
            return mapping | {"offsets": {str(partition): offset for partition, offset in self.offsets}}
        del mapping["offsets"]
        return mapping

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> Position:
        """Inverts :meth:`to_dict`.

        Raises:
            ConfigError: an unknown key or a wrong type.
        """
        mapping = config.build(Mapping[str, Any], mapping, "position")
        offsets = config.build(Mapping[str, _Place], mapping.get("offsets", {}), "position.offsets")
        if not all(name.isdecimal() for name in offsets):
            raise ConfigError(f"position.offsets of {list(offsets)}: expected partitions by number")
        by_partition = tuple(sorted((int(name), offset) for name, offset in offsets.items()))
        built: Position = config.build(cls, {**mapping, "offsets": by_partition}, "position")
        return built


def permutation(size: int, *key: int | str) -> I64:
    """Returns a permutation of ``size`` that depends only on the key, and on no version of any library.

    Places are sorted by the splitmix64 sequence that the key seeds. This sequence never repeats, so there are no ties.

    Returns:
        int64[size].
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    keys = np.empty(size, dtype=np.uint64)
    fill_stream(np.frombuffer(digest, dtype="<u8").astype(np.uint64)[0], keys)
    return sorted_places(keys)


def sorted_places(keys: U64) -> I64:
    """Returns ``argsort`` of keys that differ: uint64[·] to int64[·].

    Each key and its place are packed into one number, with the upper bits of the key above the place. Sorting these
    numbers is several times as fast. The few keys with equal upper bits are put in order afterwards.
    """
    bits = np.uint64(len(keys).bit_length())
    place = np.uint64((1 << int(bits)) - 1)
    packed = keys & ~place
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & place).view(np.int64)
    packed >>= bits
    same = np.flatnonzero(packed[1:] == packed[:-1])
    if same.size:
        tied = np.union1d(same, same + 1)
        places = order[tied]
        order[tied] = places[np.argsort(keys[places])]
    return order
