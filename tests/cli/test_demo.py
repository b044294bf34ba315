"""``girih demo``: what a package has of its own to begin with."""

from pathlib import Path

import girih
from girih import cli
from girih.cli.demo import CONFIG
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
    assert cli.run(["demo", "demo-run", "--examples", "2000"]) == 0  # in place of the earlier one
    assert read_summary(tmp_path / "demo-run" / "run")["num_examples"] == 2000


def test_what_is_no_earlier_demo_stays(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[data]\n")
    assert cli.run(["demo", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"girih: {tmp_path}: exists and holds no earlier demo; name another directory\n"
    )
    assert (tmp_path / "config.toml").read_text() == "[data]\n"


def test_its_config_is_in_the_package():
    listed = (Path(girih.__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"cli/{CONFIG.name}"' in listed
    assert CONFIG.parent == Path(cli.__file__).parent
