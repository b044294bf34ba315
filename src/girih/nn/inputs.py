"""Ids as torch's loops hold them, checked and flattened: one run of ids, and the bounds of bags in it.

Shapes: B examples, F features, N ids, M ids of each bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.errors import ConfigError, nearest

Bounds = NDArray[np.int64]


class Flat(NamedTuple):
    """Bags one after the other, feature by feature: ids int64[N], offsets int64[F·B+1], weights float32[N] or None."""

    ids: Tensor
    offsets: Bounds
    weights: Tensor | None


def integers(ids: Any, name: str) -> Tensor:
    """A tensor of integers as int64 in host memory.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(f"{name}: {kind}, expected a tensor of int64 (or int32)")
    return ids.detach().cpu().long()


def flat(
    ids: Any, offsets: Any, weights: Any, *, name: str = "input", where: str = "", last_included: bool = False
) -> Flat:
    """Bags of one feature, in the forms that ``torch.nn.EmbeddingBag`` takes.

    Args:
        ids: called ``name`` in errors; [N] with ``offsets``, or [B, M].
        offsets: [B], where each bag begins; with ``last_included`` [B+1], the last of which is N.
        weights: of the shape of ``ids``, or None.
        where: begins errors.

    Raises:
        ConfigError: shapes or types that do not go together.
    """
    ids = integers(ids, f"{where}{name}")
    if ids.dim() == 2:
        if offsets is not None:
            raise ConfigError(f"{where}offsets: an input of two dimensions is bags already; drop offsets")
        bounds = np.arange(len(ids) + 1) * ids.shape[1]
    elif ids.dim() != 1:
        raise ConfigError(f"{where}{name}: {ids.dim()} dimensions, expected 1 (with offsets) or 2")
    elif offsets is None:
        raise ConfigError(f"{where}offsets: missing; an input of one dimension needs them (or give it two)")
    else:
        bounds = _bounds(offsets, len(ids), where, last_included=last_included)
    return Flat(ids.flatten(), bounds, _weights(weights, ids, where))


def packed(ids: Any, offsets: Any, weights: Any, num_features: int) -> Flat:
    """Bags of all features in one run of ids, feature by feature: [N], [F·B+1], and [N] or None.

    Raises:
        ConfigError: shapes or types that do not go together.
    """
    if offsets is None:
        if hasattr(ids, "offsets_or_none"):  # a KeyedJaggedTensor of TorchRec
            raise ConfigError(
                f"ids: a {type(ids).__name__}: give ids.values() and ids.offsets(), its keys in the order of features"
            )
        raise ConfigError(
            "offsets: missing; give ids[N] and offsets[F·B+1] of all features, or a dict of name: (ids, offsets)"
        )
    ids = integers(ids, "ids")
    if ids.dim() != 1:
        raise ConfigError(
            f"ids: {ids.dim()} dimensions, expected 1: those of all features, one after the other"
        )
    bounds = _bounds(offsets, len(ids), "", last_included=True)
    if (len(bounds) - 1) % num_features:
        raise ConfigError(
            f"offsets: {len(bounds)}, expected F·B+1: one for each of {num_features} features of each example, and the end"
        )
    return Flat(ids, bounds, _weights(weights, ids, ""))


def joined(given: Mapping[str, Any], weights: Any, names: Sequence[str], *, last_included: bool) -> Flat:
    """Bags of all features, given by name: (ids, offsets) as :func:`flat` takes them, or ids[B, M].

    Args:
        weights: by name, or None; those of a feature that is left out are 1.

    Raises:
        ConfigError: features that are missing or unknown, shapes or types that do not go together.
    """
    if not isinstance(weights, Mapping | None):
        raise ConfigError("per_sample_weights: expected a dict of name: float32, as ids are one")
    weights = weights or {}
    for what, names_given in (("ids", given), ("per_sample_weights", weights)):
        for name in names_given:
            if name not in names:
                raise ConfigError(f"{what}: unknown feature {name!r}{nearest(name, names)}")
    parts: list[Flat] = []
    for name in names:
        if name not in given:
            raise ConfigError(f"ids: feature {name!r} is missing; expected {', '.join(map(repr, names))}")
        ids, offsets = given[name] if isinstance(given[name], tuple | list) else (given[name], None)
        where = f"feature {name!r}: "
        own = flat(ids, offsets, weights.get(name), name="ids", where=where, last_included=last_included)
        if parts and len(own.offsets) != len(parts[0].offsets):
            raise ConfigError(
                f"{where}{len(own.offsets) - 1} bags, but feature {names[0]!r} has {len(parts[0].offsets) - 1};"
                " expected one for each example"
            )
        parts.append(own)
    ends = np.cumsum([0, *(len(part.ids) for part in parts)])
    bounds = [part.offsets[:-1] + first for part, first in zip(parts, ends[:-1], strict=True)]
    all_weights = None
    if weights:
        all_weights = torch.cat([torch.ones(len(p.ids)) if p.weights is None else p.weights for p in parts])
    return Flat(torch.cat([part.ids for part in parts]), np.concatenate([*bounds, ends[-1:]]), all_weights)


def without(absent: int, given: Flat) -> Flat:
    """The same bags without one id."""
    kept = given.ids != absent
    before = np.concatenate([[0], np.cumsum(kept.numpy())])
    return Flat(
        given.ids[kept], before[given.offsets], None if given.weights is None else given.weights[kept]
    )


def _bounds(offsets: Any, num_ids: int, where: str, *, last_included: bool) -> Bounds:
    """The begin of each bag, and the last one's end."""
    offsets = integers(offsets, f"{where}offsets")
    if offsets.dim() != 1:
        raise ConfigError(f"{where}offsets: {offsets.dim()} dimensions, expected 1")
    bounds: Bounds = offsets.numpy() if last_included else np.append(offsets.numpy(), num_ids)
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != num_ids or (bounds[1:] < bounds[:-1]).any():
        raise ConfigError(
            f"{where}offsets: {bounds.tolist()[:8]}…: expected to rise from 0 to the {num_ids} ids"
        )
    return bounds


def _weights(weights: Any, ids: Tensor, where: str) -> Tensor | None:
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or weights.shape != ids.shape:
        got = f"shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ConfigError(f"{where}per_sample_weights: {got}, expected float32 of shape {tuple(ids.shape)}")
    flattened: Tensor = weights.cpu().flatten().float()
    return flattened
