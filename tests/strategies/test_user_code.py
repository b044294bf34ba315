"""Code of the user's own: strategies, losses and plans, and modules that lie where the user works."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scenes import write
from torch import nn

import girih
from companions import ran
from girih.app.run_config import RunConfig
from girih.cli import run as cli
from girih.cluster.launch import launch
from girih.config import user_code
from girih.config.user_code import RECORD
from girih.errors import ConfigError
from girih.hierarchical.graph.runnable import is_importable
from girih.lifecycle.planning import decide, facts_of
from girih.planner.plan import Plan
from girih.strategies import Strategy, create
from girih.strategies.local import Local
from girih.training.feeds import ExampleFeed
from girih.training.schedules import Pipelined
from girih.training.session import RunContext, Session
from runs import command
from support.fakes import FakeDense, FakeSparse

MINE = """
from dataclasses import dataclass
from typing import ClassVar

from girih.dense.halves.replica import Replica
from girih.planner.plan import Plan
from girih.sparse.halves.local import LocalSparse
from girih.strategies import Strategy
from girih.training.feeds import ExampleFeed
from girih.training.schedules import Pipelined
from girih.training.session import Session


@dataclass(frozen=True)
class Mine(Strategy):
    name: ClassVar[str] = "mine"
    ahead: int = 1

    def plan(self, facts):
        return Plan(
            strategy=self.name,
            options={"ahead": self.ahead},
            roles={"trainer": 1},
            schedule={"name": "pipelined", "staleness": self.ahead},
            predicted={"trainers": facts.num_trainers},
        )

    def build(self, plan, context):
        dense = Replica(context.dense)
        return Session(
            sparse=LocalSparse(context.sparse),
            dense=dense,
            schedule=Pipelined(plan.schedule["staleness"]),
            feed=ExampleFeed(context.ranks),
            optimizer=dense.optimizer,
        )


class NoStrategy:
    name = "none"


class Unfinished(Strategy):
    def plan(self, facts):
        return Plan(strategy="unfinished")
"""


@pytest.fixture
def directory(log_directory):
    (log_directory / "mine.py").write_text(MINE)
    config = log_directory / "config.toml"
    config.write_text(config.read_text() + '\n[strategy]\nname = "mine.py:Mine"\nahead = 2\n')
    return log_directory


def schema():
    return girih.Schema(
        [girih.Categorical(name="user", dim=4), girih.Categorical(name="item", dim=4)], labels="click"
    )


def data(directory, of=None):
    return girih.read_parquet(directory / "train.parquet", of or schema(), batch_size=128)


def model():
    torch.manual_seed(0)
    return girih.models.DeepFM(schema(), hidden=(8,))


class TestFromAFile:
    def test_it_is_loaded_with_its_options_and_trains(self, directory):
        config = RunConfig.load(directory / "config.toml")
        assert (config.strategy.name, config.strategy.ahead) == ("mine", 2)
        run = directory / "run"
        assert cli(["train", str(directory / "config.toml"), "--run", str(run)]) == 0
        summary = json.loads((run / "summary.json").read_text())
        assert summary["strategy"] == "mine"
        assert summary["steps"] == 24
        plan = Plan.from_dict(json.loads((run / "plan.json").read_text()))
        assert plan.options == {"ahead": 2}
        assert plan.schedule == {"name": "pipelined", "staleness": 2}

    def test_it_equals_local_with_the_same_halves(self, directory):
        losses = []
        for name in ("mine.py:Mine", "local"):
            strategy = create({"name": name, "ahead": 0} if ":" in name else name, "here", directory)
            with girih.Trainer(model(), strategy=strategy) as trainer:
                trainer.fit(data(directory), epochs=1)
                losses.append(trainer.evaluate(data(directory)).as_dict())
        assert losses[0] == losses[1]

    def test_batches_that_are_pulled_ahead_of_the_last_step_make_no_rows(self, directory):
        """``--strategy local`` reads exactly the batches that it trains on."""
        num_rows = []
        for words in ((), ("--strategy", "local")):
            run = directory / f"run{len(words)}"
            few = ("--set", "train.max_steps=5", "--set", "data.batch_size=4")
            assert cli(["train", str(directory / "config.toml"), "--run", str(run), *few, *words]) == 0
            summary = json.loads((run / "summary.json").read_text())
            assert summary["steps"] == 5
            num_rows.append(summary["num_rows"])
        assert num_rows[0] == num_rows[1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"name": "mine.py:NoStrategy"},
                "is not a subclass of girih.strategies.Strategy, with name, plan and",
            ),
            ({"name": "mine.py:Unfinished"}, "mine.py:Unfinished': Unfinished has no build and no name"),
            ({"name": "mine.py:Min"}, "Mine"),
            ({"name": "mine.py:Mine", "ahed": 1}, "ahead"),
            ({"name": "mine"}, "unknown name"),
            ({"name": "missing.py:Mine"}, "missing.py"),
        ],
    )
    def test_other_classes_are_refused(self, directory, options, message):
        with pytest.raises(ConfigError, match=message):
            create(options, "config.toml: [strategy]", directory)


class Played(Strategy):
    """Trains on fakes."""

    name = "played"

    def __init__(self):
        self.dense = FakeDense()
        self.built = []

    def plan(self, facts):
        return Plan(strategy=self.name, roles={"trainer": 1}, schedule={"staleness": 2})

    def build(self, plan, context: RunContext):
        self.sparse = FakeSparse(context.sparse)
        self.built.append(plan)
        return Session(
            sparse=self.sparse,
            dense=self.dense,
            schedule=Pipelined(plan.schedule["staleness"]),
            feed=ExampleFeed(context.ranks),
        )


class TestAnObject:
    def test_a_trainer_runs_the_halves_that_it_builds(self, log_directory):
        played = Played()
        schema_of = girih.Schema(
            [girih.Categorical(name="user", dim=2), girih.Categorical(name="item", dim=2)], labels="click"
        )
        net = girih.models.DNN(schema_of, hidden=(2,))
        played_data = data(log_directory, schema_of)
        with girih.Trainer(net, strategy=played, options=girih.TrainOptions(max_steps=3)) as trainer:
            state = trainer.fit(played_data)
            assert (state.step, state.refused) == (3, 0)
            assert trainer.plan == played.built[0]
            assert set(dict(played.sparse.stats().rows)) == {"user", "item"}
        assert played.sparse.closed
        assert played.dense.closed
        assert played.dense.num_batches == 3

    def test_other_objects_are_refused(self):
        with pytest.raises(ConfigError, match=r"strategy = an object: expected a strategy, as girih\.Hybrid"):
            girih.Trainer(model(), strategy=object())

        class Nameless(Played):
            name = ""

        with pytest.raises(ConfigError, match=r"strategy\.name = None: expected a name"):
            girih.Trainer(model(), strategy=Nameless())


class Squared(nn.Module):
    """A model of the mean squared error."""

    def __init__(self, strategies=None):
        super().__init__()
        torch.manual_seed(0)
        self.schema = schema()
        self.last = nn.Linear(8, 1)
        self.seen = []
        if strategies is not None:
            self.loss_strategies = strategies

    def forward(self, numeric, embeddings):
        return self.last(embeddings.concatenated(("user", "item")))

    def loss(self, outputs, batch):
        self.seen.append((tuple(outputs.shape), tuple(batch.labels.shape), batch.example_weights))
        return ((outputs - batch.labels) ** 2).mean()


class TestLossOfTheModel:
    def test_training_lowers_it(self, log_directory):
        records = []

        class Losses(girih.Callback):
            def on_metrics(self, record):
                records.append(record["loss"])

        net = Squared()
        options = girih.TrainOptions(epochs=4, log_every_steps=1)
        with girih.Trainer(net, options=options, callbacks=[Losses()]) as trainer:
            trainer.fit(data(log_directory))
        assert net.seen[0] == ((128, 1), (128, 1), None)
        assert sum(records[-5:]) < sum(records[:5])
        assert records[0] == pytest.approx(0.25, abs=0.25)  # a squared error, and no cross-entropy

    def test_it_may_support_some_strategies_only(self, log_directory):
        with girih.Trainer(Squared(("local",)), strategy=girih.Local()) as trainer:
            trainer.fit(data(log_directory), epochs=1)
        for strategy in (girih.Synchronous(), girih.Hybrid(), girih.Asynchronous()):
            with pytest.raises(
                ConfigError, match=rf"{strategy.name}: the loss of Squared supports local only"
            ):
                girih.Trainer(Squared(("local",)), strategy=strategy)

    def test_it_must_be_a_number(self, log_directory):
        net = Squared()
        net.loss = lambda outputs, batch: outputs
        with girih.Trainer(net) as trainer, pytest.raises(ConfigError, match=r"loss returned \[128, 1\]"):
            trainer.fit(data(log_directory))


class TestPlan:
    def facts(self, num_trainers=1):
        with girih.Trainer(model()) as trainer:
            context = trainer._run.context
            return facts_of(context.sparse, context.dense, num_trainers), context

    @pytest.mark.parametrize(
        "strategy",
        [girih.Local(), girih.Synchronous(), girih.Hybrid(), girih.Asynchronous(), girih.Substitution()],
    )
    def test_it_survives_json(self, strategy):
        facts, _ = self.facts()
        plan = strategy.plan(facts)
        again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again.to_dict() == json.loads(json.dumps(plan.to_dict()))
        assert again.fits(plan)
        assert plan.fits(again)
        assert strategy.plan(facts) == plan

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ([], "expected a table of options; girih plan prints a plan"),
            ({}, "key 'strategy' is missing"),
            ({"strategy": 3}, "strategy = 3: expected a string"),
            ({"strategy": "local", "wires": {}}, "unknown key 'wires'"),
            ({"strategy": "local", "roles": 3}, "roles = 3"),
            ({"strategy": "local", "groups": {}}, "groups = {}"),
        ],
    )
    def test_other_mappings_are_refused(self, mapping, message):
        with pytest.raises(ConfigError, match=message):
            Plan.from_dict(mapping)

    def test_a_pinned_plan_is_held_and_one_of_another_strategy_refused(self):
        facts, context = self.facts()
        own = Plan.from_dict({**Local().plan(facts).to_dict(), "predicted": {"noted": 1}})
        found = decide(Local(), facts, context, pinned=own)
        assert found is own
        for other in (girih.Synchronous().plan(facts), girih.Hybrid().plan(facts)):
            with pytest.raises(ConfigError, match=f"the plan is for strategy '{other.strategy}'"):
                decide(Local(), facts, context, pinned=other)
        with pytest.raises(ConfigError, match="plan again with girih plan"):
            decide(
                girih.Hybrid(staleness=1),
                facts,
                context,
                pinned=girih.Hybrid(staleness=2).plan(facts),
            )

    def test_an_earlier_plan_is_kept_if_it_fits(self):
        facts, context = self.facts()
        earlier = Plan.from_dict({**Local().plan(facts).to_dict(), "predicted": {"noted": 1}})
        assert decide(Local(), facts, context, earlier=earlier) is earlier
        other = girih.Synchronous().plan(facts)
        assert decide(Local(), facts, context, earlier=other).strategy == "local"

    def test_a_plan_holds_for_the_hosts_it_names_or_for_those_at_hand(self):
        facts, context = self.facts()
        pinned = Local().plan(facts)
        here = {"trainer": "10.0.0.7"}
        for given in ({"pinned": pinned}, {"earlier": replace(pinned, hosts=here)}):
            assert decide(Local(), facts, context, **given).hosts == {}
        pinned = replace(pinned, hosts=here)
        assert decide(Local(), facts, context, pinned=pinned) is pinned
        pinned = replace(pinned, hosts={"trainer 0": "10.0.0.7", "trainer 1": "10.0.0.8"})
        with pytest.raises(
            ConfigError, match="plan: hosts: 'trainer 1'; expected a host for each of 1 trainers"
        ):
            decide(Local(), facts, context, pinned=pinned)
        several = replace(facts, num_trainers=3, hosts=("a", "b", "a"))
        plan = girih.Synchronous(trainers=3).plan(several)
        assert plan.hosts_of("trainer") == several.hosts
        with pytest.raises(ConfigError, match="plan: hosts: none for trainer 2; expected"):
            replace(plan, hosts={"trainer 0": "a", "trainer 1": "b"}).check_like(plan)

    def test_a_trainer_holds_the_plan_it_is_given(self, log_directory):
        facts, _ = self.facts()
        own = Plan.from_dict({**Local().plan(facts).to_dict(), "predicted": {"noted": 1}})
        with girih.Trainer(model(), plan=own) as trainer:
            trainer.fit(data(log_directory), epochs=1)
            assert trainer.plan == own
        with (
            girih.Trainer(model(), plan=girih.Hybrid().plan(facts)) as trainer,
            pytest.raises(ConfigError, match="the plan is for strategy 'hybrid'"),
        ):
            trainer.fit(data(log_directory), epochs=1)

    def test_it_is_written_into_the_run_and_holds_on_resume(self, log_directory):
        run = log_directory / "run"
        facts, _ = self.facts()
        own = Plan.from_dict({**Local().plan(facts).to_dict(), "predicted": {"noted": 1}})
        with girih.Trainer(model(), plan=own, run=run) as trainer:
            trainer.fit(data(log_directory), epochs=1)
        assert json.loads((run / "plan.json").read_text())["predicted"] == {"noted": 1}
        (run / "plan.json").unlink()
        with girih.Trainer(model(), run=run) as trainer:
            trainer.load(max((run / "checkpoints").glob("step-*")))
            assert trainer.plan.predicted == {"noted": 1}
            trainer.fit(data(log_directory), epochs=1)
        assert json.loads((run / "plan.json").read_text())["predicted"] == {"noted": 1}


def test_more_loaders_than_trainers_are_refused(log_source):
    settings = RunConfig.load(log_source / "config.toml", overrides=["strategy.loaders=3"], strategy="hybrid")
    with pytest.raises(ConfigError, match="loaders = 3: expected at most one per trainer, 1 in all"):
        settings.planned()


@pytest.mark.slow
def test_processes_run_the_classes_that_their_launcher_checked(log_directory, capsys, monkeypatch):
    """The launcher checks the config of the run, and gives its processes the names."""
    (log_directory / "several.py").write_text(
        "import girih\nfrom girih.strategies.synchronous import Synchronous\n\n\n"
        "class Apart(Synchronous):\n    name = 'apart'\n\n\nclass Net(girih.models.DeepFM):\n    pass\n"
    )
    path = log_directory / "run"
    classes = ("model.name=several.py:Net", "strategy={name='several.py:Apart',trainers=2}")
    words = ("--run", str(path), "--set")
    assert cli(["train", str(log_directory / "config.toml"), *words, *classes, "train.max_steps=2"]) == 0
    resumed = ["train", str(path / "config.toml"), *words, "train.max_steps=4", "--resume"]

    def launched(what):
        (path / RECORD).unlink()
        return launch(what)

    with monkeypatch.context() as patch:
        patch.setattr("girih.cli.train.launch", launched)
        assert cli(resumed) == 0
    assert json.loads((path / "summary.json").read_text())["steps"] == 4
    (path / RECORD).unlink()
    capsys.readouterr()
    resumed[-2] = "train.max_steps=6"
    assert cli(resumed) == 2
    assert capsys.readouterr().err.endswith("give --model file.py:Class\n")
    assert cli([*resumed, "--model", str(log_directory / "several.py:Net")]) == 2
    assert capsys.readouterr().err.endswith("give --set strategy.name=file.py:Class\n")
    named = f"strategy.name={log_directory / 'several.py:Apart'}"
    assert cli([*resumed, "--model", str(log_directory / "several.py:Net"), "--set", named]) == 0
    assert json.loads((path / "summary.json").read_text())["steps"] == 6


SOURCE = Path(girih.__file__).resolve().parents[1]
SHADOWS = ("http", "queue", "token", "socket", "select", "numbers", "code")
"""Not ``types``, which Python itself imports for ``-m`` before girih begins."""
LOOKING_MODEL = '''
import torch
from torch import nn


class Looking(nn.Linear):
    """One operator, since its code looks into data: whoever computes it has to find this class."""

    def forward(self, values):
        return super().forward(values if float(values.sum()) < 1e30 else -values)


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), Looking(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numeric, embeddings):
        return self.layers(torch.cat([embeddings[name] for name in ("user", "item", "tags")], dim=1))


def cross_entropy(labels, predictions):
    labels, predictions = torch.from_numpy(labels), torch.from_numpy(predictions)
    return float(nn.functional.binary_cross_entropy(predictions, labels))
'''


@pytest.fixture(scope="module")
def shadowed_directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shadowed"), num_examples=321)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("synchronous", ["strategy.trainers=2"], marks=pytest.mark.heavy),
        pytest.param("hybrid", ["strategy.trainers=2"], marks=pytest.mark.heavy),
        ("hierarchical", ["strategy.trainers_per_group=2", "strategy.servers_per_group=1"]),
    ],
)
def test_files_in_the_working_directory_hide_no_module_and_define_models(
    shadowed_directory, tmp_path, strategy, options
):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported in place of {name}')\n")
    (tmp_path / "mine.py").write_text(LOOKING_MODEL)
    mine = ("train.max_steps=4", "model={name='mine:Mine'}", "train.metrics=['mine:cross_entropy']")
    done = subprocess.run(
        command(shadowed_directory, strategy, tmp_path / "run", *options, *mine),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCE),
        },  # an empty entry in it would be the working directory
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    metrics = summary["by_label"]["click"]  # of the examples of both trainers
    assert (metrics["num_examples"], metrics["custom"]) == (
        101,
        {"cross_entropy": pytest.approx(metrics["logloss"])},
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert strategy != "hierarchical" or plan["tagging"]["devices"]["layers.1"] == "server 0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine:Mine", "mine.py:Mine"])
def test_other_processes_import_modules_of_the_working_directory_but_no_files(tmp_path, monkeypatch, name):
    (tmp_path / "mine.py").write_text(LOOKING_MODEL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in user_code._BESIDE])
    monkeypatch.setattr(user_code, "_BESIDE", set())
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = user_code.load_object(name, "[model].name", tmp_path, accepts=callable, expected="a class")
    try:
        assert not is_importable(found)
        monkeypatch.chdir(tmp_path)
        assert is_importable(found) == (name == "mine:Mine")
    finally:
        del sys.modules[found.__module__]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mine:Mine", pytest.param("mine.py:Mine", marks=pytest.mark.heavy)])
def test_parameters_of_a_class_that_group_servers_cannot_import_are_refused_before_the_run(
    shadowed_directory, tmp_path, model
):
    for file in shadowed_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "mine.py").write_text(LOOKING_MODEL)
    for name in ("elsewhere", "program"):
        (tmp_path / name).mkdir()
    program = tmp_path / "program" / "train.py"
    program.write_text("import sys\nfrom girih import cli\n\nsys.exit(cli.run(sys.argv[1:]))\n")
    options = ["strategy.trainers_per_group=1", "strategy.servers_per_group=1", "train.max_steps=4"]
    words = command(tmp_path, "hierarchical", tmp_path / "run", *options, f"model={{name='{model}'}}")
    done = ran(program, *words[3:], cwd=tmp_path / "elsewhere")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "operator 'layers.1' has a parameter, 'layers.1.weight', and stays on the trainers" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_one_function_makes_the_command_of_every_process():
    """Who writes ``python -m`` out would leave the working directory in front of the import path."""
    writers = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.glob("girih/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value == "-m"
    }
    assert writers == {"girih/processes/pipe.py"}
