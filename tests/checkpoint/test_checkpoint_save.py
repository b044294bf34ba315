import pytest

from girih import checkpoint
from girih.app.run_config import RunConfig
from girih.checkpoint import Manifest, Storage
from girih.checkpoint.save import save_manifest
from girih.errors import CheckpointError, MissingFileError


@pytest.fixture
def trainer(log_directory):
    settings = RunConfig.load(log_directory / "config.toml", overrides=["train.max_steps=3"])
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        yield trainer


def test_a_checkpoint_has_its_name_only_when_complete(trainer, tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"

    def fail(*arguments):
        assert all("step" not in path.name for path in root.iterdir())
        raise RuntimeError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", fail)
        with pytest.raises(RuntimeError):
            trainer.save(root)
    assert checkpoint.latest(Storage.at(root)) is None
    path = trainer.save(root)
    assert path.name == "step-00000003"
    assert checkpoint.latest(Storage.at(root)).local == path


def test_saving_the_same_step_again_replaces_only_the_manifest(trainer, tmp_path):
    path = trainer.save(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*.safetensors")}
    trainer.state.epoch = 7
    assert save_manifest(Storage.at(tmp_path), trainer._run.content()).local == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*.safetensors")} == before
    assert Manifest.read(Storage.at(path)).state["run"]["epoch"] == 7


def test_rotation_keeps_the_last_the_protected_and_clears_leftovers(tmp_path):
    for step in (1, 2, 3, 4, 5):
        (tmp_path / f"step-{step:08d}").mkdir()
    for leftover in (".writing-99", ".old-00000009"):
        (tmp_path / leftover).mkdir()
    checkpoint.rotate(Storage.at(tmp_path), 2, protected=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000004",
        "step-00000005",
    ]


def test_find_takes_runs_directories_and_checkpoints(trainer, tmp_path):
    path = trainer.save(tmp_path / "run" / "checkpoints")
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints", path):
        assert checkpoint.find(given).local == path
    with pytest.raises(MissingFileError):
        checkpoint.find(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.find(tmp_path / "empty")


def test_files_load_with_the_safetensors_library(trainer, tmp_path):
    from safetensors import safe_open

    path = trainer.save(tmp_path)
    manifest = Manifest.read(Storage.at(path))
    shards = [name for name in manifest.parts if name.startswith("tables/")]
    assert shards
    rows = 0
    for name in shards:
        with safe_open(path / name, "pt") as file:
            assert {"ids", "embedding", "first_order"} <= set(file.keys())
            rows += len(file.get_tensor("ids"))
    assert rows == sum(manifest.rows.values())


def test_a_newer_format_is_refused(trainer, tmp_path):
    path = trainer.save(tmp_path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 3', '"format": 4'))
    with pytest.raises(CheckpointError, match="format 4"):
        Manifest.read(Storage.at(path))
