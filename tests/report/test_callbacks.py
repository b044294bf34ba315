"""Callbacks, TensorBoard's with the real package reading back what was written."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

from girih.errors import ConfigError
from girih.runs.callbacks import Callback, MLflow, TensorBoard, WandB


@pytest.fixture
def read_back():
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra: tensorboard"
    )

    def read(directory):
        events = module.EventAccumulator(str(directory))
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    return read


def line(step, loss=0.5):
    return {
        "step": step,
        "examples": step * 64,
        "epoch": 0,
        "loss": loss,
        "samples_per_s": 1e4,
        "elapsed_s": 1.0,
    }


def test_tensorboard_reads_what_was_written(tmp_path, read_back):
    board = TensorBoard(tmp_path / "runs" / "first")
    board.on_metrics(line(10, 0.75) | {"hit_rate": None})
    board.on_metrics(line(20, 0.5))
    board.on_evaluation({"step": 20, "split": "valid", "auc": 0.875, "logloss": 0.25, "gauc": None})
    board.on_end({"auc": 0.875})
    assert read_back(tmp_path / "runs" / "first") == {
        "train/loss": [(10, 0.75), (20, 0.5)],
        "train/samples_per_s": [(10, 1e4), (20, 1e4)],
        "valid/auc": [(20, 0.875)],
        "valid/logloss": [(20, 0.25)],
    }


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path, read_back):
    stopped = TensorBoard(tmp_path)
    for step in (10, 20, 30):
        stopped.on_metrics(line(step, 0.75))
    stopped.on_end(None)
    resumed = TensorBoard(tmp_path)
    resumed.on_metrics(line(20, 0.5))
    resumed.on_end(None)
    assert read_back(tmp_path)["train/loss"] == [(10, 0.75), (20, 0.5)]


def test_a_run_without_records_leaves_nothing(tmp_path, read_back):
    board = TensorBoard(tmp_path / "empty")
    board.on_end(None)
    board.on_end(None)
    assert list((tmp_path / "empty").iterdir()) == []


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'girih\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_a_directory_that_cannot_be_is_refused(tmp_path, read_back):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold TensorBoard's files"):
        TensorBoard(tmp_path / "file" / "below")


def test_a_callback_writes_only_what_it_uses():
    class Losses(Callback):
        def __init__(self):
            self.seen = []

        def on_metrics(self, record):
            self.seen.append(record["loss"])

    losses = Losses()
    losses.on_metrics(line(1, 0.5))
    losses.on_evaluation({"step": 1, "split": "valid"})
    losses.on_end(None)
    assert losses.seen == [0.5]


def test_mlflow_s_file_store_holds_what_was_logged(tmp_path, monkeypatch, capsys):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra: mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own future
        mlflow.set_tracking_uri((tmp_path / "store").as_uri())
        callback = MLflow({"lr": 0.5, "note": "x" * 6001})
        callback.on_plan({"strategy": "local"})
        callback.on_plan({"strategy": "local"})  # the run is scaled
        callback.on_metrics(line(10, 0.75) | {"hit_rate": None})
        callback.on_evaluation({"step": 20, "split": "valid", "auc": 0.875, "gauc": None})
        named = mlflow.active_run().info.run_id
        store = (tmp_path / "store").as_uri()
        assert capsys.readouterr().err.splitlines() == [f"girih: MLflow: run {named} at {store}"]
        callback.on_end({"auc": 0.9, "strategy": "local"})
        assert mlflow.active_run() is None
        client = mlflow.MlflowClient()
        logged = client.get_run(named)
        assert logged.info.status == "FINISHED"
        shown = "x" * 5997 + "..."  # a value that is cut says so
        assert logged.data.params == {"lr": "0.5", "strategy": "local", "note": shown}
        assert logged.data.metrics == {
            "train/loss": 0.75, "train/samples_per_s": 1e4, "valid/auc": 0.875, "final/auc": 0.9,
        }  # fmt: skip
        assert [(m.step, m.value) for m in client.get_metric_history(named, "valid/auc")] == [(20, 0.875)]
        stopped = MLflow()
        stopped.on_metrics(line(10))
        named = mlflow.active_run().info.run_id
        stopped.on_end(None)
        assert client.get_run(named).info.status == "KILLED"


@pytest.fixture
def wandb(monkeypatch):
    """A client that notes what it is called with: the real one wants a service."""
    client = SimpleNamespace(run=None, calls=[])

    def begin(**options):
        client.calls.append(options)
        run = SimpleNamespace(config=dict(options.get("config", {})), summary={})
        run.log = lambda numbers: client.calls.append(numbers)
        run.define_metric = lambda name, step_metric: client.calls.append((name, step_metric))
        client.run = run
        return run

    def finish(exit_code):
        client.calls.append(("finish", exit_code))
        client.last, client.run = client.run, None

    client.init, client.finish = begin, finish
    monkeypatch.setitem(sys.modules, "wandb", client)
    return client


def test_weights_and_biases_hears_the_same_numbers(wandb):
    callback = WandB(project="clicks", config={"lr": 0.5})
    assert wandb.calls == []  # other trainers than the first make one too
    callback.on_config({"lr": 0.1, "model.hidden": [8]})
    callback.on_plan({"strategy": "local"})
    callback.on_metrics(line(10, 0.75) | {"hit_rate": None})
    callback.on_evaluation({"step": 20, "split": "valid", "auc": 0.875, "gauc": None})
    callback.on_end({"auc": 0.9, "strategy": "local", "by_label": {"click": {"auc": 0.9, "gauc": None}}})
    assert wandb.calls == [
        {"project": "clicks", "config": {"lr": 0.5}},
        ("*", "step"),
        {"train/loss": 0.75, "train/samples_per_s": 1e4, "step": 10},
        {"valid/auc": 0.875, "step": 20},
        ("finish", 0),
    ]
    assert wandb.last.config == {"lr": 0.5, "model.hidden": [8], "strategy": "local"}
    assert wandb.last.summary == {"final/auc": 0.9, "final/click/auc": 0.9}


def test_weights_and_biases_hears_how_a_run_failed(wandb):
    for end, status in ((lambda each: each.on_end(None), 130), (lambda each: each.on_error(OSError()), 1)):
        callback = WandB()
        callback.on_plan({"strategy": "local"})
        end(callback)
        assert wandb.calls[-1] == ("finish", status)


@pytest.mark.parametrize(("kind", "package"), [(MLflow, "mlflow"), (WandB, "wandb")])
def test_a_client_that_is_missing_is_named(monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=f"needs a package that is not installed; pip install 'girih\\[{package}\\]'"
    ):
        kind()
