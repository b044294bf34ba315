"""How a run of a script ends: its summary, and what callbacks hear, whichever way the ``with`` block is left."""

import json
import warnings

import pytest

import girih
from girih import cli
from girih.config.file import RunConfig
from girih.errors import ConfigError
from girih.report.comparing import compare
from girih.runs.callbacks import Callback

SHORT = {"train.max_steps": 6, "train.evaluate_every_steps": 3}


class Notes(Callback):
    """Notes what it hears of the run as a whole; fails or stops the run at its first record if asked to."""

    def __init__(self, at_first=None):
        self.calls, self.options, self.at_first = [], None, at_first

    def on_config(self, options):
        self.options = options

    def on_metrics(self, record):
        if self.at_first is not None:
            self.at_first()

    def on_end(self, summary):
        self.calls.append(("end", summary and summary["auc"]))

    def on_error(self, error):
        self.calls.append(("error", str(error)))


class Plain:
    """A callback that is no girih.Callback, and has the four methods of old."""

    def __init__(self):
        self.ends = []

    def on_plan(self, plan):
        pass

    def on_metrics(self, record):
        pass

    def on_evaluation(self, record):
        pass

    def on_end(self, summary):
        self.ends.append(summary)


def begun(directory, callbacks, run="run", **options):
    path = None if run is None else directory / run
    return girih.Trainer.from_config(
        directory / "config.toml", {**SHORT, **options}, run=path, callbacks=callbacks, progress=False
    )


def summary_of(directory, run="run"):
    return json.loads((directory / run / "summary.json").read_text())


def test_leaving_a_trainer_writes_the_summary_of_girih_train(log_directory):
    notes, plain = Notes(), Plain()
    with begun(log_directory, [notes, plain]) as trainer:
        trainer.fit()
        found = trainer.evaluate()
    summary = summary_of(log_directory)
    assert notes.calls == [("end", found.auc)]
    assert plain.ends == [summary]
    assert (summary["auc"], summary["evaluated_on"], summary["steps"]) == (found.auc, "test", 6)
    words = [f"{name}={value}" for name, value in SHORT.items()]
    sets = [word for each in words for word in ("--set", each)]
    assert (
        cli.run(["train", f"{log_directory / 'config.toml'}", "--run", f"{log_directory / 'cli'}", *sets])
        == 0
    )
    other = summary_of(log_directory, "cli")
    assert list(other) == list(summary)
    assert (other["by_label"], other["evaluated_on"]) == (summary["by_label"], "test")


def test_the_summary_has_what_was_evaluated(log_directory):
    with begun(log_directory, []) as trainer:
        trainer.fit()
    summary = summary_of(log_directory)
    records = [
        json.loads(line) for line in (log_directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    valid = [record for record in records if record.get("split") == "valid"]
    assert (summary["auc"], summary["evaluated_on"]) == (valid[-1]["auc"], "valid")
    other = girih.read_parquet(log_directory / "valid.parquet", trainer.schema)
    with begun(log_directory, [], run="other") as trainer:
        trainer.fit()
        trainer.evaluate()  # of the weights before the next fit, and so not in the summary
        trainer.fit()
        found = trainer.evaluate(other)
    summary = summary_of(log_directory, "other")
    assert (summary["auc"], summary["evaluated_on"]) == (found.auc, "valid.parquet")
    assert compare([log_directory / "run", log_directory / "other"]).metrics["finished"] == ("yes", "yes")


def test_under_early_stopping_the_summary_has_the_metrics_of_the_best_weights(log_directory):
    stopping = {"metric": "logloss", "patience": 1}
    options = {
        "train.max_steps": 60,
        "sparse_optimizer.lr": 0.9,
        "train.epochs": 5,
        "train.early_stopping": stopping,
    }
    with begun(log_directory, [], **options) as trainer:
        state = trainer.fit()
        assert state.best_step < state.step
        expected = trainer.evaluate(trainer.data["valid"])
    assert summary_of(log_directory)["logloss"] == pytest.approx(expected.logloss)
    assert summary_of(log_directory)["evaluated_on"] == "valid"


def test_a_trainer_by_hand_ends_its_callbacks(log_directory):
    settings, notes = RunConfig.load(log_directory / "config.toml"), Notes()
    trainer = girih.Trainer(settings.model(), schema=settings.schema, callbacks=[notes])
    trainer.fit(settings.dataset("test"), settings.dataset("valid"))
    trainer.close()
    trainer.close()
    ((heard, auc),) = notes.calls
    assert (heard, notes.options) == ("end", None)
    assert auc is not None


def test_nothing_is_written_of_a_run_that_trained_nothing(log_directory):
    notes = Notes()
    with begun(log_directory, [notes]):
        pass
    with pytest.raises(ConfigError), begun(log_directory, [notes]) as trainer:
        trainer.fit(girih.read_parquet(log_directory / "train.parquet", girih.Schema([], labels="click")))
    assert notes.calls == []
    assert not (log_directory / "run" / "summary.json").exists()


def test_a_script_that_ends_the_run_by_itself_ends_it_once(log_directory):
    notes = Notes()
    with begun(log_directory, [notes]) as trainer:
        trainer.fit()
        summary = trainer.summary(trainer.evaluate(), duration_s=1.5)
        trainer.end(summary)
        trainer.end(None)
    assert notes.calls == [("end", summary["auc"])]
    assert summary_of(log_directory) == summary
    assert (summary["evaluated_on"], summary["duration_s"]) == ("test", 1.5)


def fails():
    raise RuntimeError("no more")


def interrupts():
    raise KeyboardInterrupt


def fitted(trainer, *, then=lambda: None):
    """What a script does with a trainer."""
    with trainer:
        trainer.fit()
        then()


def test_a_run_that_fails_has_no_summary(log_directory):
    notes, plain, last = Notes(fails), Plain(), Notes()
    with pytest.raises(RuntimeError, match="no more"):
        fitted(begun(log_directory, [notes, plain, last]))
    assert notes.calls == last.calls == [("error", "no more")]
    assert plain.ends == [None]
    caught = Notes(fails)
    with begun(log_directory, [caught], run="other") as trainer:
        with pytest.raises(RuntimeError, match="no more"):
            trainer.fit()
        trainer.close()
    assert caught.calls == [("error", "no more")]
    assert not list(log_directory.glob("*/summary.json"))


def test_a_script_that_fails_after_training_fails_its_run_whatever_callbacks_do(log_directory):
    class Broken(Callback):
        def on_error(self, error):
            raise ValueError("a second error")

    notes = Notes()
    with pytest.raises(RuntimeError, match="no more"):
        fitted(begun(log_directory, [Broken(), notes]), then=fails)
    assert notes.calls == [("error", "no more")]
    assert not (log_directory / "run" / "summary.json").exists()


def test_a_run_that_is_stopped_has_no_summary(log_directory):
    notes = Notes(lambda: trainer.request_stop())
    with begun(log_directory, [notes]) as trainer:
        trainer.fit()
    assert notes.calls == [("end", None)]
    interrupted = Notes(interrupts)
    with pytest.raises(KeyboardInterrupt), begun(log_directory, [interrupted], run="other") as trainer:
        trainer.fit()
    assert interrupted.calls == [("end", None)]
    assert not list(log_directory.glob("*/summary.json"))


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    module = pytest.importorskip("mlflow", reason="needs the extra: mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own future
        module.set_tracking_uri((tmp_path / "store").as_uri())
        yield module
        module.end_run()


def newest(mlflow):
    return mlflow.MlflowClient().search_runs(["0"])[0]


def test_mlflow_has_the_whole_config_and_the_final_metrics(log_directory, mlflow):
    wide = [{"name": f"number {n} of {'x' * 300}", "kind": "numeric", "column": "x0"} for n in range(60)]
    features = [
        {"name": "user", "kind": "categorical", "dim": 4},
        {"name": "a=b//c/", "kind": "categorical", "dim": 4, "column": "item"},
    ]
    options = {
        "features": [*features, *wide],
        "data.train": [str(log_directory / "train.parquet")] * 200,
    }
    with begun(
        log_directory,
        [girih.MLflow({"lr": 0.05, "train.seed": "mine"})],
        **options,
        **{"train.rank_at": [5], "train.gauc_by": "user"},
    ) as trainer:
        trainer.fit()
        auc = trainer.evaluate().auc
    logged = newest(mlflow)
    assert logged.info.status == "FINISHED"
    params = logged.data.params
    expected = {
        "lr": "0.05",
        "train.seed": "mine",
        "strategy": "local",
        "model.hidden": "[16, 8]",
        "features.a_b_/c_.dim": "4",
    }
    assert expected.items() <= params.items()
    assert (
        sum(name.startswith("features.number") for name in params) == 120
    )  # of 60 features, two options each
    assert len(params["data.train"]) == 6000
    assert logged.data.metrics["final/auc"] == logged.data.metrics["final/click/auc"] == auc
    assert "valid/recall_at_5" in logged.data.metrics


@pytest.mark.parametrize(
    ("at_first", "error", "status"),
    [(fails, RuntimeError, "FAILED"), (interrupts, KeyboardInterrupt, "KILLED")],
)
def test_mlflow_says_how_a_run_failed(log_directory, mlflow, at_first, error, status):
    with pytest.raises(error), begun(log_directory, [girih.MLflow(), Notes(at_first)], run=None) as trainer:
        trainer.fit()
    assert newest(mlflow).info.status == status
    assert mlflow.active_run() is None


def test_a_run_of_mlflow_that_goes_on_keeps_its_parameters(log_directory, mlflow):
    for lr in (0.1, 0.2):
        known = None if lr == 0.1 else newest(mlflow).info.run_id
        mlflow.start_run(run_id=known)
        fitted(begun(log_directory, [girih.MLflow()], run=None, **{"sparse_optimizer.lr": lr}))
    assert newest(mlflow).data.params["sparse_optimizer.lr"] == "0.1"


def test_a_store_that_mlflow_refuses_is_one_line_that_names_another(log_directory, mlflow, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(ConfigError) as raised, begun(log_directory, [girih.MLflow()], run=None) as trainer:
        trainer.fit()
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("MLflow: The filesystem tracking backend")
    assert str(raised.value).endswith("or to file:./mlruns together with MLFLOW_ALLOW_FILE_STORE=true")


def test_the_config_that_callbacks_get_hides_secrets(log_directory):
    notes = Notes()
    with begun(log_directory, [notes], run=None, **{"publish.to": "memory://me:hunter2@log"}):
        pass
    assert notes.options["publish.to"] == "memory://me:***@log"
    assert notes.options["model.hidden"] == [16, 8]
    assert (notes.options["train.max_steps"], notes.options["features.x0.kind"]) == (6, "numeric")
