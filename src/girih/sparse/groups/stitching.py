"""All outputs of a group as one kernel call takes them (Shuffle & Stitch, PICASSO §III-B).

Shapes: O passes, P features of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.sparse.groups.pack import GroupOutput


@dataclass(frozen=True)
class Stitching:
    """The outputs of a group, described for ``pool.stitch``.

    Attributes:
        served: the outputs of each pass: see :func:`~girih.sparse.groups.partition.passes`.
        described: its arguments ``passes``, ``features`` and ``modes``.
    """

    served: Sequence[tuple[int, ...]]
    described: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]

    @classmethod
    def of(cls, outputs: Sequence[GroupOutput], served: Sequence[tuple[int, ...]]) -> Stitching:
        """Those of some outputs."""
        first = [outputs[numbers[0]] for numbers in served]
        ends = np.cumsum([len(output.features) for output in first])
        passes = [
            [
                end - len(output.features),
                end,
                output.first_column,
                output.segment.dim,
                sum(outputs[number].segment.dim for number in numbers[1:]),
                output.whole,
            ]
            for output, end, numbers in zip(first, ends.tolist(), served, strict=True)
        ]
        features = np.concatenate([output.features for output in first])
        modes = np.concatenate([output.modes for output in first])
        return cls(served, (np.array(passes, np.int64), features, modes))

    def targets(self, tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.int64]:
        """int64[O, 2], the addresses of the tensors of each pass; 0 where it has one alone."""
        found = [[tensors[number].ctypes.data for number in numbers] for numbers in self.served]
        return np.array([[*addresses, 0][:2] for addresses in found], np.int64)

    def scratch(self) -> NDArray[np.int64]:
        """Memory for a thread: a number for each feature of a pass."""
        return np.empty(len(self.described[1]), np.int64)
