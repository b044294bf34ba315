"""What GPU kernels compute by bits: hashes, initial values, random rounding, beside the CPU's kernels."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from girih import optim
from girih.kernels.cpu import hashing as cpu_hashing
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.initial import fill_initial
from girih.kernels.cpu.rounding import narrow_row, narrow_row_randomly, widen_row
from girih.kernels.gpu import hashing, jit, rounding
from girih.kernels.gpu import hashing as initial
from girih.store import GroupSpec, Segment, TableSpec
from girih.store.rows.record import row_layout
from girih.tables import Constant, Normal, Uniform, Zeros

pytestmark = pytest.mark.smoke

EXTREMES = np.array([0, 1, -1, 7, 2**63 - 1, -(2**63), 2**32, 12345678901234], np.int64)


@jit.kernel
def hash_keys(ids: tl.tensor, tables: tl.tensor, out: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    h = hashing.key_hash(tl.load(ids + i, mask=mask, other=0), tl.load(tables + i, mask=mask, other=0))
    tl.store(out + i, h.to(tl.int64, bitcast=True), mask=mask)


def test_keys_hash_as_on_a_cpu():
    rng = np.random.default_rng(0)
    ids = np.concatenate([EXTREMES, rng.integers(-(2**63), 2**63 - 1, 500)])
    tables = rng.integers(0, 2000, len(ids)).astype(np.int32)
    given = [torch.from_numpy(array).to(jit.device()) for array in (ids, tables)]
    out = torch.empty_like(given[0])
    jit.launch(hash_keys, len(ids), 64, *given, out, len(ids))
    expected = [int(cpu_hashing.key_hash(i, t)) for i, t in zip(ids, tables, strict=True)]
    assert out.cpu().numpy().view(np.uint64).tolist() == expected


@jit.kernel
def fill(
    ids: tl.tensor,
    seeds: tl.tensor,
    kind: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    out: tl.tensor,
    dim: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, C)[None, :]
    zero = tl.zeros_like(i).to(tl.int64)
    seed = tl.load(seeds + zero).to(tl.uint64, bitcast=True)
    options = zero.to(tl.float64) + tl.load(first), zero.to(tl.float64) + tl.load(second)
    values = initial.initial_values(tl.load(ids + i), seed, zero + kind, options[0], options[1], column)
    tl.store(out + i * dim + column, values, mask=column < dim)


@pytest.mark.parametrize("dim", [1, 5, 16])
@pytest.mark.parametrize(
    "rule", [Normal(), Normal(mean=2, std=3), Uniform(low=-1, high=5), Zeros(), Constant(value=0.3)], ids=str
)
def test_initial_values_are_the_cpus_bit_for_bit(rule, dim):
    spec = GroupSpec("g", (TableSpec("t", (rule,)),), (Segment("s", dim, optim.SGD()),), seed=3)
    kernel = row_layout(spec, 0, 1).kernel
    ids = np.concatenate([EXTREMES, np.arange(8)])
    there = [
        torch.from_numpy(array).to(jit.device())
        for array in (ids, kernel.seeds.view(np.int64), kernel.initializer_options)
    ]
    options = there[2].reshape(-1)
    out = torch.empty(len(ids), dim, device=jit.device())
    kind = int(kernel.initializers[0, 0])
    jit.launch(
        fill, len(ids), 16, *there[:2], kind, options, options[1:], out, dim, C=triton.next_power_of_2(dim)
    )
    expected = np.empty((len(ids), dim), np.float32)
    for row, key_id in zip(expected, ids, strict=True):
        fill_initial(kernel, key_id, 0, row)
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


@jit.kernel
def round_row(values: tl.tensor, out: tl.tensor, back: tl.tensor, seed: tl.tensor, key_id: tl.tensor, step: tl.tensor, n: tl.tensor, DTYPE: tl.constexpr, NEAREST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    zero = tl.zeros_like(column).to(tl.int64)
    drawn = tl.load(seed + zero).to(tl.uint64, bitcast=True)
    noise = rounding.row_noise(drawn, tl.load(key_id + zero), zero + step, column)
    halves = rounding.narrow(tl.load(values + column, mask=mask, other=0.0), noise, DTYPE, NEAREST)
    tl.store(out + column, halves, mask=mask)
    tl.store(back + column, rounding.widen(halves, DTYPE), mask=mask)


@pytest.mark.parametrize("dtype", [at.BFLOAT16, at.FLOAT16])
@pytest.mark.parametrize("nearest", [True, False])
def test_rounding_is_the_cpus_bit_for_bit(dtype, nearest):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    named = np.array(
        [0, -0.0, 1, 65504, 65520, 1e-8, -6e-8, 3e38, np.inf, -np.inf, np.nan, 1e-45], np.float32
    )
    values = np.concatenate([bits.view(np.float32), named, rng.normal(size=500).astype(np.float32)])
    seed, key_id, step = np.uint64(2**63 + 5), np.int64(-9), 77
    there = [
        torch.from_numpy(a).to(jit.device())
        for a in (values, np.array([seed]).view(np.int64), np.array([key_id]))
    ]
    out = torch.empty(len(values), dtype=torch.int16, device=jit.device())
    back = torch.empty(len(values), device=jit.device())
    jit.launch(
        round_row,
        len(values),
        1024,
        there[0],
        out,
        back,
        there[1],
        there[2],
        step,
        len(values),
        DTYPE=dtype,
        NEAREST=nearest,
    )
    expected, widened = np.empty(len(values), np.uint16), np.empty(len(values), np.float32)
    if nearest:
        narrow_row(dtype, values, expected)
    else:
        narrow_row_randomly(dtype, values, expected, seed, key_id, step)
    widen_row(dtype, expected, widened)
    np.testing.assert_array_equal(out.cpu().numpy().view(np.uint16), expected)
    np.testing.assert_array_equal(back.cpu().numpy(), widened)
