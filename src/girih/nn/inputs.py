"""Checks ids in the forms of torch's loops, and flattens them to one run of ids with the bounds of its bags.

Ids and offsets may be on a GPU, and stay there. The host then asks for four numbers per feature about the offsets, by
one small copy, and waits for it. For an input of two dimensions, the shape gives these numbers. Arguments ``device``
are the device of the rows. Tensors move from a GPU to the host if the rows are there, and from the host to a GPU
through pinned memory.

Shapes: B examples, F features, N ids, M ids of each bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError, nearest
from girih.kernels.cpu.arrays import I64

_FIRST, _LAST, _LEAST, _MOST = range(4)


@dataclass(frozen=True)
class _IdRun:
    """Ids of some features.

    Attributes:
        ids, offsets, weights: int64[N], int64[F·B+1], float32[N] or None, on one device.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None

    def to(self, device: torch.device) -> Self:
        """Returns the same on a device."""
        weights = None if self.weights is None else moved(self.weights, device)
        return replace(
            self, ids=moved(self.ids, device), offsets=moved(self.offsets, device), weights=weights
        )


@dataclass(frozen=True)
class Bags(_IdRun):
    """Consecutive bags, feature by feature.

    Attributes:
        num_examples: B.
        bounds: int64[F+1], the start of each feature's ids, and the end of the last.
        longest: int64[F], ids of the longest bag of each feature, or an upper bound.
    """

    num_examples: int
    bounds: I64
    longest: I64


@dataclass(frozen=True)
class _FeatureBags(_IdRun):
    """Bags of some features, as received.

    Attributes:
        extents: int64[4, F]: start and end of each feature's bags, and the ids of its shortest and longest bag; valid
            only after :func:`_settled` has checked them.
        where: the beginning of errors.
    """

    extents: Tensor
    where: str


def integers(ids: object, name: str) -> Tensor:
    """Returns a tensor of integers.

    Raises:
        ConfigError: the value is something else.
    """
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(f"{name}: {kind}, expected a tensor of int64 (or int32)")
    return ids.detach()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to a device. The host does not wait for a copy to a GPU."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu" or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def flat(
    ids: object, offsets: object, weights: object, *, device: torch.device, last_included: bool = False
) -> Bags:
    """Returns the bags of one feature, from the forms that ``torch.nn.EmbeddingBag`` takes.

    Args:
        ids: [N] with ``offsets``, or [B, M].
        offsets: [B], the start of each bag; with ``last_included`` [B+1], which ends with N.
        weights: of the shape of ``ids``, or None.

    Raises:
        ConfigError: shapes or types that do not fit together.
    """
    part = _part(ids, offsets, weights, "input", "", last_included)
    return _settled(_together([part], device))


def uniform(ids: Tensor, num_bags: int, bag_size: int) -> Bags:
    """Returns bags of equal size, of one feature: int64[B·M]."""
    return _settled([_uniform(ids, num_bags, bag_size, None, "")])


def packed(ids: object, offsets: object, weights: object, num_features: int, *, device: torch.device) -> Bags:
    """Returns the bags of all features from one run of ids, feature by feature: [N], [F·B+1], and [N] or None.

    Raises:
        ConfigError: shapes or types that do not fit together.
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
    even = (len(bounds) - 1) % num_features == 0
    extents = _measure_extents(bounds, num_features if even else 1)
    bags = _settled(_together([_FeatureBags(ids, bounds, _weights(weights, ids, ""), extents, "")], device))
    if not even:
        raise ConfigError(
            f"offsets: received {len(bounds)}, expected F·B+1, which is {num_features}·B+1 for these {num_features} features: one for"
            " each feature of each example, and the end"
        )
    return bags


def joined(
    inputs: Mapping[str, object],
    weights: object,
    names: Sequence[str],
    *,
    device: torch.device,
    last_included: bool,
) -> Bags:
    """Returns the bags of all features, received by name: (ids, offsets) as in :func:`flat`, or ids[B, M].

    Args:
        weights: by name, or None; a feature that is left out has weights of 1.

    Raises:
        ConfigError: features that are missing or unknown; shapes or types that do not fit together.
    """
    if not isinstance(weights, Mapping | None):
        raise ConfigError("per_sample_weights: expected a dict of name: float32, because ids are a dict")
    weights = weights or {}
    for what, names_given in (("ids", inputs), ("per_sample_weights", weights)):
        for name in names_given:
            if name not in names:
                raise ConfigError(f"{what}: unknown feature {name!r}{nearest(name, names)}")
    parts: list[_FeatureBags] = []
    for name in names:
        if name not in inputs:
            raise ConfigError(f"ids: feature {name!r} is missing; expected {', '.join(map(repr, names))}")
        value = inputs[name]
        value = value if isinstance(value, tuple | list) else (value, None)
        if len(value) != 2:
            raise ConfigError(
                f"feature {name!r}: received {len(value)} values, expected (ids, offsets), or ids of two dimensions"
            )
        ids, offsets = value
        part = _part(ids, offsets, weights.get(name), "ids", f"feature {name!r}: ", last_included)
        if parts and len(part.offsets) != len(parts[0].offsets):
            raise ConfigError(
                f"{part.where}{len(part.offsets) - 1} bags, but feature {names[0]!r} has {len(parts[0].offsets) - 1};"
                " expected one for each example"
            )
        parts.append(part)
    return _settled(_together(parts, device), weighted=bool(weights))


def without(absent: int, bags: Bags) -> Bags:
    """Returns the same bags of one feature without one id. On a GPU, the host waits for the number of remaining ids."""
    kept = bags.ids != absent
    before = torch.zeros(len(kept) + 1, dtype=torch.int64, device=kept.device)
    torch.cumsum(kept, 0, out=before[1:])
    ids = bags.ids[kept]
    weights = None if bags.weights is None else bags.weights[kept]
    return replace(
        bags, ids=ids, offsets=before[bags.offsets], weights=weights, bounds=np.array([0, len(ids)])
    )


def _part(
    ids: object, offsets: object, weights: object, name: str, where: str, last_included: bool
) -> _FeatureBags:
    ids = integers(ids, f"{where}{name}")
    if ids.dim() == 2:
        if offsets is not None:
            raise ConfigError(f"{where}offsets: an input of two dimensions is bags already; drop offsets")
        num_bags, bag_size = ids.shape
        return _uniform(ids.flatten(), num_bags, bag_size, _weights(weights, ids, where), where)
    if ids.dim() != 1:
        raise ConfigError(f"{where}{name}: {ids.dim()} dimensions, expected 1 (with offsets) or 2")
    if offsets is None:
        raise ConfigError(f"{where}offsets: missing; an input of one dimension needs them (or give it two)")
    bounds = _bounds(offsets, len(ids), where, last_included=last_included)
    return _FeatureBags(ids, bounds, _weights(weights, ids, where), _measure_extents(bounds, 1), where)


def _uniform(ids: Tensor, num_bags: int, bag_size: int, weights: Tensor | None, where: str) -> _FeatureBags:
    most = bag_size if num_bags else 0
    extents = torch.tensor([[0], [len(ids)], [most], [most]])
    offsets = torch.arange(num_bags + 1, device=ids.device) * bag_size
    return _FeatureBags(ids, offsets, weights, extents, where)


def _bounds(offsets: object, num_ids: int, where: str, *, last_included: bool) -> Tensor:
    """Returns the start of each bag, and the end of the last, on the device of ``offsets``."""
    bounds = integers(offsets, f"{where}offsets").long()
    if bounds.dim() != 1:
        raise ConfigError(f"{where}offsets: {bounds.dim()} dimensions, expected 1")
    if not last_included:
        bounds = torch.cat([bounds, bounds.new_full((1,), num_ids)])
    if len(bounds) == 0:
        raise _falling(bounds, num_ids, where)
    return bounds


def _measure_extents(bounds: Tensor, num_features: int) -> Tensor:
    """Computes the extents of :class:`_FeatureBags`, on the device of the bounds."""
    size = (len(bounds) - 1) // num_features
    if size == 0:
        ends = bounds[:1].expand(num_features)
        return torch.stack([ends, ends, torch.zeros_like(ends), torch.zeros_like(ends)])
    least, most = torch.aminmax(bounds.diff().view(num_features, size), dim=1)
    return torch.stack([bounds[:-1:size], bounds[size::size], least, most])


def _together(parts: list[_FeatureBags], device: torch.device) -> list[_FeatureBags]:
    """Moves parts to one device: the host if all of them are there, else the device of the rows."""
    tensors = [each for part in parts for each in (part.ids, part.offsets, part.weights) if each is not None]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return parts
    return [part.to(device) for part in parts]


def _settled(parts: list[_FeatureBags], *, weighted: bool = False) -> Bags:
    """Joins all parts into one run, and checks it. Waits once for a GPU if offsets are there.

    Args:
        weighted: ids of parts without weights get the weight 1.

    Raises:
        ConfigError: offsets that do not rise from 0 to the number of ids.
    """
    extents = _copy_to_host([part.extents for part in parts])
    for part, extent in zip(parts, extents, strict=True):
        n = len(part.ids)
        rises = extent[_FIRST, 0] == 0 and extent[_LAST, -1] == n and extent[_LEAST].min() >= 0
        if not rises or extent[_MOST].max() > n:  # differences that overflowed are, too
            raise _falling(part.offsets, n, part.where)
    first, *others = parts
    ids, offsets, weights = first.ids, first.offsets, first.weights
    ends = np.cumsum([0, *(len(part.ids) for part in parts)])
    if others:
        ids = torch.cat([part.ids for part in parts])
        begins = [part.offsets[:-1] + int(end) for part, end in zip(parts, ends, strict=False)]
        offsets = torch.cat([*begins, begins[0].new_full((1,), len(ids))])
    if others and weighted:
        ones = (torch.ones(len(part.ids), device=ids.device) for part in parts)
        weights = torch.cat(
            [one if part.weights is None else part.weights for part, one in zip(parts, ones, strict=True)]
        )
    firsts = [extent[_FIRST] + end for extent, end in zip(extents, ends, strict=False)]
    return Bags(
        ids=ids.long(),
        offsets=offsets,
        weights=weights,
        num_examples=(len(first.offsets) - 1) // extents[0].shape[1],
        bounds=np.concatenate([*firsts, ends[-1:]]),
        longest=np.concatenate([extent[_MOST] for extent in extents]),
    )


def _copy_to_host(tensors: list[Tensor]) -> list[I64]:
    """Returns small tensors of four rows on the host, with one copy for all tensors on a GPU."""
    there = [tensor for tensor in tensors if tensor.is_cuda]
    if there:
        widths = [tensor.shape[1] for tensor in there]
        copies = iter(torch.split(torch.cat(there, dim=1).cpu(), widths, dim=1))
    return [(next(copies) if tensor.is_cuda else tensor).numpy() for tensor in tensors]


def _falling(bounds: Tensor, num_ids: int, where: str) -> ConfigError:
    """Returns the error about bounds that do not rise from 0 to the number of ids. It names the first bad bound."""
    values = bounds.tolist()
    problem = "received none"
    if values and values[0] != 0:
        problem = f"offsets[0] = {values[0]}"
    elif values:
        problem = f"offsets[{len(values) - 1}] = {values[-1]}, the last one"
        for place, (before, bound) in enumerate(pairwise(values), 1):
            if bound < before:
                problem = f"offsets[{place}] = {bound} is below offsets[{place - 1}] = {before}"
                break
            if bound > num_ids:
                problem = f"offsets[{place}] = {bound} is more than there are ids"
                break
    return ConfigError(f"{where}offsets: {problem}; expected to rise from 0 to the {num_ids} ids")


def _weights(weights: object, ids: Tensor, where: str) -> Tensor | None:
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or weights.shape != ids.shape:
        got = f"shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ConfigError(f"{where}per_sample_weights: {got}, expected float32 of shape {tuple(ids.shape)}")
    flattened: Tensor = weights.flatten().float()
    return flattened
