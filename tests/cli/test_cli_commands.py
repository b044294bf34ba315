"""The command line as a user meets it: files in, files out, statuses."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from companions import Companion
from girih import cli


def run(*words):
    return cli.run([str(word) for word in words])


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def trained(log_directory):
    """A finished run of two epochs."""
    path = log_directory / "run"
    assert run("train", log_directory / "config.toml", "--run", path, "--set", "train.epochs=2") == 0
    return path


def test_train_writes_what_the_contract_lists(trained, capsys):
    summary = json.loads((trained / "summary.json").read_text())
    for key in (
        "auc", "logloss", "samples_per_s", "num_examples", "num_rows", "staleness_max", "staleness_mean",
        "lost_updates", "wire_bytes", "strategy", "precision", "seed", "by_label",
    ):  # fmt: skip
        assert key in summary
    assert summary["strategy"] == "local"
    assert summary["staleness_max"] == 0
    assert summary["num_examples"] == 6000
    assert set(summary["wire_bytes"]) == {
        "ids",
        "embeddings",
        "gradients",
        "partials",
        "dense",
        "activations",
    }
    records = lines_of(trained / "metrics.jsonl")
    training = [r for r in records if "split" not in r]
    assert {"step", "examples", "loss", "samples_per_s"} <= set(training[0])
    assert [r["step"] for r in training] == [*range(5, 46, 5), 48]
    evaluations = [r for r in records if "split" in r]
    assert [(r["split"], r["step"]) for r in evaluations] == [("valid", 24), ("valid", 48)]
    events = json.loads((trained / "timeline.json").read_text())["traceEvents"]
    assert {"read", "pull", "forward", "backward", "push", "apply"} <= {event["name"] for event in events}
    assert [p.name for p in (trained / "checkpoints").iterdir()] == ["step-00000048"]


def test_evaluate_predict_and_summary_agree(trained, log_directory, capsys):
    from sklearn.metrics import log_loss, roc_auc_score  # here, as each process that tests would load it

    summary = json.loads((trained / "summary.json").read_text())
    assert run("evaluate", trained) == 0
    assert f"{summary['auc']:.5f}" in capsys.readouterr().out
    out = log_directory / "scores.parquet"
    assert (
        run(
            "predict",
            trained,
            "--data",
            log_directory / "test.parquet",
            "--out",
            out,
            "--keep",
            "user",
            "click",
        )
        == 0
    )
    table, original = pq.read_table(out), pq.read_table(log_directory / "test.parquet")
    assert table.column_names == ["user", "click", "prediction"]
    assert table["user"].equals(original["user"])
    labels, predictions = table["click"].to_numpy(), table["prediction"].to_numpy()
    assert roc_auc_score(labels, predictions) == pytest.approx(summary["auc"], abs=1e-6)
    assert log_loss(labels, predictions.astype(float)) == pytest.approx(summary["logloss"], rel=1e-5)


def test_new_data_may_be_of_another_format(trained, log_directory, tmp_path, capsys):
    rows = pq.read_table(log_directory / "test.parquet").to_pylist()
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--data", tmp_path / "new.jsonl", "--format", "jsonl"]
    assert run("predict", trained, *given, "--out", tmp_path / "new.parquet") == 0
    assert (
        run("predict", trained, "--data", log_directory / "test.parquet", "--out", tmp_path / "old.parquet")
        == 0
    )
    assert pq.read_table(tmp_path / "new.parquet").equals(pq.read_table(tmp_path / "old.parquet"))
    assert run("evaluate", trained) == 0
    usual = capsys.readouterr().out.splitlines()[-3:]
    assert run("evaluate", trained, *given) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == usual
    assert run("evaluate", trained, "--format", "jsonl") == 2
    assert "give --data PATH too" in capsys.readouterr().err


def test_predictions_as_csv_are_those_as_parquet(trained, log_directory, capsys):
    def predicted(name, *keep):
        words = "predict", trained, "--data", log_directory / "test.parquet", "--out", log_directory / name
        return run(*words, "--keep", "user", *keep)

    assert predicted("a.csv", "x0") == predicted("a.parquet", "x0") == 0
    assert f"predictions in {log_directory / 'a.csv'}" in capsys.readouterr().out
    found, expected = (
        pyarrow.csv.read_csv(log_directory / "a.csv"),
        pq.read_table(log_directory / "a.parquet"),
    )
    assert found.column_names == ["user", "x0", "prediction"]
    assert found.cast(expected.schema).equals(expected)
    assert predicted("b.csv", "tags") == 2
    assert "column 'tags' (list<element: int64>) has no text to write as CSV" in capsys.readouterr().err
    for name in ("b.tsv", "b", "b.csv.gz"):
        assert predicted(name) == 2
        assert f"{name}: predictions are written as Parquet or CSV; name it b" in capsys.readouterr().err
    assert not list(log_directory.glob("b*"))
    assert not list(log_directory.glob(".*unfinished"))


def test_predict_needs_no_labels(trained, log_directory):
    unlabelled = log_directory / "new.parquet"
    pq.write_table(pq.read_table(log_directory / "test.parquet").drop_columns(["click"]), unlabelled)
    assert run("predict", trained, "--data", unlabelled, "--out", log_directory / "a.parquet") == 0
    assert (
        run(
            "predict", trained, "--data", log_directory / "test.parquet", "--out", log_directory / "b.parquet"
        )
        == 0
    )
    assert pq.read_table(log_directory / "a.parquet") == pq.read_table(log_directory / "b.parquet")


def test_inspect_report_and_info(trained, capsys):
    assert run("inspect", trained) == 0
    shown = capsys.readouterr().out
    for word in ("step 48", "user", "item", "tags", "dense.safetensors"):
        assert word in shown
    assert run("inspect", trained / "checkpoints" / "step-00000048") == 0
    assert run("report", trained) == 0
    assert "vegaEmbed" in (trained / "report.html").read_text()
    assert run("info") == 0
    assert "torch" in capsys.readouterr().out


def test_grouped_auc_older_checkpoints_and_a_finished_runs_auc_are_told(log_directory, capsys):
    path, words = (
        log_directory / "run",
        ("train.gauc_by=user", "train.max_steps=6", "checkpoint.every_steps=2"),
    )
    assert run("train", log_directory / "config.toml", "--run", path, "--set", *words) == 0
    assert "GAUC" in capsys.readouterr().out
    assert run("inspect", path) == 0
    shown = capsys.readouterr().out
    assert "older checkpoints: of step 2, 4\n" in shown
    summary = json.loads((path / "summary.json").read_text())
    assert f"finished: AUC {summary['auc']:.5f}, logloss {summary['logloss']:.5f}\n" in shown


def test_resume_of_a_finished_run_changes_nothing(trained, log_directory, capsys):
    before = _files_of(trained)
    assert (
        run("train", log_directory / "config.toml", "--run", trained, "--resume", "--set", "train.epochs=2")
        == 0
    )
    assert "finished" in capsys.readouterr().out
    assert before == _files_of(trained)


def _files_of(run):
    """All files of a run by when they were written and what is in them, but for its lease."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_resume_with_more_epochs_equals_one_run(trained, log_directory):
    whole = log_directory / "whole"
    assert run("train", log_directory / "config.toml", "--run", whole, "--set", "train.epochs=3") == 0
    assert (
        run("train", log_directory / "config.toml", "--run", trained, "--resume", "--set", "train.epochs=3")
        == 0
    )
    one, other = (json.loads((path / "summary.json").read_text()) for path in (whole, trained))
    assert one["auc"] == other["auc"]
    assert one["logloss"] == other["logloss"]
    losses = [
        [(r["step"], r["loss"]) for r in lines_of(p / "metrics.jsonl") if r["step"] % 5 == 0 and "loss" in r]
        for p in (whole, trained)
    ]
    assert [step for step, _ in losses[0]] == [step for step, _ in losses[1]]


def test_resume_without_a_checkpoint_starts_afresh(log_directory):
    assert run("train", log_directory / "config.toml", "--run", log_directory / "fresh", "--resume") == 0


def test_strategy_replaces_the_section_whatever_the_order_of_arguments(log_directory):
    config = log_directory / "config.toml"
    config.write_text(config.read_text() + '\n[strategy]\nname = "no such thing"\n')
    assert run("train", config, "--run", log_directory / "a", "--strategy", "local") == 0
    assert run("train", "--strategy", "local", config, "--run", log_directory / "b") == 0
    assert run("train", config, "--run", log_directory / "c") == 2


def words_of(log_directory, path):
    words = ["train", log_directory / "config.toml", "--run", path]
    return list(map(str, [*words, "--set", "train.epochs=400", "--set", "checkpoint.every_steps=10"]))


def start(log_directory, path):
    """The program, as soon as it has saved."""
    words = [sys.executable, "-m", "girih", *words_of(log_directory, path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until_it_saves(path, lambda: process.poll() is None)
    return process


def start_companion(log_directory, path, *more):
    """The command in another process, as soon as it has saved."""
    companion = Companion(train, [*words_of(log_directory, path), *more])
    until_it_saves(path, companion.process.is_alive)
    return companion


def train(pipe, words):
    cli.run(words)


def until_it_saves(path, runs):
    deadline = time.monotonic() + 120
    while not list((path / "checkpoints").glob("step-*")):
        assert runs()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.heavy)])
def test_a_signal_ends_with_a_checkpoint_and_130(log_directory, number):
    path = log_directory / "run"
    process = start(log_directory, path)
    process.send_signal(number)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "--resume" in shown
    assert "Traceback" not in shown
    assert not (path / "summary.json").exists()
    newest = sorted((path / "checkpoints").iterdir())[-1]
    step = int(newest.name.removeprefix("step-"))
    assert (
        run(
            "train",
            log_directory / "config.toml",
            "--run",
            path,
            "--resume",
            "--set",
            f"train.max_steps={step + 3}",
            "--set",
            "train.epochs=400",
        )
        == 0
    )
    assert json.loads((path / "summary.json").read_text())["steps"] == step + 3


@pytest.mark.slow
def test_killed_at_any_moment_the_last_complete_checkpoint_loads(log_directory):
    path = log_directory / "run"
    for _ in range(3):
        process = start_companion(log_directory, path, "--resume")
        time.sleep(0.3)
        process.close()
        for checkpoint in (path / "checkpoints").glob("step-*"):
            assert run("inspect", checkpoint) == 0
    assert run("evaluate", path) == 0
    assert all(
        "step" not in p.name or (p / "manifest.json").is_file() for p in (path / "checkpoints").iterdir()
    )


def test_two_runs_cannot_share_a_directory(log_directory, capsys):
    path = log_directory / "run"
    process = start_companion(log_directory, path)
    try:
        assert run("train", log_directory / "config.toml", "--run", path, "--resume") == 2
        assert "is writing this run" in capsys.readouterr().err
    finally:
        process.close()


def test_a_damaged_checkpoint_is_refused_with_the_file_named(trained, capsys):
    checkpoint = trained / "checkpoints" / "step-00000048"
    for name in [p.relative_to(checkpoint) for p in checkpoint.rglob("*") if p.is_file()]:
        file = checkpoint / name
        content = file.read_bytes()
        for damaged in (content[:-1], content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]):
            file.write_bytes(damaged)
            status, error = run("evaluate", trained), capsys.readouterr().err
            if damaged != content and not (name.name == "manifest.json" and json_equal(damaged, content)):
                assert status == 2, name
                assert file.name in error
                assert error.count("\n") == 1
        file.unlink()
        assert run("evaluate", trained) == 2
        assert file.name in capsys.readouterr().err
        file.write_bytes(content)
    assert run("evaluate", trained) == 0


def json_equal(one, other):
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_rotation_keeps_the_last_and_the_best(log_directory):
    path = log_directory / "run"
    options = ["checkpoint.every_steps=7", "checkpoint.keep=2", "train.epochs=8", "sparse_optimizer.lr=0.1",
               "train.early_stopping={metric='logloss', patience=2}"]  # fmt: skip
    words = [word for option in options for word in ("--set", option)]
    assert run("train", log_directory / "config.toml", "--run", path, *words) == 0
    summary = json.loads((path / "summary.json").read_text())
    steps = sorted(int(p.name.removeprefix("step-")) for p in (path / "checkpoints").iterdir())
    assert len(steps) == 3
    assert summary["checkpoint_step"] in steps
    assert run("evaluate", path) == 0


def test_non_finite_is_status_1_with_the_step(log_directory, capsys):
    words = [
        "train",
        log_directory / "config.toml",
        "--run",
        log_directory / "run",
        "--set",
        "sparse_optimizer={name='sgd', lr=1e30}",
    ]
    assert run(*words, "--set", "first_order_optimizer={name='sgd', lr=1e30}") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step" in error
    assert "on_nonfinite" in error


def test_tensorboard_events_are_written(log_directory):
    pytest.importorskip("tensorboard")
    path = log_directory / "run"
    assert run("train", log_directory / "config.toml", "--run", path, "--set", "train.tensorboard=true") == 0
    assert list((path / "tensorboard").glob("events*"))


def test_every_format_trains_the_same_model(log_directory):
    """CSV of the same rows gives the same ids, so the same run."""
    table = pq.read_table(log_directory / "train.parquet").drop_columns(["tags"])
    for name in ("train", "valid", "test"):
        table = pq.read_table(log_directory / f"{name}.parquet").drop_columns(["tags"])
        pq.write_table(table, log_directory / f"{name}.parquet")
        pyarrow.csv.write_csv(table, log_directory / f"{name}.csv")
    config = log_directory / "config.toml"
    text = config.read_text().replace('[[features]]\nname = "tags"\nkind = "categorical"\ndim = 4\n', "")
    config.write_text(text)
    other = log_directory / "csv.toml"
    other.write_text(
        text.replace(".parquet", ".csv").replace("[data]", '[data]\nformat = "csv"\nshuffle = false')
    )
    assert run("train", config, "--run", log_directory / "a", "--set", "data.shuffle=false") == 0
    assert run("train", other, "--run", log_directory / "b") == 0
    one, two = (json.loads((log_directory / n / "summary.json").read_text()) for n in ("a", "b"))
    assert one["auc"] == two["auc"]
    assert one["num_rows"] == two["num_rows"]


def test_a_command_leaves_the_garbage_collection_of_its_caller_alone(log_directory):
    before = gc.get_freeze_count()
    words = ("--run", str(log_directory / "run"), "--set", "train.max_steps=1")
    assert cli.run(["train", str(log_directory / "config.toml"), *words]) == 0
    assert gc.get_freeze_count() <= before


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "girih", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for command in ("train", "evaluate", "predict", "inspect", "report", "info"):
        assert command in done.stdout
    assert subprocess.run([sys.executable, "-m", "girih"], capture_output=True, check=False).returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_told(trained, log_directory, capsys):
    assert (
        run("predict", trained, "--data", log_directory / "test.parquet", "--out", "/dev/full/x.parquet") == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


def test_a_new_run_does_not_go_on_with_the_checkpoints_of_another(log_directory, capsys):
    """Two runs that name one ``checkpoint.dir``."""
    shared = ["--set", f"checkpoint.dir={log_directory}/kept"]
    assert run("train", log_directory / "config.toml", "--run", log_directory / "one", *shared) == 0
    capsys.readouterr()
    second = [
        "train",
        log_directory / "config.toml",
        "--run",
        log_directory / "two",
        *shared,
        "--set",
        "train.seed=8",
    ]
    assert run(*second) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert not (log_directory / "two").exists()


def test_tables_in_shared_memory_are_read_by_one_process(log_directory, capsys):
    path = log_directory / "run"
    assert run("train", log_directory / "config.toml", "--run", path) == 0
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(
        config + '\n[store]\narena = "shared"\n[strategy]\nname = "gone.py:Mine"\n'
    )
    assert run("evaluate", path) == 0


def test_report_draws_each_run(log_directory, trained, capsys):
    assert run("report", trained, trained) == 0
    assert (trained / "report.html").is_file()


def test_a_plan_says_what_tiers_take(log_directory, capsys):
    tiers = ["--set", 'store.tiers=["dram", "ssd"]', "--set", "store.hot_rows=200000"]
    assert run("plan", log_directory / "config.toml", *tiers) == 0
    said = capsys.readouterr().err
    assert "tiers: dram above ssd, in tiers/ of the run directory" in said
    assert "200,000 hot rows of 96 bytes, 18.3 MiB of memory; 40 bytes for each row" in said


def test_a_plan_tells_its_groups_and_their_order(log_directory, capsys):
    words = [
        "--strategy",
        "synchronous",
        "--set",
        "strategy.trainers=2",
        "--out",
        log_directory / "plan.json",
    ]
    asked = ["--set", "schedule.interleaving_groups=2", "--set", "schedule.excluded=['user']"]
    assert run("plan", log_directory / "config.toml", *words) == 0
    told = capsys.readouterr().err
    assert re.search(
        r"groups of tables: embedding-4-adam_first_order-1-ftrl \(3 tables, [\d,]+ numbers per step\)", told
    )
    assert "\neach step sends " in told
    assert "interleaving" not in told
    assert run("plan", log_directory / "config.toml", *words, *asked) == 0
    told = capsys.readouterr().err
    assert re.search(
        r"interleaving groups of [\d,]+, [\d,]+ numbers per step, as schedule.interleaving_groups says", told
    )
    assert "ahead of all others: embedding-4-adam_first_order-1-ftrl" in told
    automatic = [
        *asked[:1], "schedule.interleaving_groups='auto'", *asked[:1], "schedule.micro_batches='auto'"
    ]  # fmt: skip
    assert run("plan", log_directory / "config.toml", *words, *automatic) == 0
    told = capsys.readouterr().err
    assert re.search(r"micro-batches: 1 \(by eq. 2: network", told)
    assert re.search(
        r"interleaving groups of [\d,]+ numbers per step, by eq. 3: while a trainer computes", told
    )


def test_a_plan_that_was_edited_is_refused_in_a_line(log_directory, capsys):
    words = ["--strategy", "substitution", "--set", "model.name=dnn"]
    assert run("plan", log_directory / "config.toml", *words, "--out", log_directory / "plan.json") == 0
    plan = json.loads((log_directory / "plan.json").read_text())
    owned = plan["placement"]
    for edited, said in (
        (
            {"schedule": {"name": "in_step"}},
            "plan: schedule has ['name'], but expected ['micro_batches', 'micro_batches_from', 'name', 'prefetch', 'upper_network']",
        ),
        ({"placement": {}}, "plan: placement has []"),
        (
            {"groups": [group | {"tables": "user"} for group in plan["groups"]]},
            "plan: groups: tables = 'user': expected a list",
        ),
        ({"groups": [group | {"dim": 7} for group in plan["groups"]]}, "has dim 7; expected 4"),
        (
            {"groups": [group | {"tables": None} for group in plan["groups"]]},
            "plan: groups: tables = None: expected a list",
        ),
        (
            {"placement": owned | {"user": 7}},
            "feature 'user' is owned by trainer 7, expected one of 1 from 0",
        ),
    ):
        (log_directory / "plan.json").write_text(json.dumps(plan | edited))
        words_of = ["--run", log_directory / "planned", "--plan", log_directory / "plan.json"]
        assert run("train", log_directory / "config.toml", *words, *words_of) == 2
        assert said in capsys.readouterr().err
        assert not (log_directory / "planned").exists()
