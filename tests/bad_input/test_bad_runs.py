"""Run directories and checkpoints that cannot be used; what was there before stays as it was."""

import fcntl
import json
import shutil

import pytest
from bad_site import TRAINED


def test_a_run_directory_that_is_taken(site):
    (site / "run").mkdir()
    (site / "run" / "notes.txt").write_text("mine")
    line = site.refusal(*site.train())
    assert (
        line
        == f"{site / 'run'}: not empty (it holds notes.txt); name another --run directory, or add --resume"
    )


def test_a_finished_run_is_not_trained_again(trained):
    assert "not empty (it holds checkpoints); name another --run" in trained.refusal(*trained.train())


def test_a_finished_run_is_not_scaled(trained):
    line = trained.refusal("scale", trained / "run", "trainer=2")
    assert "this run has ended: there is nothing to scale; to train on, girih train" in line
    assert "--resume --set train.epochs=N" in line


def test_a_run_directory_that_is_a_file(site):
    (site / "run").write_text("mine")
    assert (
        site.refusal(*site.train()) == f"{site / 'run'}: is a file; expected a directory to write the run to"
    )


def test_a_run_directory_below_a_file(site):
    line = site.refusal("train", site.config_file, "--run", site / "clicks.csv" / "deep" / "run")
    assert line == f"{site / 'clicks.csv'}: is a file; expected a directory to write the run to"


@pytest.mark.parametrize("parent", ["/proc", "/proc/self/fd"])
def test_a_place_where_nobody_can_write(site, parent):
    line = site.refusal("train", site.config_file, "--run", f"{parent}/run")
    assert line.startswith(f"{parent}/run: cannot be written (")
    assert line.endswith("); choose another --run")


def test_a_run_directory_in_use(site):
    (site / "run").mkdir()
    with (site / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = site.refusal(*site.train("--resume"))
    assert line == f"{site / 'run'}: another process is writing this run; wait for it or stop it"
    assert "AUC" in site.girih(*site.train())


def test_directories_made_on_the_way_are_taken_away_again(site):
    site.configure("model.name = 'deepmf'")
    line = site.refusal("train", site.config_file, "--run", site / "a" / "b" / "run")
    assert "did you mean 'deepfm'?" in line
    assert not (site / "a").exists()


RESUMED = [
    ("features.0.dim = 8\nfeatures.1.dim = 8\nfeatures.2.dim = 8", "'user' has dim 4 in the checkpoint, 8 in the con"),
    ("features.0.name = 'rating'", "was trained with features ['user', 'item', 'tags', 'history', 'price'] instead"),
    ("features.4.transform = 'log1p'", "features of other kinds, tables or transforms"),
    ("features.3 = {table = 'history', dim = 4}", "features of other kinds, tables or transforms"),
    ("labels.derive.rating = 'rating > 3'\nlabels.names = ['rating']", "its labels are ['click'], the configurati"),
    ("model.hidden = [16]", "dense.safetensors: does not fit this model: "),
    ("model.hidden = [8, 8]", "dense.safetensors: does not fit this model: "),
    ("model.name = 'dcn'", "dense.safetensors: does not fit this model: "),
    ("dense_optimizer = {name = 'sgd'}", "its dense optimizer is Adam, the configuration's is SGD"),
    ("sparse_optimizer.name = 'adagrad'", "optimizer is adam with "),
    ("first_order_optimizer.name = 'ftrl'", "optimizer is adam"),
    ("tables = [{name = 'user', dtype = 'bfloat16'}]", "step-00000010/tables/"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), RESUMED, ids=[change for change, _ in RESUMED])
def test_resuming_with_another_configuration(trained, change, message):
    trained.configure(TRAINED, change)
    line = trained.refusal(*trained.train("--resume", "--set", "train.epochs=3"))
    assert str(trained / "run" / "checkpoints" / "step-00000010") in line
    assert message in line


def test_resuming_amid_an_epoch_of_other_data(trained):
    shutil.rmtree(trained / "run" / "checkpoints" / "step-00000010")
    words = trained.train("--resume", "--set", "train.epochs=3")
    line = trained.refusal(*words, "--set", "data.train=valid.parquet")
    assert line == (
        "position: from other files, or another shuffle, shuffle_rows, seed, on_bad_row or where; start the epoch again"
    )


def test_resuming_with_another_schedule(site):
    site.configure("train.lr_schedule = {name = 'StepLR', step_size = 1}")
    site.girih(*site.train())
    site.configure("train.lr_schedule = {name = 'ExponentialLR', gamma = 0.5}\ntrain.epochs = 2")
    line = site.refusal(*site.train("--resume"))
    assert (
        "lr_schedule: the checkpoint has StepLR, but the configuration has ExponentialLR; resume with" in line
    )


def damaged_files(run):
    checkpoint = run / "checkpoints" / "step-00000010"
    return sorted(path.relative_to(run) for path in checkpoint.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_resuming_from_a_damaged_checkpoint(trained, damage):
    for name in damaged_files(trained / "run"):
        file = trained / "run" / name
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(
            {
                "cut": content[:-1],
                "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "empty": b"",
            }.get(damage, b"")
        )
        if damage == "gone":
            file.unlink()
        line = trained.refusal(*trained.train("--resume", "--set", "train.epochs=3"))
        assert "step-00000010" in line
        assert file.name in line
        file.write_bytes(content)
    assert "resumed from step-00000010" in trained.girih(
        *trained.train("--resume", "--set", "train.epochs=3")
    )


NOT_RUNS = {
    "missing": (lambda site: site / "nowhere", "nowhere: no such run"),
    "empty": (lambda site: site / "temporary", "temporary: "),
    "of something else": (lambda site: site.directory, "site: "),
    "a file": (lambda site: site / "clicks.csv", "clicks.csv: "),
}  # fmt: skip
COMMANDS = {
    "evaluate": [],
    "predict": ["--data", "test.parquet", "--out", "out.parquet"],
    "inspect": [],
    "report": [],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("where", "message"), NOT_RUNS.values(), ids=NOT_RUNS)
def test_a_path_that_is_no_run(site, where, message, command):
    site.config_file.rename(site / "other.toml")
    line = site.refusal(command, where(site), *COMMANDS[command])
    assert message.removesuffix("no such run") in line
    assert any(hint in line for hint in ("run directory", "no complete checkpoint", "no such run"))


@pytest.mark.parametrize("command", ["evaluate", "predict", "inspect"])
def test_a_run_without_a_checkpoint(trained, command):
    shutil.rmtree(trained / "run" / "checkpoints")
    (trained / "run" / "summary.json").unlink()
    line = trained.refusal(command, trained / "run", *COMMANDS[command])
    assert line == f"{trained / 'run'}: holds no complete checkpoint; train first, or name another directory"


def test_serve_names_the_option_for_a_published_log(site):
    (site / "pub").mkdir()
    (site / "pub" / "head.json").touch()
    line = site.refusal("serve", site / "pub")
    assert line == f"{site / 'pub'}: is a published log; add --follow, which serves its newest version"


TORCH_ERROR = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("Unable to allocate 2 GiB"), TORCH_ERROR], ids=str
)
def test_a_run_that_memory_has_no_room_for(site, monkeypatch, error):
    def fail(*words, **options):
        raise error

    monkeypatch.setattr("girih.trainer.Trainer.fit", fail)
    line = site.refusal_after_writing("train", site.config_file, "--run", site / "run")
    assert (site / "run").exists() == (error is TORCH_ERROR)
    assert line == (
        f"out of memory: {str(error) or 'an allocation failed'}; lower dim or data.batch_size, give tables an eviction with"
        " max_rows, or set store.tiers"
    )


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_summary_whose_checkpoint_is_gone(trained, command):
    shutil.rmtree(trained / "run" / "checkpoints" / "step-00000010")
    line = trained.refusal(command, trained / "run", *COMMANDS[command])
    assert "step-00000010: is gone, though it had the final weights; train with --resume" in line


CONFIGS = {
    "cut short": lambda text: text[: len(text) // 2] + "[",
    "of another version": lambda text: text + "\n[telemetry]\nurl = 'a'\n",
    "not text": lambda text: "\0\1\2",
}  # fmt: skip


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize("damage", CONFIGS.values(), ids=CONFIGS)
def test_a_run_whose_config_is_damaged(trained, command, damage):
    config = trained / "run" / "config.toml"
    config.write_text(damage(config.read_text()))
    line = trained.refusal(command, trained / "run", *COMMANDS[command])
    assert line.startswith(f"{config}: ")
    assert "not valid TOML" in line or "unknown section [telemetry]" in line


SUMMARIES = {
    "cut short": lambda content: content[:-20],
    "a list": lambda content: b"[]",
    "without a step": lambda content: json.dumps({"auc": 0.5}).encode(),
    "not text": lambda content: b"\xff\xfe\x00",
}  # fmt: skip


@pytest.mark.parametrize("command", ["evaluate", "predict", "inspect"])
@pytest.mark.parametrize("damage", SUMMARIES.values(), ids=SUMMARIES)
def test_a_run_whose_summary_is_damaged(trained, command, damage):
    summary = trained / "run" / "summary.json"
    summary.write_bytes(damage(summary.read_bytes()))
    line = trained.refusal(command, trained / "run", *COMMANDS[command])
    assert line.startswith(f"{summary}: damaged: ")
    assert line.endswith("; delete it, and train with --resume to write it again")
    summary.unlink()
    assert "AUC" in trained.girih(*trained.train("--resume"))
    assert json.loads(summary.read_text())["checkpoint_step"] == 10


@pytest.mark.slow
def test_report_draws_what_is_left_of_a_damaged_run(trained):
    (trained / "run" / "summary.json").write_text("{")
    (trained / "run" / "timeline.json").write_bytes(b"\xff\xff")
    (trained / "run" / "metrics.jsonl").write_text('{"step": 1, "loss"')
    (trained / "run" / "config.toml").write_text("[data")
    trained.girih("report", trained / "run")
    assert "summary.json is damaged and left out" in (trained / "run" / "report.html").read_text()


OUTPUTS = [
    (["--out", "nowhere/out.parquet"], "--out nowhere/out.parquet: the directory nowhere does not exist; create"),
    (["--out", "temporary"], "--out temporary: is a directory; name a file, as temporary/predictions.parquet"),
    (["--out", "/proc/out.parquet"], "--out /proc/out.parquet: cannot be written ("),
    (["--out", "out.parquet", "--keep", "usre"], "no column 'usre' (keep); did you mean 'user'?"),
    (["--out", "out.parquet", "--keep", "user", "--keep", "user"], "--keep user: the column would be in the out"),
    (["--out", "out.parquet", "--keep", "prediction"], "--keep prediction: the column would be in the output twi"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), OUTPUTS, ids=[" ".join(words) for words, _ in OUTPUTS])
def test_predictions_that_cannot_be_written(trained, words, message):
    (trained / "out.parquet").write_text("what was there before")
    assert message in trained.refusal("predict", trained / "run", "--data", trained / "test.parquet", *words)


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(
    "data", ["nothing.parquet", "nothing/*.parquet", "clicks.csv", "s9://bucket/a.parquet"]
)
def test_data_on_the_command_line(trained, command, data):
    out = ["--out", "out.parquet"] if command == "predict" else []
    assert f"{data}: " in trained.refusal(command, trained / "run", "--data", data, *out)


def test_a_run_without_data_to_evaluate_on(trained):
    config = trained / "run" / "config.toml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith(("test =", "valid ="))))
    line = trained.refusal("evaluate", trained / "run")
    assert line == f"{trained / 'run'}: its configuration names no test or valid data; give --data PATH"
