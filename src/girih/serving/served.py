"""One version of a model in a server: rows in mapped files, a dense half, and its predictions.

One :class:`Served` answers a whole request. To change the version, the server replaces this object.

Shapes: B examples, F categorical and sequence features, T labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.checkpoint.save import check_dtypes
from girih.data import Batch, NormalizationStats
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.files.sealed import refusing
from girih.hierarchical.graph.straight import FlatForward, flatten_module
from girih.models.embeddings import Embeddings
from girih.models.loss import probabilities
from girih.schema import Schema
from girih.schema import Sequence as SequenceFeature
from girih.serving.signature import AGAIN
from girih.sparse.groups.pack import Group
from girih.sparse.halves.mapped import MappedSparse
from girih.store.mapped import MappedFile, Stack

_EXAMPLES = 16
_LONGEST = 4


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The version of a model that answers.

    Attributes:
        step: number of training steps.
        number: its last published segment, or 0 for an export.
    """

    step: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.step}.{self.number}" if self.number else str(self.step)


class Served:
    """One version of a model. One thread at a time may use it. Versions may share stacks and the dense half.

    Args:
        groups: the embedding groups.
        stacks: the files with the rows of each group, newest first.
        spec: describes the dense half.
        dense: an existing dense half. By default, a new one is made.
        normalization: mean and deviation of numeric features.
        schema: the schema of the model.
        version: the version that answers name.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        stacks: Sequence[Stack],
        spec: DenseSpec,
        normalization: NormalizationStats,
        schema: Schema,
        version: ModelVersion,
        dense: ServedNet | None = None,
    ) -> None:
        self.groups, self.stacks = tuple(groups), tuple(stacks)
        self.normalization, self.schema, self.version = normalization, schema, version
        self._sparse = MappedSparse(groups, stacks)
        self.spec, self.dense = spec, dense or ServedNet(spec)
        if dense is None:
            self.dense.flatten(spec, schema, lambda batch: self._sparse.peek(batch).wait())

    def predict(self, batch: Batch) -> NDArray[np.float32]:
        """Returns predictions, float32[B, T], equal to those of ``girih predict``.

        Args:
            batch: at least one example, with numbers that are not yet standardized.
        """
        batch = self.normalization.apply(batch)
        logits = self.dense.predict(batch, self._sparse.peek(batch).wait())
        return probabilities(logits.numpy(), self.schema.labels.losses)

    def with_files(
        self,
        files: Sequence[Sequence[MappedFile]],
        version: ModelVersion,
        parameters: Mapping[str, Tensor] | None = None,
        normalization: NormalizationStats | None = None,
    ) -> Served:
        """Returns another version of the same model. This version does not change.

        Args:
            files: the files of each group's stack, newest first. They may include files of this version.
            parameters: all parameters of the dense half by name; None keeps the current ones.
            normalization: mean and deviation of numeric features. None keeps the current values.

        Raises:
            CheckpointError: rows or parameters do not belong to this model.
        """
        stacks = [Stack(group.spec, own) for group, own in zip(self.groups, files, strict=True)]
        spec, dense = self.spec, self.dense
        if parameters is not None:
            spec = replace(spec, module=filled(copy.deepcopy(spec.module), parameters, version))
            dense = ServedNet(spec, dense.flat_forward)
        kept = self.normalization if normalization is None else normalization
        return Served(self.groups, stacks, spec, kept, self.schema, version, dense)


def filled(module: nn.Module, parameters: Mapping[str, Tensor], where: object) -> nn.Module:
    """Returns the module with these parameters and buffers.

    Raises:
        CheckpointError: they do not belong to this module.
    """
    with refusing(where, AGAIN, fault="parameters of another model"):
        check_dtypes(parameters, module.state_dict())
        module.load_state_dict(dict(parameters))
    return module


class ServedNet(Replica):
    """A replica that runs its module as straight-line code, without Python's control flow, if possible.

    Args:
        by: the straight-line code of an equal module. None calls the module itself.
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
            spec: describes this half. read: reads the rows of a batch.
        """
        batch = example_batch(schema)
        self.flat_forward = flatten_module(spec, torch.from_numpy(batch.numeric), read(batch))


def example_batch(schema: Schema) -> Batch:
    """Returns a few examples: one id for each feature, and lists of several lengths for sequences."""
    rng = np.random.default_rng(0)
    lengths = np.ones((len(schema.sparse), _EXAMPLES), np.int64)
    for place, feature in enumerate(schema.sparse):
        if isinstance(feature, SequenceFeature):
            lengths[place] = rng.integers(1, _LONGEST + 1, _EXAMPLES)
    return Batch(
        ids=rng.integers(0, 2, int(lengths.sum())),  # the ids that every domain has
        offsets=np.concatenate([[0], lengths.reshape(-1).cumsum()]).astype(np.int32),
        numeric=rng.normal(size=(_EXAMPLES, len(schema.numeric))).astype(np.float32),
        labels=np.empty((_EXAMPLES, 0), np.float32),
    )
