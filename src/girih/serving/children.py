"""Processes that a server starts: each is told on its input what to do, and ends when that is closed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

from girih.processes.pipe import module_command

AGAIN_S = 1.0
"""Seconds until another one is tried where none could be started."""


def start_process(
    module: str,
    *words: str,
    instructions: str,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Starts a module as a process, whose first line of input says what it is to do.

    Args:
        words: of its command. environment: all of it; this process's where None. descriptors: files that it gets.

    Raises:
        OSError: the system starts no process.
    """
    process = subprocess.Popen(
        module_command(module, *words),
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # signals of the terminal reach who looks after it
    )
    with contextlib.suppress(BrokenPipeError):  # it has ended, as whoever waits for it learns
        process.stdin.write(instructions + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    return process


def release_input(process: subprocess.Popen[str]) -> None:
    """Closes the pipes to a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
