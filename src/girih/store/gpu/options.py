"""Options of an arena in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The memory of one GPU.

    Attributes:
        device: its number; None takes the one that torch has chosen.
        chunk_bytes: rows are claimed in chunks of about so many bytes, which never move.
        reserve_rows: bounds the rows of a shard; None takes as many as there is memory for.
    """

    device: int | None = None
    chunk_bytes: int = 64 << 20
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """For errors."""
        return "GPU memory"
