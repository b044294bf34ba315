"""Fixtures: sites, fresh or with a finished run in them."""

import shutil
import sys
import tempfile

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import tomli_w
from bad_site import TRAINED, Site, changed, examples

from girih import cli
from girih.cli import trainer  # noqa: F401  (imports torch, which has directories of its own to make)


@pytest.fixture(scope="session")
def plot(tmp_path_factory):
    """The data that every site begins with."""
    directory = tmp_path_factory.mktemp("plot")
    for seed, (name, rows) in enumerate({"train": 160, "valid": 60, "test": 60}.items()):
        pq.write_table(examples(rows, seed), directory / f"{name}.parquet", row_group_size=50)
    plain = examples(60).select(["user", "item", "price", "rating", "click", "weight"])
    pacsv.write_csv(plain, directory / "clicks.csv")
    (directory / "temporary").mkdir()
    return directory


@pytest.fixture(scope="session")
def trained_plot(plot, tmp_path_factory):
    """The same with a finished run in it: DeepFM, two epochs of five steps, saved after 4, 8 and 10."""
    directory = tmp_path_factory.mktemp("trained") / "site"
    shutil.copytree(plot, directory)
    config = directory / "config.toml"
    config.write_text(tomli_w.dumps(changed(TRAINED)))
    assert cli.run(["train", str(config), "--run", str(directory / "run")]) == 0
    return directory


@pytest.fixture(autouse=True)
def _imports(tmp_path, monkeypatch):
    """Models of a user's own, and where they lie, are forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if file and file.startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.fixture
def site(plot, tmp_path, capsys, monkeypatch):
    """A fresh directory with data and the base config; the current directory and temporary files are in it."""
    return _site(plot, tmp_path, capsys, monkeypatch)


@pytest.fixture
def trained(trained_plot, tmp_path, capsys, monkeypatch):
    """A fresh copy of a finished run, in ``run``."""
    return _site(trained_plot, tmp_path, capsys, monkeypatch)


def _site(source, tmp_path, capsys, monkeypatch):
    directory = tmp_path / "site"
    shutil.copytree(source, directory)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(tempfile, "tempdir", str(directory / "temporary"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(
        "girih.kernels.cpu.ahead.make_ready", lambda *_: 0.0
    )  # else lines about it come first
    site = Site(directory, capsys)
    if not site.config_file.exists():
        site.configure()
    return site
