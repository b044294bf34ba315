"""Hashes against Python's own integers, and their spread."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import hashing
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store.spec import shard_of
from support import twins

WORDS = st.integers(-(2**63), 2**63 - 1)


def word_of(bits):
    """A hash as kernels hold it; the JIT's way out to Python makes it a plain integer."""
    return bits if JIT_DISABLED else np.uint64(bits)


def test_splitmix64_gives_its_published_sequence():
    # The first outputs for the seed 1234567, as in the reference implementation's test vectors.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(hashing.stream(1234567, number)) for number in range(3)] == expected


@settings(deadline=None)
@given(x=WORDS, number=st.integers(0, 2**31 - 1))
def test_hashes_are_their_plain_twins(x, number):
    word = np.int64(x)
    assert int(hashing.mix(word)) == twins.mix(x)
    assert int(hashing.stream(word, np.int64(number))) == twins.stream(x, number)
    assert int(hashing.key_hash(word, np.int32(number))) == twins.key_hash(x, number)
    assert int(hashing.mul_add(word, 3, number)) == (x * 3 + number) & twins.MASK
    hashed = word_of(hashing.mix(word))
    assert hashing.uniform01(hashed) == twins.uniform01(twins.mix(x))
    assert hashing.low_bits(hashed, 1023) == twins.mix(x) & 1023
    assert [int(hashing.word16(hashed, i)) for i in range(4)] == [
        (twins.mix(x) >> (16 * i)) & 0xFFFF for i in range(4)
    ]


@settings(deadline=None)
@given(n=st.integers(1, 2**31 - 1), x=WORDS)
def test_scaled_stays_in_range(n, x):
    hashed = word_of(hashing.mix(np.int64(x)))
    assert hashing.scaled(hashed, n) == ((twins.mix(x) >> 32) * n) >> 32 < n


def test_uniform01_excludes_its_ends():
    assert 0 < hashing.uniform01(0) < hashing.uniform01(word_of((1 << 64) - 1)) < 1


def test_shards_get_equal_shares_of_any_ids():
    num_keys = 3000 if JIT_DISABLED else 100_000
    for ids in (np.arange(num_keys), np.arange(num_keys) << 32, -np.arange(num_keys) * 1024):
        for num_shards in (2, 7):
            shards = shard_of(ids, np.zeros(num_keys, np.int32), num_shards)
            share = np.bincount(shards, minlength=num_shards) / num_keys
            assert abs(share - 1 / num_shards).max() < 5 * (1 / num_shards / num_keys) ** 0.5
            # The low bits, which choose slots, stay even within a shard.
            odd = [int(hashing.key_hash(i, 0)) & 1 for i in ids[shards == 1][:1000]]
            assert abs(np.mean(odd) - 0.5) < 5 * 0.5 / len(odd) ** 0.5


def test_shard_of_is_the_plain_twin_and_one_shard_owns_all():
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63)], np.int64)
    tables = np.array([0, 1, 2, 3, 0], np.int32)
    expected = [twins.shard_of_key(int(i), int(t), 5) for i, t in zip(ids, tables, strict=True)]
    assert shard_of(ids, tables, 5).tolist() == expected
    assert shard_of(ids, tables, 1).tolist() == [0] * 5
