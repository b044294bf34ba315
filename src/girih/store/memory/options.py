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

    where: ClassVar[str] = "heap arena"
    reserve_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """POSIX shared memory, which outlives the process; ``attach`` goes on with what is there.

    ``repair`` has an attached one made whole whose writer was killed amid a change. ``segment`` is its name, without slashes. An attached arena keeps the rows that it was reserved for.
    """

    segment: str
    attach: bool = False
    repair: bool = False
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """The arena's name, for errors."""
        return f"shared arena {self.segment!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A memory-mapped sparse file; ``attach`` and ``repair`` as with :class:`Shared`."""

    path: str
    attach: bool = False
    repair: bool = False
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
