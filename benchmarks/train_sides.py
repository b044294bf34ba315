"""The contestants of training: each takes the same batches, the same network, Adam for it, row-wise Adagrad for rows.

Each has ``prepare(batch)``, which is not timed and stands for a data loader of its own, and ``step(prepared)``.

Shapes: B examples, F = 26 categorical and X = 13 numeric features, D dim, M ids a bag.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from ids import Shape
from sparse_sides import LR, fused_collection
from torch import Tensor, nn

import girih
from girih import models
from girih.data import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.models import Block, Embeddings, needs_of
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Spans
from girih.training.schedules import JoinedHalves, in_step

NUMERIC = 13
HIDDEN = {"dlrm": {"bottom_hidden": (512, 256), "hidden": (512, 256)}, "deepfm": {"hidden": (400, 400, 400)}}
FILL = 8192


@dataclass(frozen=True)
class Task:
    """What is trained."""

    model: str
    dim: int
    shape: Shape

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"c{i}" for i in range(self.shape.features))

    def schema(self) -> girih.Schema:
        sparse = [girih.Categorical(name=name, dim=self.dim, pooling="sum") for name in self.names]
        return girih.Schema([*sparse, *(girih.Numeric(name=f"x{i}") for i in range(NUMERIC))], "click")

    def network(self) -> nn.Module:
        """girih's module, with the same weights every time."""
        torch.manual_seed(0)
        return models.create(self.model, self.schema(), HIDDEN[self.model])

    @property
    def has_first_order(self) -> bool:
        return self.model == "deepfm"


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The same for all: torch's fastest on CPU, which girih's ``[dense_optimizer]`` picks by itself."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def replicas(module: nn.Module) -> dict[str, Replica]:
    """girih's dense half over copies of a module, by precision."""
    precisions = ("float32", "bfloat16")
    return {
        p: Replica(DenseSpec(module=copy.deepcopy(module), optimizer=adam, precision=p)) for p in precisions
    }


class Side(Protocol):
    """One contestant."""

    precision: str

    def prepare(self, batch: Batch) -> Any: ...
    def step(self, prepared: Any) -> None: ...


class Girih:
    """Both halves and the schedule, as ``Trainer`` runs them."""

    def __init__(self, task: Task, shards: int | None, store: StoreOptions | None = None) -> None:
        schema, module = task.schema(), task.network()
        self.sparse = LocalSparse(
            SparseSpec(
                schema=schema,
                needs=needs_of(module, schema),
                optimizer=girih.optim.RowwiseAdagrad(lr=LR),
                store=store or StoreOptions(shards=shards),
            )
        )
        self._dense = replicas(module)
        self.precision = "float32"
        for start in range(0, task.shape.rows, FILL):
            ids = np.arange(start, min(start + FILL, task.shape.rows))
            nothing = np.empty((len(ids), 0), np.float32)
            offsets = np.arange(task.shape.features * len(ids) + 1, dtype=np.int32)
            every = np.tile(ids, task.shape.features)
            self.sparse.pull(Batch(ids=every, offsets=offsets, numeric=nothing, labels=nothing))

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def step(self, prepared: Batch) -> None:
        dense = self._dense[self.precision]
        halves = JoinedHalves(self.sparse, dense, self.sparse.last_step, lambda: 1.0, Spans())
        for _ in in_step()([(prepared, None)], halves):
            pass

    def close(self) -> None:
        self.sparse.close()


class Eager:
    """A network in a plain loop; a subclass says where embeddings come from."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = adam(module.parameters())
        self.precision = "float32"

    def learn(self, labels: Tensor, *inputs: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            logits = self.module(*inputs)
        loss = F.binary_cross_entropy_with_logits(logits.float().view_as(labels), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss.item()

    def close(self) -> None:
        return


class DenseAlone(Eager):
    """The network with its embeddings given; their gradients are computed, and go nowhere."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.network())
        size = task.shape.batch, task.shape.features
        self.given = [torch.randn(*size, task.dim).mul_(0.01).requires_grad_()]
        self.given += [torch.zeros(*size, 1, requires_grad=True)] if task.has_first_order else []
        self.embeddings = Embeddings(
            (Block(task.names, self.given[0]),), {}, tuple(Block(task.names, g) for g in self.given[1:])
        )

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(batch.numeric), torch.from_numpy(batch.labels)

    def step(self, prepared: tuple[Tensor, Tensor]) -> None:
        for leaf in self.given:
            leaf.grad = None
        self.learn(prepared[1], prepared[0], self.embeddings)


class ReplicaAlone:
    """girih's dense half with its embeddings given: what our own loop costs beside plain PyTorch."""

    def __init__(self, task: Task) -> None:
        self.given = DenseAlone(task)
        self._dense = replicas(task.network())
        self.precision = "float32"

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def step(self, prepared: Batch) -> None:
        for leaf in self.given.given:
            leaf.grad = None
        dense = self._dense[self.precision]
        computed = dense.compute(prepared, self.given.embeddings)
        computed.vote.cast(torch.tensor(False))
        computed.apply(computed.vote)

    def close(self) -> None:
        return


class TorchRecTables(Eager):
    """The same network over TorchRec's fused embedding bags, in plain PyTorch.

    So not only the sparse half differs: girih's float32 linear layers go through oneDNN where that pays, these do not.

    Tables of FBGEMM are multiples of 4 wide, so that a first-order weight would cost 4 columns of a second lookup;
    here it is a column of the same row, of D + 4 columns.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task.network())
        self.task, self.dim = task, task.dim + 4 * task.has_first_order
        self.tables = fused_collection(list(task.names), task.shape.rows, self.dim, "rowwise_adagrad")

    def prepare(self, batch: Batch) -> tuple[Any, Tensor, Tensor]:
        return keyed(self.task.names, batch), torch.from_numpy(batch.numeric), torch.from_numpy(batch.labels)

    def step(self, prepared: tuple[Any, Tensor, Tensor]) -> None:
        ids, numeric, labels = prepared
        values = self.tables(ids).values().view(len(labels), -1, self.dim)
        names = self.task.names
        if self.task.has_first_order:
            values, first_order, _ = values.split([self.task.dim, 1, 3], dim=2)
            embeddings = Embeddings((Block(names, values),), {}, (Block(names, first_order),))
        else:
            embeddings = Embeddings((Block(names, values),))
        self.learn(labels, numeric, embeddings)


class TorchRecDLRM(Eager):
    """TorchRec's own DLRM, of the same layers, over the same fused embedding bags."""

    def __init__(self, task: Task) -> None:
        from torchrec.models.dlrm import DLRM

        tables = fused_collection(list(task.names), task.shape.rows, task.dim, "rowwise_adagrad")
        torch.manual_seed(0)
        module = DLRM(
            embedding_bag_collection=tables,
            dense_in_features=NUMERIC,
            dense_arch_layer_sizes=[*HIDDEN["dlrm"]["bottom_hidden"], task.dim],
            over_arch_layer_sizes=[*HIDDEN["dlrm"]["hidden"], 1],
        )
        super().__init__(module)
        self.optimizer = adam(  # tables learn in their backward pass
            [p for name, p in module.named_parameters() if "embedding_bag_collection" not in name]
        )
        self.task = task

    def prepare(self, batch: Batch) -> tuple[Any, Tensor, Tensor]:
        return keyed(self.task.names, batch), torch.from_numpy(batch.numeric), torch.from_numpy(batch.labels)

    def step(self, prepared: tuple[Any, Tensor, Tensor]) -> None:
        ids, numeric, labels = prepared
        self.learn(labels, numeric, ids)


def keyed(names: tuple[str, ...], batch: Batch) -> Any:
    """A batch's ids as TorchRec wants them, as its data pipes give them."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    offsets = torch.from_numpy(batch.offsets)
    return KeyedJaggedTensor(
        list(names), torch.from_numpy(batch.ids), lengths=offsets.diff(), offsets=offsets.long()
    )
