"""Where a run can be stopped, resumed, saved twice or go wrong: nothing may be silently another thing."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import girih
from girih import checkpoint
from girih.app.run_config import RunConfig
from girih.checkpoint.save import Save
from girih.cluster.cluster import Cluster
from girih.errors import (
    CheckpointError,
    ConfigError,
    Lost,
    NonFiniteError,
    RoleError,
    RunDirectoryError,
    WireError,
)
from girih.runs.callbacks import Callback


def settings_of(directory, *overrides):
    return RunConfig.load(directory / "config.toml", overrides=overrides)


def predictions(trainer, settings):
    return trainer.predict(settings.dataset("test"))


class StopAt(Callback):
    """Asks for a stop at one step (each step makes a record)."""

    def __init__(self, step):
        self.step = step
        self.trainer = None

    def on_metrics(self, record):
        if record["step"] == self.step:
            self.trainer.request_stop()


def fit_until(settings, run, step):
    """Trains with a stop requested at a step, as a signal would."""
    stop = StopAt(step)
    with settings.trainer(run=run, callbacks=[stop]) as trainer:
        stop.trainer = trainer
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        assert trainer.stopped
        return trainer.state.step


EVALUATED = (
    "train.epochs=2",
    "train.log_every_steps=1",
    "train.evaluate_every_steps=4",
    'train.lr_schedule={name="ReduceLROnPlateau", factor=0.5, patience=0, threshold=0.01, metric="logloss"}',
)


@pytest.fixture(scope="module")
def whole(log_source, tmp_path_factory):
    """Of a run that nothing has stopped: its directory, predictions, and the scale of its learning rates."""
    settings, run = settings_of(log_source, *EVALUATED), tmp_path_factory.mktemp("whole") / "run"
    with settings.trainer(run=run) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        return run, predictions(trainer, settings), trainer.learning_rate.scale()


@pytest.mark.parametrize("stop_at", [3, 4, 8, 24, 25])
def test_an_evaluation_that_a_stop_left_undone_is_made_up_for(log_directory, tmp_path, whole, stop_at):
    settings = settings_of(log_directory, *EVALUATED)
    whole_run, expected, scale = whole
    assert fit_until(settings, tmp_path / "run", stop_at) == stop_at
    with settings.trainer(run=tmp_path / "run") as resumed:
        resumed.load(tmp_path / "run")
        resumed.fit(settings.dataset("train"), settings.dataset("valid"), epochs=2 - resumed.state.epoch)
        assert resumed.learning_rate.scale() == scale
        np.testing.assert_array_equal(predictions(resumed, settings), expected)
    assert evaluations(tmp_path / "run") == evaluations(whole_run)


def evaluations(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["auc"]) for r in map(json.loads, lines) if "split" in r]


@pytest.mark.parametrize("last", [8, 24])
def test_so_is_the_evaluation_behind_the_last_step(log_directory, tmp_path, last):
    """One of some steps, or that of an epoch's end."""
    settings = settings_of(log_directory, *EVALUATED, f"train.max_steps={last}")
    with settings.trainer(run=tmp_path / "whole") as whole:
        whole.fit(settings.dataset("train"), settings.dataset("valid"))
    assert fit_until(settings, tmp_path / "run", last) == last
    with settings.trainer(run=tmp_path / "run") as resumed:
        resumed.load(tmp_path / "run")
        resumed.fit(settings.dataset("train"), settings.dataset("valid"), epochs=2 - resumed.state.epoch)
        assert resumed.state.to_dict() | {"train_s": 0} == whole.state.to_dict() | {"train_s": 0}
        assert resumed.learning_rate.scale() == whole.learning_rate.scale()
    assert [step for step, _ in evaluations(tmp_path / "run")] == list(range(4, last + 1, 4))
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


def test_max_steps_at_an_epochs_end_ends_the_epoch(log_directory):
    stopping = "train.early_stopping={metric='logloss', patience=5}"
    by_steps = settings_of(log_directory, stopping, "train.epochs=9", "train.max_steps=24")
    by_epochs = settings_of(log_directory, stopping, "train.epochs=1")
    states = []
    for settings in (by_steps, by_epochs):
        with settings.trainer() as trainer:
            trainer.fit(settings.dataset("train"), settings.dataset("valid"))
            states.append(trainer.state.to_dict() | {"train_s": 0})
    assert states[0] == states[1]


def test_saving_another_model_under_the_same_step_replaces_it(log_directory, tmp_path):
    live = []
    for seed in (1, 2):
        settings = settings_of(log_directory, f"train.seed={seed}", "train.max_steps=4")
        with settings.trainer() as trainer:
            trainer.fit(settings.dataset("train"))
            path = trainer.save(tmp_path)
            live.append(predictions(trainer, settings))
    with settings.trainer() as loaded:
        loaded.load(path)
        np.testing.assert_array_equal(predictions(loaded, settings), live[1])
    assert not np.array_equal(live[0], live[1])


def test_saving_after_the_best_weights_came_back_saves_those(log_directory, tmp_path):
    settings = settings_of(
        log_directory,
        "train.epochs=9",
        "sparse_optimizer.lr=0.1",
        "train.early_stopping={metric='logloss', patience=1}",
    )
    with settings.trainer(run=tmp_path / "run") as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        assert trainer.state.best_step < trainer.state.step
        live = predictions(trainer, settings)
        path = trainer.save(tmp_path / "saved")
    for source in (path, tmp_path / "run"):
        with settings.trainer() as loaded:
            loaded.load(source, resume=False)
            np.testing.assert_array_equal(predictions(loaded, settings), live)


def test_a_used_run_directory_is_refused_until_it_is_loaded(log_directory, tmp_path):
    settings = settings_of(log_directory, "train.max_steps=3")
    with settings.trainer(run=tmp_path / "run") as trainer:
        trainer.fit(settings.dataset("train"))
        with pytest.raises(RunDirectoryError, match=r"process \d+ on \S+ is writing this run"):
            settings.trainer(run=tmp_path / "run")
    with settings.trainer(run=tmp_path / "run") as trainer:
        with pytest.raises(RunDirectoryError, match="holds an earlier run"):
            trainer.fit(settings.dataset("train"))
        trainer.load(tmp_path / "run")
        trainer.fit(settings.dataset("train"))


def test_early_stopping_goes_on_from_another_run_with_its_best(log_directory, tmp_path):
    options = (
        "train.epochs=9",
        "sparse_optimizer.lr=0.1",
        "train.early_stopping={metric='logloss', patience=1}",
    )
    settings = settings_of(log_directory, *options)
    with settings.trainer(run=tmp_path / "first") as first:
        first.fit(settings.dataset("train"), settings.dataset("valid"))
        best = predictions(first, settings)
    with settings.trainer() as second:
        second.load(tmp_path / "first")
        steps = second.state.step
        second.fit(settings.dataset("train"), settings.dataset("valid"), epochs=2)
        assert second.state.step > steps  # a new fit is a new wish to train
        np.testing.assert_array_equal(predictions(second, settings), best)


@pytest.fixture
def giving_up(monkeypatch):
    """Has the first save of each of some steps be given up, as where an embedding server is killed amid it."""
    write = Save.write

    def giving_up(*steps):
        names = {checkpoint.name_of(step) for step in steps}

        def lost():
            raise Lost("the rows of the moment when this save began are gone")

        def written(save):
            if save._name in names:
                names.remove(save._name)
                save._rows = SimpleNamespace(write=lost, close=save._rows.close)
            return write(save)

        monkeypatch.setattr(Save, "write", written)

    return giving_up


BEST = (
    "train.epochs=12",
    "sparse_optimizer.lr=0.1",
    "train.early_stopping={metric='logloss', patience=1}",
    "checkpoint.every_steps=10",
    "checkpoint.keep=1",
)


class Known(Callback):
    """Keeps step → logloss of all evaluations."""

    def __init__(self):
        self.judged = {}

    def on_evaluation(self, record):
        self.judged[record["step"]] = record["logloss"]


@pytest.fixture(scope="module")
def best_step(log_source):
    """The step with the best weights where no save is given up, neither the first nor the last evaluation's."""
    settings, known = settings_of(log_source, *BEST), Known()
    with settings.trainer(callbacks=[known]) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        assert min(known.judged) < trainer.state.best_step < max(known.judged)
        return trainer.state.best_step


@pytest.mark.parametrize("in_run", [True, False], ids=["run", ""])
def test_best_weights_whose_save_is_given_up_leave_it_to_the_best_that_are_kept(
    log_directory, tmp_path, best_step, giving_up, capsys, in_run
):
    giving_up(best_step)
    settings, run = settings_of(log_directory, *BEST), tmp_path / "run"
    known = Known()
    with settings.trainer(run=run if in_run else None, callbacks=[known]) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        others = {step: value for step, value in known.judged.items() if step != best_step}
        state = trainer.state
        assert (state.best_value, state.best_step) == min((value, step) for step, value in others.items())
        assert trainer.evaluate(settings.dataset("valid")).logloss == state.best_value
        expected = predictions(trainer, settings)
    told = capsys.readouterr().err
    assert (
        f"the best weights so far, of step {best_step}, are in no checkpoint; the best are now those of step"
        in told
    )
    if in_run:
        for resume in (True, False):
            with settings.trainer() as loaded:
                loaded.load(run, resume=resume)
                if resume:
                    loaded.fit(settings.dataset("train"), settings.dataset("valid"), epochs=0)
                np.testing.assert_array_equal(predictions(loaded, settings), expected)


def test_where_all_saves_of_best_weights_are_given_up_the_last_ones_are_final(log_directory, giving_up):
    settings = settings_of(log_directory, *BEST, "checkpoint.every_steps=1000")
    giving_up(*range(10_000))
    known = Known()
    with settings.trainer(callbacks=[known]) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        last = max(known.judged)
        assert trainer.state.best_step in (None, last)
        assert trainer.evaluate(settings.dataset("valid")).logloss == known.judged[last]


def test_without_early_stopping_an_earlier_best_is_not_put_back(log_directory, tmp_path):
    options = ("train.epochs=9", "sparse_optimizer.lr=0.1")
    stopping = settings_of(log_directory, *options, "train.early_stopping={metric='logloss', patience=1}")
    with stopping.trainer(run=tmp_path / "run") as first:
        first.fit(stopping.dataset("train"), stopping.dataset("valid"))
        best = predictions(first, stopping)
    settings = settings_of(log_directory, *options)
    with settings.trainer(run=tmp_path / "run") as second:
        second.load(tmp_path / "run")
        steps = second.state.step
        second.fit(settings.dataset("train"), settings.dataset("valid"), epochs=1)
        assert second.state.step > steps
        live = predictions(second, settings)
        assert not np.array_equal(live, best)
    with settings.trainer() as loaded:
        loaded.load(tmp_path / "run", resume=False)
        np.testing.assert_array_equal(predictions(loaded, settings), live)


def test_a_requested_stop_ends_one_fit_and_not_the_next_evaluation(log_directory):
    settings = settings_of(log_directory)
    with settings.trainer() as trainer:
        trainer.request_stop()
        with pytest.raises(KeyboardInterrupt):  # while the training data's moments are taken
            trainer.fit(settings.dataset("train"))
        assert trainer.stopped
        trainer.fit(settings.dataset("train"))
        assert not trainer.stopped
        assert trainer.state.epoch == 1
        assert trainer.evaluate(settings.dataset("test")).num_examples == 1000
        trainer.request_stop()
        with pytest.raises(KeyboardInterrupt):
            trainer.evaluate(settings.dataset("test"))
        assert trainer.evaluate(settings.dataset("test")).num_examples == 1000


class NormsThenExplodes(torch.nn.Module):
    """Batch norm on the embeddings; the third training batch becomes NaN before it."""

    def __init__(self, schema):
        super().__init__()
        self.schema = schema
        self.norm = torch.nn.BatchNorm1d(12)
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.linear = torch.nn.Linear(12, 1)
        self.calls = 0

    def forward(self, numeric, embeddings):
        assert not self.frozen.training
        self.calls += self.training
        inputs = embeddings.concatenated()
        return self.linear(self.norm(inputs * float("nan") if self.training and self.calls == 3 else inputs))


def test_a_skipped_step_moves_no_running_mean_and_frozen_parts_stay_frozen(log_directory):
    settings = settings_of(log_directory)
    model = NormsThenExplodes(settings.schema)
    with girih.Trainer(model, options=girih.TrainOptions(on_nonfinite="skip")) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        assert trainer.state.refused == 1
        assert torch.isfinite(model.norm.running_mean).all()
        assert model.norm.num_batches_tracked == trainer.state.step - 1
        assert np.isfinite(predictions(trainer, settings)).all()


def test_a_shard_of_another_checkpoint_is_refused(log_directory, tmp_path):
    paths = []
    for seed in (1, 2):
        settings = settings_of(log_directory, f"train.seed={seed}", "train.max_steps=4", "data.shuffle=false")
        with settings.trainer() as trainer:
            trainer.fit(settings.dataset("train"))
            paths.append(trainer.save(tmp_path / str(seed)))
    name = next(name for name in checkpoint.Manifest.read(checkpoint.Storage.at(paths[0])).shards)
    (paths[0] / name).write_bytes((paths[1] / name).read_bytes())
    with settings.trainer() as trainer, pytest.raises(CheckpointError, match="shard-0000"):
        trainer.load(paths[0])


def test_the_dense_rate_can_change_on_resume_unless_a_schedule_holds_it(log_directory, tmp_path):
    first = settings_of(log_directory, "train.max_steps=2")
    with first.trainer(run=tmp_path / "a") as trainer:
        trainer.fit(first.dataset("train"))
    slower = settings_of(log_directory, "dense_optimizer.lr=1e-6")
    with slower.trainer() as trainer:
        trainer.load(tmp_path / "a")
        assert trainer.dense.optimizer.param_groups[0]["lr"] == 1e-6
    schedule = 'train.lr_schedule={name="StepLR", step_size=1, gamma=0.5, interval="step"}'
    scheduled = settings_of(log_directory, "train.max_steps=2", schedule)
    with scheduled.trainer(run=tmp_path / "b") as trainer:
        trainer.fit(scheduled.dataset("train"))
    with scheduled.trainer() as trainer:
        trainer.load(tmp_path / "b")
        assert trainer.learning_rate.scale() == 0.25
    other = settings_of(log_directory, schedule, "dense_optimizer.lr=1e-6")
    with other.trainer() as trainer, pytest.raises(CheckpointError, match="began at"):
        trainer.load(tmp_path / "b")


def test_every_call_tells_which_process_is_gone(log_directory, tmp_path):
    """Where a half only learns that nobody answers."""
    settings, cluster = settings_of(log_directory, "train.max_steps=1"), Cluster()

    def gone(*args, **options):
        raise WireError("no answer")

    with settings.trainer(cluster=cluster) as trainer:
        trainer.fit(settings.dataset("train"))
        path = trainer.save(tmp_path / "saved")
        for method in ("pull", "peek", "sync", "stats", "load"):
            setattr(trainer.sparse, method, gone)
        cluster._error = RoleError("embedding-server 1 was ended by SIGKILL")
        for call in (
            lambda: trainer.save(tmp_path / "again"),
            lambda: trainer.load(path),
            lambda: trainer.predict(settings.dataset("test")),
            lambda: trainer.evaluate(settings.dataset("test")),
            lambda: trainer.fit(settings.dataset("train")),
            lambda: trainer.summary(None, duration_s=0.0),
        ):
            with pytest.raises(RoleError, match="embedding-server 1"):
                call()


def test_a_trainer_that_was_not_made_gives_its_run_directory_back(log_directory, tmp_path, monkeypatch):
    def fails(directory):
        raise RuntimeError("no tensorboard here")

    settings = settings_of(log_directory, "train.tensorboard=true")
    with monkeypatch.context() as patched:
        patched.setattr("girih.trainer.TensorBoard", fails)
        with pytest.raises(
            RuntimeError, match="no tensorboard"
        ) as kept:  # as a notebook keeps what was raised
            settings.trainer(run=tmp_path / "run")
    with settings_of(log_directory).trainer(run=tmp_path / "run") as trainer:
        trainer.fit(settings.dataset("train"), epochs=1)
    assert kept.value is not None


def test_what_needs_a_session_says_so_before_there_is_one(log_source):
    with settings_of(log_source).trainer() as trainer:
        for name in ("sparse", "dense", "learning_rate"):
            with pytest.raises(ConfigError, match="fit, load or evaluate first"):
                getattr(trainer, name)


def test_a_step_that_ends_a_run_is_no_update(log_source):
    """Under on_nonfinite = "stop": the number of updates is that of optimizer steps, for whoever goes on."""
    settings = settings_of(log_source, "dense_optimizer.lr=1e30", "train.log_every_steps=1")
    with settings.trainer() as trainer:
        with pytest.raises(NonFiniteError):
            trainer.fit(settings.dataset("train"), epochs=1)
        applied = trainer.dense.state()["optimizer"]["state"][0]["step"]
        assert trainer.state.num_updates == int(applied)


def test_gradients_of_another_loop_are_not_added_to_a_step(log_source):
    settings = settings_of(log_source, "train.max_steps=3")
    weights = []
    for left in (0.0, 100.0):
        with settings.trainer() as trainer:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.full_like(parameter, left)
            trainer.fit(settings.dataset("train"), epochs=1)
            weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *weights))
