"""Tables of other packages on a GPU, for gpu.py: of a fixed size, one id per bag.

    python gpu_peers.py PEER FEATURES EXAMPLES ROWS DIM OPTIMIZER    prints the median seconds of a step

Both have all tables in one array, so that one operation serves all features, as girih's groups do.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from gpu_timing import timed, zipf
from torch import Tensor, nn

from girih.kernels.gpu import jit

LR = 0.01


class CompiledBag:
    """``nn.EmbeddingBag`` under ``torch.compile``, with sparse gradients.

    Args:
        rows: of each table; optimizer: "sgd" or "adam" (``SparseAdam``).
    """

    def __init__(self, features: int, rows: int, dim: int, optimizer: str) -> None:
        self._module = nn.EmbeddingBag(
            features * rows, dim, mode="sum", include_last_offset=True, sparse=True, device=jit.device()
        )
        self._bags = torch.compile(self._module)
        of = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}[optimizer]
        self._optimizer: Any = of(list(self._module.parameters()), lr=LR)

    def step(self, ids: Tensor, offsets: Tensor, gradient: Tensor) -> None:
        """Forward, backward and update: int64[n] of the joined tables, int64[n+1], float32[n, D]."""
        self._optimizer.zero_grad(set_to_none=True)
        self._bags(ids, offsets).backward(gradient)
        self._optimizer.step()


class Tbe:
    """FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``, its optimizer fused."""

    def __init__(self, features: int, rows: int, dim: int, optimizer: str) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        table = (rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        self._bags: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [table] * features,
            optimizer={"sgd": OptimType.EXACT_SGD, "adam": OptimType.ADAM}[optimizer],
            learning_rate=LR,
            pooling_mode=PoolingMode.SUM,
            device=jit.device(),
        )

    def step(self, ids: Tensor, offsets: Tensor, gradient: Tensor) -> None:
        """Forward, backward and update: int64[n], each of its own table; int64[n+1]; float32[B, F · D]."""
        self._bags(ids, offsets).backward(gradient)


PEERS = {"nn.EmbeddingBag, compiled": CompiledBag, "FBGEMM": Tbe}


def step_seconds(name: str, features: int, examples: int, rows: int, dim: int, optimizer: str) -> float:
    """Median seconds of a step of a peer's tables, on Zipf ids that are on the device."""
    side = PEERS[name](features, rows, dim, optimizer)
    is_joined = name != "FBGEMM"  # its tables follow each other in one
    device, rng, n = jit.device(), np.random.default_rng(0), features * examples
    first = torch.arange(features, device=device).repeat_interleave(examples) * (rows if is_joined else 0)
    batches = [torch.from_numpy(zipf(rng, 1.05, rows, n)).to(device) + first for _ in range(8)]
    offsets = torch.arange(n + 1, device=device)
    gradient = torch.randn((n, dim) if is_joined else (examples, features * dim), device=device)
    times = []
    for number in range(24):
        ids = batches[number % 8]
        times.append(timed(lambda ids=ids: side.step(ids, offsets, gradient)))
    return float(np.median(times[8:]))


if __name__ == "__main__":
    peer, *shape, kind = sys.argv[1:]
    print(step_seconds(peer, *(int(number) for number in shape), kind))
