"""Options of GPU memory. They need no torch, so every process can read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The memory of one GPU.

    Attributes:
        device: the number of the GPU. None takes torch's current GPU.
        chunk_bytes: the approximate size of the chunks in which rows are claimed. Chunks keep their addresses.
        reserve_rows: the maximum number of rows of a shard. None means that only the memory limits the rows.
    """

    device: int | None = None
    chunk_bytes: int = 64 << 20
    reserve_rows: int | None = None

    @property
    def where(self) -> str:
        """The name of the memory in errors."""
        return "GPU memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTier:
    """GPU memory as a tier above host memory: HybridHash (PICASSO §III-D).

    Attributes:
        hot_rows: the number of rows of this store that stay in GPU memory. They are the rows that were read most.
            There is additional room for the rows of the last two batches.
        flush_every_steps: the number of steps after which the hot rows are chosen again.
        warm_up_steps: the number of steps before the first choice. They only count reads.
        chunk_bytes: the approximate size of the chunks in which GPU memory is claimed.
        device: the number of the GPU. None takes torch's current GPU.
    """

    hot_rows: int
    flush_every_steps: int = 100
    warm_up_steps: int = 100
    chunk_bytes: int = 64 << 20
    device: int | None = None
