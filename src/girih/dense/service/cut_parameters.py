"""Parameters that servers hold in parts, and as the whole model has them: for checkpoints, which know no splits (HT §4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from girih.dense.graph import CutParameter

Entry = tuple[str, str | None, Any]
"""Name of a parameter or buffer; None, or a key of the optimizer's state; a tensor or a plain value."""


class CutParameters:
    """Cuts what belongs to whole parameters, and joins what belongs to parts.

    Optimizer state of a parameter's shape is cut as the parameter is; other state, as a count of steps, is each part's.
    """

    def __init__(self, splits: Iterable[CutParameter]) -> None:
        self._splits = {split.parameter: split for split in splits}
        self._whole_of = {part: split for split in self._splits.values() for part in split.parts}

    def cut(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries of whole parameters as those that servers hold."""
        found: list[Entry] = []
        for name, key, value in entries:
            split = self._splits.get(name)
            if split is None:
                found.append((name, key, value))
                continue
            sizes = list(split.sizes)
            values: Sequence[Any] = [value] * len(sizes)
            if isinstance(value, Tensor) and value.dim() > split.dim and value.shape[split.dim] == sum(sizes):
                values = value.split(sizes, split.dim)  # type: ignore[no-untyped-call]
            found += [(part, key, each) for part, each in zip(split.parts, values, strict=True)]
        return found

    def joined(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """The inverse of :meth:`cut`; what parts have each for itself is the first one's."""
        waiting: dict[tuple[str, str | None], dict[str, Any]] = {}
        for name, key, value in entries:
            split = self._whole_of.get(name)
            if split is None:
                yield name, key, value
                continue
            parts = waiting.setdefault((split.parameter, key), {})
            parts[name] = value
            if len(parts) == len(split.parts):
                values = [parts[part] for part in split.parts]
                whole = isinstance(value, Tensor) and value.dim() > split.dim
                yield split.parameter, key, torch.cat(values, split.dim) if whole else values[0]
