"""Parts of a checkpoint on their way to S3: a real server keeps them."""

import threading

import numpy as np
import pytest

from girih.checkpoint import Storage, storage
from girih.checkpoint.storage import PartsUpload
from girih.errors import CheckpointError, MissingFileError
from girih.optim import Adagrad
from girih.store import GroupSpec, Keys, Segment, SnapshotFile, Store, TableSpec, write_rows
from girih.tables import Normal

PART = 5 << 20  # the least that S3 takes


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(
        storage, "PartsUpload", lambda files, path, reaching: PartsUpload(files, path, reaching, PART)
    )


def uploads(files):
    """Those that are neither complete nor ended."""
    return files.call_s3("list_multipart_uploads", Bucket="girih").get("Uploads", [])


def test_a_shard_is_sent_in_parts_and_never_lies_on_a_disk_of_this_machine(
    s3_server, s3_address, small_parts, monkeypatch
):
    spec = GroupSpec("g", (TableSpec("t", (Normal(),)),), (Segment("embedding", 32, Adagrad(lr=0.1)),))
    store, num_rows = Store(spec), 60_000
    ids = np.arange(num_rows, dtype=np.int64)
    tables, before = np.zeros(num_rows, np.int32), np.empty((num_rows, 32), np.float32)
    store.lookup(Keys(ids, tables), 1, before)
    root = Storage.at(s3_address)
    with store.snapshot() as snapshot, monkeypatch.context() as patch:
        patch.setattr(storage, "tempfile", None)
        with root.create("shard") as sink:
            facts = write_rows(snapshot, sink, "shard")
    assert facts["bytes"] > 3 * PART
    assert root.sizes() == {"shard": facts["bytes"]}
    key = root.url.removeprefix("s3://girih/")
    found = s3_server.call_s3("head_object", Bucket="girih", Key=f"{key}/shard")
    assert found["ETag"].strip('"').endswith(f"-{-(-facts['bytes'] // PART)}")  # of that many parts
    assert uploads(s3_server) == []
    other, after = Store(spec), np.empty_like(before)
    with root.fetch("shard") as file:
        other.restore([SnapshotFile(file, "shard", facts["crc32"])])
    other.peek(Keys(ids, tables), after)
    np.testing.assert_array_equal(before, after)


def test_what_fails_leaves_no_part(s3_server, s3_address, small_parts):
    root = Storage.at(s3_address)

    def write_some():
        with root.create("shard") as sink:
            sink.begin(3 * PART)
            sink.write_at(memoryview(bytes(PART)), PART)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_some()
    assert uploads(s3_server) == []
    assert root.sizes() == {}
    assert not [each for each in threading.enumerate() if each.name.startswith("girih-upload")]


def test_a_store_that_refuses_is_told_in_a_line(s3_server, small_parts):
    with (
        pytest.raises((CheckpointError, MissingFileError), match="s3://no-such-bucket/run/shard") as caught,
        Storage("s3://no-such-bucket/run").create("shard") as sink,
    ):
        sink.begin(10)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_part_that_cannot_be_sent_ends_the_save(s3_server, s3_address, small_parts):
    root = Storage.at(s3_address)

    def write_to_what_is_gone():
        with root.create("shard") as sink:
            sink.begin(30 * PART)
            (open_upload,) = uploads(s3_server)
            s3_server.call_s3(
                "abort_multipart_upload",
                Bucket="girih",
                Key=open_upload["Key"],
                UploadId=open_upload["UploadId"],
            )
            for number in range(30):
                sink.write_at(memoryview(bytes(PART)), number * PART)
            sink.finish()

    with pytest.raises(CheckpointError, match="shard"):
        write_to_what_is_gone()
    assert root.sizes() == {}
