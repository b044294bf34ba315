"""Writes a whole checkpoint, or leaves no checkpoint.

Every process with shards writes its parts and reports them. Rank 0 checks that the parts cover all tables, and then
writes the manifest. Threads do this work while training continues. Segments of a log are written in the same way.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from safetensors.torch import load
from safetensors.torch import save as serialize
from torch import Tensor, nn

from girih.checkpoint.description import KEPT, ModelDescription
from girih.checkpoint.manifest import (
    DENSE,
    NAME,
    Manifest,
    PartFacts,
    Parts,
    check_coverage,
    check_parts,
    name_of,
    rows_of,
)
from girih.checkpoint.parts import PartReader, SparseSave
from girih.checkpoint.storage import Storage
from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data.normalization import NormalizationStats
from girih.errors import CheckpointError, GirihError, RoleError, StorageFullError
from girih.files.sealed import refusing
from girih.files.whole import disk_full
from girih.models.needs import needs_of
from girih.models.zoo import description_of, options_of
from girih.schema import Schema
from girih.store.snapshot.tensorfile import check_tensors

TENSOR, ITEMS = "$tensor", "$items"


def split(tree: object, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Returns a tree in which names replace tensors, and the tensors by name."""
    tensors: dict[str, Tensor] = {}

    def walk(node: object, path: str) -> object:
        if isinstance(node, Tensor):
            while path in tensors:  # keys "a.b" and "b" in "a", or 1 and "1"
                path += "'"
            tensors[path] = node.detach().cpu().contiguous().clone()
            return {TENSOR: path}
        if isinstance(node, Mapping):
            if all(isinstance(key, str) and key not in (TENSOR, ITEMS) for key in node):
                return {key: walk(item, f"{path}.{key}" if path else key) for key, item in node.items()}
            return {ITEMS: [[key, walk(item, f"{path}.{key}")] for key, item in node.items()]}
        if isinstance(node, list | tuple):
            return [walk(item, f"{path}.{index}") for index, item in enumerate(node)]
        return node

    return walk(tree, prefix), tensors


def join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverses :func:`split`, except that tuples become lists."""
    if isinstance(tree, Mapping):
        if TENSOR in tree:
            return tensors[tree[TENSOR]]
        if ITEMS in tree:
            return {key: join(item, tensors) for key, item in tree[ITEMS]}
        return {key: join(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    return tree


def tensors_in(content: bytes, where: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name.

    Raises:
        CheckpointError: see :func:`~girih.store.snapshot.tensorfile.check_tensors`.
    """
    check_tensors(content, where)
    with refusing(where, "use another checkpoint"):
        return load(content)


def check_dtypes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuses tensors whose dtype torch would convert silently.

    Raises:
        ValueError: a tensor has another dtype than the expected tensor of the same name.
    """
    for name, tensor in expected.items():
        if name in tensors and tensors[name].dtype != tensor.dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, expected {tensor.dtype}")


def describe_model(
    model: nn.Module, schema: Schema, options: TrainOptions, normalization: NormalizationStats | None
) -> ModelDescription:
    """Returns the description of a module and its training options."""
    recipe: dict[str, object] = {
        "model": description_of(model),
        "train": {name: getattr(options, name) for name in KEPT},
    }
    if recipe["model"] is None:
        recipe["options"] = options_of(model)
    return ModelDescription(
        schema=schema.to_dict(),
        fingerprint=schema.fingerprint(),
        needs={feature: tuple(sorted(kinds)) for feature, kinds in needs_of(model, schema).items()},
        recipe=recipe,
        normalization=None if normalization is None else normalization.to_dict(),
    )


PATIENCE_S = 1800.0
_MOST_PAUSE_S = 0.02


class SavedRows(Protocol):
    """The interface of a sparse half for checkpoints. All trainers call its methods together."""

    def begin_save(self, writer: Storage) -> SparseSave:
        """Begins to save the current state of all rows. The returned object writes it, while training continues."""

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows with the saved rows. The number of shards may differ from the number at the save.

        Args:
            step: the number of updates at the save.

        Raises:
            CheckpointError: rows are damaged, or have another layout. The message names the part.
        """


class DenseState(TypedDict):
    """The state of a dense half: state dicts of model and optimizer, and the name of the optimizer's class."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    optimizer_name: str


class SavedParameters(Protocol):
    """The interface of a dense half for checkpoints. All trainers call its methods together."""

    def state(self) -> DenseState:
        """Returns parameters and optimizer state."""

    def restore(self, state: DenseState) -> None:
        """Reverses :meth:`state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The state that a checkpoint keeps, taken between two steps.

    Attributes:
        step: batches seen.
        state: plain values and tensors: everything except rows, parameters and the model's description.
        sparse, dense: the halves, which have the rows and the parameters.
        plan: the plan of the run.
        random: the state of each trainer's random generators, by rank. Only the value on rank 0 is saved.
    """

    step: int
    model: ModelDescription
    state: Mapping[str, Any]
    sparse: SavedRows
    dense: SavedParameters
    plan: Mapping[str, Any] | None = None
    random: Sequence[Any] = ()


class CollectiveWrite:
    """Writes a checkpoint or a segment. Each trainer writes its parts, and rank 0 also writes the dense part.

    Trainers report their parts to rank 0 through the registry, so any thread may write.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        words: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._ranks, self._number, self._words = ranks, ranks.next_number(), words

    def write(
        self, place: Storage, rows: SparseSave, tensors: Mapping[str, Tensor], advice: str
    ) -> dict[str, PartFacts] | None:
        """Writes rows and tensors. Returns the facts of all parts on rank 0, which must then write the manifest.

        Args:
            advice: the end of the error message for a tensor with NaN.

        Raises:
            StorageFullError: the disk of a trainer is full. CheckpointError: parts are missing, or occur twice.
            RoleError: a process of the run ended.
        """
        try:
            with self._words():
                parts = dict(rows.write())
        except BaseException as error:
            if not self._ranks.first:
                reason = f"trainer {self._ranks.rank}: {error}"
                self._report_to_first({"error": reason, "full": isinstance(error, StorageFullError)})
            raise
        finally:
            rows.close()
        if not self._ranks.first:
            self._report_to_first({"parts": parts})
            return None
        for rank in range(1, self._ranks.size):
            theirs = self._parts_of(rank)
            for name in parts.keys() & theirs.keys():
                raise CheckpointError(f"{place}/{name}: written twice, by trainer {rank} and before it")
            parts |= theirs
        dense = serialize(dict(tensors))
        check_tensors(dense, f"{place}/{DENSE}", advice)
        with self._words():
            place.make()
            place.replace(DENSE, dense)
        check_coverage(parts, place.url)
        return {**parts, DENSE: {"bytes": len(dense), "crc32": {"": zlib.crc32(dense)}}}

    def _report_to_first(self, message: Mapping[str, object]) -> None:
        """Sends rank 0 the facts about the parts that this trainer wrote, or this trainer's error."""
        self._ranks.put(f"write/{self._number}/{self._ranks.rank}", json.dumps(message))

    def _parts_of(self, rank: int) -> Parts:
        """Waits for the facts about the parts that another trainer wrote.

        Raises:
            StorageFullError, GirihError: the trainer failed. RoleError: a process of the run ended.
        """
        key, until, pause = f"write/{self._number}/{rank}", time.monotonic() + PATIENCE_S, 0.001
        while (text := self._ranks.take(key)) is None:
            if self._ranks.lost.is_set():
                raise RoleError(f"trainer {rank} wrote no shards: a process of the run is gone")
            if time.monotonic() > until:
                raise GirihError(f"trainer {rank} wrote no shards for {PATIENCE_S:.0f} s; is its disk hung?")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)
        reported = json.loads(text)
        if "error" in reported:
            raise (StorageFullError if reported["full"] else GirihError)(reported["error"])
        return dict(reported["parts"])


class Save:
    """A checkpoint of one moment. All trainers begin it between two steps, and write it while training continues.

    The constructor copies parameters, data position and counters. The sparse half preserves the rows.

    Args:
        root: the storage in which the checkpoint gets the name ``step-…``. Only the value on rank 0 is used.

    Raises:
        StorageFullError: the disk is full. No partial checkpoint stays.
    """

    def __init__(self, root: Storage, content: Content, ranks: TrainerGroup | None = None) -> None:
        self._ranks = ranks or TrainerGroup()
        self._write = CollectiveWrite(self._ranks)
        self._root, self._name = root, name_of(content.step)
        self._fields, self._tensors = _begin(content, self._ranks)
        self._draft = root.draft(self._name)
        with self._removing():
            with _named_full(root):
                if self._ranks.first:
                    root.remove(self._draft.name, first=NAME)
                    self._draft.make()
                self._draft = Storage(self._ranks.broadcast(self._draft.absolute().url))
            self._rows = content.sparse.begin_save(self._draft)  # in this call, only an SSD tier can be full

    def write(self) -> Storage:
        """Writes the checkpoint ``root/step-…`` and returns its storage. Replaces a checkpoint with the same name.

        Raises:
            StorageFullError: the disk is full. No partial checkpoint stays.
            CheckpointError: parts are missing.
        """
        advice = "no checkpoint with it could be loaded: set it to a number"
        with self._removing(), _named_full(self._root):
            parts = self._write.write(self._draft, self._rows, self._tensors, advice)
            if parts is not None:
                self._complete(parts)
        return self._root / self._name

    def _complete(self, parts: Parts) -> None:
        try:
            check_parts(parts, self._draft)
        except CheckpointError as error:
            hint = "; where hosts share no directory, set checkpoint.dir to an address that all of them reach"
            raise CheckpointError(f"{str(error).partition(';')[0]}{hint}") from None
        Manifest(**self._fields, rows=rows_of(parts), parts=parts).write(self._draft)
        if self._draft.name != self._name:
            self._root.remove(self._name, first=NAME)
            self._root.publish(self._draft, self._name)

    @contextlib.contextmanager
    def _removing(self) -> Iterator[None]:
        """Removes half-written files after an error."""
        try:
            yield
        except Exception:
            if self._ranks.first:
                with contextlib.suppress(Exception):  # so that the first error is reported
                    self._root.remove(self._draft.name, first=NAME)
            raise


def save_manifest(root: Storage, content: Content, ranks: TrainerGroup | None = None) -> Storage:
    """Replaces only the manifest of ``root/step-…``. This checkpoint must have the current rows and parameters.

    Raises:
        StorageFullError: the disk is full. The old manifest stays.
    """
    ranks = ranks or TrainerGroup()
    place = root / name_of(content.step)
    fields, _ = _begin(content, ranks)
    if ranks.first:
        with _named_full(root):
            before = Manifest.read(place)
            Manifest(**fields, rows=before.rows, parts=before.parts).write(place)
    return place


def _begin(content: Content, ranks: TrainerGroup) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the manifest's fields without the parts, and copies of the tensors that these fields name."""
    whole = {"dense": content.dense.state(), "state": content.state, "random": list(content.random)}
    fields, tensors = split(whole if ranks.first else dict.fromkeys(whole))
    fields |= {"step": content.step, "plan": content.plan, **vars(content.model)}
    return fields, tensors


@contextlib.contextmanager
def _named_full(root: Storage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if disk_full(error, root.url) is not None:
            message = f"{root}: no space left for a checkpoint; free some, then --resume"
            raise StorageFullError(message) from None
        raise
