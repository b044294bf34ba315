"""What a process loads: memory and seconds of every start, which a stray import would bring back."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import girih
from girih import cli
from girih.cluster.roles import RoleName, module_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here"),
]

SAY = """
import importlib, sys
importlib.import_module("{}")
print(*(name for name in ("torch", "numba", "pyarrow") if name in sys.modules))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""
MOST_ROLE_BYTES = 250 << 20


def loaded_with(module):
    done = subprocess.run(
        [sys.executable, "-c", SAY.format(module)], capture_output=True, text=True, check=True
    )
    names, resident_kib = done.stdout.splitlines()
    return set(names.split()), 1024 * int(resident_kib)


@pytest.mark.parametrize(
    "module", ["girih.cluster.launch", "girih.cli.train", "girih.cli.calibrate", "girih.cluster.child"]
)
def test_the_launcher_loads_no_library_of_numbers(module):
    names, _ = loaded_with(module)
    assert names == set()


@pytest.mark.parametrize(
    "module",
    ["girih.trainer", "girih.sparse.halves.remote", "girih.dense.halves.deferred", "girih.serving.loaded"],
)
def test_who_has_rows_in_host_memory_loads_no_gpu_kernels(module):
    say = f"import importlib, sys; importlib.import_module('{module}'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    assert not {"triton", "girih.kernels.gpu.jit"} & set(done.stdout.split())


def test_help_loads_no_command():
    say = "import sys; from girih import cli; cli.run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    *shown, loaded = done.stdout.splitlines()
    told = dict(line.split(maxsplit=1) for line in shown[-len(cli.COMMANDS) :])
    assert told == cli.COMMANDS
    loaded = set(loaded.split())
    assert (
        not ({f"girih.cli.{cli.MODULES.get(name, name)}" for name in cli.COMMANDS} | {"torch", "numba"})
        & loaded
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_says_of_each_command_what_it_says_itself(command):
    own = cli.cli.get_command(None, command).help
    assert own.startswith(cli.COMMANDS[command].rstrip("."))


MODULES = {name: module_of(name) for name in RoleName if name != RoleName.TRAINER}
WITH_TORCH = {MODULES[RoleName.GROUP_SERVER]}  # it computes parts of the net


@pytest.mark.parametrize("module", sorted(set(MODULES.values()) - WITH_TORCH))
def test_a_role_loads_no_torch_and_is_small_when_it_is_empty(module):
    names, resident_bytes = loaded_with(module)
    assert "torch" not in names
    assert ("pyarrow" in names) == (module == MODULES[RoleName.LOADER])  # the others read no files
    assert resident_bytes < MOST_ROLE_BYTES


@pytest.mark.parametrize("module", ["girih.serving.following", "girih.cli.serve"])
def test_who_follows_a_log_and_who_looks_after_workers_load_no_torch(module):
    names, _ = loaded_with(module)
    assert "torch" not in names


def test_only_who_starts_processes_pickles():
    source, users = Path(girih.__file__).parent, set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = (
                {alias.name for alias in node.names}
                if isinstance(node, ast.Import)
                else {node.module}
                if isinstance(node, ast.ImportFrom)
                else set()
            )
            if names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
                users.add(str(file.relative_to(source)))
    assert users == {"cluster/cluster.py", "cluster/child.py"}
