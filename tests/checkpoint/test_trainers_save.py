"""What several trainers save together: each its own parts and random state, told to rank 0."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

import girih
from companions import together
from girih.checkpoint import Manifest, Storage
from girih.checkpoint.description import ModelDescription
from girih.checkpoint.load import load
from girih.checkpoint.save import Content, Save, save_manifest
from girih.errors import CheckpointError, GirihError, StorageFullError
from girih.optim import SGD
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec

SCHEMA = girih.Schema.from_dict(
    {
        "features": [{"name": name, "kind": "categorical", "dim": 4} for name in ("user", "item")],
        "labels": {"names": ["click"]},
    }
)


class Parameters:
    """A dense half that has one tensor."""

    def state(self):
        return {"weight": torch.ones(3)}

    def restore(self, state):
        self.restored = state


class Shards(LocalShards):
    """A sparse half that has nothing but shards."""

    def load(self, reader, *, step):
        super().load(reader)


def shards_of(rank, size, shards=1):
    needs = {"user": {"embedding"}, "item": {"embedding"}}
    spec = SparseSpec(schema=SCHEMA, needs=needs, optimizer=SGD(lr=0.1), store=StoreOptions(shards=shards))
    return Shards(spec.groups(), spec.store, place=rank, num_places=size)


def content(rank, holding, step=7):
    return Content(
        step=step,
        model=ModelDescription(
            schema=SCHEMA.to_dict(), fingerprint=SCHEMA.fingerprint(), needs={}, recipe={}, normalization=None
        ),
        state={"run": {"step": step, "refused": 0}},
        sparse=holding,
        dense=Parameters(),
        plan={"strategy": "synchronous"},
        random=[{"cpu": torch.full((4,), r)} for r in range(2)] if rank == 0 else [],
    )


def save_both(ranks):
    """Saves, saves the manifest again, then has rank 1 fail; returns the names of errors, and of parts."""
    directory = ranks.broadcast(tempfile.mkdtemp() if ranks.first else None)
    root, holding, told = Storage.at(directory), shards_of(ranks.rank, ranks.size), []
    Save(root, content(ranks.rank, holding), ranks).write()
    save_manifest(root, content(ranks.rank, holding), ranks)
    for error in (StorageFullError("it is full"), GirihError("it is broken")):
        save = Save(root, content(ranks.rank, holding, step=8), ranks)
        if ranks.rank == 1:
            save._rows.write = failing(error)
        try:
            save.write()
        except GirihError as raised:
            told.append(f"{type(raised).__name__}: {raised}")
    save = Save(root, content(ranks.rank, holding, step=9), ranks)
    if ranks.rank == 1:
        save._rows.write = dict  # it has written nothing
    try:
        save.write()
    except GirihError as raised:
        told.append(f"{type(raised).__name__}: {raised}")
    ranks.barrier()
    holding.close()
    return directory, told


def failing(error):
    def write():
        raise error

    return write


def test_trainers_save_together(tmp_path):
    (directory, told), (_, beside) = together(save_both)
    place = Storage.at(Path(directory, "step-00000007"))
    manifest = Manifest.read(place)
    assert sorted(manifest.shards) == [
        f"tables/embedding-4-sgd/shard-000{rank}.safetensors" for rank in range(2)
    ]
    assert manifest.plan == {"strategy": "synchronous"}
    assert told[0].startswith("StorageFullError: ")
    assert told[0].endswith("no space left for a checkpoint; free some, then --resume")
    assert told[1] == "GirihError: trainer 1: it is broken"
    assert told[2].startswith("CheckpointError: ")
    assert "shard-0001.safetensors: missing: no part holds shard 1 of 2 of table" in told[2]
    assert beside[1] == "GirihError: it is broken"
    assert Storage.at(directory).names() == ["step-00000007"]
    holding, dense = shards_of(0, 1, shards=3), Parameters()
    loaded = load(place, SCHEMA)
    loaded.put(sparse=holding, dense=dense)
    assert [state["cpu"].tolist() for state in loaded.random] == [[0] * 4, [1] * 4]
    assert loaded.plan == {"strategy": "synchronous"}
    assert loaded.state == {"run": {"step": 7, "refused": 0}}
    assert torch.equal(dense.restored["weight"], torch.ones(3))
    holding.close()


def test_parts_that_did_not_arrive_are_told(tmp_path):
    holding = shards_of(0, 1)
    save = Save(Storage.at(tmp_path), content(0, holding))
    write = save._rows.write

    def elsewhere():
        parts = write()
        for name in parts:
            (Path(save._draft.url) / name).unlink()
        return parts

    save._rows.write = elsewhere
    with pytest.raises(CheckpointError, match=r"missing; where hosts share no directory, set checkpoint.dir"):
        save.write()
    assert list(tmp_path.iterdir()) == []
    holding.close()


def test_a_part_of_another_shard_is_refused(tmp_path):
    holding = shards_of(0, 1, shards=2)
    place = Save(Storage.at(tmp_path), content(0, holding)).write()
    manifest = Manifest.read(place)
    one, two = sorted(manifest.shards)
    content_of = json.loads((place.local / "manifest.json").read_text())
    facts = content_of["parts"]
    facts[one]["crc32"], facts[two]["crc32"] = facts[two]["crc32"], facts[one]["crc32"]
    (place.local / one).write_bytes((place.local / two).read_bytes())
    changed = Manifest(**{k: v for k, v in content_of.items() if k != "crc32"})
    changed.write(place)
    with pytest.raises(CheckpointError, match=r"shard-0000.*: damaged: shard is 1, but the manifest says 0"):
        load(place, SCHEMA).put(sparse=holding, dense=Parameters())
    holding.close()
