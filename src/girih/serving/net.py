"""The dense half of a server: a replica that predicts alone.

Shapes: B examples, F categorical and sequence features, T labels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from girih.data import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.hierarchical.graph.straight import FlatForward, flatten_module
from girih.models.embeddings import Embeddings
from girih.schema import Schema, Sequence

_EXAMPLES = 16
_LONGEST = 4


class ServedNet(Replica):
    """A replica whose module is called by straight-line code, where there is such.

    Args:
        by: of a module like this one; None has the module called as it is.
    """

    def __init__(self, spec: DenseSpec, by: FlatForward | None = None) -> None:
        super().__init__(spec)
        self.flat_forward = by
        self._set_mode(False)

    def outputs(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """See :meth:`Replica.outputs`."""
        if self.flat_forward is None:
            return super().outputs(batch, embeddings)
        with torch.inference_mode():
            return self.flat_forward(self.module, torch.from_numpy(batch.numeric), embeddings)

    def flatten(self, spec: DenseSpec, schema: Schema, read: Callable[[Batch], Embeddings]) -> None:
        """Finds straight-line code for the module.

        Args:
            spec: that of this half. read: reads the rows of a batch.
        """
        batch = example_batch(schema)
        self.flat_forward = flatten_module(spec, torch.from_numpy(batch.numeric), read(batch))


def example_batch(schema: Schema) -> Batch:
    """A few examples: one id for each feature, and lists of several lengths for sequences."""
    rng = np.random.default_rng(0)
    lengths = np.ones((len(schema.sparse), _EXAMPLES), np.int64)
    for place, feature in enumerate(schema.sparse):
        if isinstance(feature, Sequence):
            lengths[place] = rng.integers(1, _LONGEST + 1, _EXAMPLES)
    return Batch(
        ids=rng.integers(0, 2, int(lengths.sum())),  # a domain, say, has no others
        offsets=np.concatenate([[0], lengths.reshape(-1).cumsum()]).astype(np.int32),
        numeric=rng.normal(size=(_EXAMPLES, len(schema.numeric))).astype(np.float32),
        labels=np.empty((_EXAMPLES, 0), np.float32),
    )
