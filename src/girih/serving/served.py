"""One version of a model as a server has it: rows in mapped files, a dense half, and all that turns a batch into predictions.

A server answers each request by one :class:`Served` from begin to end, and moves to another version by putting another one in its
place (:class:`ServedModel`): an attribute is set at once or not at all.

Shapes: B examples, F categorical and sequence features, T labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.checkpoint.recipe import train_options
from girih.checkpoint.save import check_dtypes, tensors_in
from girih.data import Batch, NormalizationStats
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.errors import CheckpointError
from girih.files.sealed import open_file, refusing
from girih.hierarchical.graph.straight import FlatForward, flatten_module
from girih.kernels.cpu import ahead
from girih.models.embeddings import Embeddings
from girih.models.loss import probabilities
from girih.models.needs import check_needs, check_same_needs
from girih.models.zoo import from_recipe
from girih.schema import Schema
from girih.schema import Sequence as SequenceFeature
from girih.serving.dense_graph import net_of
from girih.serving.signature import AGAIN, NAME, Signature, check_file, inputs_of, outputs_of
from girih.sparse.groups.leaves import example_for
from girih.sparse.groups.pack import Group, served_groups
from girih.sparse.halves.mapped import MappedSparse
from girih.store.mapped import MappedFile, Stack
from girih.telemetry.stats import Stats
from girih.training.specs import dense_spec

_EXAMPLES = 16
_LONGEST = 4


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The version of a model that answers.

    Attributes:
        step: steps of training in it. number: of the last published segment in it, 0 for an export as it is.
    """

    step: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.step}.{self.number}" if self.number else str(self.step)


class Served:
    """One version of a model. One thread at a time may use it; stacks, and the dense half, may be shared by several versions.

    Args:
        groups: of tables. stacks: the rows of each, newest files first.
        spec: of the dense half. dense: that half, where there is one already; else it is made.
        normalization: of numeric features. schema: of the model. version: what answers name.
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
        """Predictions, float32[B, T], as ``girih predict`` gives them.

        Args:
            batch: at least one example, its numbers not standardized yet.
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
        """Another version of the same model; this one stays as it is.

        Args:
            files: those of each group's stack, newest first; files that this one has may be among them.
            parameters: of the dense half, all of them by name; None keeps those that are there.
            normalization: None keeps this one's.

        Raises:
            CheckpointError: rows or parameters of another model.
        """
        stacks = [Stack(group.spec, own) for group, own in zip(self.groups, files, strict=True)]
        spec, dense = self.spec, self.dense
        if parameters is not None:
            spec = replace(spec, module=filled(copy.deepcopy(spec.module), parameters, version))
            dense = ServedNet(spec, dense.flat_forward)
        kept = self.normalization if normalization is None else normalization
        return Served(self.groups, stacks, spec, kept, self.schema, version, dense)


class ServedModel:
    """A named model and the version of it that answers now.

    Attributes:
        name: as clients ask for it. signature: of its export.
        current: None until there is one; whoever answers a request reads it once.
    """

    def __init__(self, name: str, signature: Signature, current: Served | None = None) -> None:
        self.name, self.signature, self.current = name, signature, current


def open_served(directory: Path, *, verify: bool = True) -> tuple[Signature, Served]:
    """The model in an exported directory, ready to answer.

    Args:
        verify: compares the checksum of every file, which reads all of them.

    Raises:
        MissingFileError: no export, or a file of it is gone. CheckpointError: damaged, or of another format.
    """
    signature = Signature.read(directory)
    ahead.make_ready(ahead.serving())
    with refusing(directory / NAME, AGAIN):
        schema = Schema.from_dict(signature.schema, str(directory))
        described = schema.fingerprint(), inputs_of(schema), outputs_of(schema)
        if described != (signature.fingerprint, signature.inputs, signature.outputs):
            raise ValueError("its fingerprint, inputs or outputs are not those of its schema")
        normalization = NormalizationStats.empty(schema)
        if signature.normalization is not None:
            normalization = NormalizationStats.from_dict(signature.normalization, schema)
        options = replace(train_options(signature.recipe["train"]), device="cpu")
        groups = served_groups(schema, check_needs(signature.needs, schema, "its needs"), options.seed)
        found = [list(rows.tables) for rows in signature.rows]
        if found != [[table.name for table in group.spec.tables] for group in groups]:
            raise CheckpointError(
                f"{directory}: its tables {found} are packed otherwise than this girih packs them; {AGAIN}"
            )
        for name in signature.dense.files if verify else ():
            check_file(directory, name, signature.files)
        module = _module(directory, signature, schema, groups)
        if signature.recipe["model"] is not None:
            check_same_needs(module, signature.needs, schema)
        stacks = []
        for group, rows in zip(groups, signature.rows, strict=True):
            facts = signature.files[rows.file] if verify else None
            stacks.append(Stack(group.spec, [MappedFile(directory / rows.file, facts)]))
        # parameters stay such as have gradients: torch multiplies others otherwise, and predictions would differ in their last bits
        spec = dense_spec(module, schema, options, torch.optim.SGD, Stats())
        return signature, Served(groups, stacks, spec, normalization, schema, ModelVersion(signature.step))


def _module(directory: Path, signature: Signature, schema: Schema, groups: Sequence[Group]) -> nn.Module:
    """The net with its parameters: made from the recipe, or from the operators of a user's class."""
    parameters = parameters_in(directory / signature.dense.parameters)
    described, program = signature.recipe["model"], signature.dense.program
    if described is not None:
        return filled(from_recipe(described, schema, parameters, directory), parameters, directory)
    if program is None:
        raise CheckpointError(
            f"{directory}: neither a recipe nor a program of its net; export the model again"
        )
    path, example = directory / program, example_for(schema, groups, train=False)
    with open_file(path) as file:
        return net_of(file.read(), parameters, example, len(schema.labels.names), path)


def parameters_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        MissingFileError: it is gone. CheckpointError: damaged.
    """
    with open_file(path, path.parent, AGAIN) as file:
        return tensors_in(file.read(), str(path))


def filled(module: nn.Module, parameters: Mapping[str, Tensor], where: object) -> nn.Module:
    """The module with these parameters and buffers.

    Raises:
        CheckpointError: they are another model's.
    """
    with refusing(where, AGAIN, fault="parameters of another model"):
        check_dtypes(parameters, module.state_dict())
        module.load_state_dict(dict(parameters))
    return module


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
        if isinstance(feature, SequenceFeature):
            lengths[place] = rng.integers(1, _LONGEST + 1, _EXAMPLES)
    return Batch(
        ids=rng.integers(0, 2, int(lengths.sum())),  # a domain, say, has no others
        offsets=np.concatenate([[0], lengths.reshape(-1).cumsum()]).astype(np.int32),
        numeric=rng.normal(size=(_EXAMPLES, len(schema.numeric))).astype(np.float32),
        labels=np.empty((_EXAMPLES, 0), np.float32),
    )
