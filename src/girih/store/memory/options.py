"""Options for the memory of a shard: private, shared between processes, or in a file."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import ClassVar

from girih.store.memory import mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Heap:
    """Private memory, on huge pages where the system has them.

    ``reserve_rows`` bounds the rows; by default as many as the machine's memory could hold.
    """

    name: ClassVar[str] = "heap"
    reserve_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """POSIX shared memory, which outlives the process; ``attach`` goes on with what is there.

    ``segment`` is its name, without slashes. An attached arena keeps the rows that it was reserved for.
    """

    name: ClassVar[str] = "shared"
    segment: str
    attach: bool = False
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """The arena's name, for errors."""
        return f"shared arena {self.segment!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A memory-mapped sparse file; ``attach`` goes on with what is there."""

    name: ClassVar[str] = "file"
    path: str
    attach: bool = False
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """The arena's name, for errors."""
        return f"arena file {self.path!r}"


ArenaOptions = Heap | Shared | File


def remove_arena(options: ArenaOptions) -> None:
    """Removes a shared or file arena by name, if it is there; who has it mapped keeps the memory."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(options, File):
            os.unlink(options.path)
        elif isinstance(options, Shared):
            mapping.unlink_shared(options.segment)


def remove_segments(beginning: str) -> None:
    """Removes all shared arenas whose names begin so, where the system tells what there is."""
    for name in mapping.segments():
        if name.startswith(beginning):
            remove_arena(Shared(segment=name))
