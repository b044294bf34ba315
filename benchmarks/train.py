"""Whole training steps: girih, the same model over ``nn.EmbeddingBag``, and the dense half alone.

    python benchmarks/train.py [--model deepfm] [--dim 16] [--seconds 5]

Criteo-shaped batches (13 numeric, 26 categorical features, 4,096 examples) are made beforehand; the three
alternate in rounds of a few steps, and the median samples/s over the rounds are printed. ``dense alone``
has the embeddings given and is what no system can beat on this machine.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import girih
from girih import models
from girih.data import Batch
from girih.dense.replica import Replica
from girih.models import Block, Embeddings, bce_with_logits, needs_of
from girih.schedules import in_step
from girih.spans import Spans
from girih.sparse.local import LocalSparse

CATEGORICAL, NUMERIC, BATCH, ROWS, NUM_BATCHES, ROUND = 26, 13, 4096, 500_000, 20, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="deepfm", choices=sorted(set(models.BY_NAME) - {"din", "mmoe", "lr", "fm"})
    )
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch's own sparse optimizer
    features = [girih.Categorical(name=f"c{i}", dim=arguments.dim) for i in range(CATEGORICAL)]
    schema = girih.Schema([*features, *(girih.Numeric(name=f"x{i}") for i in range(NUMERIC))], "click")
    model = models.create(arguments.model, schema)
    batches = make_batches()
    contestants: dict[str, Callable[[list[Batch]], None]] = {
        "girih": girih_steps(model, schema, arguments.precision),
        "nn.EmbeddingBag": torch_steps(copy.deepcopy(model), schema, arguments.dim, arguments.precision),
        "dense alone": dense_steps(copy.deepcopy(model), schema, arguments.dim, arguments.precision),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(arguments.rounds + 1):
        part = [batches[(number * ROUND + i) % NUM_BATCHES] for i in range(ROUND)]
        for name, steps in contestants.items():
            start = time.perf_counter()
            steps(part)
            if number:
                rates[name].append(ROUND * BATCH / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    title = (
        f"{arguments.model}, D = {arguments.dim}, {arguments.precision}, {torch.get_num_threads()} threads"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "samples/s", "of dense alone"):
        table.add_column(column, justify="right" if column else "left")
    for name, rate in medians.items():
        table.add_row(name, f"{rate:,.0f}", f"{rate / medians['dense alone']:.0%}")
    Console().print(table)


def make_batches() -> list[Batch]:
    rng = np.random.default_rng(0)
    return [
        Batch(
            ids=(rng.zipf(1.2, CATEGORICAL * BATCH) % ROWS).astype(np.int64),
            offsets=np.arange(CATEGORICAL * BATCH + 1, dtype=np.int32),
            numeric=rng.normal(size=(BATCH, NUMERIC)).astype(np.float32),
            labels=(rng.random((BATCH, 1)) < 0.25).astype(np.float32),
        )
        for _ in range(NUM_BATCHES)
    ]


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)  # type: ignore[arg-type]


def girih_steps(
    model: torch.nn.Module, schema: girih.Schema, precision: str
) -> Callable[[list[Batch]], None]:
    sparse = LocalSparse(schema, needs_of(model, schema), optimizer=girih.optim.Adagrad(lr=0.05))
    dense = Replica(model, adam, precision=precision)

    def steps(batches: list[Batch]) -> None:
        for _ in in_step(((b, None) for b in batches), sparse, dense, bce_with_logits, lambda: 1.0, Spans()):
            pass

    return steps


def torch_steps(
    model: torch.nn.Module, schema: girih.Schema, dim: int, precision: str
) -> Callable[[list[Batch]], None]:
    needs = needs_of(model, schema)
    first_order = any("first_order" in kinds for kinds in needs.values())
    widths = [dim] + ([1] if first_order else [])
    bags = [[torch.nn.EmbeddingBag(ROWS, w, mode="mean", sparse=True) for _ in schema.sparse] for w in widths]
    rows_optimizer = torch.optim.Adagrad([bag.weight for group in bags for bag in group], lr=0.05)
    optimizer, names = adam(model.parameters()), tuple(f.name for f in schema.sparse)

    def steps(batches: list[Batch]) -> None:
        for batch in batches:
            ids = torch.from_numpy(batch.ids).view(CATEGORICAL, BATCH, 1)
            blocks = [
                Block(names, torch.stack([bag(ids[i]) for i, bag in enumerate(group)], dim=1))
                for group in bags
            ]
            embeddings = Embeddings((blocks[0],), {}, tuple(blocks[1:]))
            loss_step(model, embeddings, batch, precision)
            for each in (rows_optimizer, optimizer):
                each.step()
                each.zero_grad()

    return steps


def dense_steps(
    model: torch.nn.Module, schema: girih.Schema, dim: int, precision: str
) -> Callable[[list[Batch]], None]:
    optimizer, names = adam(model.parameters()), tuple(f.name for f in schema.sparse)
    given = torch.randn(BATCH, CATEGORICAL, dim), torch.randn(BATCH, CATEGORICAL, 1)

    def steps(batches: list[Batch]) -> None:
        for batch in batches:
            leaves = [tensor.clone().requires_grad_() for tensor in given]
            loss_step(
                model,
                Embeddings((Block(names, leaves[0]),), {}, (Block(names, leaves[1]),)),
                batch,
                precision,
            )
            optimizer.step()
            optimizer.zero_grad()

    return steps


def loss_step(model: torch.nn.Module, embeddings: Embeddings, batch: Batch, precision: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(torch.from_numpy(batch.numeric), embeddings)
    logits = logits.float()
    _, gradient = bce_with_logits(logits.detach(), torch.from_numpy(batch.labels), None)
    logits.backward(gradient)


if __name__ == "__main__":
    main()
