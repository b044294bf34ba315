"""An example batch as a model would get it, before there are data: for tracing (HT §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from girih.data.batch import Batch
from girih.models.embeddings import Embeddings
from girih.schema import Schema
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.pack import Group, sequence_bounds
from girih.sparse.spec import SparseSpec

EXAMPLES = 8
MOST_IDS = 3
SCALE = 0.01


def example_of(spec: SparseSpec) -> tuple[Tensor, Embeddings]:
    """An example batch packed as those of a run; see :func:`example_for`."""
    return example_for(spec.schema, spec.groups())


def example_for(schema: Schema, groups: Sequence[Group], *, train: bool = True) -> tuple[Tensor, Embeddings]:
    """Numeric inputs float32[B, X], of zeros, and embeddings at random, packed in groups; ``train`` has them collect gradients.

    Sequences have one to three ids.
    """
    random = np.random.default_rng(0)
    lengths = np.array(
        [1 + example % MOST_IDS for _ in schema.sparse for example in range(EXAMPLES)], np.int64
    )
    batch = Batch(
        ids=np.zeros(int(lengths.sum()), np.int64),
        offsets=np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
        numeric=np.zeros((EXAMPLES, len(schema.numeric)), np.float32),
        labels=np.zeros((EXAMPLES, len(schema.labels.names)), np.float32),
    )
    shapes = [output.shape_in(batch) for group in groups for output in group.outputs]
    outputs = [random.normal(scale=SCALE, size=shape).astype(np.float32) for shape in shapes]
    leaves = Leaves(groups, outputs, sequence_bounds(groups, batch), train=train)
    return torch.from_numpy(batch.numeric), leaves.embeddings()
