"""The console of commands that print tables."""

from __future__ import annotations

from rich.console import Console

WIDE = 1000
"""Columns where output goes to a file or another program, which no edge of a screen cuts."""


def screen() -> Console:
    """Standard output: as wide as its terminal, else as wide as any table."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=WIDE)
