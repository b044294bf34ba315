"""Options of GPU memory. They need no torch, so every process can read them."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTier:
    """GPU memory above the host's: HybridHash (PICASSO §III-D).

    Attributes:
        hot_rows: rows of this store that stay in GPU memory: those that were read most. Beside them there is room for the
            rows of the last two batches.
        flush_every_steps: how often the hot rows are chosen anew.
        warm_up_steps: steps that only count, before they are chosen first.
        chunk_bytes: GPU memory is claimed in chunks of about so many bytes.
        device: number of the GPU; None takes the one that torch has chosen.
    """

    hot_rows: int
    flush_every_steps: int = 100
    warm_up_steps: int = 100
    chunk_bytes: int = 64 << 20
    device: int | None = None
