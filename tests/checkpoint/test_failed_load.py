"""A checkpoint whose rows cannot be loaded ends the load on all trainers, whose dense copies are as before."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from girih.checkpoint import Storage
from girih.checkpoint.load import LoadedCheckpoint
from girih.checkpoint.state import RunState
from girih.comm.group import TrainerGroup
from girih.comm.registry import LocalRegistry
from girih.comm.service import Service, connect
from girih.errors import CheckpointError
from girih.hierarchical.hogwild import HogwildReplica
from girih.services.dense_server import DenseServer
from girih.sparse.halves.remote import RemoteSparse
from girih.sparse.protocol import SparseVerb
from support.dense_suite import case, dense_spec
from support.votes import apply

SECRET = b"of this run"


class Damaged(Service):
    """An embedding server that finds damage in what it is to load."""

    verbs = SparseVerb

    def __init__(self):
        super().__init__(index=0, address="shm://", secret=SECRET)

    def on_load(self, request):
        raise CheckpointError("shard-0000: damaged")


def listening(role, stop):
    """Where a role listens that runs in a thread until ``stop`` is set."""
    told, address = threading.Event(), []
    threading.Thread(target=role.run, args=(lambda at: (address.append(at), told.set()), stop)).start()
    assert told.wait(20)
    return address[0]


def loaded(rank, registry):
    """Tries to load; the error, whether the parameters are as before, and the step that rows are of."""
    ranks = TrainerGroup(rank, 2, registry)
    stop, addresses = threading.Event(), None
    if ranks.first:
        dense_server = DenseServer(
            index=0, num_replicas=ranks.size, averaging="easgd", rate=None, address="shm://", secret=SECRET
        )
        addresses = [listening(role, stop) for role in (dense_server, Damaged())]
    at, damaged = ranks.broadcast(addresses)
    dense = HogwildReplica(dense_spec(), ranks, nets=1, servers=[connect(at, secret=SECRET)])
    spec = SimpleNamespace(groups=lambda: ())
    sparse = RemoteSparse(spec, None, ranks, workers=(), servers=(damaged,), secret=SECRET)
    saved, one = dense.state(), case(0)
    saved = {**saved, "model": {name: value.clone() for name, value in saved["model"].items()}}
    apply(dense.compute(one.batch, one.embeddings()))
    dense.sync()
    before = {name: value.clone() for name, value in dense.state()["model"].items()}
    checkpoint = LoadedCheckpoint(
        Storage("memory://none"), RunState(step=3), None, {}, [], None, saved, {}, None
    )
    told = ""
    try:
        checkpoint.put(sparse=sparse, dense=dense)
    except CheckpointError as error:
        told = str(error)
    after = dense.state()["model"]
    same = all(torch.equal(after[name], value) for name, value in before.items())
    ranks.barrier()
    dense.close()
    sparse.close()
    stop.set()
    ranks.close()
    return {"told": told, "same": same, "last_step": sparse.last_step}


def test_all_trainers_learn_of_damaged_rows_and_have_their_parameters_back():
    registry = LocalRegistry()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(loaded, range(2), [registry] * 2))
    for each in found:
        assert each == {"told": "shard-0000: damaged", "same": True, "last_step": 0}
