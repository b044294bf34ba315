"""One block of memory for all arrays of a shard: private, shared between processes, or a file.

The arena reserves a large address range, and claims memory in this range when rows are added. So rows keep their
addresses during growth. Arrays contain no addresses, so another process may map the same memory at another address.

    ┌────────┬─────────────┬────────┬───────┬─────────┬─────────┬──────┐
    │ header │ description │ tables │ cells │ index 0 │ index 1 │ rows │
    └────────┴─────────────┴────────┴───────┴─────────┴─────────┴──────┘

The header has magic, format, a fingerprint of the layout, and a mark that is set while a verb changes the arrays. If
the writer died during a change, the memory is refused or repaired. If the writer died between two verbs, the memory is
valid. After a crash of the machine, a file is valid only if it was closed before.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import ConfigError, MissingFileError, StorageFullError
from girih.kernels.cpu.layout import STATE_WORDS
from girih.store.memory import mapping
from girih.store.memory.mapping import ArenaOptions, Heap, Shared, remove_arena
from girih.store.memory.pushes import LANE_WORDS, LANES
from girih.store.spec import hash_of

_MAGIC = int.from_bytes(b"girihmem", "little")
_FORMAT = 3
SLOT_BYTES = 8
PAGE_BYTES = 4096
_HUGE_PAGE = 2 << 20
_LEAST_ROWS, _MOST_ROWS = 1 << 10, 3 << 29  # 3 << 29 keys fill 2³¹ slots
_MOST_OF_MAPPINGS = 0.95  # above this share of mappings, a failed reservation lacks mappings, not memory
CHANGING, REPLACING = 1, 2
"""Marks: rows change, or all rows are replaced. No repair can complete a replacement."""
# Words of the header. The shard's own state begins at _STATE, its record of pushes at _PUSHES.
_MAGIC_AT, _FORMAT_AT, _FINGERPRINT_AT, _ROWS_AT, _TEXT_AT, _WRITING_AT, _CLOSED_AT, _BOOT_AT = range(8)
_STATE, _PUSHES = 64, 128
_FOREIGN = "not an arena of girih; remove it, or give another name"


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """The sizes that a shard needs from its arena.

    Attributes:
        description: the layout as ASCII JSON. An arena with another description is refused.
        num_words: 32-bit words of a row, with meta and padding.
        tables_bytes, cells_bytes: sizes of the arrays that do not depend on the number of rows.
    """

    description: str
    num_words: int
    tables_bytes: int
    cells_bytes: int

    @property
    def fingerprint(self) -> int:
        """A 63-bit hash of the description."""
        return hash_of(self.description) >> 1

    def regions(self, reserve_rows: int) -> dict[str, tuple[int, int]]:
        """Returns (offset, size) of each region in bytes. ``end`` marks the end of the last region."""
        index_bytes = SLOT_BYTES * index_slots(reserve_rows)
        sizes = {
            "header": PAGE_BYTES,
            "description": len(self.description),
            "tables": self.tables_bytes,
            "cells": self.cells_bytes,
            "index 0": index_bytes,
            "index 1": index_bytes,
            "rows": 4 * self.num_words * reserve_rows,
            "end": 0,
        }
        places, offset = {}, 0
        for name, size in sizes.items():
            alignment = PAGE_BYTES if name in ("header", "description", "tables", "cells") else _HUGE_PAGE
            offset = -(-offset // alignment) * alignment
            places[name] = (offset, size)
            offset += size
        return places


def index_slots(num_rows: int) -> int:
    """Returns the smallest power of two of slots that holds ``num_rows`` keys at a load of at most 3/4."""
    return max(16, 1 << (-(-4 * num_rows // 3) - 1).bit_length())


class Arena:
    """The memory of one shard, made by :func:`open_arena`.

    Attributes:
        where: the arena's name, for errors.
        attached: True if it already held a shard. torn: True if its writer died during a change.
        reserve_rows: the number of rows that fit into the address space.
        marks: int64[1], :data:`CHANGING` or :data:`REPLACING` while the arrays change.
        state: int64[16], the words of the header that the shard uses.
        pushes: the words of the header for :class:`girih.store.memory.pushes.Pushes`.
    """

    def __init__(
        self, where: str, shape: ArenaShape, reserve_rows: int, memory: mmap.mmap, descriptor: int | None
    ) -> None:
        self.where, self.reserve_rows = where, reserve_rows
        self.attached = self.torn = False
        self._memory, self._descriptor = memory, descriptor
        self._places = shape.regions(reserve_rows)
        self._header: NDArray[np.int64] = np.frombuffer(memory, np.int64, PAGE_BYTES // 8)
        self.marks = self._header[_WRITING_AT : _WRITING_AT + 1]
        self.state = self._header[_STATE : _STATE + STATE_WORDS]
        self.pushes = self._header[_PUSHES : _PUSHES + 1 + LANE_WORDS * LANES]

    @property
    def is_claimed_ahead(self) -> bool:
        """True if memory must be claimed before its first access. Private memory needs no claim."""
        return self._descriptor is not None

    def size_bytes(self, region: str) -> int:
        """Returns the reserved size of a region in bytes."""
        return self._places[region][1]

    def array(self, region: str, dtype: DTypeLike, *row_shape: int) -> NDArray[Any]:
        """Returns a whole region as an array of rows."""
        offset, size = self._places[region]
        flat: NDArray[Any] = np.frombuffer(self._memory, dtype, size // np.dtype(dtype).itemsize, offset)
        return flat.reshape(-1, *row_shape)

    def claim(self, region: str, start: int, stop: int) -> None:
        """Makes sure that bytes ``start`` to ``stop`` of a region can be accessed.

        Raises:
            StorageFullError: the reservation, the disk or the shared memory is too small.
        """
        offset, size = self._places[region]
        if stop > size:
            raise self.full()
        if self._descriptor is not None:
            mapping.claim(self._descriptor, offset + start, offset + stop, self.where)

    def full(self) -> StorageFullError:
        """Returns the error to raise if the reservation is full."""
        return StorageFullError(
            f"{self.where}: full, its address space was reserved for {self.reserve_rows:,} rows;"
            " raise reserve_rows, or give its tables an eviction with max_rows"
        )

    def clear(self, region: str, start: int, stop: int) -> None:
        """Sets bytes of a region to 0. Returns whole pages to the system if the system accepts them."""
        offset, _ = self._places[region]
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        advice = "MADV_DONTNEED" if self._descriptor is None else "MADV_REMOVE"
        content = self.array(region, np.uint8)
        if sys.platform == "linux" and hasattr(mmap, advice) and first < last:
            with contextlib.suppress(OSError):
                self._memory.madvise(getattr(mmap, advice), offset + first, last - first)
                content[start:first] = 0
                content[last:stop] = 0
                return
        content[start:stop] = 0

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Marks the arena while its whole content is replaced."""
        self.marks[0] = REPLACING
        try:
            yield
        finally:
            self.marks[0] = 0

    def mark_whole(self) -> None:
        """Removes the mark of an interrupted change that the last writer left."""
        self._header[_WRITING_AT], self.torn = 0, False

    def close(self) -> None:
        """Writes all data to the medium, marks the arena as closed, and lets other processes attach.

        Do not write the arrays afterwards.
        """
        if self._descriptor is not None:
            self._memory.flush()
            self._header[_CLOSED_AT] = 1
            self._memory.flush(0, PAGE_BYTES)
            mapping.unlock(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _initialize(self, shape: ArenaShape) -> None:
        header, text = self._header, shape.description.encode()
        if self._descriptor is not None:
            cells_start, cells_bytes = self._places["cells"]
            mapping.claim(self._descriptor, 0, cells_start + cells_bytes, self.where)
        elif hasattr(mmap, "MADV_HUGEPAGE"):
            start = self._places["index 0"][0]
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE, start, self._places["end"][0] - start)
        header[_WRITING_AT] = REPLACING  # until the store has written its first state
        header[_FORMAT_AT], header[_FINGERPRINT_AT] = _FORMAT, shape.fingerprint
        header[_ROWS_AT], header[_TEXT_AT] = self.reserve_rows, len(text)
        header[_BOOT_AT] = mapping.boot_number()
        self.array("description", np.uint8)[:] = np.frombuffer(text, np.uint8)
        header[_MAGIC_AT] = _MAGIC


def open_arena(options: ArenaOptions, shape: ArenaShape) -> Arena:
    """Reserves memory for a shard, or attaches to the memory of an existing shard.

    Raises:
        ConfigError: the name is taken or cannot be used, another process has the arena open, the arena has another
            layout, or its writer died during a change and ``repair`` is False.
        MissingFileError: there is nothing to attach to.
        StorageFullError: the system does not grant the reservation.
    """
    rows = options.reserve_rows
    if rows is not None and not 1 <= rows <= _MOST_ROWS:
        raise ConfigError(f"reserve_rows = {rows}: expected 1 to {_MOST_ROWS:,}")
    if isinstance(options, Heap):
        return _reserve(shape, rows, None, options.where)
    where = options.where
    if isinstance(options, Shared) and (not options.segment or "/" in options.segment):
        raise ConfigError(f"{where}: expected a name without slashes")
    if options.attach and rows is not None:
        raise ConfigError(f"{where}: an attached arena keeps the rows it was reserved for; drop reserve_rows")
    if options.repair and not options.attach:
        raise ConfigError(
            f"{where}: repair = True: there is nothing to repair in a new arena; give attach = True too"
        )
    try:
        flags = os.O_RDWR if options.attach else os.O_RDWR | os.O_CREAT | os.O_EXCL
        if isinstance(options, Shared):
            descriptor = mapping.open_shared(options.segment, flags)
        else:
            descriptor = os.open(options.path, flags | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{where}: exists already; attach to it, or remove it first") from None
    except FileNotFoundError:
        fix = "there is nothing to attach to; make it without attach"
        fix = fix if options.attach else "no such directory; make it first"
        raise MissingFileError(f"{where}: {fix}") from None
    except OSError as error:
        reason = f"cannot be opened ({error.strerror}); give a place that can be written"
        raise ConfigError(f"{where}: {reason}") from None
    try:
        mapping.lock(descriptor, where)
        arena = (
            _attach(shape, descriptor, where, options.repair)
            if options.attach
            else _reserve(shape, rows, descriptor, where)
        )
        if not isinstance(options, Shared) and hasattr(mmap, "MADV_RANDOM"):
            # Rows that the system reads ahead have pages of up to 2 MB. It writes a whole page after a change of a byte.
            arena._memory.madvise(mmap.MADV_RANDOM, *arena._places["rows"])
        return arena
    except BaseException:
        os.close(descriptor)
        if not options.attach:
            remove_arena(options)
        raise


def _reserve(shape: ArenaShape, reserve_rows: int | None, descriptor: int | None, where: str) -> Arena:
    """Maps a new arena. Without ``reserve_rows``, the reservation shrinks until the system grants it."""
    room = mapping.room_bytes(descriptor) // (4 * shape.num_words)
    rows = reserve_rows or max(_LEAST_ROWS, min(_MOST_ROWS, room))
    while True:
        size, _ = shape.regions(rows)["end"]
        try:
            memory = mapping.map_memory(descriptor, size)
            break
        except (OSError, OverflowError, ValueError) as error:
            if reserve_rows is not None or rows == _LEAST_ROWS:
                count, most = mapping.mappings()
                advice = "lower reserve_rows"
                if most and count > _MOST_OF_MAPPINGS * most:
                    advice = (
                        f"this process has {count:,} of the {most:,} mappings that it may have: keep tables packed"
                        " (schedule.packing), lower store.shards, or raise vm.max_map_count"
                    )
                raise StorageFullError(
                    f"{where}: the system does not reserve {size:,} bytes for {rows:,} rows ({error}); {advice}"
                ) from None
            rows = max(_LEAST_ROWS, rows // 2)
    arena = Arena(where, shape, rows, memory, descriptor)
    arena._initialize(shape)
    return arena


def _attach(shape: ArenaShape, descriptor: int, where: str, repair: bool) -> Arena:
    size = os.fstat(descriptor).st_size
    if size < PAGE_BYTES:
        raise ConfigError(f"{where}: {_FOREIGN}")
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    if refusal := _refusal(memory, shape, repair):
        raise ConfigError(f"{where}: {refusal}")
    header = np.frombuffer(memory, np.int64, PAGE_BYTES // 8)
    arena = Arena(where, shape, int(header[_ROWS_AT]), memory, descriptor)
    expected, _ = arena._places["end"]
    if expected > size:
        raise ConfigError(f"{where}: {size:,} bytes, expected {expected:,}; it was cut short")
    header[_CLOSED_AT], header[_BOOT_AT] = 0, mapping.boot_number()
    arena.attached, arena.torn = True, bool(header[_WRITING_AT])
    return arena


def _refusal(memory: mmap.mmap, shape: ArenaShape, repair: bool) -> str:
    """Returns why this memory may not be attached, or an empty text if it may be attached."""
    header = np.frombuffer(memory, np.int64, PAGE_BYTES // 8)
    if header[_MAGIC_AT] != _MAGIC:
        return _FOREIGN
    if header[_FORMAT_AT] != _FORMAT:
        return f"format {header[_FORMAT_AT]}, expected {_FORMAT}; restore from a checkpoint"
    if header[_FINGERPRINT_AT] != shape.fingerprint:
        text = memory[PAGE_BYTES : PAGE_BYTES + int(header[_TEXT_AT])]
        mismatch = difference(json.loads(text), json.loads(shape.description))
        return f"made for another layout: {mismatch}; restore from a checkpoint into a new arena"
    mend = "remove it and restore from a checkpoint"
    if header[_WRITING_AT] == REPLACING:
        return f"its writer died while all rows were replaced, so some are missing; {mend}"
    if header[_WRITING_AT] and not repair:
        return f"its writer died during a change, so a row may be torn; attach with repair=True, or {mend}"
    boot = mapping.boot_number()
    if not header[_CLOSED_AT] and (boot == 0 or header[_BOOT_AT] != boot):
        return f"the machine went down before it was closed, so parts may be missing; {mend}"
    return ""


def difference(actual: object, expected: object, path: str = "") -> str:
    """Returns the first difference of two plain values, or an empty text.

    Example: ``segments[0].dim is 8, expected 16``.
    """
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in {**expected, **actual}:
            text = difference(actual.get(key), expected.get(key), f"{path}.{key}" if path else str(key))
            if text:
                return text
        return ""
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for position, (one, other) in enumerate(zip(actual, expected, strict=True)):
            text = difference(one, other, f"{path}[{position}]")
            if text:
                return text
        return ""
    return "" if actual == expected else f"{path} is {actual!r}, expected {expected!r}"
