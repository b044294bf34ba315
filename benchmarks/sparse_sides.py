"""The contestants of the sparse half: each looks up the same ids, pools by sum, and takes the same gradients.

Each has ``prepare(ids, bag)``, which is not timed, ``forward(prepared)`` → a tensor of B · F · D values that leads to
autograd, and ``update()``, which does what its backward pass has not done yet.

Shapes: B examples, F features, N ids in the batch, D dim.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from ids import Shape, static
from numpy.typing import NDArray
from torch import Tensor
from upstream import gradient_arrives

import girih
from girih.comm.group.trainers import Vote
from girih.data import Batch
from girih.optim import SparseOptimizer
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.store import Store
from support.store_verbs import evict

LR = 0.05
OPTIMIZERS: dict[str, SparseOptimizer] = {
    "rowwise_adagrad": girih.optim.RowwiseAdagrad(lr=LR),
    "adagrad": girih.optim.Adagrad(lr=LR),
    "sgd": girih.optim.SGD(lr=LR),
    "adam": girih.optim.Adam(lr=LR),
    "ftrl": girih.optim.FTRL(lr=LR),
}
STATE_COLUMNS = {
    "rowwise_adagrad": lambda dim: 1,
    "adagrad": lambda dim: dim,
    "sgd": lambda dim: 0,
    "adam": lambda dim: 2 * dim,
    "ftrl": lambda dim: 2 * dim,
}
FILL = 8192
SPARE_ROWS = 70_000
"""Of each table, made and evicted before timing, so that new ids take memory that was touched before."""


class Side(Protocol):
    """One contestant at one number of threads."""

    def prepare(self, ids: NDArray[np.int64], bag: int) -> Any: ...
    def forward(self, prepared: Any) -> Tensor: ...
    def update(self) -> None: ...
    def fill(self, rows: int) -> None: ...
    def close(self) -> None: ...


def run_step(side: Side, prepared: Any, gradient: Tensor) -> tuple[float, float]:
    """Seconds of the forward pass, and of backward and update; ``gradient`` is float32[B · F · D]."""
    given = gradient.clone()
    start = time.perf_counter()
    out = side.forward(prepared)
    middle = time.perf_counter()
    given = [given.view(out.shape)]
    gradient_arrives(out, given)
    side.update()
    return middle - start, time.perf_counter() - middle


def fill_all(sides: Sequence[tuple[Side, int]]) -> None:
    """Fills tables side by side; the kernels let threads run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: each[0].fill(each[1]), sides))


def _features(shape: Shape, dim: int) -> list[girih.Categorical]:
    return [girih.Categorical(name=f"f{i}", dim=dim, pooling="sum") for i in range(shape.features)]


class Packed:
    """girih as ``Trainer`` runs it: F tables packed into one group."""

    packing: ClassVar[bool] = True

    def __init__(
        self, shape: Shape, dim: int, optimizer: str, threads: int = 1, *, spare_rows: int = SPARE_ROWS
    ) -> None:
        schema = girih.Schema(_features(shape, dim), "y")
        needs = {feature.name: frozenset({"embedding"}) for feature in schema.sparse}
        self.sparse = LocalSparse(
            SparseSpec(
                schema=schema,
                needs=needs,
                optimizer=OPTIMIZERS[optimizer],
                store=StoreOptions(shards=threads),
                partition=None if self.packing else {name: (name,) for name in needs},
            )
        )
        self.num_updates, self.spare_rows = 0, spare_rows
        self.features = shape.features

    def fill(self, rows: int) -> None:
        """Gives each table its first ``rows`` ids."""
        for start in range(0, rows + self.spare_rows, FILL):
            ids = np.arange(start, min(start + FILL, rows + self.spare_rows))
            self.forward(self.prepare(np.tile(ids, self.features), 1))
        spare = np.arange(rows, rows + self.spare_rows)
        for _, store in self.stores():
            num_tables = len(store.spec.tables)
            tables = np.repeat(np.arange(num_tables, dtype=np.int32), self.spare_rows)
            evict(store, np.tile(spare, num_tables), tables)

    def prepare(self, ids: NDArray[np.int64], bag: int) -> Batch:
        size = len(ids) // bag // self.features
        nothing = np.empty((size, 0), np.float32)
        offsets = np.arange(0, len(ids) + 1, bag, dtype=np.int32)
        return Batch(ids=ids, offsets=offsets, numeric=nothing, labels=nothing)

    def forward(self, prepared: Batch) -> Tensor:
        self.pulled = self.sparse.pull(prepared)
        return self.pulled.wait().stacked()

    def update(self) -> None:
        self.num_updates += 1
        self.pulled.push(self.num_updates, 1.0, Vote())

    def close(self) -> None:
        self.sparse.close()

    def stores(self) -> Iterator[tuple[str, Store]]:
        return self.sparse.stores()

    def num_new(self) -> int:
        """Keys that got a row so far."""
        return self.sparse.stats().store["new"]


class Unpacked(Packed):
    """The same kernels on the same threads, with a group for each table."""

    packing = False


class Module:
    """girih's drop-in module: one ``girih.nn.EmbeddingBag`` for the ids of all features."""

    def __init__(self, shape: Shape, dim: int, optimizer: str, threads: int = 1) -> None:
        self.bags = girih.nn.EmbeddingBag(
            dim, mode="sum", optimizer=OPTIMIZERS[optimizer], store=StoreOptions(shards=threads)
        )
        self.features = shape.features

    def fill(self, rows: int) -> None:
        """Gives each feature its first ``rows`` ids."""
        for start in range(0, rows + SPARE_ROWS, FILL):
            ids = np.arange(start, min(start + FILL, rows + SPARE_ROWS))
            self.bags(*self.prepare(np.tile(ids, self.features), 1))
        spare, _ = self.prepare(np.tile(np.arange(rows, rows + SPARE_ROWS), self.features), 1)
        for store in self.bags.tables.shards.stores[0]:
            evict(store, spare.numpy(), np.zeros(len(spare), np.int32))

    def prepare(self, ids: NDArray[np.int64], bag: int) -> tuple[Tensor, Tensor]:
        size = len(ids) // self.features
        feature = np.repeat(np.arange(self.features, dtype=np.int64), size) << 56  # wraps: any int64 is an id
        return torch.from_numpy(ids + feature), torch.arange(0, len(ids), bag)

    def forward(self, prepared: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.bags(*prepared)
        return out

    def update(self) -> None:
        return

    def close(self) -> None:
        for store in self.bags.tables.shards.stores[0]:
            store.close()


class Collection(Packed):
    """girih's drop-in module for many features: ``girih.nn.EmbeddingBagCollection``, of F tables."""

    def __init__(self, shape: Shape, dim: int, optimizer: str, threads: int = 1) -> None:
        self.bags = girih.nn.EmbeddingBagCollection(
            _features(shape, dim), optimizer=OPTIMIZERS[optimizer], store=StoreOptions(shards=threads)
        )
        self.features, self.spare_rows = shape.features, SPARE_ROWS

    def prepare(self, ids: NDArray[np.int64], bag: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(ids), torch.arange(0, len(ids) + 1, bag)

    def forward(self, prepared: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.bags(*prepared)
        return out

    def update(self) -> None:
        return

    def close(self) -> None:
        self.bags.tables.shards.close()

    def stores(self) -> Iterator[tuple[str, Store]]:
        return self.bags.tables.shards.files()


class Static:
    """What static tables share: they are full from the start."""

    def fill(self, rows: int) -> None:
        return

    def update(self) -> None:
        return

    def close(self) -> None:
        return


class Fbgemm(Static):
    """FBGEMM's table-batched embedding on CPU, the optimizer fused into its backward pass."""

    OPTIMIZERS: ClassVar = {
        "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
        "adagrad": "EXACT_ADAGRAD",
        "sgd": "EXACT_SGD",
    }
    """All that it has on CPU; Adam, LAMB, LARS and partial row-wise Adam refuse it, FTRL it has nowhere."""

    def __init__(self, shape: Shape, dim: int, optimizer: str) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        spec = (shape.rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * shape.features,
            optimizer=getattr(OptimType, self.OPTIMIZERS[optimizer]),
            learning_rate=LR,
            eps=OPTIMIZERS[optimizer].eps if optimizer != "sgd" else 0.0,
            pooling_mode=PoolingMode.SUM,
        )
        self.tables.init_embedding_weights_uniform(-0.01, 0.01)
        self.rows = shape.rows

    def prepare(self, ids: NDArray[np.int64], bag: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(static(ids, self.rows)), torch.arange(0, len(ids) + 1, bag)

    def forward(self, prepared: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.tables(*prepared)
        return out


class Torch(Static):
    """One ``torch.nn.EmbeddingBag(sparse=True)`` for the ids of all features, and a sparse torch optimizer."""

    OPTIMIZERS: ClassVar = {
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
        "adam": torch.optim.SparseAdam,
    }

    def __init__(self, shape: Shape, dim: int, optimizer: str) -> None:
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch's own sparse optimizers
        weight = torch.empty(shape.features * shape.rows, dim).uniform_(-0.01, 0.01)
        self.bags = torch.nn.EmbeddingBag(*weight.shape, mode="sum", sparse=True, _weight=weight)
        self.optimizer = self.OPTIMIZERS[optimizer](self.bags.parameters(), lr=LR)
        self.shape = shape

    def prepare(self, ids: NDArray[np.int64], bag: int) -> tuple[Tensor, Tensor]:
        rows = self.shape.rows
        first = np.repeat(np.arange(self.shape.features) * rows, len(ids) // self.shape.features)
        return torch.from_numpy(static(ids, rows) + first), torch.arange(0, len(ids), bag)

    def forward(self, prepared: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.bags(*prepared)
        return out

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchRec(Static):
    """TorchRec's ``FusedEmbeddingBagCollection``: keyed jagged tensors around FBGEMM."""

    OPTIMIZERS: ClassVar = Fbgemm.OPTIMIZERS

    def __init__(self, shape: Shape, dim: int, optimizer: str) -> None:
        self.keys = [f"f{i}" for i in range(shape.features)]
        self.tables = fused_collection(self.keys, shape.rows, dim, optimizer)
        self.rows = shape.rows

    def prepare(self, ids: NDArray[np.int64], bag: int) -> tuple[Tensor, Tensor]:
        lengths = torch.full((len(ids) // bag,), bag, dtype=torch.int32)
        return torch.from_numpy(static(ids, self.rows)), lengths

    def forward(self, prepared: tuple[Tensor, Tensor]) -> Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        out: Tensor = self.tables(KeyedJaggedTensor(self.keys, prepared[0], lengths=prepared[1])).values()
        return out


def fused_collection(keys: list[str], rows: int, dim: int, optimizer: str, pooling: str = "SUM") -> Any:
    """A table a key; ``optimizer`` as named by girih."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    kinds = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    tables = [
        EmbeddingBagConfig(
            name=f"t_{key}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[key],
            pooling=PoolingType[pooling],
        )
        for key in keys
    ]
    return FusedEmbeddingBagCollection(
        tables, optimizer_type=kinds[optimizer], optimizer_kwargs={"lr": LR}, device=torch.device("cpu")
    )
