"""16-bit floats against NumPy's, torch's, and their own neighbours."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import rounding
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.kernels.cpu.layout import BFLOAT16, FLOAT16
from support.twins import nearest_16, stochastic_16

CODES = {"bfloat16": BFLOAT16, "float16": FLOAT16}
FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9)
SMALL = st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=9)


def narrow(values, dtype, **noise):
    values = np.asarray(values, np.float32)
    halves = np.zeros(len(values), np.uint16)
    if noise:
        rounding.narrow_row_randomly(CODES[dtype], values, halves, **noise)
    else:
        rounding.narrow_row(CODES[dtype], values, halves)
    return halves


def widen(halves, dtype):
    values = np.zeros(len(halves), np.float32)
    rounding.widen_row(CODES[dtype], halves, values)
    return values


@pytest.mark.parametrize("dtype", CODES)
def test_every_16_bit_pattern_widens_as_in_torch_and_comes_back(torch, dtype):
    halves = np.arange(0, 65536, 37 if JIT_DISABLED else 1).astype(np.uint16)
    values = widen(halves, dtype)
    theirs = torch.from_numpy(halves.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(values, theirs)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(narrow(values, dtype)[finite], halves[finite])
    noise = {"seed": np.uint64(3), "key_id": np.int64(4), "step": 5}
    np.testing.assert_array_equal(narrow(values, dtype, **noise)[finite], halves[finite])


@pytest.mark.parametrize("dtype", CODES)
@settings(deadline=None, max_examples=60)
@given(values=FLOATS)
def test_nearest_is_the_plain_twin_and_torch(torch, dtype, values):
    mine = widen(narrow(values, dtype), dtype)
    if dtype == "float16":
        np.testing.assert_array_equal(mine, nearest_16(values, dtype))
    theirs = torch.tensor(values).to(getattr(torch, dtype)).float().numpy()
    within = np.isfinite(theirs)
    np.testing.assert_array_equal(mine[within], theirs[within])
    assert np.isfinite(mine).all()


@pytest.mark.parametrize("dtype", CODES)
@settings(deadline=None, max_examples=60)
@given(
    values=SMALL,
    seed=st.integers(0, 2**64 - 1),
    key_id=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(1, 99),
)
def test_random_rounding_is_the_plain_twin(dtype, values, seed, key_id, step):
    values = [v if abs(v) > 1e-30 else 0.0 for v in values]
    mine = widen(narrow(values, dtype, seed=np.uint64(seed), key_id=np.int64(key_id), step=step), dtype)
    np.testing.assert_array_equal(mine, stochastic_16(values, dtype, seed, key_id, step))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("value", [1.003, -0.3337, 1234.567, 3.1e-6, -5.2e-8, 2e-9])
def test_random_rounding_gives_the_neighbours_and_is_right_on_average(dtype, value):
    num = 500 if JIT_DISABLED else 20_000
    value = np.float32(value)
    found = np.concatenate(
        [
            widen(narrow(np.full(8, value), dtype, seed=np.uint64(1), key_id=np.int64(key), step=2), dtype)
            for key in range(num // 8)
        ]
    ).astype(np.float64)
    assert len(set(found)) <= 2
    assert found.min() <= value <= found.max() or dtype == "float16"
    gap = np.ptp(found) or 2.0**-24
    assert abs(found.mean() - float(value)) < 5 * gap / 2 / len(found) ** 0.5 + gap / 65536


@pytest.mark.parametrize(("dtype", "most"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
def test_what_is_too_large_saturates_and_nan_stays(dtype, most):
    values = np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32)
    for noise in ({}, {"seed": np.uint64(1), "key_id": np.int64(1), "step": 1}):
        mine = widen(narrow(values, dtype, **noise), dtype)
        assert mine[:4].tolist() == [most, -most, most, -most]
        assert np.isnan(mine[4])
