"""Measures what a model keeps of an example for its backward pass, and what memory there is for it."""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from girih.data import Dataset
from girih.data.batch import Batch
from girih.data.shares import cut
from girih.dense.halves.replica import to_device
from girih.dense.spec import DenseSpec
from girih.models.embeddings import Embeddings
from girih.planner.facts import Activations
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.pack import sequence_bounds
from girih.sparse.spec import SparseSpec

EXAMPLES = 256


def measure_activations(data: Dataset, sparse: SparseSpec, dense: DenseSpec, num_sharing: int) -> Activations:
    """Runs a copy of the model forward once, with rows of zeros, on the first examples in file order.

    What autograd saves is counted, each memory once, without parameters and rows, which are there anyway.

    Args:
        num_sharing: trainers that share the memory that is free.

    Raises:
        DataError: a bad row.
    """
    free = _free_bytes(dense.device) / num_sharing
    batch = next(iter(data.in_order().batches(0)), None)
    if batch is None or not batch[0].num_examples:
        return Activations(bytes_per_example=0.0, free_bytes=free)
    few = cut(batch[0], 0, min(EXAMPLES, batch[0].num_examples))
    kept = _kept_bytes(dense, few, _zeros(sparse, few))
    return Activations(bytes_per_example=kept / few.num_examples, free_bytes=free)


def _zeros(sparse: SparseSpec, batch: Batch) -> Embeddings:
    groups = sparse.groups()
    outputs = [np.zeros(output.shape_in(batch), np.float32) for group in groups for output in group.outputs]
    return Leaves(groups, outputs, sequence_bounds(groups, batch), train=True).embeddings()


def _kept_bytes(dense: DenseSpec, batch: Batch, embeddings: Embeddings) -> int:
    given = to_device(embeddings, dense.device)
    numeric = torch.from_numpy(np.nan_to_num(batch.numeric)).to(dense.device)
    devices = [dense.device] if dense.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        module = copy.deepcopy(dense.module).to(dense.device)  # whose running moments may move
        leaves = [block.values for block in (*given.blocks, *given.first_order)]
        leaves += [sequence.values for sequence in given.sequences.values()]
        there = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *leaves, numeric)}
        found: dict[int, tuple[int, Tensor]] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in there:
                found[storage.data_ptr()] = storage.nbytes(), tensor  # which keeps the address taken
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast(dense.device.type, torch.bfloat16, enabled=dense.precision == "bfloat16"),
        ):
            logits = module(numeric, given)
        del logits
    return sum(size for size, _ in found.values())


def _free_bytes(device: torch.device) -> float:
    """Memory that could be taken now."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
