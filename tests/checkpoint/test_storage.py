"""One contract for every place."""

import numpy as np
import pytest

from girih.checkpoint import Storage
from girih.errors import CheckpointError, ConfigError, MissingFileError
from girih.store import GroupSpec, Keys, Segment, SnapshotFile, Store, TableSpec, write_rows
from girih.tables import Normal


@pytest.fixture
def root(address):
    return Storage.at(address)


def fill(storage, **contents):
    for name, content in contents.items():
        storage.replace(name, content)


def write(sink, num_bytes, pieces):
    """Writes bytes by their positions."""
    sink.begin(num_bytes)
    for position, piece in pieces.items():
        sink.write_at(memoryview(piece), position)
    sink.finish()


def test_an_empty_place_holds_nothing(root):
    assert not root.exists()
    assert root.names() == []
    assert root.sizes() == {}
    with pytest.raises(MissingFileError, match="nothing: no such file"):
        root.read("nothing")
    with pytest.raises(MissingFileError, match="nothing: no such file"), root.fetch("nothing"):
        pass
    root.remove("nothing", first="manifest.json")


def test_what_is_written_is_read(root):
    step = root / "step-1"
    step.make()
    with step.create("tables/a/shard-0000") as sink:
        write(sink, 10, {4: b"ending", 0: b"head"})
    step.replace("manifest.json", b"first")
    step.replace("manifest.json", b"second one")
    assert step.read("manifest.json") == b"second one"
    assert step.read("tables/a/shard-0000", 2, 6) == b"aden"
    with step.fetch("tables/a/shard-0000") as file:
        assert file.fileno() >= 0
        assert file.read() == b"headending"
    assert step.sizes() == {"manifest.json": 10, "tables/a/shard-0000": 10}
    assert step.names() == ["manifest.json", "tables"]
    assert root.names() == ["step-1"]
    assert root.exists()
    assert step.exists("manifest.json")
    assert not step.exists("dense")


def test_a_file_that_fails_leaves_nothing(root):
    root.make()

    def write_half():
        with root.create("shard") as sink:
            sink.begin(10)
            sink.write_at(memoryview(b"half"), 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert root.sizes() == {}


def test_the_first_goes_first(root, monkeypatch):
    step = root / "step-1"
    step.make()
    fill(step, **{"a": b"1", "manifest.json": b"2", "z": b"3"})
    root.remove("step-1", first="manifest.json")
    assert root.names() == []
    assert not step.exists()


def test_a_draft_becomes_what_it_is_called(root):
    root.make()
    draft = root.draft("step-00000003")
    draft.make()
    draft.replace("manifest.json", b"here")
    root.publish(draft, "step-00000003")
    assert root.names() == ["step-00000003"]
    assert (root / "step-00000003").read("manifest.json") == b"here"


def test_other_processes_are_seen(root):
    root.make()
    again = Storage(root.url)
    assert root.names() == []
    again.replace("one", b"1")
    assert root.names() == ["one"]
    again.replace("one", b"22")
    assert root.sizes() == {"one": 2}


def test_a_shard_goes_anywhere_and_comes_back(root):
    spec = GroupSpec("g", (TableSpec("t", (Normal(),)),), (Segment("embedding", 3, _sgd()),))
    store = Store(spec)
    ids = np.arange(500, dtype=np.int64)
    tables, before = np.zeros(500, np.int32), np.empty((500, 3), np.float32)
    store.lookup(Keys(ids, tables), 1, before)
    root.make()
    with store.snapshot(root.scratch) as snapshot, root.create("shard") as sink:
        facts = write_rows(snapshot, sink, "shard")
    assert root.sizes() == {"shard": facts["bytes"]}
    other, after = Store(spec), np.empty_like(before)
    with root.fetch("shard") as file:
        other.restore([SnapshotFile(file, "shard", facts["crc32"])])
    other.peek(Keys(ids, tables), after)
    np.testing.assert_array_equal(before, after)


def _sgd():
    from girih.optim import SGD

    return SGD(lr=0.1)


def test_addresses():
    assert Storage.at("s3://bucket/run/").url == "s3://bucket/run"
    assert Storage.at("file:///a/b").local.as_posix() == "/a/b"
    assert (Storage.at("s3://bucket/run") / "step-1").parent == Storage("s3://bucket/run")
    assert (Storage.at("s3://bucket/run") / "step-1").name == "step-1"
    assert Storage.at("s3://bucket/run").local is None
    assert Storage.at("here").parent == Storage(".")
    assert Storage.at("here").absolute().url.endswith("/here")


def test_an_address_of_nothing_that_is_known():
    with pytest.raises(ConfigError, match="nowhere://a"):
        Storage("nowhere://a").names()


def test_a_bucket_that_is_missing_is_told_in_a_line(s3_server):
    with pytest.raises((CheckpointError, MissingFileError), match="s3://no-such-bucket/run/a") as caught:
        Storage("s3://no-such-bucket/run").replace("a", b"1")
    assert "\n" not in str(caught.value)
