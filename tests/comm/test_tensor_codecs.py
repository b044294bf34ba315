"""Codecs of activations and gradients: their bounds, what they keep exactly, and what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from girih.comm.codecs.tensors import ACTIVATIONS, GRADIENTS, BFloat16, Float32, Int8, TopK
from girih.errors import WireError

CODECS = [Float32(), BFloat16(), Int8(), TopK(), TopK(0.5), TopK(1.0)]
SHAPES = st.sampled_from([(1,), (7,), (3, 5), (2, 3, 4), ()])
ANY = st.floats(width=32)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def arrays_of(elements):
    return hnp.arrays(np.float32, SHAPES, elements=elements)


def there(codec, values):
    packed = codec.pack(values)
    assert sum(array.nbytes for array in packed) == codec.packed_bytes(values.shape)
    got = codec.unpack(packed, values.shape)
    assert got.dtype == np.float32
    assert got.shape == values.shape
    return got


def largest_of(values, num_kept):
    """The places of the largest magnitudes, of equal ones the first; NaN above infinity."""
    magnitudes = np.abs(values.astype(np.float64)).reshape(-1)
    magnitudes[np.isnan(magnitudes)] = np.inf
    above = np.isnan(values).reshape(-1)
    return np.sort(np.lexsort((np.arange(values.size), -magnitudes, ~above))[:num_kept])


@settings(deadline=None, max_examples=60)
@given(values=arrays_of(ANY), codec=st.sampled_from(CODECS))
def test_what_is_not_finite_arrives_so(values, codec):
    got = there(codec, values)
    if not np.isfinite(values).all():
        assert not np.isfinite(got).all()
    elif np.abs(values).max() <= 2.0**100:
        assert np.isfinite(got).all()


@settings(deadline=None, max_examples=60)
@given(arrays_of(ANY))
def test_bfloat16_rounds_as_torch_does(values):
    got, torchs = there(BFloat16(), values), torch.tensor(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(got, torchs)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(torchs[torchs == 0]))


def test_every_bfloat16_is_exact():
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    np.testing.assert_array_equal(there(BFloat16(), values), values)


@settings(deadline=None, max_examples=60)
@given(arrays_of(FINITE))
def test_int8_is_within_half_a_step_of_its_row(values):
    got = there(Int8(), values)
    rows, back = (
        each.reshape(-1, values.shape[-1] if values.ndim else 1).astype(np.float64) for each in (values, got)
    )
    lows, tops = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
    step = (tops - lows) / 255
    size = np.maximum(abs(lows), abs(tops))
    assert (abs(back - rows) <= step * (0.5 + 1e-4) + size * 2.0**-23 + 2.0**-100).all()
    assert (back[rows == lows] == np.broadcast_to(lows, rows.shape)[rows == lows]).all()


def test_int8_of_a_row_does_not_depend_on_others():
    values = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    wide = np.concatenate([values, np.full((1, 16), 1e6, np.float32), np.full((1, 16), np.nan, np.float32)])
    np.testing.assert_array_equal(there(Int8(), wide)[:6], there(Int8(), values))


def test_int8_keeps_the_zeros_behind_a_relu_and_its_own_steps():
    values = np.maximum(np.random.default_rng(0).normal(size=(9, 33)), 0).astype(np.float32)
    assert (there(Int8(), values)[values == 0] == 0).all()
    steps = np.random.default_rng(1).permutation(256).astype(np.float32).reshape(1, -1) * 0.25 - 8
    np.testing.assert_array_equal(there(Int8(), steps), steps)


def test_an_int8_row_beyond_float32s_range_arrives_as_nan():
    values = np.array([[-3e38, 3e38], [1, 2], [np.inf, 0], [3.4e38, 0]], np.float32)
    got = there(Int8(), values)
    assert np.isnan(got[[0, 2]]).all()
    np.testing.assert_array_equal(got[1], values[1])
    assert got[3, 1] == 0


@settings(deadline=None, max_examples=60)
@given(
    values=arrays_of(st.one_of(ANY, st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 2.0**-130]))),
    share=st.sampled_from([0.01, 0.1, 0.34, 0.5, 1.0]),
)
def test_topk_sends_the_largest(values, share):
    codec = TopK(share)
    indices, _ = codec.pack(values)
    np.testing.assert_array_equal(indices, largest_of(values, int(np.ceil(share * values.size))))
    want = np.zeros(values.size, np.float32)
    want[indices] = there(BFloat16(), values.reshape(-1)[indices])
    np.testing.assert_array_equal(there(codec, values).reshape(-1), want)


def test_topk_finds_the_last_of_many_that_differ_little():
    values = (1 + np.random.default_rng(0).permutation(2000) * 2.0**-20).astype(np.float32)
    values[::2] *= -1
    np.testing.assert_array_equal(TopK(0.25).pack(values)[0], largest_of(values, 500))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4), (), (1, 1)])
def test_shapes_and_empty_ones(codec, shape):
    np.testing.assert_array_equal(there(codec, np.full(shape, 3, np.float32)), np.full(shape, 3, np.float32))


@pytest.mark.parametrize("codec", CODECS[:4], ids=str)
def test_other_layouts_are_sent_as_they_read(codec):
    wide = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    for values in (wide.T, wide[::2, ::3], np.broadcast_to(wide[:1], (4, 12))):
        np.testing.assert_array_equal(there(codec, values), there(codec, values.copy()))


@pytest.mark.parametrize("codec", CODECS[:4], ids=str)
def test_a_message_of_another_shape_or_kind_is_refused(codec):
    packed = codec.pack(np.ones((4, 8), np.float32))
    with pytest.raises(WireError, match=f"a message by {codec.name}: .*expected"):
        codec.unpack(packed, (5, 9))
    with pytest.raises(WireError):
        codec.unpack((*packed, packed[0]), (4, 8))
    with pytest.raises(WireError):
        codec.unpack((packed[0].astype(np.int64), *packed[1:]), (4, 8))


def test_a_place_beyond_the_message_is_refused():
    indices, halves = TopK(0.5).pack(np.ones(8, np.float32))
    with pytest.raises(WireError, match="place 8 of 8 numbers"):
        TopK(0.5).unpack((indices + np.uint32(5), halves), (8,))


def test_what_goes_forward_and_what_goes_back():
    assert list(ACTIVATIONS) == ["float32", "bfloat16", "int8"]  # gradients bear int8 badly (HT §4.2)
    assert list(GRADIENTS) == ["float32", "bfloat16", "topk"]
