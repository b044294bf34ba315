"""The memory and time that the model takes per example.

A run measures both. A plan must not depend on a clock. For plans, girih counts the memory and uses nominal times.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from girih.comm.group import TrainerGroup
from girih.data import Dataset
from girih.data.batch import Batch, cut
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import made_by, to_device
from girih.models.embeddings import Embeddings
from girih.planner.facts import DenseCost, Facts
from girih.planner.traffic import Speeds
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.pack import sequence_bounds
from girih.sparse.spec import SparseSpec

EXAMPLES, FEW, REPEATS = 256, 2, 3
MOST, LIMIT_S = 20, 0.1
"""The most passes to measure, and the seconds after which girih stops.

It measures at least three passes, since short passes vary.
"""


def measure_dense_cost(
    data: Dataset, sparse: SparseSpec, dense: DenseSpec, ranks: TrainerGroup, examples: int = EXAMPLES
) -> DenseCost | None:
    """Runs a copy of the model forward and backward on the first examples in file order. Rows are zeros.

    All trainers call it and compute at the same time, as in training. All use the result of rank 0. Memory is the
    tensors that autograd saves, each storage once. Parameters and rows do not count, because they exist anyway. Time is
    the time of a fast pass, see :func:`_now`. A small and a large pass give a line, which separates the fixed cost of a
    pass from the cost of an example.

    Args:
        examples: number of examples in the larger pass.

    Returns:
        None if there are fewer than three examples.

    Raises:
        DataError: a row is not valid.
    """
    hosts = ranks.hosts()
    memory = memory_bytes(dense.device) / max(1, hosts.count(hosts[0]))
    more = _first_examples(data, examples)
    if more is None:
        return None
    few = cut(more, 0, FEW)
    with _copied(dense) as module:
        kept = _kept_bytes(module, dense, more, _zeros(sparse, more))
        ranks.barrier()
        (of_few, _), (of_more, busy) = (
            _seconds(module, dense, each, _zeros(sparse, each)) for each in (few, more)
        )
    example_s = max(0.0, of_more - of_few) / (more.num_examples - FEW)
    pass_s = max(0.0, of_few - FEW * example_s)
    measured = (kept / more.num_examples, memory, pass_s, example_s)
    return replace(DenseCost(*ranks.broadcast(measured)), busy_threads=ranks.broadcast(busy))


def count_dense_cost(
    data: Dataset, sparse: SparseSpec, dense: DenseSpec, facts: Facts, num_local: int
) -> DenseCost | None:
    """Returns the cost of the model for plans. Memory per example is counted, and times are nominal.

    See also :func:`measure_dense_cost`.

    Args:
        num_local: number of trainers that share this machine's memory.
    """
    batch = _first_examples(data, EXAMPLES)
    if batch is None:
        return None
    with _copied(dense) as module:
        kept = _kept_bytes(module, dense, batch, _zeros(sparse, batch))
    return DenseCost(
        bytes_per_example=kept / batch.num_examples,
        memory_bytes=memory_bytes(dense.device) / num_local,
        pass_s=facts.speeds.pass_s,
        example_s=facts.speeds.example_s(facts.model.num_parameters),
    )


def count_update(dense: DenseSpec, speeds: Speeds) -> DenseCost:
    """Returns the cost of the optimizer for plans.

    Its state is counted. The time is that of reading and writing the state at the nominal speed.
    """
    cost = with_update(DenseCost(0.0, host_memory_bytes()), dense, TrainerGroup())
    size = sum(each.nbytes for each in dense.module.parameters() if each.requires_grad)
    update_s = 2 * cost.parameter_copies * size / speeds.memory_bytes_per_s
    return replace(cost, update_s=update_s, busy_threads=1.0)


def with_update(cost: DenseCost, dense: DenseSpec, ranks: TrainerGroup) -> DenseCost:
    """Adds the measured cost of the optimizer.

    The measurement makes some steps on a copy of the parameters, with gradients of zero. All trainers call it and use
    the result of rank 0.
    """
    parameters = [
        nn.Parameter(each.detach().to(dense.device, copy=True))
        for each in dense.module.parameters()
        if each.requires_grad
    ]
    optimizer = made_by(dense.optimizer, parameters)
    if optimizer is None:
        return cost
    for each in parameters:
        each.grad = torch.zeros_like(each)
    seconds = []
    for _ in range(1 + REPEATS):  # the first step creates the state
        started = _now(dense.device)
        optimizer.step()
        seconds.append(_now(dense.device) - started)
    state = [each for of_one in optimizer.state.values() for each in of_one.values()]
    kept = sum(each.nbytes for each in state if isinstance(each, Tensor))
    size = sum(each.nbytes for each in parameters)
    counted = {"update_s": min(seconds[1:]), "parameter_copies": (2 * size + kept) / size}
    return replace(cost, **ranks.broadcast(counted))


def _first_examples(data: Dataset, count: int) -> Batch | None:
    """Returns the first examples in file order, or None if there are too few."""
    batch = next(iter(data.in_order().batches(0)), None)
    if batch is None or batch[0].num_examples <= FEW:
        return None
    return cut(batch[0], 0, min(count, batch[0].num_examples))


@contextmanager
def _copied(dense: DenseSpec) -> Iterator[nn.Module]:
    """Yields a copy of the model, and restores the random state afterwards.

    The caller may change the gradients and running moments of the copy.
    """
    devices = [dense.device] if dense.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield copy.deepcopy(dense.module).to(dense.device)


def _zeros(sparse: SparseSpec, batch: Batch) -> Embeddings:
    groups = sparse.groups()
    outputs = [np.zeros(output.shape_in(batch), np.float32) for group in groups for output in group.outputs]
    return Leaves(groups, outputs, sequence_bounds(groups, batch), train=True).embeddings()


def _kept_bytes(module: nn.Module, dense: DenseSpec, batch: Batch, embeddings: Embeddings) -> int:
    inputs, numeric = _inputs(dense, batch, embeddings)
    leaves = [block.values for block in (*inputs.blocks, *inputs.first_order)]
    leaves += [sequence.values for sequence in inputs.sequences.values()]
    there = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *leaves, numeric)}
    storages: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            storages[storage.data_ptr()] = storage.nbytes(), tensor  # the reference keeps the address in use
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), dense.arithmetic():
        logits = module(numeric, inputs)
    del logits
    return sum(size for size, _ in storages.values())


def _seconds(
    module: nn.Module, dense: DenseSpec, batch: Batch, embeddings: Embeddings
) -> tuple[float, float]:
    """Returns the first quartile of the seconds of passes, and the first quartile of their busy threads.

    Busy threads follow from processor time, so other processes have no effect.
    """
    inputs, numeric = _inputs(dense, batch, embeddings)
    passes_s: list[float] = []
    busy: list[float] = []
    while len(passes_s) < 1 + REPEATS or (sum(passes_s[1:]) < LIMIT_S and len(passes_s) < 1 + MOST):
        started, before = _now(dense.device), time.process_time()
        with dense.arithmetic():
            logits = module(numeric, inputs)
        if logits.requires_grad:
            logits.sum().backward()
        passes_s.append(_now(dense.device) - started)
        busy.append(time.process_time() - before)
    seconds, busy_s = (sorted(each[1:])[(len(each) - 1) // 4] for each in (passes_s, busy))
    return seconds, busy_s / max(seconds, 1e-9)


def _inputs(dense: DenseSpec, batch: Batch, embeddings: Embeddings) -> tuple[Embeddings, Tensor]:
    return to_device(embeddings, dense.device), torch.from_numpy(np.nan_to_num(batch.numeric)).to(
        dense.device
    )


def _now(device: torch.device) -> float:
    """Returns the wall-clock time for a GPU, and the processor time of this thread for a CPU.

    This thread takes part in the whole pass. The run's other processes start at the same time and import torch. So a
    pass took 2.4 times as long by wall clock.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


def memory_bytes(device: torch.device) -> float:
    """Returns the memory of this host, or of a GPU."""
    return float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory_bytes()


def host_memory_bytes() -> float:
    """Returns the memory of this host."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def host_bytes() -> float:
    """Returns the free memory of this host."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return host_memory_bytes()
