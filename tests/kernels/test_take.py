import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import take as kernels
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.hashing import fill_stream, stream
from reference import bag_ends, bag_tails, flatten, gather_bags

BAGS = st.lists(st.lists(st.integers(-5, 5), max_size=5), min_size=1, max_size=8)


def drawn_index(data: st.DataObject, num_rows: int) -> np.ndarray:
    """int64[K, B], some batches of a few rows each."""
    num_batches, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    row = st.integers(0, num_rows - 1)
    rows = data.draw(st.lists(row, min_size=num_batches * size, max_size=num_batches * size))
    return np.array(rows, dtype=np.int64).reshape(num_batches, size)


@settings(max_examples=60, deadline=None)
@given(BAGS, st.data())
def test_bags_are_taken_whole(bags: list[list[int]], data: st.DataObject) -> None:
    index = drawn_index(data, len(bags))
    values, offsets = flatten(bags)
    want = [gather_bags(bags, rows) for rows in index]
    counts = np.zeros(len(index), dtype=np.int64)
    kernels.count_values(sealed(offsets), index, counts)
    assert counts.tolist() == [sum(map(len, batch)) for batch in want]
    ends = np.full((len(index), index.shape[1] + 3), -9, dtype=np.int32)
    firsts = np.arange(7, 7 + len(index))
    kernels.bag_ends(sealed(offsets), index, firsts, 2, ends)
    expected = [bag_ends(batch, first) for batch, first in zip(want, firsts, strict=True)]
    assert ends.tolist() == [[-9, -9, *batch, -9] for batch in expected]
    starts = np.cumsum(counts) - counts + 2 * np.arange(len(index))  # two places are left alone after each
    out = np.full(int(starts[-1] + counts[-1] + 2), -9)
    kernels.take_bags(sealed(values), sealed(offsets), index, starts, out)
    flat = [i for batch in want for i in [*(i for bag in batch for i in bag), -9, -9]]
    assert out.tolist() == flat


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8), st.data())
def test_single_values_are_taken(column: list[int], data: st.DataObject) -> None:
    index = drawn_index(data, len(column))
    values = np.array(column, dtype=np.int64)
    starts = np.arange(len(index)) * (index.shape[1] + 1)
    out = np.full(len(index) * (index.shape[1] + 1), -9)
    kernels.take(sealed(values), index, starts, out)
    assert out.tolist() == [i for rows in index for i in [*(column[row] for row in rows), -9]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.data())
def test_rows_are_taken(width: int, data: st.DataObject) -> None:
    values = np.arange(5 * width, dtype=np.float32).reshape(5, width)
    index = drawn_index(data, 5)[0]
    out = np.full((len(index), width), -9, dtype=np.float32)
    kernels.take_rows(sealed(values), index, out)
    np.testing.assert_array_equal(out, values[index])


@settings(max_examples=60, deadline=None)
@given(BAGS, st.integers(1, 6))
def test_tails_are_the_last_values(bags: list[list[int]], length: int) -> None:
    values, offsets = flatten(bags)
    want, short = flatten(bag_tails(bags, length))
    out = np.zeros(len(want), dtype=np.int64)
    kernels.copy_tails(sealed(values), sealed(offsets), sealed(short), out)
    assert out.tolist() == want.tolist()


@settings(max_examples=60, deadline=None)
@given(BAGS, st.data())
def test_stretches_are_copied(bags: list[list[int]], data: st.DataObject) -> None:
    values, offsets = flatten(bags)
    order = data.draw(st.permutations(range(len(bags))))
    begins, ends = offsets[:-1][order], offsets[1:][order]
    starts = np.cumsum(ends - begins) - (ends - begins) + 1
    out = np.full(len(values) + 2, -9)
    kernels.copy_stretches(sealed(values), begins, ends, starts, out)
    assert out.tolist() == [-9, *(i for bag in order for i in bags[bag]), -9]


def test_the_stream_is_that_of_hashing() -> None:
    out = np.zeros(5, dtype=np.uint64)
    fill_stream(np.uint64(2**64 - 3), out)
    assert out.tolist() == [int(stream(np.uint64(2**64 - 3), i)) for i in range(5)]
    assert out.tolist() == SPLITMIX


SPLITMIX = [
    17824971123127853533,
    17039259473404265729,
    18363971414914884509,
    8043341295829897994,
    2742686685723344479,
]  # of 2⁶⁴-3, by the public algorithm
