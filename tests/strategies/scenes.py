"""Small data with a configuration for each kind of model, and trainings of it that need few processes.

A scene is played by all trainers of a group: each is a process with real collectives, while loaders, embedding
workers and embedding servers are threads of the first one, with real sockets and shared memory.
"""

import atexit
import faulthandler
import json
import os
import pickle
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sent import Sent

from companions import Companion
from girih.app.run_config import RunConfig
from girih.cluster.cluster import Cluster
from girih.comm.group import TrainerGroup
from girih.comm.registry import LocalRegistry, RegistryServer
from girih.comm.registry.remote import RemoteRegistry
from girih.data.click_log import click_log
from girih.errors import NonFiniteError

STEPS, SIZE = int(os.environ.get("GIRIH_STEPS", "20")), 32
SECRET = b"of these scenes"
MOST_S = int(os.environ.get("GIRIH_PATIENCE_S", "280"))
ODD = 5
"""Examples of an epoch's last batch."""

FEATURES = """
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[features]]
name = "tags"
kind = "categorical"
dim = 4
pooling = "mean"
[[features]]
name = "x0"
kind = "numeric"
transform = ["log1p", "standardize"]
"""

HISTORY = """
[[features]]
name = "history"
kind = "sequence"
table = "item"
"""

SCENE = """
[[features]]
name = "scene"
kind = "numeric"
"""
STAR = """
name = "star"
domain = "scene"
num_domains = 3
partitioned_norm = false
auxiliary_hidden = [4]
hidden = [8]
"""

LABELS = """loss = { spent = "huber", rating = "mse" }
huber_delta = 2.0
missing = "skip"
mask = { spent = "click", buy = "user < 250" }
label_weight = { buy = "importance" }
weight = "sampled" """

LOG = """
[data]
train = "train.parquet"
valid = "valid.parquet"
test = "test.parquet"
batch_size = {size}
{features}
[labels]
names = {labels}
{weight}
[model]
{model}
[sparse_optimizer]
{sparse}
[dense_optimizer]
name = "adam"
lr = 0.003
[store]
shards = 2
[train]
seed = 3
log_every_steps = 20
{more}
"""

WEIGHTED = """
[data]
format = "libsvm"
train = "train.svm"
test = "test.svm"
batch_size = {size}
[[features]]
name = "words"
kind = "categorical"
dim = 4
pooling = "mean"
[[features]]
name = "marks"
kind = "categorical"
dim = 8
pooling = "sum"
[labels]
names = ["click"]
[model]
name = "wide_deep"
hidden = [8]
[sparse_optimizer]
name = "ftrl"
[first_order_optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
[dense_optimizer]
name = "adagrad"
lr = 0.01
[store]
shards = 1
"""


def write(directory, *, num_examples=STEPS * SIZE, size=SIZE, held_out=101):
    """Writes data, and ``deepfm``, ``din``, ``mmoe``, ``star``, ``labels`` and ``weighted`` as configurations.

    Evaluation data have ``held_out`` examples.
    """
    start = 0
    for name, rows in (("train", num_examples), ("valid", held_out), ("test", held_out)):
        pq.write_table(log(rows, start), directory / f"{name}.parquet", row_group_size=700)
        start += rows
    for name, rows in (("train", num_examples), ("test", 500)):
        (directory / f"{name}.svm").write_text(svm(rows))
    adam, adagrad = 'name = "adam"\nlr = 0.01', 'name = "adagrad"\nlr = 0.05'
    rowwise, one, two = 'name = "rowwise_adagrad"\nlr = 0.05', '["click"]', '["click", "buy"]'
    four = '["click", "buy", "spent", "rating"]'
    first_order = '[first_order_optimizer]\nname = "ftrl"'
    for name, features, labels, weight, model, sparse, more in (
        ("deepfm", FEATURES, one, "", 'name = "deepfm"\nhidden = [16, 8]', adam, first_order),
        ("din", FEATURES + HISTORY, one, 'weight = "importance"', 'name = "din"\nhidden = [8]', adagrad, ""),
        ("mmoe", FEATURES, two, "", 'name = "mmoe"\nexpert_hidden = [8]\ntower_hidden = [4]', rowwise, ""),
        (
            "labels",
            FEATURES,
            four,
            LABELS,
            'name = "mmoe"\nexpert_hidden = [8]\ntower_hidden = [4]',
            adagrad,
            "",
        ),
        ("star", FEATURES + SCENE, one, "", STAR, adam, ""),
    ):
        content = LOG.format(
            size=size, features=features, labels=labels, weight=weight, model=model, sparse=sparse, more=more
        )
        (directory / f"{name}.toml").write_text(content)
    (directory / "weighted.toml").write_text(WEIGHTED.format(size=size))
    (directory / "config.toml").write_text((directory / "deepfm.toml").read_text())
    return directory


def log(rows, start):
    table, _ = click_log(rows, start=start, cardinality=300)
    rng = np.random.default_rng(start)
    items = table["item"].to_numpy()
    lengths = rng.integers(0, 5, rows)
    bounds = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    history = pa.ListArray.from_arrays(pa.array(bounds), pa.array(rng.choice(items, lengths.sum())))
    table = table.append_column("history", history)
    scenes = np.where(items % 50 == 0, 2, items % 2)  # the third is rare, so that many shares lack it
    table = table.append_column("scene", pa.array(scenes))
    table = table.append_column("importance", pa.array(rng.choice([0.0, 0.5, 1.0, 3.0], rows)))
    table = table.append_column("buy", pa.array((rng.random(rows) < 0.3).astype(np.int8)))
    spent = np.where(
        table["click"].to_numpy() > 0, rng.gamma(2.0, size=rows), np.nan
    )  # nothing without a click
    table = table.append_column("spent", pa.array(spent))
    rare = rng.random(rows) < 0.97  # many shares of a step have no rating, and some steps
    table = table.append_column("rating", pa.array(rng.integers(1, 6, rows), mask=rare))
    return table.append_column("sampled", pa.array(rng.choice([0.5, 1.0, 2.0], rows)))


def svm(rows):
    rng = np.random.default_rng(rows)
    lines = []
    for _ in range(rows):
        ids, weights = rng.integers(1, 200, 2), rng.uniform(-1, 2, 2)
        lines.append(f"{rng.integers(0, 2)} {ids[0]}:{weights[0]:.4f} {ids[1]}:{weights[1]:.4f}")
    return "\n".join(lines) + "\n"


def counted(directory, features, *, examples=None):
    """The features of a summary, counted from the files.

    Args:
        features: name → its column and its table. examples: of the training data; all if None.
    """
    files = {name: pq.read_table(directory / f"{name}.parquet") for name in ("train", "test")}
    files["train"] = files["train"].slice(0, examples)
    ids, seen = {}, {}
    for name, (column, table) in features.items():
        for split, file in files.items():
            values = file[column].combine_chunks()
            values = values.flatten() if pa.types.is_list(values.type) else values
            ids[name, split] = values.to_pylist()
        seen.setdefault(table, set()).update(ids[name, "train"])
    return {
        name: {
            "table": table,
            "rows": len(seen[table]),
            "ids": len(ids[name, "train"]),
            "evaluated_ids": len(ids[name, "test"]),
            "unseen": sum(each not in seen[table] for each in ids[name, "test"]) / len(ids[name, "test"]),
        }
        for name, (_, table) in features.items()
    }


class Threads(Cluster):
    """Roles as threads of the first trainer's process; the trainers are others' business."""

    def __init__(self, ranks, change=lambda role: role):
        super().__init__()
        self.ranks = ranks
        self._change, self._started, self.failures = change, {}, []
        self.secret, self.registry = SECRET, None  # the same on all ranks; nothing comes back elsewhere
        self.addresses = {}

    def prepare(self, counts):
        pass

    def start(self, name, roles, bearing=None):
        found = None
        if self.ranks.first:
            found = [self._begin(name, self._change(pickle.loads(pickle.dumps(role)))) for role in roles()]
        self.addresses[name] = tuple(self.ranks.broadcast(found))
        return self.addresses[name]

    def _begin(self, name, role):
        stop, told, address = threading.Event(), threading.Event(), []

        def ready(where):
            address.append(where)
            told.set()

        def run():
            try:
                role.run(ready, stop)
            except Exception as error:
                self.failures.append(error)
                told.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._started.setdefault(name, []).append((stop, thread))
        assert told.wait(30), name
        assert not self.failures, self.failures
        return address[0]

    def end(self, name):
        for stop, thread in self._started.pop(name, []):
            stop.set()
            thread.join(20)
            assert not thread.is_alive(), name

    def show_in(self, run, metrics=None):
        pass

    def close(self, *, failed=False):
        if not failed:
            self.ranks.barrier()
        for name in ("loader", "group-server", "dense-server", "embedding-worker", "embedding-server"):
            self.end(name)


def play(directory, scene, ranks=None, *, change=lambda role: role, act=None):
    """Trains and evaluates; returns the summary, with all of the metrics, and leaves checkpoints in ``name``."""
    with pytest.MonkeyPatch.context() as patch:
        if "staged" in scene:  # slots beside the hot ones, so few that rows come and go
            patch.setattr("girih.store.tiers.slot_memory._FIRST_STAGED", scene["staged"])
        return _play(directory, scene, ranks, change, act)


def _play(directory, scene, ranks, change, act):
    settings = RunConfig.load(
        directory / f"{scene.get('config', 'deepfm')}.toml",
        overrides=[*scene.get("overrides", ()), *(f"strategy.{o}" for o in scene.get("options", ()))],
        strategy=scene.get("strategy", "local"),
    )
    settings = replace(settings, plan=scene.get("plan"))
    datasets = {
        name: settings.dataset(name) for name in ("train", "valid", "test") if getattr(settings.data, name)
    }
    ranks = ranks or TrainerGroup()
    counting = Sent() if "sent" in scene else None
    with settings.trainer(run=directory / scene["name"], cluster=Threads(ranks, change)) as trainer:
        if "load" in scene:
            trainer.load(directory / scene["load"])
        if act is not None:
            trainer._run.open(datasets["train"])
            act(trainer)
        if "spoil" in scene:
            spoils = scene["spoil"] if isinstance(scene["spoil"], list) else [scene["spoil"]]
            for kind, rank, step in spoils:
                spoil(trainer, ranks.rank, kind, rank % ranks.size, step)
        if scene.get("slow_rank", -1) == ranks.rank:
            trainer.model.register_forward_pre_hook(lambda module, given: time.sleep(0.02))
        if "waits" in scene:
            from waits import waits_by_step  # beside the tests of GPUs

            with pytest.MonkeyPatch.context() as patch:
                return {"waits": ranks.gather(waits_by_step(trainer, datasets["train"], patch))}
        left = settings.train.epochs - trainer.state.epoch
        if "raises" in scene:
            try:
                trainer.fit(datasets["train"], epochs=left)
            except NonFiniteError as error:
                return {"error": str(error), "step": trainer.state.step}
            raise AssertionError("nothing was raised")
        trainer.fit(datasets["train"], datasets.get("valid") if scene.get("valid") else None, epochs=left)
        metrics = trainer.evaluate(datasets["test"])
        kept = kept_samples(trainer)
        summary = trainer.summary(metrics, duration_s=0.0)
        if counting is not None:
            summary["sent_bytes"] = ranks.sum([counting.end()])[0]
        if "groups" in trainer.plan.options:
            summary["rounds"] = ranks.gather(rounds_of(trainer))
        if "tell" in scene:
            summary["told"] = ranks.gather(tell(trainer, datasets["test"]))
    summary["kept"] = kept
    return summary


def rounds_of(trainer):
    """Rounds of averaging that this trainer's copy took part in, or each of the group servers that it leads."""
    of_servers = [
        told["counters"].get("averaging_rounds", 0)
        for title, told in trainer.dense.processes().items()
        if title.startswith("group-server")
    ]
    return of_servers or [trainer._run.context.stats.counters["averaging_rounds"]]


def kept_samples(trainer):
    """Batches whose ids embedding workers keep."""
    processes = trainer.sparse.stats().processes.values()
    return sum(process["gauges"].get("kept_samples", 0) for process in processes)


def tell(trainer, data):
    """Of one rank: its copy of what all have alike, the columns it reads, and its predictions."""
    shared = torch.cat([p.detach().reshape(-1) for p in trainer.dense.shared])
    return {
        "shared": shared.numpy().tobytes().hex(),
        "columns": [feature.name for feature in trainer._run.session.feed.schema_of(data).features],
        "rows": sum(trainer.sparse._shards.rows().values()),
        "predicted": trainer.predict(data).tolist(),
    }


def spoil(trainer, rank, kind, spoiled_rank, step):
    """Has one trainer meet a number that is not finite in one step."""
    calls = [0]

    def before(module, given):
        numeric, embeddings = given
        if not module.training or len(numeric) < 2:  # not the try with one example
            return None
        calls[0] += 1
        if calls[0] != step or rank != spoiled_rank:
            return None
        if kind == "nan":
            return numeric * float("nan"), embeddings
        embeddings.blocks[0].values.register_hook(lambda gradient: gradient * float("inf"))
        return None

    trainer.model.register_forward_pre_hook(before)


def play_all(directory, scenes, num_trainers, kind=TrainerGroup):
    """Plays scenes in turn with so many trainers, whose group is of a ``kind``; returns the summary of each, by name."""
    if (num_trainers, kind) not in COMPANIES:
        COMPANIES[num_trainers, kind] = Company(num_trainers, kind)
    try:
        return COMPANIES[num_trainers, kind].play(directory, scenes)
    except BaseException:
        COMPANIES.pop((num_trainers, kind)).end()
        raise


class Company:
    """Trainers that wait for scenes to play, so that one group of processes serves all tests of a session."""

    def __init__(self, size, kind):
        self._server = RegistryServer(LocalRegistry(), SECRET)
        self._trainers = [Companion(join, rank, size, self._server.address, kind) for rank in range(size)]
        atexit.register(self.end)

    def play(self, directory, scenes):
        """Summaries by name."""
        for trainer in self._trainers:
            trainer.pipe.send((directory, scenes))
        waiting = {trainer.pipe for trainer in self._trainers}
        while waiting:
            ready = wait(waiting, MOST_S * len(scenes))
            try:
                told = [pipe.recv() for pipe in ready]
            except EOFError:
                time.sleep(2)  # the others may have something to say as well
                told = []
            assert told, "\n".join(sum((trainer.printed() for trainer in self._trainers), ()))
            waiting -= set(ready)
        return json.loads((directory / "summaries.json").read_text())

    def end(self):
        """Ends the trainers."""
        atexit.unregister(self.end)
        for trainer in self._trainers:
            trainer.close()
        self._server.close()


COMPANIES = {}


def join(pipe, rank, num_trainers, address, kind):
    """One trainer of a company, which plays until nobody asks any more."""
    ranks = kind(rank, num_trainers, RemoteRegistry(address, SECRET))
    with suppress(EOFError):
        while True:
            directory, scenes = pipe.recv()
            summaries = {}
            for scene in scenes:
                faulthandler.dump_traceback_later(MOST_S - 20, exit=True)
                ranks.forget_stop()
                ranks.set_unsynchronized(False)
                print("playing", scene)
                summaries[scene["name"]] = play(directory, scene, ranks)
                summaries[scene["name"]]["stopped"] = ranks.stopping
            ranks.barrier()
            if ranks.first:
                (directory / "summaries.json").write_text(json.dumps(summaries))
            faulthandler.cancel_dump_traceback_later()
            pipe.send("played")
