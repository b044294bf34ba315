"""Records in chunks of GPU memory, which are claimed as they are needed and never move.

Shapes: V 32-bit words of a record.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from girih.kernels.gpu.layout import stride_of

_MOST_CHUNKS = 1 << 16
_MOST_ROWS = 1 << 31
_HEADROOM_BYTES = 1 << 30  # left for what a step needs beside its rows


class RecordChunks:
    """Owns the memory of records.

    Args:
        num_words: V. chunk_bytes: about how much a chunk takes. most_rows: bounds the records; None leaves that to memory.
        device: where it is to be.

    Attributes:
        device: where it is.
        chunk_bits, stride: records of a chunk, as a power of two, and words from one to the next.
        chunks: int64[·], the address of each chunk.
    """

    def __init__(self, num_words: int, chunk_bytes: int, most_rows: int | None, device: torch.device) -> None:
        self.device = device
        self.stride = stride_of(num_words)
        self.chunk_bits = max(6, (chunk_bytes // (4 * self.stride)).bit_length() - 1)
        self._records: list[Tensor] = []
        self._most = min(most_rows or _MOST_ROWS, _MOST_ROWS, _MOST_CHUNKS << self.chunk_bits)
        self.chunks = torch.zeros(_MOST_CHUNKS, dtype=torch.int64, device=self.device)

    @property
    def capacity(self) -> int:
        """Records that there is memory for."""
        return min(len(self._records) << self.chunk_bits, self._most)

    @property
    def record_bytes(self) -> int:
        """From one record to the next."""
        return 4 * self.stride

    def claim(self, rows: int) -> None:
        """Claims chunks until there is memory for ``rows``, or no more beside what a step needs."""
        size = self.record_bytes << self.chunk_bits
        while self.capacity < min(rows, self._most):
            if self.device.type == "cuda" and _free_bytes(self.device) < size + _HEADROOM_BYTES:
                return  # there may be more later
            try:
                chunk = torch.empty(1 << self.chunk_bits, self.stride, dtype=torch.int32, device=self.device)
            except torch.OutOfMemoryError:
                self._most = self.capacity
                return
            self.chunks[len(self._records)] = chunk.data_ptr()
            self._records.append(chunk)

    def upto(self, rows_ever: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, int32[·, V] of the rows of a chunk), of the first ``rows_ever``."""
        for number, chunk in enumerate(self._records):
            first = number << self.chunk_bits
            if first < rows_ever:
                yield first, chunk[: rows_ever - first]

    def close(self) -> None:
        """Frees the memory, once no stream uses it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._records.clear()


def _free_bytes(device: torch.device) -> int:
    """Bytes that the device has free, or that torch keeps and nothing uses."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
