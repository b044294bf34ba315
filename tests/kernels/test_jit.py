"""How kernels are compiled, and where."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from girih.kernels.cpu import jit
from girih.kernels.cpu.jit import JIT_DISABLED, njit_lean
from girih.kernels.cpu.prefetch import prefetch, prefetch_columns

needs_jit = pytest.mark.skipif(JIT_DISABLED, reason="NUMBA_DISABLE_JIT is set")


@njit_lean
def total(array):
    result = 0.0
    for i in range(array.shape[0]):
        prefetch(array, i + 8)
        prefetch_columns(array, -i, 0, 40)
        result += array[i, 0]
    return result


@njit_lean
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
    jit._cached(lambda x: x)
    assert before == jit.numba.config.CACHE_DIR


@needs_jit
def test_another_place_or_a_change_of_any_kernel_source_changes_the_cache_directory(tmp_path, monkeypatch):
    """Numba keeps kernels by the path of their source: what is ready for one place is not for another."""
    here = jit._digest()
    assert here == Path(jit.CACHE_DIRECTORY or here).name
    root = Path(jit.__file__).parents[1]
    shutil.copytree(root, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "kernels" / "cpu" / "jit.py"))
    before = jit._digest()
    assert before != here
    with (tmp_path / "kernels" / "cpu" / "optimizers" / "sgd.py").open("a") as file:
        file.write("# changed\n")
    assert jit._digest() != before


@pytest.mark.slow
@needs_jit
@pytest.mark.parametrize("place", ["cache", "temporary", "none"])
def test_kernels_run_wherever_they_can_be_kept_and_where_they_cannot(tmp_path, place):
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    own = temporary / f"girih-{os.getuid()}"
    temporary.mkdir()
    if place != "cache":
        cache.write_text("")
    if place == "none":
        own.mkdir()
        own.chmod(0o777)  # others could put kernels there
    code = "import sys; from girih.kernels.cpu.hashing import mix; print(mix(5), 'numba.cpython.heapq' in sys.modules)"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    for run in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        compiles = run == 0 or place == "none"  # what is kept is loaded without all that numba can compile
        assert done.stdout.strip() == f"13168350753275463132 {compiles}", done.stderr
    kept = {name for name, path in (("cache", cache), ("temporary", own)) if list(path.rglob("*.nbi"))}
    assert kept == {place} - {"none"}
