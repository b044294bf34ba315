"""Options of an arena in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The memory of the GPU that this process uses.

    Attributes:
        chunk_bytes: rows are claimed in chunks of about so many bytes, which never move.
        reserve_rows: bounds the rows of a shard; None takes as many as there is memory for.
    """

    chunk_bytes: int = 64 << 20
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """For errors."""
        return "GPU memory"
