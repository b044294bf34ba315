"""Trainers at their own pace: nobody waits, nobody's examples are lost or read twice; each learns from its own batch.

What a server says of staleness is held to the rows themselves. The gradient of a row that is in every batch is 1, and so
is SGD's rate: what a trainer pulls is how many updates it has seen.
"""

import math
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scenes import Threads
from torch import nn

import girih
from companions import together
from girih.checkpoint import CheckpointOptions
from girih.schema import Labels

pytestmark = pytest.mark.slow

SCHEMA = girih.Schema(
    [girih.Categorical(name="user", dim=1), girih.Numeric(name="slope"), girih.Numeric(name="row")],
    labels=Labels(names=("click",), weight="importance"),
)
SIZE, STEPS, EPOCHS = 8, 10, 3  # of a batch, of an epoch
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


def write(path, users, slopes, weights):
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
        train = girih.read_parquet(directory / f"{data}.parquet", SCHEMA, batch_size=SIZE)
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
        if ranks.first and step == EPOCHS * STEPS:
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


def two(ranks):
    """All scenes, by name, as one trainer saw them."""
    directory = Path(ranks.broadcast(tempfile.mkdtemp(prefix="girih-apart-") if ranks.first else None))
    if ranks.first:
        same = np.zeros(STEPS * SIZE, np.int64)
        write(directory / "same.parquet", same, same + 1.0, same + 1.0)
        write(
            directory / "own.parquet", [5] * 4 + [6] * 4, [1, 1, 1, 5, 3, 3, 3, 3], [1, 1, 2, 0, 1, 3, 1, 1]
        )
    ranks.barrier()
    told = {"own paces": own_paces(ranks, directory), "stopped": stopped(ranks, directory)}
    for strategy in (girih.Hybrid, girih.Asynchronous):
        told[f"means {strategy.name}"] = fit(ranks, strategy(trainers=2), directory, "own")
        for staleness in (0, 2):
            name = f"{strategy.name} {staleness}"
            told[name] = fit(ranks, strategy(trainers=2, staleness=staleness), directory, epochs=EPOCHS)
    ranks.barrier()
    if ranks.first:
        shutil.rmtree(directory)
    return told


@pytest.fixture(scope="module")
def told():
    return together(two)


def epochs_of(*seen):
    """Rows of each epoch, in order, of the steps of some trainers."""
    num_epochs = len(seen[0]) // STEPS
    return [
        sorted(row for steps in seen for rows in steps[e * STEPS : (e + 1) * STEPS] for row in rows)
        for e in range(num_epochs)
    ]


ALL_ROWS = list(range(STEPS * SIZE))


def test_a_trainer_trains_all_its_epochs_while_another_has_not_begun(told):
    fast, slow = (each["own paces"] for each in told)
    assert epochs_of(fast["seen"], slow["seen"]) == [ALL_ROWS] * EPOCHS
    for each in (fast, slow):
        assert (each["state"]["step"], each["state"]["epoch"]) == (EPOCHS * STEPS, EPOCHS)
    assert fast["pulled"][-1] > -EPOCHS * STEPS  # none of the other's updates was there yet
    assert slow["pulled"][-1] == pytest.approx(-2 * EPOCHS * STEPS, abs=8)


def test_trainers_that_were_stopped_at_different_steps_go_on_where_each_was(told):
    one, other = ([each["stopped"][part] for part in ("first", "then")] for each in told)
    assert [one[0]["state"]["step"], other[0]["state"]["step"]] == [9, 12]
    assert [one[1]["state"]["step"], other[1]["state"]["step"]] == [2 * STEPS, 2 * STEPS]
    seen = [first["seen"] + then["seen"] for first, then in (one, other)]
    assert epochs_of(*seen) == [ALL_ROWS] * 2
    assert one[1]["state"]["saved_step"] == other[1]["state"]["saved_step"] == 18


def test_each_trainer_learns_from_the_mean_over_its_own_examples(told):
    """Row 5 is in the first trainer's share alone, row 6 in the second one's; weights are those of examples."""
    own = [1.0, (3 + 3 * 3 + 3 + 3) / 6]
    for rank, each in enumerate(told):
        here = each["means asynchronous"]
        assert here["losses"] == pytest.approx([own[rank] * here["pulled"][0]])
        moved = here["of_all"]
        assert moved == pytest.approx(-sum(own), rel=1e-6)
        here = each["means hybrid"]
        whole = (4 * own[0] + 6 * own[1]) / 10
        assert here["of_all"] == pytest.approx(-whole, rel=1e-6)
    before = [each["means asynchronous"]["pulled"][0] for each in told]
    for name, expected in (("asynchronous", own), ("hybrid", [own[0] * 0.4, own[1] * 0.6])):
        here = told[0][f"means {name}"]
        after = np.log(np.array(here["predicted"]) / (1 - np.array(here["predicted"])))
        rows = [after[0] / 1.0 - here["of_all"], after[4] / 3.0 - here["of_all"]]
        np.testing.assert_allclose(np.array(before) - rows, expected, rtol=1e-4)


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_hybrid_says_of_staleness_is_what_the_rows_say(told, staleness):
    """Before the update of step k there are k; both trainers' are one."""
    behind = []
    for each in told:
        pulled = each[f"hybrid {staleness}"]["pulled"]
        behind += [k + round(value) for k, value in enumerate(pulled)]
    summary = told[0][f"hybrid {staleness}"]["summary"]
    assert max(behind) == staleness
    for name in ("staleness", "updates_since_read"):
        assert summary[f"{name}_max"] == max(behind)
        assert summary[f"{name}_mean"] == pytest.approx(sum(behind) / len(behind))


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_asynchronous_says_of_updates_since_a_read_is_what_the_rows_say(told, staleness):
    """Each of all updates comes at a place of its own, whatever the order: the sum of places is known."""
    here = [each[f"asynchronous {staleness}"] for each in told]
    reads = [[-round(value) for value in each["pulled"]] for each in here]
    num_updates = sum(map(len, reads))
    assert num_updates == 2 * EPOCHS * STEPS
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
