"""Codecs of ids and rows between trainers, embedding workers and servers (Persia §4.2.3)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import WireError
from girih.kernels.cpu import wire_codecs
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.wire_codecs import PLAIN, SINGLES

_MOST_BAGS: Final = 1 << 26
_MOST_SMALL: Final = 0xFFFF


class Unpacked(NamedTuple):
    """A batch that was received.

    Attributes:
        ids: int64[N], as in ``Batch``. Ids of pooled bags may be in another order within the bag.
        offsets: int32[F·B+1], as in ``Batch``.
        weights: float32[N], or None.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int32]
    weights: NDArray[np.float32] | None


def pack(
    batch_ids: NDArray[np.int64],
    offsets: NDArray[np.int32],
    num_examples: int,
    pooled: NDArray[np.bool_],
    weights: NDArray[np.float32] | None = None,
) -> tuple[NDArray[Any], ...]:
    """Packs the ids of a batch, in the order of features.

    Args:
        batch_ids: int64[N], as in ``Batch``.
        offsets: int32[F·B+1], as in ``Batch``.
        num_examples: the number of examples, B.
        weights: float32[N] or None, as in ``Batch``.
        pooled: bool[F], True for features whose order within a bag does not matter.

    Returns:
        Five arrays. Sizes, int64[2+2F]: B, 1 if there are weights, and per feature the number of ids and of unique ids.
        Ids, int64. Counts, uint16 or uint32. Examples, uint16, or uint32 if B > 65,535. Weights, float32[N] or [0].
    """
    num_features, num_ids = len(pooled), len(batch_ids)
    ends = offsets[:: num_examples or 1][: num_features + 1]
    longest = int(np.diff(ends).max(initial=0))
    sizes = np.zeros(2 + 2 * num_features, np.int64)
    sizes[:2] = num_examples, weights is not None
    packed_ids = np.empty(num_ids, np.int64)
    counts = np.empty(num_ids + num_features * num_examples, np.uint32)
    samples = np.empty(num_ids, np.uint16 if num_examples <= _MOST_SMALL else np.uint32)
    no_weights = np.empty(0, np.float32)
    packed_weights = no_weights if weights is None else np.empty(num_ids, np.float32)
    written = wire_codecs.pack_ids(
        sealed(batch_ids), sealed(offsets), num_examples, pooled, sealed(no_weights if weights is None else weights),
        np.zeros(1 << (2 * longest + 1).bit_length(), np.int32), np.empty(longest, np.int32),
        np.empty(longest, np.int64), sizes[2:], packed_ids, counts, samples, packed_weights,
    )  # fmt: skip
    num_packed, num_counts, num_samples, largest = (int(number) for number in written)
    small = np.uint16 if largest <= _MOST_SMALL else np.uint32
    return (
        sizes,
        packed_ids[:num_packed],
        counts[:num_counts].astype(small),
        samples[:num_samples],
        packed_weights,
    )


def unpack(arrays: tuple[NDArray[Any], ...]) -> Unpacked:
    """Reverses ``pack``.

    Raises:
        WireError: the arrays do not fit together.
    """
    sizes, packed_ids, counts, samples, weights = _checked(arrays)
    num_examples, has_weights = int(sizes[0]), bool(sizes[1])
    ids_of, unique_of = sizes[2::2], sizes[3::2]
    num_ids = int(ids_of.sum())
    ids, order = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32)
    offsets = np.empty(len(unique_of) * num_examples + 1, np.int32)
    scratch = np.empty(num_examples, np.int32)
    if counts.dtype != samples.dtype:
        counts, samples = counts.astype(np.uint32), samples.astype(np.uint32)
    if not wire_codecs.unpack_ids(
        sealed(sizes[2:]),
        num_examples,
        sealed(packed_ids),
        sealed(counts),
        sealed(samples),
        scratch,
        ids,
        offsets,
        order,
    ):
        raise WireError("packed ids: the counts do not add up, or an example is beyond the batch")
    return Unpacked(ids, offsets, weights[order] if has_weights else None)


def _checked(arrays: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
    """Returns the arrays, after checking their dtypes, dims and lengths."""
    kinds = ("int64", "int64", "uint16 uint32", "uint16 uint32", "float32")
    if len(arrays) != len(kinds) or any(
        array.ndim != 1 or array.dtype.name not in kind.split()
        for array, kind in zip(arrays, kinds, strict=True)
    ):
        raise WireError(
            f"packed ids: {[f'{a.dtype}{list(a.shape)}' for a in arrays]}; expected one dim each of {kinds}"
        )
    sizes, packed_ids, counts, samples, weights = arrays
    if len(sizes) < 2 or len(sizes) % 2:
        raise WireError(f"packed ids: {len(sizes)} sizes; expected 2 and 2 for each feature")
    num_examples, has_weights, ids_of, unique_of = int(sizes[0]), int(sizes[1]), sizes[2::2], sizes[3::2]
    most = len(packed_ids) + len(samples)
    lies = (
        not 0 <= num_examples <= _MOST_BAGS
        or num_examples * len(ids_of) > _MOST_BAGS
        or has_weights not in (0, 1)
        or most >= 1 << 31
        or bool(((ids_of < 0) | (ids_of > most) | (unique_of < SINGLES) | (unique_of > most)).any())
    )
    if not lies:
        packed = unique_of >= 0
        lies = (
            int(ids_of[packed].sum()) != len(samples)
            or int(np.where(packed, unique_of, ids_of).sum()) != len(packed_ids)
            or int(unique_of[packed].sum()) + num_examples * int((unique_of == PLAIN).sum()) != len(counts)
            or len(weights) != (int(ids_of.sum()) if has_weights else 0)
            or int(ids_of.sum()) >= 1 << 31
        )
    if lies:
        raise WireError(
            f"packed ids: sizes {sizes[:8].tolist()}… do not fit {len(packed_ids)} ids, {len(counts)} counts,"
            f" {len(samples)} examples, {len(weights)} weights"
        )
    return arrays


KAPPA = wire_codecs.KAPPA


def shrink(values: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Encodes vectors, float32[..., D], as float16 numbers and one scale per vector.

    The decoded value differs by at most 2⁻¹²(1 + 2⁻⁹)‖v‖∞. For a number of at least 2⁻²⁹‖v‖∞, it differs by at most
    about 2⁻¹¹ of the number. If the result is denormal, the error grows by at most half the spacing of denormal
    float32. Zeros stay zeros and keep their sign. NaN stays NaN, and infinities stay infinities. In a vector with NaN
    or infinities, ‖v‖∞ is the largest magnitude of its finite numbers, which are encoded as usual.

    Returns:
        float16[..., D], and ‖v‖∞ of each vector: float32[..., 1], or [..., 0] if D is 0.
    """
    dim = values.shape[-1]
    halves = np.empty(values.shape, np.uint16)
    scales = np.empty((*values.shape[:-1], min(dim, 1)), np.float32)
    if values.size:
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, dim)
        scaled = np.empty(dim, np.float32)
        wire_codecs.shrink_blocks(sealed(rows), scaled, halves.reshape(-1, dim), scales.reshape(-1))
    return halves.view(np.float16), scales


def grow(halves: NDArray[np.float16], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reverses ``shrink``: float16[..., D], float32[..., 1] → float32[..., D].

    Raises:
        WireError: the two arrays do not fit together.
    """
    fits = halves.dtype == np.float16 and scales.dtype == np.float32 and halves.ndim == scales.ndim > 0
    if not fits or (halves.size and scales.shape != (*halves.shape[:-1], 1)):
        raise WireError(
            f"{halves.dtype}{list(halves.shape)} with scales {scales.dtype}{list(scales.shape)}; expected"
            " float16[..., D] and float32[..., 1]"
        )
    bits = np.ascontiguousarray(halves)
    values: NDArray[np.float32] = bits.astype(np.float32)
    if not halves.size:
        return values
    dim = halves.shape[-1]
    rows, scale = values.reshape(-1, dim), np.ascontiguousarray(scales).reshape(-1, 1)
    wide = ~(scale[:, 0] >= wire_codecs.SMALL)  # vectors whose factor exceeds float32
    with np.errstate(invalid="ignore", over="ignore"):
        rows *= scale * np.float32(1 / KAPPA)
        if wide.any():
            rows[wide] = bits.reshape(-1, dim)[wide] * (scale[wide].astype(np.float64) / KAPPA)
    return values
