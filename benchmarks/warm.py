"""Touches memory and gives it back: a program of its own, which ``harness.warm_memory`` runs.

    python warm.py BYTES        prints how many bytes it touched

It stops where less than SPARE_BYTES would stay available, and offers itself first to a system that runs out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from pathlib import Path

SPARE_BYTES = 2 << 30
PIECE_BYTES = 256 << 20
HUGE_PAGE_BYTES, PAGE_BYTES = 2 << 20, mmap.PAGESIZE


def available_bytes() -> int:
    """Memory that is free or could be; half of all where the system does not say."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":") for line in file.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def resident_bytes() -> int:
    """Memory of this process; none where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * PAGE_BYTES if file.is_file() else 0


def touch(wanted_bytes: int) -> int:
    """Has the system find a page for each of so many bytes; returns for how many it did, until memory is short."""
    memory = mmap.mmap(-1, max(1, wanted_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    before, touched = resident_bytes(), 0
    while touched < wanted_bytes and available_bytes() > SPARE_BYTES + PIECE_BYTES:
        end = min(touched + PIECE_BYTES, wanted_bytes)
        write(memory, touched, end, HUGE_PAGE_BYTES)
        if resident_bytes() - before < end - HUGE_PAGE_BYTES:  # some pages are small ones
            write(memory, touched, end, PAGE_BYTES)
        touched = end
    return touched


def write(memory: mmap.mmap, first: int, last: int, step: int) -> None:
    """Writes one byte every ``step`` bytes."""
    memory[first:last:step] = bytes(-(-(last - first) // step))


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    print(touch(int(sys.argv[1])))
