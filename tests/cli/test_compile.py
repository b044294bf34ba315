"""``girih compile``, as an image for containers runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from girih.kernels.cpu import ahead
from girih.kernels.cpu.jit import CACHE_DIRECTORY, JIT_DISABLED, KERNELS

needs_jit = pytest.mark.skipif(JIT_DISABLED, reason="NUMBA_DISABLE_JIT is set")
DOCKERFILE = Path(__file__).parents[2] / "deploy" / "docker" / "Dockerfile"


def girih(*arguments, **environment):
    command = [sys.executable, "-m", "girih", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@needs_jit
def test_usual_kernels_are_those_of_one_process_with_rows_in_memory():
    usual = set(ahead.usual())
    assert {
        "lookup.read_known",
        "update.apply_adam",
        "update.apply_any",
        "take.take",
        "strings.unpack",
    } <= usual
    assert {*ahead.loading(), *ahead.serving(), *ahead.writing_mapped()} <= usual
    assert not usual & {*ahead.on_disk(), *ahead.above_host(), *ahead.packing(), *ahead.packing_tensors()}
    assert usual < set(KERNELS)


@needs_jit
@pytest.mark.skipif(CACHE_DIRECTORY is None, reason="no directory keeps kernels here")
def test_compiled_kernels_are_not_compiled_again():
    ahead.make_ready(KERNELS)
    done = girih("compile", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    count = len(KERNELS)
    assert done.stdout == f"{count} of {count} kernels in {CACHE_DIRECTORY}, compiled in 0.0 s\n"


@needs_jit
@pytest.mark.heavy
def test_an_empty_cache_is_filled_and_nothing_is_compiled_later(tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    for words, count in (((), len(ahead.usual())), (("--all",), len(KERNELS))):
        done = girih("compile", *words, **cache)
        assert done.returncode == 0, done.stderr
        (directory,) = (tmp_path / "girih").iterdir()
        assert re.fullmatch(
            rf"{count} of {count} kernels in {directory}, compiled in \d+\.\d s\n", done.stdout
        )
        demo = girih("demo", tmp_path / "demo", "--examples", 1000, **cache)
        assert demo.returncode == 0, demo.stderr
        assert "compil" not in demo.stderr
    assert {path.name for path in (directory / "ready").iterdir()} == set(KERNELS)
    files = sorted(path.name for path in directory.glob("*.nbc"))
    assert len(files) >= sum(len(kernel.kinds) for kernel in KERNELS.values())


@needs_jit
def test_without_a_directory_it_says_so_in_one_line(tmp_path):
    (tmp_path / "cache").touch()
    (tmp_path / f"girih-{os.geteuid()}").touch()
    done = girih("compile", NUMBA_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("girih: compile: nothing was compiled: ")
    assert done.stderr.endswith("set NUMBA_CACHE_DIR to a directory that only you can write\n")
    assert done.stderr.count("\n") == 1


def test_kernels_that_run_as_plain_python_are_refused():
    done = girih("compile", NUMBA_DISABLE_JIT="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "girih: compile: NUMBA_DISABLE_JIT is set, so that kernels run as plain Python; unset it\n"
    )


def test_the_image_compiles_as_the_user_who_runs_it():
    """Girih refuses kernels of another user."""
    steps = [
        line.split(maxsplit=1) for line in DOCKERFILE.read_text().splitlines() if line and line[0] != "#"
    ]
    assert steps.index(["USER", "girih"]) < steps.index(["RUN", "girih compile --all"])
    assert [words for word, words in steps if word == "USER"] == ["girih"]
    assert steps[-1] == ["ENTRYPOINT", '["girih"]']
    for word, paths in steps:
        if word == "COPY":
            assert all((DOCKERFILE.parents[2] / path).exists() for path in paths.split()[:-1])
