"""Files of rows to be mapped: written, stacked, merged, damaged; against dictionaries."""

import ctypes
import multiprocessing
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from girih.errors import CheckpointError, ConfigError, MissingFileError
from girih.kernels.cpu import mapped as kernels
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.optim import SGD
from girih.store import GroupSpec, Heap, Keys, Segment, Store, TableSpec
from girih.store.mapped import MappedFile, MappedFileFacts, MappedWriter, Stack, merge, writer
from girih.store.mapped.writer import joined
from girih.tables import Constant, Normal, Uniform, Zeros
from support.store_verbs import group, peek
from support.twins import key_hash

IDS = [0, -1, 1, 5, 9, 2**63 - 1, -(2**63), 2**40, 77]
KEY = st.tuples(st.sampled_from(IDS), st.integers(0, 2))
MANY = 300 if JIT_DISABLED else 20_000


def tables_of(dtype="float32"):
    """Three tables whose initial values are of three kinds, of two segments, 5 columns wide."""
    initializers = (Normal(std=1.0), Uniform(low=-1, high=2), Constant(value=0.3))
    specs = tuple(TableSpec(f"t{n}", (each, Zeros())) for n, each in enumerate(initializers))
    segments = (Segment("embedding", 4, SGD()), Segment("first_order", 1, SGD()))
    return GroupSpec("some", specs, segments, dtype, seed=3)


def arrays(keys):
    return np.array([i for i, _ in keys], np.int64), np.array([t for _, t in keys], np.int32)


def rows_for(keys, width=5, salt=0):
    return np.array(
        [[hash((key, salt, w)) % 1000 / 7 for w in range(width)] for key in keys], np.float32
    ).reshape(len(keys), width)


def written(path, spec, rows, buried=(), **sizes):
    keys = list(rows)
    with MappedWriter(path, spec, sizes.pop("most", len(keys) + len(buried)), **sizes) as writer:
        writer.bury(*arrays(list(buried)))
        if keys:
            writer.add(*arrays(keys), np.stack([rows[key] for key in keys]))
        return writer.finish()


def read(stack, keys):
    """Rows and where they were found, in place and copied, which agree."""
    ids, tables = arrays(keys)
    out = np.full((len(keys), stack.spec.dim), np.nan, np.float32)
    addresses = np.zeros(len(keys), np.int64)
    found = stack.peek(Keys(ids, tables), out, addresses)
    floats = ctypes.c_float * stack.spec.dim
    values = np.stack([np.array(floats.from_address(int(address)), np.float32) for address in addresses])
    copied = np.full_like(out, np.nan)
    np.testing.assert_array_equal(stack.peek(Keys(ids, tables), copied), found)
    np.testing.assert_array_equal(copied, values)
    return values, found


def read_each(stack, keys):
    """The same by :meth:`Stack.copy_each`, of one feature for each table, in another order; each example has one key's id, twice."""
    size, (ids, tables) = len(stack.spec.tables), arrays(keys)
    ids, tables = np.repeat(ids, 2), np.repeat(tables, 2)
    places = np.arange(size)[::-1].copy()
    out = np.full((len(ids), size, 4), np.nan, np.float32)
    tail = np.full((len(ids), size, stack.spec.dim - 4), np.nan, np.float32)
    given = np.tile(ids, size + 1)  # the batch has one more feature in front
    features = np.arange(1, size + 1)
    stack.copy_each(given, features, np.arange(size, dtype=np.int32), places, out, tail)
    alone = np.full_like(out, np.nan)
    stack.copy_each(given, features, np.arange(size, dtype=np.int32), places, alone, None)
    np.testing.assert_array_equal(alone, out)
    values = np.concatenate([out, tail], axis=2)[np.arange(len(ids)), places[tables]]
    np.testing.assert_array_equal(values[::2], values[1::2])
    return values[::2]


def initial(spec, keys):
    with Store(spec, arena=Heap(reserve_rows=1000)) as store:
        return peek(store, *arrays(keys))


@settings(max_examples=25 if JIT_DISABLED else 80, deadline=None)
@given(st.lists(st.tuples(st.lists(KEY, max_size=12), st.lists(KEY, max_size=4)), max_size=4))
def test_a_stack_reads_as_dictionaries_do(tmp_path_factory, layers):
    spec, directory = tables_of(), tmp_path_factory.mktemp("stack")
    files, known = [], {}
    for number, (keys, buried) in enumerate(layers):  # oldest first
        keys = [key for key in dict.fromkeys(keys) if key not in buried]
        rows = dict(zip(keys, rows_for(keys, salt=number), strict=True))
        facts = written(directory / str(number), spec, rows, dict.fromkeys(buried))
        assert facts.rows == len(keys)
        assert facts.buried == len(set(buried))
        files.insert(0, MappedFile(directory / str(number), facts))
        known |= rows | dict.fromkeys(buried)
    stack = Stack(spec, files)
    keys = [(i, t) for i in IDS for t in range(3)]
    values, found = read(stack, keys)
    expected = initial(spec, keys)
    for number, key in enumerate(keys):
        row = known.get(key)
        if row is not None:
            expected[number] = row
            assert found[number] >= 0
        else:
            assert found[number] == (-2 if key in known else -1)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(read_each(stack, keys), expected)
    for keep in (True, False):
        facts = merge(directory / "merged", spec, files, keep_buried=keep)
        assert facts.rows == sum(row is not None for row in known.values())
        assert facts.buried == (sum(row is None for row in known.values()) if keep else 0)
        np.testing.assert_array_equal(
            read(Stack(spec, [MappedFile(directory / "merged", facts)]), keys)[0], expected
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_keys_without_a_row_have_the_initial_values_of_the_store(tmp_path, dtype):
    spec = tables_of(dtype)
    keys = [(i, t) for i in [*IDS, *range(100)] for t in range(3)]
    for values in (read(Stack(spec, []), keys)[0], read_each(Stack(spec, []), keys)):
        np.testing.assert_array_equal(values, initial(spec, keys))


@pytest.mark.parametrize("memory", [1 << 40, 1])
def test_rows_are_written_in_large_pieces_and_the_index_in_memory_or_in_the_file(
    tmp_path, monkeypatch, memory
):
    monkeypatch.setattr(writer, "_ROWS_TOGETHER", 10_000)
    monkeypatch.setattr(writer, "_PAGE", 4096)
    monkeypatch.setattr(writer, "_memory_bytes", lambda: memory)
    spec, ids = group(("a", "b"), dim=17), np.arange(3000)
    tables, rows = (ids % 2).astype(np.int32), np.random.default_rng(1).random((3000, 17), np.float32)
    with MappedWriter(tmp_path / "rows", spec, 6000) as made:
        for part in np.array_split(ids, 7):
            made.add(part, tables[part], rows[part])
        made.bury(ids + 10_000, tables[:500].repeat(6))
        facts = made.finish()
    found = MappedFile(tmp_path / "rows", facts)
    assert (found.num_rows, found.num_buried) == (3000, 3000)
    np.testing.assert_array_equal(found.rows, rows)
    out = np.empty((3000, 17), np.float32)
    Stack(spec, [found]).peek(Keys(ids, tables), out)
    np.testing.assert_array_equal(out, rows)


def test_many_rows_in_chunks_are_what_a_stranger_reads(tmp_path):
    spec, rng = group(("a", "b"), dim=17), np.random.default_rng(1)
    ids = rng.permutation(np.arange(-MANY // 2, MANY // 2)).astype(np.int64)
    tables, rows = (ids % 2).astype(np.int32), rng.normal(size=(MANY, 17)).astype(np.float32)
    with MappedWriter(tmp_path / "rows", spec, 2 * MANY) as writer:
        for start in range(0, MANY, 997):
            part = slice(start, start + 997)
            assert writer.add(ids[part], tables[part], rows[part]) == len(ids[part])
        assert writer.add(ids[:50], tables[:50], -rows[:50]) == 0  # a key counts as it was first said
        assert writer.bury(ids[:50], tables[:50]) == 0
        facts = writer.finish()
    assert os.listdir(tmp_path) == ["rows"]
    assert facts == MappedFileFacts(**facts.to_dict())
    file = MappedFile(tmp_path / "rows", facts.to_dict())
    values, found = read(Stack(spec, [file]), list(zip(ids.tolist(), tables.tolist(), strict=True)))
    np.testing.assert_array_equal(values, rows)
    assert not found.any()
    assert (file.rows.ctypes.data % 64, file.index.ctypes.data % 64) == (0, 0)
    plain = load_file(tmp_path / "rows")
    np.testing.assert_array_equal(plain["rows"], rows)
    assert plain["index"].shape[0] % kernels.BLOCK == 0
    assert (plain["index"][:, 1] != 0).sum() == MANY
    everything = [np.concatenate(parts) for parts in zip(*file.chunks(), strict=True)]
    order, theirs = np.argsort(everything[0]), np.argsort(ids)
    for found, expected in zip(everything, (ids, tables, rows), strict=True):
        np.testing.assert_array_equal(found[order], expected[theirs])


def test_files_that_are_merged_piece_by_piece_read_as_they_did(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_ROWS_TOGETHER", 10_000)
    monkeypatch.setattr(writer, "_PAGE", 4096)
    spec, rng, files = group(("a", "b"), dim=17), np.random.default_rng(2), []
    for name in ("oldest", "older", "newest"):
        keys = {(int(i), int(i) % 2): rng.random(17, np.float32) for i in rng.integers(0, MANY, MANY // 2)}
        buried = [(int(i), int(i) % 2) for i in range(0, MANY, 7) if (i, i % 2) not in keys]
        files.insert(0, MappedFile(tmp_path / name, written(tmp_path / name, spec, keys, buried)))
    asked = [(i, i % 2) for i in range(-5, MANY + 5)]
    for part, below in ((files, []), (files[:2], files[2:])):
        facts = merge(tmp_path / "merged", spec, part, keep_buried=bool(below), durable=False)
        merged = MappedFile(tmp_path / "merged", facts)
        values, expected = (read(Stack(spec, each), asked)[0] for each in ([merged, *below], files))
        np.testing.assert_array_equal(values, expected)


def test_more_rows_than_were_announced_are_refused_in_a_merge(tmp_path):
    spec = tables_of()
    rows = {(n, 0): np.full(5, n, np.float32) for n in range(10)}
    file = MappedFile(tmp_path / "rows", written(tmp_path / "rows", spec, rows))
    none = np.empty((0, kernels.FILE_COLUMNS), np.int64)
    with MappedWriter(tmp_path / "fits", spec, 10) as fits:
        fits.take(file, none)
        assert fits.finish().rows == 10
    with (
        pytest.raises(ConfigError, match="more rows than most_rows = 9"),
        MappedWriter(tmp_path / "not", spec, 10, 9) as short,
    ):
        short.take(file, none)


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 2**20))
def test_checksums_of_two_pieces_are_joined(first, second, more):
    second += bytes(more)
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_an_empty_file_serves(tmp_path):
    spec = tables_of()
    file = MappedFile(tmp_path / "none", written(tmp_path / "none", spec, {}))
    assert (file.num_rows, file.num_buried, list(map(len, next(file.chunks())))) == (0, 0, [0, 0, 0])
    np.testing.assert_array_equal(read(Stack(spec, [file]), [(5, 1)])[0], initial(spec, [(5, 1)]))


def test_a_writer_refuses_what_does_not_fit_and_leaves_nothing(tmp_path):
    spec = tables_of()
    keys, tables = arrays([(1, 0), (2, 1)])
    rows = rows_for([(1, 0), (2, 1)])
    with MappedWriter(tmp_path / "rows", spec, 2) as writer:
        for words, given in (
            ("float32\\[2, 5\\]", (keys, tables, rows[:, :4])),
            ("float64", (keys, tables, rows.astype(np.float64))),
            ("int64\\[K\\] and int32\\[K\\]", (keys.astype(np.int32), tables, rows)),
            ("table numbers from 0 to 3", (keys, np.array([0, 3], np.int32), rows)),
            ("table numbers from -1", (keys, np.array([0, -1], np.int32), rows)),
        ):
            with pytest.raises(ConfigError, match=words):
                writer.add(*given)
        assert writer.add(keys, tables, rows) == 2
        with pytest.raises(ConfigError, match="more rows than most_rows = 2"):
            writer.add(keys + 9, tables, rows)
    with MappedWriter(tmp_path / "rows", spec, 2) as writer:
        many = np.arange(kernels.BLOCK, dtype=np.int64)
        with pytest.raises(ConfigError, match="more keys than most_keys = 2"):
            writer.bury(many, np.zeros(len(many), np.int32))
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_told(tmp_path):
    with (
        pytest.raises(OSError, match=r"no space left|too large"),
        MappedWriter(tmp_path / "rows", tables_of(), 1 << 50),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_every_damaged_byte_is_found(tmp_path):
    spec, path = tables_of(), tmp_path / "rows"
    facts = written(path, spec, {(1, 0): np.arange(5, dtype=np.float32)}, [(2, 1)])
    whole = path.read_bytes()
    for position in [*range(0, 520, 13), len(whole) - 1]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged|not a file of girih's"):
            MappedFile(path, facts)
    for length in (0, 5, 300, len(whole) - 4):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            MappedFile(path, facts)
        with pytest.raises(CheckpointError, match="damaged"):
            MappedFile(path)  # its form alone
    path.unlink()
    with pytest.raises(MissingFileError, match="no such file"):
        MappedFile(path, facts)


def test_an_index_that_leads_outside_is_found_though_its_checksum_is_right(tmp_path):
    index = np.zeros((kernels.BLOCK, 2), np.int64)
    assert kernels.first_unsound(sealed(index), 0, 0, 1) == -1
    for word in (2, -5, 1 << kernels.ROW_BITS | 1, 1 << kernels.ROW_BITS):
        index[7, 1] = word
        assert kernels.first_unsound(sealed(index), 1, 0, 1) == 7
    index[:, 1] = 1
    assert kernels.first_unsound(sealed(index), 1, 0, 1) == kernels.BLOCK  # a probe would never end


def unsound(index, num_rows, num_buried, num_tables):
    """The plain twin of :func:`girih.kernels.cpu.mapped.first_unsound`: whether nobody may follow an index."""
    size, slots = len(index), [tuple(slot) for slot in index.tolist()]
    keys = [(i, word >> kernels.ROW_BITS, (word & kernels.ROW_MASK) - 1) for i, word in slots if word]
    rows = [row for *_, row in keys if row != kernels.BURIED]
    if any(not (0 <= table < num_tables) for _, table, _ in keys):
        return True
    if len(keys) == size or len(rows) != num_rows or len(keys) - len(rows) != num_buried:
        return True
    if any(not 0 <= row < num_rows for row in rows) or len({key[:2] for key in keys}) < len(keys):
        return True
    for slot, (key, word) in enumerate(slots):
        if word:
            hashed = key_hash(key, word >> kernels.ROW_BITS)
            at = ((hashed >> 32) * (size // kernels.BLOCK) >> 32) * kernels.BLOCK + hashed % kernels.BLOCK
            while slots[at][1] and at != slot:
                at = (at + 1) % size
            if at != slot:
                return True
    return False


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_an_index_is_sound_if_a_lookup_of_each_key_finds_its_slot(tmp_path_factory, seed):
    """Swapped, copied, moved and cleared slots, compared with the plain twin."""
    rng = np.random.default_rng(seed)
    keys = [(int(i), int(t)) for i, t in zip(rng.permutation(200), rng.integers(0, 3, 200), strict=True)]
    path = tmp_path_factory.mktemp("index") / "rows"
    buried = keys[150:]
    written(path, tables_of(), dict(zip(keys[:150], rows_for(keys[:150]), strict=True)), buried)
    index = np.array(MappedFile(path).index)
    for _ in range(rng.integers(0, 3)):
        one, other = rng.integers(0, len(index), 2)
        change = rng.integers(0, 3)
        if change == 0:
            index[[one, other]] = index[[other, one]]
        elif change == 1:
            index[one] = index[other]
        else:
            index[one, rng.integers(0, 2)] += rng.integers(-1, 2)
    found = kernels.first_unsound(sealed(index), 150, 50, 3) >= 0
    assert found == unsound(index, 150, 50, 3)


def test_files_of_another_group_are_refused(tmp_path):
    facts = written(tmp_path / "rows", tables_of(), {(1, 0): np.zeros(5, np.float32)})
    file = MappedFile(tmp_path / "rows", facts)
    for spec, what in ((group(("a",), dim=5), "tables"), (group(("t0", "t1", "t2"), dim=5), "segments")):
        with pytest.raises(CheckpointError, match=f"its {what} are"):
            Stack(spec, [file])


def _shared_kib(path, both, told):
    file = MappedFile(path)
    assert float(file.rows.sum()) == 0.0  # touches all
    both.wait(60)
    pss, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Pss:"):
            pss += int(line.split()[1])
    both.wait(60)  # what one has alone, as the other has ended, is no longer shared
    told.put(pss)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="the system does not say what processes share"
)
def test_processes_that_map_a_file_share_its_memory(tmp_path):
    spec, size = group(("a",), dim=256), 4000
    ids = np.arange(size, dtype=np.int64)
    with MappedWriter(tmp_path / "rows", spec, size) as writer:
        writer.add(ids, np.zeros(size, np.int32), np.zeros((size, 256), np.float32))
        facts = writer.finish()
    context = multiprocessing.get_context("fork")
    both, told = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_shared_kib, args=(tmp_path / "rows", both, told)) for _ in range(2)]
    for process in processes:
        process.start()
    total = sum(told.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert 0.9 * facts.bytes / 1024 < total < 1.2 * facts.bytes / 1024  # once, not once each
