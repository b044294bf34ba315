"""A kernel is kept only if the directory's name is true of it, and a full disk costs a warning."""

import os
import subprocess
import sys

import pytest

from girih.kernels.cpu.jit import JIT_DISABLED

pytestmark = pytest.mark.skipif(JIT_DISABLED, reason="NUMBA_DISABLE_JIT is set")
COMPILE = """
import os, resource, sys
from girih.kernels.cpu import ahead, jit
if sys.argv[1] == "edited":
    jit._digest = lambda: "of another source"
if sys.argv[1] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
ahead.make_ready(["take.take"], lambda line: None)
print(ahead.is_kept("take.take"), len(list(__import__("pathlib").Path(jit.CACHE_DIRECTORY).glob("*.nbc"))) > 0)
"""


def run(code, *words, **environment):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(("case", "kept"), [("as it is", True), ("edited", False), ("full", False)])
def test_what_is_kept(tmp_path, case, kept):
    done = run(COMPILE, case, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{kept} {kept}\n"
    assert ("kernels cannot be kept in" in done.stderr) == (case == "full")


def test_options_of_numba_have_directories_of_their_own(tmp_path):
    code = "from girih.kernels.cpu import jit; print(jit.CACHE_DIRECTORY)"
    options = ({}, {"NUMBA_OPT": "1"}, {"NUMBA_BOUNDSCHECK": "1"}, {"NUMBA_LOOP_VECTORIZE": "0"})
    found = {run(code, NUMBA_CACHE_DIR=str(tmp_path), **each).stdout for each in options}
    assert len(found) == len(options)
