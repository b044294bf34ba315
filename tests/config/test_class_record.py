"""Which classes the config of a run may name: the record, its key, and the import path."""

import json
import os
import stat
import sys

import pytest

from girih.config import with_overrides
from girih.config.class_record import RECORD, check_class, record_classes, run_of
from girih.config.user_code import files_of, load_object, naming
from girih.errors import ConfigError
from girih.runs.files import make_private

CODE = "import pathlib\n\npathlib.Path({marker!r}).touch()\n\n\nclass Mine:\n    pass\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with ``mine.py``, a package ``parent_pack``, a run directory and a home; a file ``ran`` if anything ran."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code = CODE.format(marker=str(tmp_path / "ran"))
    for name in (
        "mine.py",
        "parent_pack/__init__.py",
        "parent_pack/inner.py",
        "run/inside.py",
        "run/run_pack/__init__.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("parent_pack", "run_pack"))]:
        del sys.modules[name]


def check(place, name, kind="model"):
    check_class(kind, name, place / "run" / "config.toml", place / "run")


def test_a_recorded_class_may_be_named_and_nothing_runs_before(place):
    for name in (f"{place / 'mine.py'}:Mine", "parent_pack.inner:Mine", "parent_pack:Mine"):
        with pytest.raises(ConfigError, match=r"give --model file\.py:Class"):
            check(place, name)
        record_classes(place / "run", {"model": name}, place)
        check(place, name)
        with pytest.raises(ConfigError, match=r"give --set strategy\.name=file\.py:Class"):
            check(place, name, "strategy")
        with pytest.raises(ConfigError, match="records another class"):
            check(place, name.replace(":Mine", ":Other"))
    assert not (place / "ran").exists()
    assert "parent_pack" not in sys.modules
    accepts = {"accepts": lambda value: isinstance(value, type), "expected": "a class"}
    assert load_object("parent_pack.inner:Mine", "here", **accepts).__name__ == "Mine"
    assert (place / "ran").exists()


def test_functions_in_a_list_are_recorded_together(place):
    first, second = f"{place / 'mine.py'}:first", "parent_pack.inner:second"
    record_classes(place / "run", {"train": [first, second], "model": f"{place / 'mine.py'}:Mine"}, place)
    check(place, [first, second], "train")
    check(place, f"{place / 'mine.py'}:Mine")
    inside = f"{place / 'run' / 'inside.py'}:first"
    for names in (
        [first],
        [second, first],
        [first, second, "os:system"],
        [first, inside],
        [first, 5],
        [[first]],
        first,
    ):
        with pytest.raises(
            ConfigError, match=r"give --set 'train\.metrics=\[\"file\.py:function\"\]' to girih train"
        ):
            check(place, names, "train")
    file = place / "run" / "config.toml"
    file.write_text(f"[train]\nmetrics = ['{first}', '{second}']\n")
    assert with_overrides(file, (), None, place / "run")["train"] == {"metrics": [first, second]}
    file.write_text(f"[train]\nmetrics = ['{second}']\n")
    with pytest.raises(
        ConfigError, match=r"config\.toml: \[train\]\.metrics = \['parent_pack\.inner:second'\]"
    ):
        with_overrides(file, ("train.epochs=2",), None, place / "run")
    chosen = with_overrides(file, ('train.metrics=["a.py:b"]',), None, place / "run")
    assert chosen["train"] == {"metrics": ["a.py:b"]}
    assert not (place / "ran").exists()


def test_another_file_behind_the_same_name_is_another_class(place):
    (place / "other").mkdir()
    (place / "other" / "mine.py").write_text("")
    (place / "link.py").symlink_to(place / "mine.py")
    record_classes(place / "run", {"model": f"{place / 'link.py'}:Mine"}, place)
    check(place, f"{place / 'mine.py'}:Mine")  # what would be imported is the same
    (place / "link.py").unlink()
    (place / "link.py").symlink_to(place / "other" / "mine.py")
    with pytest.raises(ConfigError, match="records another class"):
        check(place, f"{place / 'link.py'}:Mine")
    record_classes(place / "run", {"model": "parent_pack.inner:Mine"}, place)
    (place / "parent_pack").rename(place / "moved")
    (place / "other" / "parent_pack").mkdir()
    (place / "other" / "parent_pack" / "inner.py").write_text("")
    sys.path.insert(0, str(place / "other"))
    with pytest.raises(ConfigError, match="records another class"):
        check(place, "parent_pack.inner:Mine")


def test_a_class_inside_the_run_directory_is_refused_even_with_a_record(place, monkeypatch):
    monkeypatch.chdir(place / "run")
    (place / "outside.py").symlink_to(place / "run" / "inside.py")
    (place / "same").symlink_to(place / "run")
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    for name in (
        "inside.py:M",
        f"{place / 'outside.py'}:M",
        f"{place / 'same' / 'inside.py'}:M",
        "../run/inside.py:M",
        "run_pack:M",
    ):
        record_classes(place / "run", {"model": name}, place / "run")
        with pytest.raises(ConfigError, match="the file is in the run directory"):
            check(place, name)
    assert not (place / "ran").exists()


def test_the_key_is_the_users_alone(place):
    name, home = f"{place / 'mine.py'}:Mine", place / "state" / "girih"
    record_classes(place / "run", {"model": name}, place)
    key = home / "key"
    assert os.listdir(home) == ["key"]
    assert (stat.S_IMODE(home.stat().st_mode), stat.S_IMODE(key.stat().st_mode), key.stat().st_size) == (
        0o700,
        0o600,
        32,
    )
    content = key.read_bytes()
    for mode in (0o640, 0o604, 0o620, 0o602):
        key.chmod(mode)
        with pytest.raises(ConfigError, match=rf"mode {mode:o} of user"):
            check(place, name)
    key.chmod(0o600)
    check(place, name)
    home.chmod(0o770)
    with pytest.raises(ConfigError, match="can be written by others"):
        check(place, name)
    home.chmod(0o700)
    for other in (content[:-1], b"", os.urandom(32)):
        key.write_bytes(other)
        with pytest.raises(ConfigError, match="give --model"):
            check(place, name)
    key.unlink()
    (place / "shown").write_bytes(content)
    (place / "shown").chmod(0o600)
    key.symlink_to(place / "shown")
    with pytest.raises(ConfigError, match="give --model"):
        check(place, name)


def test_without_a_key_nothing_is_recorded_and_nothing_fails(place, monkeypatch):
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "file"))
    record_classes(place / "run", {"model": f"{place / 'mine.py'}:Mine"}, place)
    assert not (place / "run" / RECORD).exists()
    with pytest.raises(ConfigError, match=f"it has no {RECORD}"):
        check(place, f"{place / 'mine.py'}:Mine")


def test_what_an_override_or_an_argument_names_needs_no_record(place):
    file, mine = place / "run" / "config.toml", f"{place / 'mine.py'}:Mine"
    file.write_text(f'strategy = "{mine}"\n[model]\nname = "{mine}"\nwidth = 3\n')

    def read(*overrides, strategy=None):
        return with_overrides(file, overrides, strategy, place / "run")

    with pytest.raises(ConfigError, match=r"config\.toml: \[model\]\.name = .*mine\.py:Mine"):
        read("train.epochs=2")
    with pytest.raises(ConfigError, match=r"config\.toml: \[strategy\]\.name"):
        read(*naming("a b.py:Mine"))
    found = read(*naming("a b.py:Mine"), "strategy.name=local")
    assert found["model"] == {"name": f"{os.getcwd()}/a b.py:Mine", "width": 3}
    assert read("model.name=deepfm", strategy="local")["model"] == {"name": "deepfm"}
    record_classes(place / "run", {"model": mine, "strategy": mine}, place)
    assert read("strategy.x=1")["strategy"] == {"name": mine, "x": 1}
    assert set(json.loads((place / "run" / RECORD).read_text())) == {"model", "strategy"}
    for name in ("Mine", ":Mine", "mine.py:"):
        with pytest.raises(ConfigError, match=f"--model {name}: expected"):
            naming(name)


def test_a_config_in_a_directory_that_looks_like_a_run_is_one(place):
    config = place / "run" / "config.toml"
    config.write_text("")
    assert run_of(config, None) is None
    assert run_of(config, place / "run") == (place / "run").resolve()
    (place / "run" / "checkpoints").mkdir()
    assert run_of(config, None) is None  # the directory of a project may have some, too
    (place / "run" / ".lock").touch()
    (place / "linked.toml").symlink_to(config)
    for each in (config, place / "linked.toml", place / "run" / "other.toml"):
        assert run_of(each, None) == (place / "run").resolve()


def test_a_config_that_is_a_link_is_still_that_of_the_run(place):
    """Relative paths start where the link leads to, when they are checked and when they are loaded."""
    elsewhere = place / "away" / "deep"
    elsewhere.mkdir(parents=True)
    (place / "away" / "mine.py").write_text((place / "mine.py").read_text())
    (place / "run" / "config.toml").symlink_to(elsewhere / "config.toml")
    record_classes(place / "run", {"model": "mine.py:Mine"}, place)
    for name in (f"{place / 'away' / 'mine.py'}:Mine", "../mine.py:Mine"):
        (elsewhere / "config.toml").write_text(f'[model]\nname = "{name}"\n')
        with pytest.raises(ConfigError, match="records another class"):
            with_overrides(place / "run" / "config.toml", (), None, place / "run")
    (elsewhere / "config.toml").write_text(f'[model]\nname = "{place / "mine.py"}:Mine"\n')
    with_overrides(place / "run" / "config.toml", (), None, place / "run")


def test_packages_are_looked_for_in_no_run_directory(place, monkeypatch):
    (place / "run" / "config.toml").write_text('[model]\nname = "deepfm"\n')
    with_overrides(place / "run" / "config.toml", (), None, place / "run")
    monkeypatch.chdir(place / "run")
    with pytest.raises(ModuleNotFoundError):
        files_of("run_pack:M", place / "run")
    with pytest.raises(ConfigError, match="no module 'run_pack'"):
        load_object("run_pack:M", "here", place / "run", accepts=callable, expected="a class")
    assert not (place / "ran").exists()


def test_a_private_directory_is_no_link(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="is a link"):
        make_private(tmp_path / "link")
