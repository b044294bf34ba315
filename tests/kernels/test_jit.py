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
from girih.kernels.cpu.system import prefetch, prefetch_columns

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
def test_the_cache_directory_is_named_by_sources_and_versions_and_not_by_their_place(tmp_path, monkeypatch):
    here = jit._digest()
    assert here == Path(jit.CACHE_DIRECTORY or here).name
    root = Path(jit.__file__).parents[1]
    shutil.copytree(root, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "kernels" / "cpu" / "jit.py"))
    with (tmp_path / "kernels" / "gpu" / "pool.py").open("a") as file:
        file.write("# changed\n")
    assert jit._digest() == here
    for holder, name in ((jit.numba, "__version__"), (jit.np, "__version__"), (jit, "llvm_version")):
        with monkeypatch.context() as other:
            other.setattr(holder, name, "0")
            assert jit._digest() != here
    with (tmp_path / "kernels" / "cpu" / "optimizers" / "sgd.py").open("a") as file:
        file.write("# changed\n")
    assert jit._digest() != here


@needs_jit
def test_an_image_that_names_its_processor_is_for_all_hosts(monkeypatch):
    here = jit._digest()
    monkeypatch.setattr(jit.numba.config, "CPU_NAME", "x86-64-v3")
    monkeypatch.setattr(jit.numba.config, "CPU_FEATURES", "")
    there = jit._digest()
    assert there != here
    monkeypatch.setattr(jit.llvm, "get_host_cpu_name", lambda: "another")
    monkeypatch.setattr(jit.codegen, "get_host_cpu_features", lambda: "+others")
    assert jit._digest() == there


def chosen(cache, temporary, *, user=None):
    """The cache directory of a new process, and its warning."""
    code = "from girih.kernels.cpu.jit import CACHE_DIRECTORY as d, CACHE_WARNING as w; print(d); print(w)"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, user=user
    )
    directory, warning = done.stdout.splitlines()
    return directory, warning


@needs_jit
@pytest.mark.parametrize("level", ["girih", "girih/digest"])
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("stranger", f"belongs to user 65534, and you are user {os.geteuid()}"),
        ("writable", "can be written by others (mode 777)"),
        ("link", "is a link, not a directory"),
        ("file", "File exists"),
    ],
)
def test_a_cache_that_others_can_write_is_refused_with_one_line(tmp_path, level, trouble, reason):
    (tmp_path / "temporary").mkdir()
    place = tmp_path / "cache" / level.replace("digest", jit._digest())
    place.parent.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    if trouble == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif trouble == "file":
        place.touch()
    else:
        place.mkdir(mode=0o700)
    if trouble == "writable":
        place.chmod(0o777)
    if trouble == "stranger":
        if os.geteuid() != 0:
            pytest.skip("only root can make a directory of another user")
        os.chown(place, 65534, 65534)
    directory, warning = chosen(tmp_path / "cache", tmp_path / "temporary")
    assert directory == str(tmp_path / "temporary" / f"girih-{os.geteuid()}" / jit._digest())
    assert reason in warning
    assert str(place) in warning
    assert warning.endswith(f"using {directory} instead: {jit._REMEDY}")


@needs_jit
def test_a_private_cache_is_taken_without_a_word(tmp_path):
    directory, warning = chosen(tmp_path / "cache", tmp_path)
    assert (directory, warning) == (str(tmp_path / "cache" / "girih" / jit._digest()), "")
    for path in (Path(directory), Path(directory).parent):
        assert path.stat().st_mode & 0o777 == 0o700


@needs_jit
def test_without_any_cache_one_line_says_so(tmp_path):
    (tmp_path / "cache").touch()
    (tmp_path / f"girih-{os.geteuid()}").touch()
    directory, warning = chosen(tmp_path / "cache", tmp_path)
    assert directory == "None"
    assert warning.endswith(f"kernels compile again in each process: {jit._REMEDY}")


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
