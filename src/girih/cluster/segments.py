"""Names of shared memory: what processes that were killed leave behind, removed without importing the store."""

from __future__ import annotations

import contextlib
import os
import secrets

SHARED_MEMORY = "/dev/shm"


def new_prefix() -> str:
    """Begins the names of all shared memory of a run."""
    return f"girih-{secrets.token_hex(4)}"


def remove_segments(prefix: str) -> None:
    """Removes all shared memory whose names begin so, where the system tells what there is."""
    if prefix and os.path.isdir(SHARED_MEMORY):
        for name in os.listdir(SHARED_MEMORY):
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(SHARED_MEMORY, name))
