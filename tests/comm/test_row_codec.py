"""The lossy codec of vectors, against NumPy's own float16, and its bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from girih.comm.codecs.rows import KAPPA, grow, shrink
from girih.errors import WireError

TINY = float(np.finfo(np.float32).smallest_subnormal)


def plain_shrink(values):
    """In float64, with NumPy's rounding to float16."""
    rows = values.reshape(-1, values.shape[-1]).astype(np.float64)
    finite = np.isfinite(rows)
    scales = np.where(finite, np.abs(rows), 0).max(1)
    scales[(scales == 0) & ~finite.all(1)] = 1
    factor = KAPPA / np.where(scales == 0, 1, scales)
    with np.errstate(over="ignore"):
        halves = (rows * factor[:, None]).astype(np.float16)
    return halves.reshape(values.shape), scales.astype(np.float32).reshape(*values.shape[:-1], -1)


def check(values):
    halves, scales = shrink(values)
    want_halves, want_scales = plain_shrink(values)
    np.testing.assert_array_equal(scales, want_scales)
    # the kernel multiplies in float32: where it lands beside a tie, the neighbour is as near
    finite = np.isfinite(values)
    spacing = np.abs(halves.view(np.int16).astype(int) - want_halves.view(np.int16))[finite]
    assert spacing.max(initial=0) <= 1
    assert (spacing != 0).mean() < 0.02 if spacing.size > 500 else True

    got = grow(halves, scales)
    assert got.dtype == np.float32
    assert got.shape == values.shape
    largest = np.broadcast_to(scales, values.shape).astype(np.float64)
    error = np.abs(got[finite].astype(np.float64) - values[finite])
    magnitude = np.abs(values[finite].astype(np.float64))
    assert (error <= 2.0**-12 * (1 + 2.0**-9) * largest[finite] + TINY / 2).all()
    normal = magnitude >= 2.0**-29 * largest[finite]
    assert (error[normal] <= 2.0**-11 * 1.01 * magnitude[normal] + TINY / 2).all()
    zero = values == 0
    assert (got[zero] == 0).all()
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(values[zero]))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(values))
    infinite = np.isinf(values)
    np.testing.assert_array_equal(got[infinite], values[infinite])
    top = finite & (np.abs(values) == largest)
    np.testing.assert_array_equal(got[top], values[top])


@pytest.mark.parametrize("exponent", [-149, -140, -126, -101, -100, -99, -20, 0, 20, 126])
def test_bounds_hold_at_any_scale(exponent):
    rng = np.random.default_rng(exponent + 200)
    with np.errstate(under="ignore"):
        values = (rng.uniform(-2, 2, (50, 3, 16)) * 2.0**exponent).astype(np.float32)
        values[::7] *= np.float32(2.0**-20)
        values[:, :, ::5] *= rng.choice([0, 1e-3, 1e-7, 1e-9, 1e-12], values[:, :, ::5].shape).astype(
            np.float32
        )
    check(values)


FLOATS = st.floats(width=32)


@settings(deadline=None, max_examples=300)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([1, 4, 8])), elements=FLOATS))
def test_any_floats(values):
    check(values)


def test_every_half_grows_to_itself():
    halves = np.arange(65_536, dtype=np.uint16).view(np.float16).reshape(-1, 16)
    with np.errstate(invalid="ignore"):  # signalling NaN, without the JIT
        got = grow(halves, np.full((4096, 1), KAPPA, np.float32))
    np.testing.assert_array_equal(got, halves.astype(np.float32))
    with np.errstate(under="ignore", invalid="ignore"):
        small = grow(halves, np.full((4096, 1), 2.0**-120, np.float32))
        np.testing.assert_array_equal(small, (halves.astype(np.float64) * 2.0**-135).astype(np.float32))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (8,), (2, 3, 4)])
def test_shapes_and_empty_ones(shape):
    values = np.full(shape, 3, np.float32)
    np.testing.assert_array_equal(grow(*shrink(values)), values)


def test_what_does_not_fit_is_refused():
    halves, scales = shrink(np.ones((4, 8), np.float32))
    for wrong in ((halves[:3], scales), (halves, scales[:, :0]), (halves, scales[0]), (halves, np.ones((4, 2), np.float32)),
                  (halves.astype(np.float32), scales), (halves, scales.astype(np.float64))):  # fmt: skip
        with pytest.raises(WireError):
            grow(*wrong)
