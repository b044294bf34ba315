"""Same results on a busy machine and from hosts that learn outcomes late; staleness is bounded, and measured as the rows show it."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scenes import Threads, play, play_all, write
from torch import nn

import girih
from companions import together
from girih.checkpoint import CheckpointOptions
from girih.schema import Labels
from girih.strategies import asynchronous, hybrid
from runs import difference, train

STEPS = 12
SHORT = [f"train.max_steps={STEPS}", "train.log_every_steps=1"]
TWO, SERVERS = ["strategy.trainers=2"], ["strategy.embedding_servers=2"]
AUTO = ["schedule.micro_batches=auto", "schedule.interleaving_groups=auto"]
ONE_GROUP = ["strategy.servers_per_group=2"]
heavy = pytest.mark.heavy
SAME = [
    pytest.param("substitution", TWO, marks=heavy, id="substitution"),
    pytest.param("substitution", [*TWO, "strategy.dense=split"], marks=heavy, id="split"),
    pytest.param("substitution", [*TWO, "strategy.dense=replicated"], marks=heavy, id="replicated"),
    pytest.param("substitution", [*TWO, AUTO[0]], marks=heavy, id="substitution-auto"),
    pytest.param("local", [AUTO[0], "model.dropout=0.1"], marks=heavy, id="local"),
    pytest.param("synchronous", [*TWO, *AUTO], marks=heavy, id="synchronous"),
    pytest.param("hybrid", [*TWO, *SERVERS, "strategy.staleness=0"], marks=heavy, id="hybrid"),
    pytest.param("hierarchical", [*ONE_GROUP, "model.dropout=0.1"], marks=heavy, id="hierarchical"),
]
BOUNDED = [
    pytest.param("hybrid", [*TWO, *SERVERS, "strategy.staleness=3"], 3, marks=heavy, id="hybrid"),
    pytest.param("asynchronous", [*TWO, *SERVERS, "strategy.staleness=3"], 3, marks=heavy, id="asynchronous"),
    pytest.param("hierarchical", ["strategy.groups=2", "strategy.nets=2"], None, marks=heavy, id="groups"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("same"), num_examples=2 * STEPS * 32)


@contextlib.contextmanager
def busy_cores():
    """Twice as many processes that compute as there are cores."""
    count = 2 * len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def losses(run):
    return [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "words", "num_trainers"),
    [("substitution", [], 2), ("hierarchical", [*ONE_GROUP, "model.dropout=0.1"], 1)],
)
def test_trainers_on_a_busy_machine_give_the_same_result(directory, strategy, words, num_trainers):
    """Only training meets the busy cores; the tests of whole runs below start their processes there, too."""

    def train_once(name):
        scene = {"name": f"{strategy}-{name}", "strategy": strategy, "overrides": [*SHORT, *words]}
        if num_trainers == 1:
            return play(directory, scene)
        return play_all(directory, [scene], num_trainers)[scene["name"]]

    idle = train_once("idle")
    with busy_cores():
        busy = train_once("busy")
    assert_same(directory / f"{strategy}-idle", directory / f"{strategy}-busy", idle, busy)


def assert_same(idle, busy, one, other):
    plans = [json.loads((run / "plan.json").read_text()) for run in (idle, busy)]
    assert plans[0] == plans[1]
    assert losses(idle) == losses(busy)
    assert (one["auc"], one["logloss"]) == (other["auc"], other["logloss"])
    assert difference(idle, busy) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "words"), SAME)
def test_a_busy_machine_gives_the_same_result(directory, tmp_path, strategy, words):
    idle, busy = tmp_path / "idle", tmp_path / "busy"
    one = train(directory, strategy, idle, *SHORT, *words)
    with busy_cores():
        other = train(directory, strategy, busy, *SHORT, *words)
    assert_same(idle, busy, one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "words", "staleness"), BOUNDED)
def test_a_busy_machine_keeps_the_bounds(directory, tmp_path, strategy, words, staleness):
    idle, busy, words = (
        tmp_path / "idle",
        tmp_path / "busy",
        ["train.epochs=1", "train.log_every_steps=1", *words],
    )
    summaries = {idle: train(directory, strategy, idle, *words)}
    with busy_cores():
        summaries[busy] = train(directory, strategy, busy, *words)
    for run, summary in summaries.items():
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert max(record.get("examples", 0) for record in records) == 2 * STEPS * 32
        assert summary["lost_updates"] == 0
        assert staleness is None or summary["staleness_max"] <= staleness


DEFERRED_STEPS, DEFERRED_SIZE = 6, 16


def short_scene(name, strategy, **more):
    short = [f"train.max_steps={DEFERRED_STEPS}", f"data.batch_size={DEFERRED_SIZE}"]
    return {"name": name, "strategy": strategy, "overrides": short, "options": ["staleness=0"], **more}


@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_deferred_outcomes_equal_immediate_ones(tmp_path, monkeypatch, strategy):
    directory = write(
        tmp_path, num_examples=DEFERRED_STEPS * DEFERRED_SIZE, size=DEFERRED_SIZE, held_out=DEFERRED_SIZE
    )
    waiting = play(directory, short_scene("waiting", strategy))
    for module in (hybrid, asynchronous):
        monkeypatch.setattr(module, "deferred_if", lambda on_gpu, spec: replace(spec, deferred=True))
    halves = []
    late = play(directory, short_scene("late", strategy), act=lambda trainer: halves.append(trainer.dense))
    assert halves[0].deferred
    assert difference(directory / "waiting", directory / "late") == (0, 0)
    assert late["logloss"] == waiting["logloss"]
    refused = play(directory, short_scene("refused", strategy, spoil=("nan", 0, 3), raises=True))
    assert refused["step"] == 3
    assert "step 3: the loss is nan" in refused["error"]
    infinite = play(directory, short_scene("infinite", strategy, spoil=("infinite", 0, 2), raises=True))
    assert infinite["step"] == 2
    assert "the gradient of feature" in infinite["error"]


SCHEMA = girih.Schema(
    [girih.Categorical(name="user", dim=1), girih.Numeric(name="slope"), girih.Numeric(name="row")],
    labels=Labels(names=("click",), weight="importance"),
)
SLOPES_SIZE, SLOPES_STEPS, EPOCHS = 8, 10, 3  # of a batch, of an epoch
MOST_S = 100


class Slopes(nn.Module):
    """The loss is the weighted mean of slope · (the user's number + a number of all).

    Attributes:
        seen: of each step, the rows of its examples. pulled: the first one's number. losses: the mean of the step.
        before_step: called with the number of each step.
    """

    def __init__(self, before_step):
        super().__init__()
        self.of_all = nn.Parameter(torch.zeros(1))
        self.seen, self.pulled, self.losses, self.before_step = [], [], [], before_step

    def forward(self, numeric, embeddings):
        users = embeddings["user"]
        if self.training:
            self.seen.append(numeric[:, 1].int().tolist())
            self.pulled += users[:1, 0].tolist()
            self.before_step(len(self.seen))
        return numeric[:, :1] * (users + self.of_all)

    def loss(self, outputs, batch):
        weights = batch.example_weights[:, None]
        mean = (outputs * weights).sum() / weights.sum()
        self.losses.append(mean.item())
        return mean


def write_slopes(path, users, slopes, weights):
    rows = np.arange(len(users))
    columns = {"user": users, "slope": slopes, "row": rows, "click": rows % 2, "importance": weights}
    pq.write_table(pa.table(columns), path)


def fit(ranks, strategy, directory, data="same", before_step=None, epochs=1, load=False, **options):
    """Trains; returns what the trainer saw and says. ``before_step`` gets the trainer and the number of a step."""
    here = []
    model = Slopes(lambda step: None if before_step is None else before_step(here[0], step))
    with girih.Trainer(
        model,
        schema=SCHEMA,
        sparse_optimizer=girih.optim.SGD(lr=1.0),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        strategy=strategy,
        cluster=Threads(ranks),
        **options,
    ) as trainer:
        here.append(trainer)
        if load:
            trainer.load(options["run"])
        train = girih.read_parquet(directory / f"{data}.parquet", SCHEMA, batch_size=SLOPES_SIZE)
        trainer.fit(train, epochs=epochs - trainer.state.epoch)
        summary = trainer.summary(None, duration_s=0.0)
        rows = trainer.predictions(train)
        predicted = np.concatenate([probabilities for _, probabilities in rows])[:, 0]
    ranks.set_unsynchronized(False)
    return {"summary": summary, "seen": model.seen, "pulled": model.pulled, "losses": model.losses,
            "state": trainer.state.to_dict(), "of_all": model.of_all.item(), "predicted": predicted.tolist()}  # fmt: skip


def wait_for(ranks, note):
    until = time.monotonic() + MOST_S
    while not ranks.has(note):
        assert time.monotonic() < until, f"{note}: the other trainer waits"
        time.sleep(0.005)


def own_paces(ranks, directory):
    """The second trainer does its first step once the first one has done all of its own."""

    def before_step(_, step):
        if ranks.first and step == EPOCHS * SLOPES_STEPS:
            ranks.put("all done", "1")
        elif not ranks.first and step == 1:
            wait_for(ranks, "all done")

    return fit(ranks, girih.Asynchronous(trainers=2), directory, before_step=before_step, epochs=EPOCHS)


def stopped(ranks, directory):
    """The first one is stopped at step 9, while the second one waits at step 12 to save with it; then they go on."""

    def before_step(trainer, step):
        if not ranks.first and step == 12:
            ranks.put("ahead", "1")
        elif ranks.first and step == 9:
            wait_for(ranks, "ahead")
            trainer.request_stop()

    run, strategy = str(directory / "stopped"), girih.Asynchronous(trainers=2)
    options = {"run": run, "checkpoints": CheckpointOptions(every_steps=6), "epochs": 2}
    first = fit(ranks, strategy, directory, before_step=before_step, **options)
    then = fit(ranks, strategy, directory, load=True, **options)
    return {"first": first, "then": then}


def train_two(ranks):
    """All scenes, by name, as one trainer saw them."""
    directory = Path(ranks.broadcast(tempfile.mkdtemp(prefix="girih-apart-") if ranks.first else None))
    if ranks.first:
        same = np.zeros(SLOPES_STEPS * SLOPES_SIZE, np.int64)
        write_slopes(directory / "same.parquet", same, same + 1.0, same + 1.0)
        write_slopes(
            directory / "own.parquet", [5] * 4 + [6] * 4, [1, 1, 1, 5, 3, 3, 3, 3], [1, 1, 2, 0, 1, 3, 1, 1]
        )
    ranks.barrier()
    reports = {"own paces": own_paces(ranks, directory), "stopped": stopped(ranks, directory)}
    for strategy in (girih.Hybrid, girih.Asynchronous):
        reports[f"means {strategy.name}"] = fit(ranks, strategy(trainers=2), directory, "own")
        for staleness in (0, 2):
            name = f"{strategy.name} {staleness}"
            reports[name] = fit(ranks, strategy(trainers=2, staleness=staleness), directory, epochs=EPOCHS)
    ranks.barrier()
    if ranks.first:
        shutil.rmtree(directory)
    return reports


@pytest.fixture(scope="module")
def reports():
    return together(train_two)


def epochs_of(*seen):
    """Rows of each epoch, in order, of the steps of some trainers."""
    num_epochs = len(seen[0]) // SLOPES_STEPS
    return [
        sorted(
            row for steps in seen for rows in steps[e * SLOPES_STEPS : (e + 1) * SLOPES_STEPS] for row in rows
        )
        for e in range(num_epochs)
    ]


ALL_ROWS = list(range(SLOPES_STEPS * SLOPES_SIZE))


@pytest.mark.slow
def test_a_trainer_does_not_wait_for_another_that_has_not_started(reports):
    fast, slow = (each["own paces"] for each in reports)
    assert epochs_of(fast["seen"], slow["seen"]) == [ALL_ROWS] * EPOCHS
    for each in (fast, slow):
        assert (each["state"]["step"], each["state"]["epoch"]) == (EPOCHS * SLOPES_STEPS, EPOCHS)
    assert fast["pulled"][-1] > -EPOCHS * SLOPES_STEPS  # none of the other's updates was there yet
    assert slow["pulled"][-1] == pytest.approx(-2 * EPOCHS * SLOPES_STEPS, abs=8)


@pytest.mark.slow
def test_trainers_that_stopped_at_different_steps_resume_there(reports):
    one, other = ([each["stopped"][part] for part in ("first", "then")] for each in reports)
    assert [one[0]["state"]["step"], other[0]["state"]["step"]] == [9, 12]
    assert [one[1]["state"]["step"], other[1]["state"]["step"]] == [2 * SLOPES_STEPS, 2 * SLOPES_STEPS]
    seen = [first["seen"] + then["seen"] for first, then in (one, other)]
    assert epochs_of(*seen) == [ALL_ROWS] * 2
    assert one[1]["state"]["saved_step"] == other[1]["state"]["saved_step"] == 18


@pytest.mark.slow
def test_each_trainer_learns_from_the_mean_over_its_own_examples(reports):
    """Row 5 is in the first trainer's share alone, row 6 in the second one's; weights are those of examples."""
    own = [1.0, (3 + 3 * 3 + 3 + 3) / 6]
    for rank, each in enumerate(reports):
        here = each["means asynchronous"]
        assert here["losses"] == pytest.approx([own[rank] * here["pulled"][0]])
        moved = here["of_all"]
        assert moved == pytest.approx(-sum(own), rel=1e-6)
        here = each["means hybrid"]
        whole = (4 * own[0] + 6 * own[1]) / 10
        assert here["of_all"] == pytest.approx(-whole, rel=1e-6)
    before = [each["means asynchronous"]["pulled"][0] for each in reports]
    for name, expected in (("asynchronous", own), ("hybrid", [own[0] * 0.4, own[1] * 0.6])):
        here = reports[0][f"means {name}"]
        after = np.log(np.array(here["predicted"]) / (1 - np.array(here["predicted"])))
        rows = [after[0] / 1.0 - here["of_all"], after[4] / 3.0 - here["of_all"]]
        np.testing.assert_allclose(np.array(before) - rows, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_staleness_is_that_of_the_rows_under_hybrid(reports, staleness):
    """Before the update of step k there are k; both trainers' are one."""
    behind = []
    for each in reports:
        pulled = each[f"hybrid {staleness}"]["pulled"]
        behind += [k + round(value) for k, value in enumerate(pulled)]
    summary = reports[0][f"hybrid {staleness}"]["summary"]
    assert max(behind) == staleness
    for name in ("staleness", "updates_since_read"):
        assert summary[f"{name}_max"] == max(behind)
        assert summary[f"{name}_mean"] == pytest.approx(sum(behind) / len(behind))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_updates_since_a_read_are_those_of_the_rows_under_asynchronous(reports, staleness):
    """Each of all updates comes at a place of its own, whatever the order: the sum of places is known."""
    here = [each[f"asynchronous {staleness}"] for each in reports]
    reads = [[-round(value) for value in each["pulled"]] for each in here]
    num_updates = sum(map(len, reads))
    assert num_updates == 2 * EPOCHS * SLOPES_STEPS
    summary, mean = here[0]["summary"], (num_updates - 1) / 2 - sum(map(sum, reads)) / num_updates
    assert summary["updates_since_read_mean"] == pytest.approx(mean)
    assert summary["updates_since_read_max"] >= math.ceil(mean)
    assert summary["staleness_max"] == max(each["state"]["staleness_max"] for each in here) <= staleness
    if staleness == 0:  # a trainer's update comes before its next read
        most = [
            after - 1 - read
            for each in reads
            for read, after in zip(each, [*each[1:], num_updates], strict=True)
        ]
        assert summary["updates_since_read_max"] <= max(most)
