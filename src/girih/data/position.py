"""Where in the data a run stands, and the order in which an epoch walks through it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih import config


class Cursor(NamedTuple):
    """Where a unit begins: its place in the epoch's order and, in text files, its first byte and line."""

    part: int = 0
    byte: int = 0
    line: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the next batch starts.

    Attributes:
        epoch: after the last batch of an epoch, the next one.
        window: ordinal of the window that holds the next row, in this epoch.
        part, byte, line: where the window begins: place in the epoch's order of row groups or text files,
            and, in a text file, byte (of its decompressed text) and line.
        row: rows of the window that earlier batches took.
        skipped: bad rows dropped before the window.
        order: 16 hex digits of what decides the order of rows; a position fits only the order it is from.
    """

    epoch: int = 0
    window: int = 0
    part: int = 0
    byte: int = 0
    line: int = 0
    row: int = 0
    skipped: int = 0
    order: str = ""

    @property
    def cursor(self) -> Cursor:
        """Where the window begins."""
        return Cursor(self.part, self.byte, self.line)

    def to_dict(self) -> dict[str, Any]:
        """As a flat mapping that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Position:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: an unknown key or a wrong type.
        """
        built: Position = config.build(cls, mapping, "position")
        return built


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A permutation of ``size`` that depends on the key alone: the same in every version of every library.

    Places are sorted by the splitmix64 sequence that the key seeds; it never repeats, so there are no ties.

    Returns:
        int64[size].
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    state = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return np.argsort(mixed(state)).astype(np.int64, copy=False)


def mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, element by element."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
