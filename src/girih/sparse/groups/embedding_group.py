"""The interface of embedding groups on any device.

Shapes: F features, N ids in the batch, U unique keys of a group, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.sparse.groups.group import Fill
from girih.sparse.groups.pack import Group


class ReadRows(Protocol):
    """The rows of one group for one batch. Each kind of group adds its own attributes."""

    @property
    def outputs(self) -> Sequence[NDArray[np.float32] | Tensor]:
        """The tensors of the group's outputs, on its device."""
        ...


class SummedGradients(Protocol):
    """The gradients of a group's keys. Each kind of group adds its own attributes."""

    @property
    def nonfinite_key(self) -> int | Tensor:
        """A key with a gradient that is not finite, or -1: an int, or int32[1] on the group's device."""
        ...


Keys = TypeVar("Keys")
Read = TypeVar("Read", bound=ReadRows)
Summed = TypeVar("Summed", bound=SummedGradients)
Array = TypeVar("Array", contravariant=True)


class EmbeddingGroup(Protocol[Keys, Read, Summed, Array]):
    """One embedding group over the shards of one process. Each device has its own implementation.

    Attributes:
        group: tables, features and outputs.
        device_type: the type of the torch device of the outputs, or None for arrays in host memory.
    """

    group: Group

    @property
    def device_type(self) -> str | None: ...

    def find(self, batch: Batch) -> Keys:
        """Returns the unique keys of a batch, for the other methods. They depend only on the batch's ids."""
        ...

    def fetch(self, keys: Keys) -> None:
        """Starts to read the rows of the next lookup from tiers below memory. Changes no result."""
        ...

    def lookup(self, batch: Batch, step: int, *, train: bool, keys: Keys | None = None) -> tuple[Read, Fill]:
        """Reads the rows of a batch. With ``train``, new keys get rows, and rows are marked as used.

        Args:
            keys: the result of :meth:`find`. None calls it now.

        Returns:
            The rows, with outputs that are still empty, and a function that fills the outputs in. Fill in all
            examples before you call another method of the group.
        """
        ...

    def gradients(self, read: Read, gradients: Sequence[Array | None], batch: Batch) -> Summed | None:
        """Returns the gradient of each unique key, or None if no output took part in the loss.

        Args:
            gradients: the gradient of each output, float32[·, D] on this group's device. None if the output took no
                part in the loss.
        """
        ...

    def apply(self, read: Read, gradients: Summed, step: int, lr_scale: float) -> None:
        """Updates the rows with their gradients."""
        ...

    def inverse(self, read: Read) -> NDArray[np.int32] | Tensor:
        """Returns int32[N], the key number of each of the group's ids: an array, or a tensor on the group's device.

        It serves to name the feature of a key with a gradient that is not finite.
        """
        ...

    def absent(self, read: Read) -> NDArray[np.bool_]:
        """Returns bool[·], by key number: True for keys without a row."""
        ...


AnyGroup = EmbeddingGroup[Any, Any, Any, Any]
"""A group on any device. A process may have groups on several devices."""
