"""``girih demo``: what a package has of its own to begin with."""

import json
from pathlib import Path

import pytest

import girih
from girih import cli
from girih.cli.demo import CONFIG, Best, _show
from girih.runs.directory import read_summary


def test_it_trains_on_a_log_that_it_makes_and_tells_the_best_auc(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["demo", "--examples", "1000"]) == 0
    told = capsys.readouterr().out
    assert "DeepFM, one epoch" in told
    assert "best possible" in told
    summary = read_summary(tmp_path / "demo-run" / "run")
    assert summary["num_examples"] == 1000
    assert f"{summary['auc']:.4f}" in told
    assert (tmp_path / "demo-run" / "run" / "report.html").is_file()
    monkeypatch.chdir("demo-run")
    assert cli.run(["demo", ".", "--examples", "2000"]) == 0  # in place of the earlier one
    assert read_summary(Path("run"))["num_examples"] == 2000


def left_by_a_demo(directory, *names):
    for name in names:
        if name == "config.toml":
            (directory / name).write_bytes(CONFIG.read_bytes())
        else:
            (directory / name).mkdir()
            (directory / name / "file").touch()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("config.toml", "holds config.toml, which is not from an earlier demo, or was changed"),
        ("other/config.toml", "holds other, which is not from an earlier demo, or was changed"),
        ("notes.txt", "holds notes.txt, which is not from an earlier demo, or was changed"),
    ],
)
def test_an_earlier_demo_with_work_of_the_user_stays(tmp_path, capsys, changed, told):
    left_by_a_demo(tmp_path, "config.toml", "data", "run")
    (tmp_path / changed).parent.mkdir(exist_ok=True)
    with (tmp_path / changed).open("a") as file:
        file.write("# lr = 0.1 was better\n")
    before = sorted(tmp_path.rglob("*"))
    assert cli.run(["demo", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"girih: {tmp_path}: {told}; name another directory\n"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("names", [["run"], ["data"], ["config.toml"], ["data", "run"]])
def test_a_part_of_a_demo_stays(tmp_path, capsys, names):
    left_by_a_demo(tmp_path, *names)
    before = sorted(tmp_path.rglob("*"))
    assert cli.run(["demo", str(tmp_path)]) == 2
    told = f"holds {', '.join(names)}, no earlier demo; name another directory"
    assert capsys.readouterr().err == f"girih: {tmp_path}: {told}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_is_no_directory(tmp_path, capsys):
    (tmp_path / "demo-run").touch()
    assert cli.run(["demo", str(tmp_path / "demo-run")]) == 2
    assert capsys.readouterr().err == f"girih: {tmp_path / 'demo-run'}: is a file; name a directory\n"


def test_paths_are_shown_as_they_are(tmp_path, capsys):
    summary = {"auc": 0.7, "logloss": 0.5, "compile_s": 0.0, "num_rows": 5}
    (tmp_path / "[red]" / "run").mkdir(parents=True)
    (tmp_path / "[red]" / "run" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "[red]" / "config.toml").touch()
    _show(tmp_path / "[red]", Best(0.8, 0.4), 3.0)
    assert f"  {tmp_path / '[red]' / 'config.toml'}  the config: change it" in capsys.readouterr().out


def test_its_config_is_in_the_package():
    listed = (Path(girih.__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"cli/{CONFIG.name}"' in listed
    assert CONFIG.parent == Path(cli.__file__).parent
