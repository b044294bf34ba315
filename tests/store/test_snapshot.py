"""A store, a file, and a store again."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from girih import optim
from girih.errors import CheckpointError, ConfigError, StorageFullError
from girih.store import Store
from girih.store.rows.record import row_layout
from girih.tables import LFU, LRU, TTL, Fixed, MinCount
from support.store_verbs import (
    NUM_IDS,
    by_key,
    contents,
    group,
    peek,
    read_snapshot,
    taken,
    train,
    two_segments,
    write_snapshot,
)

MOST = NUM_IDS * 3 // 4


def trained(spec, steps=range(1, 6), store=None, **where):
    """A store after some steps of keys that it owns."""
    return train(store or Store(spec, **where), steps)


def assert_equal_stores(left, right):
    mine, other = contents(left), contents(right)
    assert mine.keys() == other.keys()
    for name in mine:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)
    assert left.counters() == right.counters()
    assert left.last_step == right.last_step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "eviction",
    [None, LRU(max_rows=30), LFU(max_rows=30), TTL(steps=2), TTL(seconds=5, max_rows=20), Fixed(max_rows=9)],
)
def test_a_restored_store_is_the_same_and_goes_on_the_same(tmp_path, eviction, dtype):
    spec = two_segments(dtype, eviction=eviction, admission=MinCount(count=2, cells=500))
    store = trained(spec, clock=lambda: 1.7e9)
    write_snapshot(store, tmp_path / "0")
    restored = Store(spec, clock=lambda: 1.7e9)
    restored.restore([read_snapshot(tmp_path / "0")])
    assert_equal_stores(store, restored)
    trained(spec, range(6, 9), store)
    trained(spec, range(6, 9), restored)
    assert by_key(store) == by_key(restored)
    assert store.counters() == restored.counters()
    if eviction is not None and eviction.name != "none":
        lists = [contents(s)["ids"][contents(s)["tables"] == 0].tolist() for s in (store, restored)]
        assert lists[0] == lists[1]


def test_restore_replaces_what_was_there(tmp_path):
    spec = two_segments()
    store = trained(spec)
    write_snapshot(store, tmp_path / "0")
    other = trained(spec, range(10, 20))
    other.restore([read_snapshot(tmp_path / "0")])
    assert_equal_stores(store, other)


def test_a_store_restores_from_another_without_a_file():
    spec = two_segments()
    store, other = trained(spec), Store(spec)
    other.restore([taken(store)])
    assert_equal_stores(store, other)
    with store.snapshot(), pytest.raises(ConfigError, match="is being saved"):
        store.restore([taken(other)])
    assert_equal_stores(store, other)


@pytest.mark.parametrize(
    "eviction",
    [LFU(max_rows=MOST), LRU(max_rows=MOST), TTL(steps=3), TTL(seconds=5, max_rows=MOST)],
)
def test_as_many_shards_as_before_are_each_as_they_were(tmp_path, eviction):
    spec = two_segments(eviction=eviction)
    steps = [1, 2, 5, 4, 6, 3]  # late ones too: the list is in order of arrival, not of last use
    shards = [trained(spec, steps, shard=s, num_shards=3, clock=lambda: 1.7e9) for s in range(3)]
    for shard, store in enumerate(shards):
        write_snapshot(store, tmp_path / str(shard))
    for shard, store in enumerate(shards):
        restored = Store(spec, shard=shard, num_shards=3, clock=lambda: 1.7e9)
        restored.restore([read_snapshot(tmp_path / str(s)) for s in range(3)])
        assert_equal_stores(store, restored)
        for either in (store, restored):
            trained(spec, [7, 9, 8], either)
        assert by_key(store) == by_key(restored)
        lists = [contents(s)["ids"][contents(s)["tables"] == 0].tolist() for s in (store, restored)]
        assert lists[0] == lists[1]


def test_optimizer_state_may_be_begun_anew():
    store = trained(two_segments())
    other = Store(
        two_segments(first=optim.Adagrad(initial_accumulator_value=0.5), second=optim.FTRL(beta=2.0, l2=1.0))
    )
    other.restore([taken(store)], optimizer_state=False)
    mine, theirs = contents(store), contents(other)
    np.testing.assert_array_equal(mine["embedding"], theirs["embedding"])
    np.testing.assert_array_equal(mine["first_order"], theirs["first_order"])
    assert (theirs["embedding.sum"] == 0.5).all()
    np.testing.assert_allclose(theirs["first_order.z"], -mine["first_order"] * (2.0 / 0.1 + 1.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (two_segments("float16"), "'users', 'items': dtype float32, expected float16"),
        (two_segments(first=optim.Adagrad()), "optimizer is adam with exp_avg, exp_avg_sq, ftrl with z, n, expected adagrad"),
        (two_segments(first=optim.SGD()), "expected sgd, ftrl with z, n; continue with that optimizer, or start a new run"),
        (group(("users", "items"), dim=3), "rows hold embedding and first_order, expected embedding; "),
        (group(("users", "item"), dim=3), "table 'items' is not in this model's group; did you mean 'item'"),
        (group(("users", "items", "tags"), dim=3), "rows hold embedding and first_order, expected embedding; "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, other, message):
    write_snapshot(trained(two_segments()), tmp_path / "0")
    store = trained(other)
    before = contents(store)
    with pytest.raises(CheckpointError, match=message):
        store.restore([read_snapshot(tmp_path / "0")])
    for name, column in contents(store).items():
        np.testing.assert_array_equal(column, before[name])


@pytest.mark.parametrize("shards", [1, 3])
def test_a_live_snapshot_restores_stores_without_a_file(shards):
    spec = two_segments(
        eviction=LRU(max_rows=30 if shards == 1 else 3000), admission=MinCount(count=2, cells=500)
    )
    store = trained(spec)
    others = [Store(spec, shard=shard, num_shards=shards) for shard in range(shards)]
    with store.snapshot() as snapshot:
        for other in others:
            other.restore([snapshot])
    assert by_key(*others) == by_key(store)
    if shards == 1:
        assert_equal_stores(*others, store)
        np.testing.assert_array_equal(others[0].state.memory.arrays.cells, store.state.memory.arrays.cells)


def test_momentum_is_part_of_the_layout():
    with pytest.raises(CheckpointError, match="optimizer is sgd, expected sgd with momentum"):
        Store(group(optimizer=optim.SGD(momentum=0.9))).restore([taken(Store(group()))])


def test_a_snapshot_that_was_closed_is_not_written(tmp_path):
    store = trained(two_segments())
    snapshot = store.snapshot()
    snapshot.close()
    with pytest.raises(CheckpointError, match="closed before it was read"):
        write_snapshot(snapshot, tmp_path / "0")


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [("float32", "torch.float32"), ("bfloat16", "torch.bfloat16"), ("float16", "torch.float16")],
)
def test_the_safetensors_library_reads_the_file(torch, tmp_path, dtype, tag):
    import safetensors.torch

    store = trained(two_segments(dtype, admission=MinCount(count=2, cells=500)))
    report = write_snapshot(store, tmp_path / "0")
    tensors = safetensors.torch.load_file(tmp_path / "0")
    columns = contents(store)
    assert set(tensors) == set(columns) | {"bloom.users"}
    assert str(tensors["embedding"].dtype) == tag
    np.testing.assert_array_equal(tensors["ids"].numpy(), columns["ids"])
    values = peek(store, columns["ids"], columns["tables"])
    np.testing.assert_array_equal(tensors["embedding"].float().numpy(), values[:, :3])
    np.testing.assert_array_equal(tensors["embedding.exp_avg"].numpy(), columns["embedding.exp_avg"])
    assert report["bytes"] == (tmp_path / "0").stat().st_size
    assert report["rows"] == store.num_rows
    assert set(report["crc32"]) == set(tensors) | {""}


def test_an_empty_store_makes_a_file_too(tmp_path):
    write_snapshot(Store(two_segments()), tmp_path / "0")
    assert safetensors.numpy.load_file(tmp_path / "0")["embedding"].shape == (0, 3)
    store = trained(two_segments())
    store.restore([read_snapshot(tmp_path / "0")])
    assert store.num_rows == 0


def test_every_damaged_byte_of_the_data_is_found(tmp_path):
    checksums = write_snapshot(trained(two_segments()), tmp_path / "0")["crc32"]
    good = (tmp_path / "0").read_bytes()
    start = 8 + struct.unpack("<Q", good[:8])[0]
    store = Store(two_segments())
    for at in np.linspace(start, len(good) - 1, 25).astype(int):
        (tmp_path / "bad").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match=r"bad: damaged: tensor .* has checksum"):
            store.restore([read_snapshot(tmp_path / "bad", checksums)])
    assert store.num_rows == 0


def test_a_file_of_any_length_but_its_own_is_refused(tmp_path):
    write_snapshot(trained(two_segments()), tmp_path / "0")
    good = (tmp_path / "0").read_bytes()
    for length in [0, 7, 8, 100, len(good) // 2, len(good) - 1, len(good) + 1]:
        (tmp_path / "bad").write_bytes((good + b"x")[:length])
        with pytest.raises(CheckpointError, match="bad: damaged"):
            read_snapshot(tmp_path / "bad")


def test_damaged_headers_are_refused(tmp_path):
    write_snapshot(trained(two_segments()), tmp_path / "0")
    good = (tmp_path / "0").read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8 : 8 + length])

    def write(change):
        changed = json.loads(json.dumps(header))
        change(changed)
        text = json.dumps(changed).encode()
        (tmp_path / "bad").write_bytes(struct.pack("<Q", len(text)) + text + good[8 + length :])

    for change in (
        lambda h: h.pop("ids"),
        lambda h: h["ids"].update(dtype="I32"),
        lambda h: h["ids"].update(shape=[-1]),
        lambda h: h["ids"].update(data_offsets=[8, 16]),
        lambda h: h["ids"].pop("shape"),
        lambda h: h["__metadata__"].update(girih="{}"),
        lambda h: h["__metadata__"].update(girih="{"),
        lambda h: h["__metadata__"].update(kind="other"),
        lambda h: h.pop("__metadata__"),
    ):
        write(change)
        with pytest.raises(CheckpointError, match=r"bad: (damaged|not a shard)"):
            read_snapshot(tmp_path / "bad")
    (tmp_path / "bad").write_bytes(struct.pack("<Q", 2) + b"[]")
    with pytest.raises(CheckpointError, match="damaged"):
        read_snapshot(tmp_path / "bad")


CRAFTED = {
    "a table that is none": ("tables", 2),
    "a negative table": ("tables", -1),
    "a row above all": ("rows", 1 << 20),
    "a negative row": ("rows", -2),
    "a neighbour above all": ("newer", 1 << 20),
    "a neighbour below none": ("newer", -2),
}


@pytest.mark.parametrize(("column", "value"), CRAFTED.values(), ids=CRAFTED)
def test_row_numbers_of_a_crafted_file_lead_nowhere(tmp_path, column, value):
    spec = two_segments(eviction=LRU(max_rows=10**6))
    write_snapshot(trained(spec), tmp_path / "0")
    content = bytearray((tmp_path / "0").read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    first, _ = json.loads(content[8 : 8 + length])[column]["data_offsets"]
    content[8 + length + first + 40 : 8 + length + first + 44] = struct.pack("<i", value)
    (tmp_path / "0").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"0: damaged: column '{column}' has values outside"):
        Store(spec).restore([read_snapshot(tmp_path / "0")])


def altered(path, spec, alter):
    """Writes a file of a store in which some columns were changed in place; returns its description."""
    write_snapshot(trained(spec), path)
    content = bytearray(path.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    columns = {}
    for name, kind in (
        ("ids", "<i8"),
        ("tables", "<i4"),
        ("newer", "<i4"),
        ("rows", "<i4"),
        ("embedding", "<u4"),
    ):
        first, last = (8 + length + at for at in header[name]["data_offsets"])
        if spec.dtype != "float32" and name == "embedding":
            kind = "<u2"
        columns[name] = np.frombuffer(memoryview(content)[first:last], kind)
    alter(columns)
    path.write_bytes(content)
    return json.loads(header["__metadata__"]["girih"])


def describe(path, changes):
    """Changes the description of a file in place."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    described = json.loads(header["__metadata__"]["girih"]) | changes
    header["__metadata__"]["girih"] = json.dumps(described)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def twice(columns):
    columns["ids"][3], columns["tables"][3] = columns["ids"][5], columns["tables"][5]


def into_another_table(columns):
    users, items = (np.flatnonzero(columns["tables"] == table) for table in (0, 1))
    columns["newer"][users[1]] = columns["rows"][items[1]]


@pytest.mark.parametrize(
    ("dtype", "alter", "told"),
    [
        ("float32", twice, "it has a key twice"),
        ("float32", into_another_table, "the list of a table leads into another table"),
        ("float32", lambda c: c["rows"].__setitem__(3, c["rows"][5]), "two rows have one number"),
        ("float32", lambda c: c["embedding"].__setitem__(7, 0x7FC00000), "'embedding' holds NaN"),
        ("bfloat16", lambda c: c["embedding"].__setitem__(7, 0xFFC0), "'embedding' holds NaN"),
        ("float16", lambda c: c["embedding"].__setitem__(7, 0x7E00), "'embedding' holds NaN"),
    ],
)
def test_rows_that_none_can_have_are_refused_and_nothing_is_replaced(tmp_path, dtype, alter, told):
    spec = two_segments(dtype, eviction=LRU(max_rows=10**6))
    altered(tmp_path / "0", spec, alter)
    store = trained(spec, range(1, 3))
    before = by_key(store)
    with pytest.raises(CheckpointError, match=f"0: damaged: .*{told}"):
        store.restore([read_snapshot(tmp_path / "0")])
    assert by_key(store) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rows": -1}, {"num_rows": 1.5}, {"num_rows": 1 << 40}, {"shard": 1}, {"num_shards": 0}, {"oldest": [-2, -1]},
        {"oldest": [1 << 20, -1]}, {"oldest": []}, {"rows_ever": -1}, {"rows_ever": 1 << 40}, {"counters": []},
        {"counters": [{"lookups": "many"}] * 2}, {"last_step": 1 << 31}, {"tables": 7}, {"group": None}, {"segments": [{"dim": -3, "state": []}]},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_a_crafted_description_are_refused(tmp_path, changes):
    write_snapshot(trained(two_segments(eviction=LRU(max_rows=10**6))), tmp_path / "0")
    describe(tmp_path / "0", changes)
    with pytest.raises(CheckpointError, match="0: damaged"):
        read_snapshot(tmp_path / "0")


def test_row_numbers_beyond_the_size_of_a_file_take_no_memory(tmp_path):
    spec, most = two_segments(eviction=LRU(max_rows=10**6)), 1 << 25
    oldest = altered(tmp_path / "0", spec, lambda columns: None)["oldest"]
    store = Store(spec)
    store.restore([read_snapshot(tmp_path / "0")])
    before, moved = by_key(store), most - store.num_rows

    def far(columns):
        columns["rows"] += moved
        columns["newer"][columns["newer"] >= 0] += moved

    altered(tmp_path / "0", spec, far)
    describe(tmp_path / "0", {"rows_ever": most, "oldest": [row + moved * (row >= 0) for row in oldest]})
    tracemalloc.start()
    try:
        store.restore([read_snapshot(tmp_path / "0")])
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert by_key(store) == before


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    store = trained(two_segments())

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StorageFullError, match="no space left"):
        write_snapshot(store, tmp_path / "0")


def test_chunks_are_bounded(monkeypatch, tmp_path):
    spec = two_segments(eviction=LRU(max_rows=10**6))
    monkeypatch.setattr(
        "girih.store.snapshot.snapshot._CHUNK_BYTES", 8 * 4 * row_layout(spec, 0, 1).num_words
    )
    monkeypatch.setattr("girih.store.snapshot.file._CHUNK_BYTES", 100)
    monkeypatch.setattr("girih.store.snapshot.file._LEAST_CHUNK", 7)
    store = trained(spec)
    with store.snapshot() as snapshot:
        assert max(len(chunk["ids"]) for chunk in snapshot.chunks()) == 8
    write_snapshot(store, tmp_path / "0")
    file = read_snapshot(tmp_path / "0")
    assert max(len(chunk["ids"]) for chunk in file.chunks()) == 7
    other = Store(store.spec)
    other.restore([file])
    assert_equal_stores(store, other)
