"""Trainers of other systems on the hosts of ``slow_hosts``: TorchRec with sharded tables, and DDP with sparse gradients, over gloo.

As a program, this file is one of the trainers, and its argument is a :class:`Task` as JSON. All contestants read girih's batches with
girih's reader, each its share, and train girih's own DLRM network. Only the embeddings and the synchronization differ.

Shapes: B examples of a trainer, F = 26 categorical features, D dim, R rows of a table.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fleet
import harness  # noqa: F401 (makes tests/support known to sparse_sides)
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_sides
from ids import Shape
from sparse_sides import LR
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from girih.app.run_config import RunConfig
from girih.cluster.roles import HostSpec
from girih.data import Batch
from girih.data.batch import share_of
from girih.models import Block, Embeddings

DDP = "DDP, sparse gradients"
SHARDINGS = {"TorchRec, row-wise": "row", "TorchRec, column-wise": "column", "TorchRec, table-wise": "table"}
PEERS = (*SHARDINGS, DDP)
LEAST_COLUMNS = 4
"""Columns of a shard are a multiple of this in FBGEMM."""


@dataclass(frozen=True)
class Task:
    """What the trainers of one contestant do.

    Attributes:
        config: file with data and batch size, as of ``girih train``. batch: examples of a step of all trainers.
        contestant: one of ``PEERS``. dim, rows: of each table.
        address, port: of trainer 0.
        plan: windows, links and bounds, see :class:`fleet.Plan`; its ``overrides`` are not used.
    """

    config: str
    batch: int
    contestant: str
    dim: int
    rows: int
    trainers: int
    address: str
    port: int
    plan: Mapping[str, Any]


def measure(task: Task, hosts: Sequence[HostSpec], *, timeout_s: float) -> dict[str, Any]:
    """Runs a contestant, trainer i on the i-th host; returns ``windows`` as :func:`fleet.measure` does.

    Raises:
        RuntimeError: a trainer failed; the last lines of each.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = []
        for rank, host in enumerate(hosts):
            environment = {**os.environ, **host.environment, "RANK": str(rank), "WORLD_SIZE": str(len(hosts)),
                           "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": task.address, "MASTER_PORT": str(task.port)}  # fmt: skip
            out, errors = (
                stack.enter_context((folder / f"{kind}-{rank}").open("w")) for kind in ("out", "errors")
            )
            words = [*host.command, sys.executable, __file__, json.dumps(asdict(task))]
            process = subprocess.Popen(words, env=environment, stdout=out, stderr=errors)
            stack.callback(process.kill)
            started.append(process)
        until = time.monotonic() + timeout_s
        while any(process.poll() is None for process in started) and time.monotonic() < until:
            if any(process.poll() for process in started):
                break
            time.sleep(0.1)
        if any(process.poll() != 0 for process in started):
            ends = [(folder / f"errors-{rank}").read_text()[-600:] for rank in range(len(hosts))]
            raise RuntimeError(f"{task.contestant}: a trainer failed:\n" + "\n".join(ends))
        found: dict[str, Any] = json.loads((folder / "out-0").read_text().splitlines()[-1])
        return found


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


class Joined(nn.Module):
    """Tables and girih's network. ``tables`` maps what :meth:`Contestant.prepare` returns to float32[B, F, D]."""

    def __init__(self, tables: nn.Module, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.tables, self.network, self.names = tables, network, tuple(names)

    def forward(self, ids: Any, numeric: Tensor) -> Tensor:
        """Logits of a batch."""
        values = self.tables(ids)
        values = (values if isinstance(values, Tensor) else values.values()).view(
            len(numeric), len(self.names), -1
        )
        logits: Tensor = self.network(numeric, Embeddings((Block(self.names, values),)))
        return logits


@dataclass(frozen=True)
class Contestant:
    """A model over all trainers, and how its ids look.

    Attributes:
        prepare: ids of a batch in the model's form.
        optimizers: that the loop steps; tables of TorchRec step in their backward pass.
    """

    model: nn.Module
    prepare: Callable[[Batch], Any]
    optimizers: tuple[torch.optim.Optimizer, ...]

    def step(self, batch: Batch) -> None:
        """Trains on this trainer's share of a batch."""
        logits = self.model(self.prepare(batch), torch.from_numpy(batch.numeric))
        labels = torch.from_numpy(batch.labels)
        loss = F.binary_cross_entropy_with_logits(logits.view_as(labels), labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


class OneBag(nn.Module):
    """All tables as one ``EmbeddingBag`` with sparse gradients, so that DDP sums one sparse tensor a step."""

    def __init__(self, features: int, rows: int, dim: int) -> None:
        super().__init__()
        self.features = features
        self.bag = nn.EmbeddingBag(features * rows, dim, mode="sum", sparse=True)
        nn.init.normal_(self.bag.weight, std=0.01)

    def forward(self, ids: tuple[Tensor, Tensor]) -> Tensor:
        """float32[F · B, D], features first, as [B, F, D]."""
        ids_of_all, offsets = ids
        pooled: Tensor = self.bag(ids_of_all, offsets)
        return pooled.view(self.features, -1, pooled.shape[1]).transpose(0, 1).contiguous()


def data_parallel(task: Task, side: train_sides.Task) -> Contestant:
    """DDP with sparse gradients: every trainer holds all tables."""
    names, rows = side.names, task.rows
    tables = OneBag(len(names), rows, task.dim)
    model = DistributedDataParallel(Joined(tables, side.network(), names))

    def prepare(batch: Batch) -> tuple[Tensor, Tensor]:
        offsets = torch.from_numpy(batch.offsets).long()
        lengths = offsets[:: batch.num_examples].diff()
        first = torch.repeat_interleave(torch.arange(len(names)) * rows, lengths)
        return torch.from_numpy(batch.ids) + first, offsets[:-1]

    network = model.module.network.parameters()
    optimizers = torch.optim.Adagrad(tables.parameters(), lr=LR), train_sides.adam(network)
    return Contestant(model, prepare, optimizers)


def sharded(task: Task, side: train_sides.Task) -> Contestant:
    """TorchRec: every trainer holds a part of the tables, and DDP sums the gradients of the network."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    size, names = task.trainers, side.names
    parts = min(size, task.dim // LEAST_COLUMNS)
    placements = {
        "row": lambda table: row_wise(),
        "column": lambda table: column_wise(ranks=[(table * parts + part) % size for part in range(parts)]),
        "table": lambda table: table_wise(rank=table % size),
    }
    place = placements[SHARDINGS[task.contestant]]
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=task.dim, num_embeddings=task.rows, feature_names=[name]
            )
            for name in names
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR}
    )
    plan = construct_module_sharding_plan(
        tables,
        {f"t_{name}": place(table) for table, name in enumerate(names)},
        sharder=sharder,  # type: ignore[arg-type]
        local_size=1,
        world_size=size,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        Joined(tables, side.network(), names),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],  # type: ignore[list-item]
    )
    network = [parameter for name, parameter in model.named_parameters() if not name.startswith("tables.")]
    return Contestant(model, lambda batch: train_sides.keyed(names, batch), (train_sides.adam(network),))


def _main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    side = train_sides.Task("dlrm", task.dim, Shape(fleet.FEATURES, task.batch // size, task.rows))
    contestant = (data_parallel if task.contestant == DDP else sharded)(task, side)
    pids: list[int | None] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    titles = {f"trainer {number}": pid for number, pid in enumerate(pids) if pid is not None}
    plan = fleet.Plan(**{**task.plan, "links": tuple(task.plan["links"])})
    bounds, notes = fleet.Bounds(plan), []
    for step, batch in enumerate(_batches(task, rank, size), 1):
        contestant.step(batch)
        if rank == 0:
            bounds.on_metrics({"step": step})
            if step >= plan.warmup and step % plan.steps == 0:
                seen = {
                    "time_s": time.perf_counter(),
                    "step": step,
                    "examples": step * task.batch,
                    "rows": 0,
                    "phases_s": {},
                }
                notes.append(seen | {"tiers": {}, **fleet.use(titles, plan.links, plan.usage)})
        if step == plan.max_steps:
            break
    dist.barrier()
    if rank == 0:
        print(json.dumps({"windows": fleet.windows(notes)}), flush=True)
    dist.destroy_process_group()


def _batches(task: Task, rank: int, size: int) -> Iterator[Batch]:
    """This trainer's share of each batch, read ahead in a thread."""
    data = RunConfig.load(Path(task.config), overrides=[f"data.batch_size = {task.batch}"]).dataset("train")
    with data.ahead(0, None, lambda batch: share_of(batch, rank, size)) as batches:
        for batch, _ in batches:
            yield batch


if __name__ == "__main__":
    _main()
