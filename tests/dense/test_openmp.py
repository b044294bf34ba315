"""How long OpenMP's idle threads spin: girih says it in time, or not at all."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TELL = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def told(code, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {TELL}"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_girih_lets_idle_threads_sleep():
    assert told("import girih, torch") == "20000"


@pytest.mark.parametrize(
    ("variables", "expected"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_what_the_environment_says_holds(variables, expected):
    assert told("import girih", **variables) == expected


def test_torch_that_is_there_has_read_it_already():
    assert told("import torch, girih") == "None"


@pytest.mark.parametrize(
    ("variables", "words"),
    [({}, "GOMP_SPINCOUNT=20000"), ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=active")],
)
def test_info_says_what_holds(variables, words):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    done = subprocess.run(
        [sys.executable, "-m", "girih", "info"], env=environment, capture_output=True, text=True, check=True
    )
    assert words in done.stdout
