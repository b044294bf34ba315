"""Kernels are compiled before they are needed, once, whoever is killed meanwhile."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tomli_w

import girih
from girih.kernels.cpu import ahead, index
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.optim import FTRL, Adagrad, Adam
from girih.tables import LFU, LRU, TTL

pytestmark = pytest.mark.skipif(JIT_DISABLED, reason="NUMBA_DISABLE_JIT is set")

FEW = [
    "index.after_free_slot",
    "hashing.fill_stream",
    "take.take",
    "saving.put_spilled",
    "gradients.scatter_whole",
]

HEARD = """
import os, sys
from numba.core import event

class Heard(event.Listener):
    def on_start(self, happened):
        function = happened.data["dispatcher"].py_func
        amid = "amid" if os.path.exists(os.environ.get("PLAN", "")) else "before"
        with open(os.environ["HEARD"], "a") as file:
            file.write(f"{os.getpid()} {amid} {function.__module__.rpartition('.')[2]}.{function.__qualname__}\\n")

    def on_end(self, happened):
        pass

event.register("numba:compile", Heard())
"""
READY = """
import sys
from girih.kernels.cpu import ahead
ahead.make_ready(sys.argv[1:])
for name in sys.argv[1:]:
    for signature in ahead.signatures(ahead.KERNELS[name]):
        ahead.KERNELS[name].dispatcher.compile(signature)
"""


@pytest.fixture
def cold(tmp_path):
    """The environment of processes that share an empty cache, and write what they compile to ``heard``."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HEARD)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "HEARD": str(tmp_path / "heard"),
        "PLAN": str(tmp_path / "run" / "plan.json"),
    }


def begun(environment, names):
    return subprocess.Popen(
        [sys.executable, "-c", READY, *names], env=environment, stderr=subprocess.PIPE, text=True
    )


def heard(environment):
    """(process, whether training had begun, function) of each compilation of a kernel."""
    lines = [line.split() for line in Path(environment["HEARD"]).read_text().splitlines()]
    return [(pid, amid, name) for pid, amid, name in lines if name in ahead.KERNELS]


def marks(environment):
    (directory,) = Path(environment["NUMBA_CACHE_DIR"], "girih").iterdir()
    return {path.name for path in (directory / "ready").iterdir()}


def test_types_are_those_of_annotations():
    for name, kernel in ahead.KERNELS.items():
        assert len(ahead.signatures(kernel)) == len(kernel.kinds), name
    ids, weights = ahead.signatures(ahead.KERNELS["take.take"])
    assert [str(kind) for kind in weights] == [
        "readonly array(float32, 1d, C)",
        "array(int64, 2d, C)",
        "array(int64, 1d, C)",
        "array(float32, 1d, C)",
    ]
    assert ids[1:3] == weights[1:3]


def test_array_type_may_be_an_alias_as_in_numpy_2_5():
    item = TypeVar("item", bound=np.generic)
    array = np.ndarray[tuple[Any, ...], np.dtype[item]]
    alias = pytest.importorskip("typing_extensions").TypeAliasType("NDArray", array, type_params=(item,))
    for hint in (alias, array):
        assert str(ahead._type_of(hint[np.float32])) == "array(float32, 1d, C)"
        assert str(ahead._type_of(Annotated[hint[np.float32], 2])) == "array(float32, 2d, C)"


@pytest.mark.parametrize(
    ("rows", "applying"),
    [
        ([[Adagrad(lr=0.1)]], {"update.apply_adagrad"}),
        ([[Adam(lr=0.1), Adam(lr=0.2)]], {"update.apply_adam_to_segments"}),
        ([[Adam(lr=0.1), FTRL()], [FTRL()]], {"update.apply_any", "update.apply_ftrl"}),
    ],
)
def test_of_optimizers_only_those_of_the_run_are_compiled(rows, applying):
    names = ahead.training(rows)
    assert {name for name in names if name.startswith("update.apply_")} == applying
    assert not set(names) & {*ahead.packing(), *ahead.packing_tensors(), *ahead.on_disk()}
    assert "tensor_codecs.keep_largest" in ahead.packing_tensors()
    assert "disk_reads.read_at_once" in ahead.on_disk()


@pytest.mark.parametrize(
    ("evictions", "more"),
    [
        ([None, LRU(max_rows=5)], set()),
        ([TTL(steps=5)], {"lookup.expire"}),
        ([None, LFU(max_rows=5)], {"recency.oldest_first", "update.drop_rows"}),
    ],
)
def test_what_only_some_tables_need_is_compiled_for_them_alone(evictions, more):
    plain = set(ahead.training([[Adam(lr=0.1)]]))
    assert set(ahead.training([[Adam(lr=0.1)]], evictions)) - plain == more
    assert "update.load_keys" in ahead.loading()
    assert "update.load_keys" not in plain


def test_numbas_cache_finds_kernels_of_other_processes():
    """It tells closures apart by what they hold, pickled."""
    assert pickle.loads(pickle.dumps(index.find)) == "girih.kernels.cpu.index.find"
    for name, kernel in ahead.KERNELS.items():
        held = {cell.cell_contents for cell in kernel.dispatcher.py_func.__closure__ or ()}
        assert {type(each) for each in held} <= {bool, type(index.find)}, name


@pytest.mark.slow
def test_of_several_processes_one_compiles_and_the_others_wait(cold):
    processes = [begun(cold, FEW) for _ in range(3)]
    told = [process.communicate(timeout=240)[1].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    assert ["compiling kernels (kept for later runs)"] in [lines[:1] for lines in told]
    assert sorted({name for *_, name in heard(cold)}) == sorted(FEW)
    again = begun(cold, FEW)
    assert again.communicate(timeout=240)[1] == ""
    assert len(heard(cold)) == len(FEW) + 1  # take is of two kinds
    assert marks(cold) == set(FEW)


def test_two_installations_compile_once(cold, tmp_path):
    """The second one lies at another path, and its files are newer."""
    few = ["hashing.fill_stream", "take.take"]
    first = begun(cold, few)
    first.communicate(timeout=240)
    assert first.returncode == 0
    assert {name for *_, name in heard(cold)} == set(few)
    Path(cold["HEARD"]).write_text("")
    other = tmp_path / "other" / "girih"
    shutil.copytree(Path(girih.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    for source in other.rglob("*.py"):
        source.touch()
    environment = {**cold, "PYTHONPATH": os.pathsep.join([str(other.parent), cold["PYTHONPATH"]])}
    where = [sys.executable, "-c", "import girih; print(girih.__file__)"]
    found = subprocess.run(where, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == f"{other / '__init__.py'}\n"
    second = begun(environment, few)
    assert second.communicate(timeout=240)[1] == ""
    assert second.returncode == 0
    assert heard(cold) == []


SAVE = """
import sys, time
from girih.kernels.cpu import ahead
kernel = ahead.KERNELS["take.take"]
signature = ahead.signatures(kernel)[int(sys.argv[1])]
file = kernel.dispatcher._cache._cache_file
save = file._save_index
file._save_index = lambda index: (time.sleep(4), save(index))
print("ready", flush=True)
sys.stdin.readline()
kernel.dispatcher.compile(signature)
"""
FIND = """
from girih.kernels.cpu import ahead
kernel = ahead.KERNELS["take.take"]
for signature in ahead.signatures(kernel):
    found = kernel.dispatcher._cache.load_overload(signature, kernel.dispatcher.targetctx)
    assert found and found.signature.args == signature
"""


@pytest.mark.slow
def test_processes_that_save_kinds_of_a_kernel_at_once_keep_both(cold):
    """Without a lock, both write the index and the first file."""
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", SAVE, kind], env=cold, stdin=pipe, stdout=pipe)
        for kind in "01"
    ]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=240)
        assert process.returncode == 0
    subprocess.run([sys.executable, "-c", FIND], env=cold, check=True)


def test_a_refused_cache_is_told_once_in_a_process_and_its_children(cold, tmp_path):
    (tmp_path / "cache").touch()
    say = """
import subprocess, sys
from girih.kernels.cpu import ahead
ahead.make_ready([], print)
ahead.make_ready([], print)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "child"], check=True)
"""
    environment = {**cold, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", say], env=environment, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.endswith("set NUMBA_CACHE_DIR to a directory that only you can write")


@pytest.mark.slow
def test_what_a_killed_process_left_is_compiled_by_the_next(cold):
    killed = begun(cold, FEW)
    try:
        until = time.monotonic() + 200
        while not (Path(cold["HEARD"]).exists() and heard(cold)):
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    after = begun(cold, FEW)
    after.communicate(timeout=240)
    assert after.returncode == 0
    assert marks(cold) == set(FEW)


def test_what_a_lost_helper_took_is_compiled_here(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "CACHE_DIRECTORY", str(tmp_path))

    def lost(names, queue, lock):
        taken = f"import os; os.read({queue}, 1)"
        process = subprocess.Popen([sys.executable, "-c", taken], pass_fds=[queue])
        process.wait()
        return process

    monkeypatch.setattr(ahead, "_helper", lost)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    told = []
    assert ahead.make_ready(FEW, told.append) > 0
    assert {path.name for path in (tmp_path / "ready").iterdir()} == set(FEW)
    assert [line.partition(" in ")[0] for line in told] == [
        "compiling kernels (kept for later runs)",
        "compiled kernels",
    ]
    assert ahead.make_ready(FEW, told.append) == 0
    assert len(told) == 2


def test_how_far_it_has_come_is_told_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "CACHE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(ahead, "TELL_EVERY_S", 0.01)
    lines = [f"compiling kernels: {count} of {len(FEW)}" for count in range(len(FEW) + 1)]
    told = []

    def one_at_a_line(names, lock):
        for line, name in zip(lines, [*names, None], strict=True):
            while line not in told:
                time.sleep(0.001)
            time.sleep(5 * ahead.TELL_EVERY_S)
            if name is not None:
                (tmp_path / "ready" / name).touch()

    monkeypatch.setattr(ahead, "_compile_together", one_at_a_line)
    ahead.make_ready(FEW, told.append)
    first, *between, last = told  # each once, however often it was looked
    assert (first, last.partition(" in ")[0]) == (
        "compiling kernels (kept for later runs)",
        "compiled kernels",
    )
    assert between == lines


def test_without_a_directory_each_process_compiles_once(monkeypatch):
    monkeypatch.setattr(ahead, "CACHE_DIRECTORY", None)
    ahead.make_ready(FEW)
    assert ahead.make_ready(FEW) == 0


HALVES = {"compress_ids": True, "wire_embeddings": "float16", "wire_gradients": "float16"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "local"},
        {"name": "synchronous", "trainers": 2},
        {"name": "substitution", "trainers": 2},
        {"name": "hybrid"},
        {"name": "hybrid", **HALVES},
    ],
    ids=lambda strategy: "-".join(map(str, strategy.values())),
)
def test_no_step_waits_for_a_compiler(cold, log_directory, strategy):
    """On an empty cache, with bags, weights, a sequence, rows of 16 bits, evictions, evaluations and checkpoints."""
    for path in log_directory.glob("*.parquet"):
        table = pq.read_table(path)
        ones = pc.add(pc.multiply(table["user"], 0), 1.0)
        path.unlink()
        pq.write_table(table.append_column("one", ones), path)
    mapping = tomllib.loads((log_directory / "config.toml").read_text())
    mapping["features"] += [
        {"name": "history", "kind": "sequence", "column": "tags", "table": "tags", "dim": 4}
    ]
    mapping["features"][1] |= {"weights": "one"}
    mapping["features"][2] |= {"max_length": 3}
    mapping["tables"] = [
        {"name": "user", "eviction": {"name": "lru", "max_rows": 200}, "dtype": "float16"},
        {
            "name": "item",
            "eviction": {"name": "ttl", "steps": 5},
            "admission": {"name": "min_count", "count": 2},
        },
        {"name": "tags", "eviction": {"name": "lfu", "max_rows": 100}},
    ]
    mapping["train"] |= {"evaluate_every_steps": 10}
    mapping |= {"checkpoint": {"every_steps": 7}, "strategy": strategy}
    (log_directory / "config.toml").write_text(tomli_w.dumps(mapping))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "girih",
            "train",
            str(log_directory / "config.toml"),
            "--run",
            str(log_directory / "run"),
        ],
        env=cold,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("compiling kernels: ")]
    assert lines[0] == "compiling kernels (kept for later runs)"
    assert lines[1].startswith("compiled kernels in ")
    compiled = heard(cold)
    assert not [name for _, amid, name in compiled if amid == "amid"]
    kinds = {name: len(kernel.kinds) for name, kernel in ahead.KERNELS.items()}
    names = [name for *_, name in compiled if name != "jit._identity"]
    assert names
    again = [name for name in names if names.count(name) > kinds[name]]
    assert not again, f"{again} compiled twice; did a file in src/ change while this test ran?"
    assert json.loads((log_directory / "run" / "summary.json").read_text())["compile_s"] > 0
