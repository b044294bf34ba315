"""Every code block of the README and the docs runs: Python, TOML, and the ``girih`` lines of consoles."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih import cli
from girih.app.run_config import SECTIONS, RunConfig
from girih.config import write_toml

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "experiments").glob("*.md")),
    *sorted((ROOT / "docs" / "migrate").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = """
[data]
train = "train/*.parquet"
valid = "valid.parquet"
test = "test.parquet"
batch_size = 256
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[features]]
name = "price"
kind = "numeric"
transform = ["log1p", "standardize"]
[labels]
names = ["click"]
[model]
name = "deepfm"
hidden = [8]
"""


def click_log(rows, seed):
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 50, rows), rng.integers(0, 80, rows)
    columns = {
        "user": user,
        "item": item,
        "price": rng.exponential(9.0, rows),
        "history": [rng.integers(0, 50, n).tolist() for n in rng.integers(0, 4, rows)],
        "rating": rng.integers(1, 6, rows),
        "click": (rng.random(rows) < 0.2 + 0.6 * ((user + item) % 3 == 0)).astype(np.int64),
    }
    return pa.table(columns)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A directory with the files that the pages speak of."""
    for name in ("train", "new"):
        (tmp_path / name).mkdir()
        for part in range(2):
            pq.write_table(click_log(600, part), tmp_path / name / f"{part}.parquet")
    for name in ("valid", "test"):
        pq.write_table(click_log(300, 7), tmp_path / f"{name}.parquet")
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def title(page):
    """The name of a page below docs."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks(page, language):
    return [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


MARKS = {
    "strategies.md": pytest.mark.heavy,  # nine processes
    "README.md": pytest.mark.slow,
    "serving.md": pytest.mark.slow,
}
CONSOLE = [
    pytest.param(page, id=title(page), marks=MARKS.get(title(page), []))
    for page in PAGES
    if blocks(page, "console")
]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_blocks_have_a_language_that_is_tested(page):
    kinds = {kind for kind, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert kinds <= {"python", "toml", "console", "text", "json"}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=title)
def test_python_runs(page, workplace):
    namespace = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python")):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, f"{page.name}, python block {number + 1}", "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=title)
def test_toml_is_a_valid_config_or_a_part_of_one(page, workplace, monkeypatch):
    for code in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            (workplace / named[1]).write_text(code)
    for code in blocks(page, "toml"):
        for name in re.findall(r"\$\{(\w+)\}", code):
            monkeypatch.setenv(name, "set")
        parsed = tomllib.loads(code)
        assert set(parsed) <= set(SECTIONS)
        whole = tomllib.loads(CONFIG) | parsed
        if "features" in parsed and "labels" not in parsed:
            whole["labels"] = {"names": ["click"]}
        if "model" not in parsed:
            whole["model"] = {"name": "dnn"}
        write_toml(workplace / "page.toml", whole)
        settings = RunConfig.load(workplace / "page.toml")
        if "features" in parsed:
            settings.model()


@pytest.mark.parametrize("page", CONSOLE)
def test_console_lines_run(page, workplace, capsys):
    for code in blocks(page, "console"):
        lines = code.splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if not line.startswith("$ girih "):
                continue
            status = cli.run(shlex.split(line[2:], comments=True)[1:])
            if following.startswith("girih: "):
                assert status == 2
                assert capsys.readouterr().err.strip() == following
            else:
                assert status == 0, capsys.readouterr().err
            capsys.readouterr()


def test_relative_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_starts_with_commands_that_exist():
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    for target in ("demo", "test", "lint", "bench", "docs"):
        assert (
            subprocess.run([make, "-n", target], cwd=ROOT, capture_output=True, check=False).returncode == 0
        )
    assert (
        subprocess.run(
            [sys.executable, "-m", "girih", "--version"], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_no_docstring_of_the_library_begins_with_a_question_word():
    """A docstring says what a thing is or does: a subject and a verb, or a verb."""
    begins = re.compile(r'"""(Of|What|How|Where|When|So) ')
    files = sorted((ROOT / "src").rglob("*.py"))
    lines = ((file, line) for file in files for line in file.read_text(encoding="utf-8").splitlines())
    assert [f"{file.relative_to(ROOT)}: {line.strip()}" for file, line in lines if begins.search(line)] == []
