"""How kernels are compiled, and where."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from girih.kernels.cpu import jit
from girih.kernels.cpu.jit import JIT_DISABLED, njit, njit_lean, prefetch, prefetch_at

needs_jit = pytest.mark.skipif(JIT_DISABLED, reason="NUMBA_DISABLE_JIT is set")


@njit_lean
def total(array):
    result = 0.0
    for i in range(array.shape[0]):
        prefetch(array, i + 8)
        prefetch_at(array, -i, 64)
        result += array[i, 0]
    return result


@njit
def quotient(x, y):
    return x / y


def test_prefetch_is_harmless_beyond_the_ends():
    assert total(np.arange(40, dtype=np.float32).reshape(10, 4)) == 180


@needs_jit
def test_prefetch_reaches_the_machine_code():
    array = np.zeros((3, 3))
    fresh = jit.numba.njit(total.py_func)
    fresh(array)
    assert "prefetch" in next(iter(fresh.inspect_asm().values()))


@needs_jit
def test_division_by_zero_is_as_in_numpy():
    assert quotient(1.0, 0.0) == np.inf


@needs_jit
def test_the_users_own_functions_keep_their_cache():
    before = jit.numba.config.CACHE_DIR
    njit(lambda x: x)
    assert before == jit.numba.config.CACHE_DIR


@needs_jit
def test_a_change_of_any_kernel_source_changes_the_cache_directory(tmp_path, monkeypatch):
    root = Path(jit.__file__).parents[1]
    shutil.copytree(root, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "kernels" / "cpu" / "jit.py"))
    before = jit._sources_digest()
    assert before == Path(jit._CACHE_DIRECTORY or before).name
    with (tmp_path / "kernels" / "cpu" / "optimizers" / "sgd.py").open("a") as file:
        file.write("# changed\n")
    assert jit._sources_digest() != before


@needs_jit
@pytest.mark.parametrize("place", ["a directory", "a file"])
def test_kernels_run_where_the_cache_can_or_cannot_be_written(tmp_path, place):
    cache = tmp_path / "cache"
    if place == "a file":
        cache.write_text("")
    code = "from girih.kernels.cpu.hashing import mix; print(mix(5))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.stdout.strip() == "13168350753275463132", done.stderr
    if place == "a directory":
        assert list((cache / "girih").rglob("*.nbi"))
