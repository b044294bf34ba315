"""A report that cannot be drawn: one line about it, and no lost numbers."""

import errno
import shutil
import subprocess
import sys

import pytest

from girih import report
from girih.errors import ConfigError

PACKAGES = ("altair", "vl_convert", "jinja2")
RUN = "from girih import cli; sys.exit(cli.run(sys.argv[1:]))"
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({!r})); " + RUN
FILL_THE_DISK = """
import sys
class Fill:
    def find_spec(name, path, target=None):
        if name == "vl_convert":
            sys.meta_path.remove(Fill)
            with open("full", "wb", buffering=0) as file:
                for size in (1 << 20, 1 << 10, 1):
                    try:
                        while file.write(bytes(size)):
                            pass
                    except OSError:
                        pass
sys.meta_path.insert(0, Fill)
"""


def girih(code, *arguments, before=(), **options):
    command = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def permitted(*command):
    """Skips the test where this user may not run a command."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


@pytest.mark.parametrize("package", PACKAGES)
def test_report_names_the_extra_of_a_missing_package(run_directory, package):
    done = girih(WITHOUT.format([package]), "report", run_directory)
    told = f"girih: no report: {package} is not installed; pip install 'girih[report]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    assert not (run_directory / "report.html").exists()


def test_demo_shows_its_numbers_without_the_packages_of_reports(tmp_path):
    done = girih(WITHOUT.format(PACKAGES), "demo", tmp_path / "demo", "--examples", 1000)
    assert done.returncode == 0, done.stderr
    assert "best possible" in done.stdout
    assert "run/summary.json" in done.stdout
    assert "report.html" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "no report" in line]
    assert line.endswith("is not installed; pip install 'girih[report]'")


@pytest.mark.slow
def test_demo_shows_its_numbers_when_the_disk_is_full(tmp_path):
    permitted("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(tmp_path))
    try:
        done = girih(FILL_THE_DISK + RUN, "demo", "demo", "--examples", 1000, cwd=tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert done.returncode == 0, done.stderr
    assert "best possible" in done.stdout
    assert "report.html" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "report" in line and "next:" not in line]
    assert "no space left" in line


@pytest.mark.slow
def test_demo_draws_its_report_without_proc(tmp_path):
    without_proc = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"]
    permitted(*without_proc, "true")
    code = "import sys, os; assert not os.listdir('/proc'); " + RUN
    done = girih(code, "demo", tmp_path / "demo", "--examples", 1000, before=without_proc)
    assert done.returncode == 0, done.stderr
    assert "best possible" in done.stdout
    assert "panicked" not in done.stderr
    assert (tmp_path / "demo" / "run" / "report.html").is_file()


class PanicException(BaseException):
    """As PyO3's: not an Exception."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PanicException("left == right"), "no report: PanicException: left == right"),
        (OSError(errno.ENOSPC, "No space left on device"), "no report: OSError: .*No space left on device"),
        (KeyError("a bug"), "no report: KeyError: 'a bug'"),
    ],
)
def test_whatever_fails_in_drawing_is_an_error_of_girih(run_directory, monkeypatch, error, told):
    def fail(*_):
        raise error

    monkeypatch.setattr("vl_convert.javascript_bundle", fail)
    page = pytest.importorskip("girih.report.page")
    page._drawing_code.cache_clear()
    with pytest.raises(ConfigError, match=told):
        report.write_report(run_directory)
    page._drawing_code.cache_clear()


def test_ctrl_c_ends_drawing(run_directory, monkeypatch):
    monkeypatch.setattr("girih.report.page.page_of", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write_report(run_directory)
