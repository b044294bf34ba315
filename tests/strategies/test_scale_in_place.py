"""Roles that are scaled beside a trainer of a program's own, which has no launcher: what it writes, and goes on with."""

import json
import os
import tomllib

import pytest

import girih
from girih.cluster.launchers.local import LocalProcess
from girih.cluster.roles import RoleName
from girih.lifecycle import rescaling
from girih.lifecycle.run_planner import Calibrated
from girih.planner.calibration import LINKS, Calibration, Link, Rate, StepWork
from girih.processes.segments import SHARED_MEMORY
from girih.runs import scale_requests
from girih.runs.callbacks import Callback
from girih.strategies.strategy import price
from girih.training import log

pytestmark = pytest.mark.heavy
EPOCH = 24
"""Steps of an epoch: 3,000 examples, 128 at a time."""


class Scales(Callback):
    """Asks for a scaling at some steps, and keeps the plans that it hears of."""

    def __init__(self, run, wanted):
        self.run, self.wanted, self.plans = run, wanted, []

    def on_plan(self, plan):
        self.plans.append(plan)

    def on_metrics(self, record):
        if record["step"] in self.wanted:
            scale_requests.ask(self.run, self.wanted[record["step"]])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Has a request be seen between the same two steps, however fast they are."""
    monkeypatch.setattr(rescaling, "LOOK_S", 0.0)


@pytest.fixture
def begin(log_directory):
    """A trainer whose run asks for scalings, by step; with the callback that does."""

    def begin(wanted, **overrides):
        run = log_directory / "run"
        scales = Scales(run, wanted)
        overrides = {"train.log_every_steps": 1, "store.shards": 1, **overrides}
        trainer = girih.Trainer.from_config(
            log_directory / "config.toml",
            overrides,
            strategy="hybrid",
            run=run,
            callbacks=[scales],
            progress=False,
        )
        return trainer, scales

    return begin


def counts_in(run):
    options = tomllib.loads((run / "config.toml").read_text())["strategy"]
    return options.get("embedding_servers"), options.get("embedding_workers")


def test_the_config_has_the_new_counts_and_keeps_them(begin):
    trainer, scales = begin({3: {"embedding-worker": 2}}, **{"strategy.embedding_servers": 1})
    with trainer:
        trainer.fit()
        assert [each["roles"] for each in scale_requests.history(scales.run)] == [
            {"embedding-worker": [1, 2]}
        ]
        assert len(scales.plans) == 2
        assert counts_in(scales.run) == (1, 2)
        trainer.fit()
        assert counts_in(scales.run) == (1, 2)


def test_servers_that_are_killed_as_they_end_leave_nothing_in_the_way_of_others(begin, monkeypatch):
    """As the supervisor does with those that take too long; later there are fewer, whose names would not be wanted."""
    end = LocalProcess.end

    def end_by_force(self):
        (LocalProcess.kill if self.name == RoleName.EMBEDDING_SERVER else end)(self)

    monkeypatch.setattr(LocalProcess, "end", end_by_force)
    trainer, scales = begin({3: {"embedding-server": 3}, 9: {"embedding-server": 1}})
    with trainer:
        trainer.fit()
        assert trainer.state.step == EPOCH
        assert [each["roles"] for each in scale_requests.history(scales.run)] == [
            {"embedding-server": [1, 3]},
            {"embedding-server": [3, 1]},
        ]
        segment = trainer._cluster.segment
        left = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(segment)]
        assert left
        assert all(name.startswith(f"{segment}-0-") for name in left)
    assert not [name for name in os.listdir(SHARED_MEMORY) if name.startswith(segment)]


@pytest.mark.parametrize("last", [EPOCH, 9])
def test_a_scaling_at_the_last_step_takes_no_evaluation_along(begin, last):
    """The run has an evaluation left, that of the epoch's end, or nothing at all."""
    trainer, scales = begin({last: {"embedding-worker": 2}}, **{"train.max_steps": last})
    with trainer:
        trainer.fit()
        state = trainer.state
        assert (state.step, state.epoch) == (last, int(last == EPOCH))
        lines = map(json.loads, (scales.run / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines if "split" in line] == [last] * state.epoch
        assert [each["step"] for each in scale_requests.history(scales.run)] == [last] * state.epoch
        assert scale_requests.pending(scales.run) is None


def narrow():
    """A machine whose links are so slow that those of embedding servers and workers decide."""
    work = StepWork(
        lookup=Rate(0, 0, 0), updates={"adam": Rate(0, 0, 0)}, example_s=0, value_s=0, step_s=0, products=((64, 1e12),)
    )  # fmt: skip
    links = dict.fromkeys(LINKS, Link(latency_s=0.0, bytes_per_s=1e3))
    return Calibration(trainers=2, machine={"cores": 4}, links=links, work=work)


def test_a_speed_is_predicted_of_the_new_counts(begin):
    trainer, scales = begin({3: {"embedding-server": 2, "embedding-worker": 2}})
    with trainer:
        trainer._run.planning.calibrated = Calibrated(narrow(), "narrow.json")
        trainer.fit()
        before, after = (plan["predicted"]["speed"] for plan in scales.plans)
        assert after["from"] == before["from"] == "narrow.json"
        assert after["samples_per_s"] > 1.5 * before["samples_per_s"]
        expected = price(
            girih.Hybrid(embedding_servers=2, embedding_workers=2), trainer._run.planning._priced_by
        )
        assert after["samples_per_s"] == expected.samples_per_s
        assert json.loads((scales.run / "plan.json").read_text())["predicted"]["speed"] == after
        summary = trainer.summary(None, duration_s=0.0)
        assert summary["predicted_samples_per_s"] == summary["plan"]["speed"]["samples_per_s"]
        assert summary["predicted_samples_per_s"] == after["samples_per_s"]


def test_a_speed_that_first_steps_predict_is_that_of_those_since(begin, monkeypatch):
    monkeypatch.setattr(log, "LIMIT_S", 0.0)
    monkeypatch.setattr(log, "MOST_OF_RUN", 1.0)
    trainer, _ = begin({7: {"embedding-worker": 2}})
    with trainer:
        trainer.fit()
        summary = trainer.summary(None, duration_s=0.0)
        assert summary["predicted_from"] == "its first step since it was scaled at step 7"
        assert summary["predicted_samples_per_s"] > 0
