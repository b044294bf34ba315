"""Nested state dicts as plain JSON beside a flat mapping of tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetensors.torch import load
from torch import Tensor

from girih.runs.sealed import refusing
from girih.store.snapshot.tensorfile import check_tensors

TENSOR, ITEMS = "$tensor", "$items"


def split(tree: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Returns the tree with tensors replaced by their names, and the tensors by name."""
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
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
    """The inverse of :func:`split`; tuples come back as lists."""
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
    """The tensors of a safetensors file by name.

    Raises:
        CheckpointError: see :func:`~girih.store.snapshot.tensorfile.check_tensors`.
    """
    check_tensors(content, where)
    with refusing(where, "use another checkpoint"):
        return load(content)


def check_dtypes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuses tensors that would be converted without a word.

    Raises:
        ValueError: another dtype than that of the expected tensor of the same name.
    """
    for name, own in expected.items():
        if name in tensors and tensors[name].dtype != own.dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, expected {own.dtype}")
