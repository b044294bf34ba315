"""The sparse half alone: forward, backward and update of 26 features, beside ``nn.EmbeddingBag(sparse=True)``.

    python benchmarks/kernels.py [--dims 16 64] [--rows 500000] [--repeats 15]

Both get the same ids (Zipf, fresh every batch, every id seen before), pooling and optimizer (Adagrad), one
thread, and alternate in one run; medians are printed. Not alike: girih's tables are hash tables, torch's static.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import girih
from girih.data import Batch
from girih.sparse.local import LocalSparse

FEATURES, BATCH = 26, 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, default=500_000, help="of each feature")
    parser.add_argument("--zipf", type=float, default=1.2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch's own sparse optimizer
    table = Table(
        title=f"{FEATURES} features × {BATCH:,} examples, one id a bag, milliseconds (median)",
        title_justify="left",
    )
    for column in ("D", "what", "girih", "nn.EmbeddingBag", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for dim in arguments.dims:
        ours, theirs = Ours(dim, arguments.rows), Theirs(dim, arguments.rows)
        times: dict[str, list[tuple[float, float]]] = {"girih": [], "torch": []}
        rng = np.random.default_rng(0)
        for repeat in range(arguments.repeats + 3):
            ids = (rng.zipf(arguments.zipf, (FEATURES, BATCH)) % arguments.rows).astype(np.int64)
            gradient = torch.from_numpy(rng.normal(size=(BATCH, FEATURES, dim)).astype(np.float32))
            for name, side in (("girih", ours), ("torch", theirs)):
                measured = timed(
                    lambda side=side, ids=ids: side.forward(ids),
                    lambda side=side, g=gradient: side.backward(g),
                )
                if repeat >= 3:
                    times[name].append(measured)
        for index, what in enumerate(("forward", "backward + update")):
            a, b = (statistics.median(pair[index] for pair in times[name]) for name in ("girih", "torch"))
            table.add_row(str(dim), what, f"{a:.2f}", f"{b:.2f}", f"{b / a:.1f}×")
    Console().print(table)


def timed(forward: Callable[[], None], backward: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of each."""
    start = time.perf_counter()
    forward()
    middle = time.perf_counter()
    backward()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


class Ours:
    """girih's local sparse half."""

    def __init__(self, dim: int, rows: int) -> None:
        schema = girih.Schema([girih.Categorical(name=f"f{i}", dim=dim) for i in range(FEATURES)], "y")
        needs = {f.name: frozenset({"embedding"}) for f in schema.sparse}
        self.sparse = LocalSparse(schema, needs, optimizer=girih.optim.Adagrad(lr=0.05))
        self.offsets = np.arange(FEATURES * BATCH + 1, dtype=np.int32)
        self.empty = np.empty((BATCH, 0), np.float32)
        for start in range(0, rows, BATCH):
            self.forward(np.tile(np.arange(start, start + BATCH), (FEATURES, 1)))

    def forward(self, ids: np.ndarray) -> None:
        self.pulled = self.sparse.pull(
            Batch(ids=ids.reshape(-1), offsets=self.offsets, numeric=self.empty, labels=self.empty)
        )

    def backward(self, gradient: torch.Tensor) -> None:
        self.pulled.wait().stacked().grad = gradient
        self.sparse.push(self.pulled)


class Theirs:
    """torch's embedding bags with sparse gradients."""

    def __init__(self, dim: int, rows: int) -> None:
        self.bags = [torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(FEATURES)]
        self.optimizer = torch.optim.Adagrad([p for bag in self.bags for p in bag.parameters()], lr=0.05)
        self.offsets = torch.arange(BATCH)

    def forward(self, ids: np.ndarray) -> None:
        tensors = torch.from_numpy(ids)
        self.out = torch.stack([bag(tensors[i], self.offsets) for i, bag in enumerate(self.bags)], dim=1)

    def backward(self, gradient: torch.Tensor) -> None:
        self.out.backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    main()
