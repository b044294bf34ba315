"""What a process loads: memory and seconds of every start, which a stray import would bring back."""

import subprocess
import sys

import pytest

from girih.cluster.roles import MODULES

SAY = """
import importlib, sys
importlib.import_module("{}")
print(*(name for name in ("torch", "numba") if name in sys.modules))
"""


def loaded_with(module):
    done = subprocess.run(
        [sys.executable, "-c", SAY.format(module)], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["girih.cluster.launch", "girih.cli.train", "girih.cluster.child"])
def test_the_launcher_loads_neither_torch_nor_numba(module):
    assert loaded_with(module) == set()


@pytest.mark.parametrize("module", MODULES.values())
def test_a_role_loads_no_torch(module):
    assert "torch" not in loaded_with(module)
