"""Memory levels off where each step has shapes of its own: oneDNN's caches keep few primitives."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from girih.dense.accel import onednn
from girih.dense.accel.process_settings import CAPACITIES

pytestmark = pytest.mark.slow

PRODUCTS = """
import ctypes, os, torch
from girih.dense.accel.process_settings import limit_primitive_caches
from girih.schema import Categorical, Schema, Sequence
limit_primitive_caches(Schema([Categorical(name="user", dim=4), Sequence(name="seen", dim=4)], labels="click"))
class Info(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
torch.set_num_threads(1)
layer = torch.nn.Linear(64, 80)
def step(rows):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), layer.weight, layer.bias, "none", [], "")
def in_use():
    return libc.mallinfo2().field7
for rows in range(1000, 1100):
    step(rows)
before = in_use()
for rows in range(1100, 1300):
    step(rows)
print(in_use() - before)
"""


def environment(**variables):
    return {name: value for name, value in os.environ.items() if name not in CAPACITIES} | variables


def printed(code, **variables):
    return subprocess.check_output(
        [sys.executable, "-c", code], env=environment(**variables), text=True
    ).strip()


@pytest.mark.skipif(
    not onednn.available() or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="needs oneDNN's products and glibc 2.33",
)
def test_shapes_that_do_not_come_again_hold_no_memory():
    many = dict.fromkeys(CAPACITIES, "1024")  # as oneDNN and PyTorch have it
    few, all_kept = int(printed(PRODUCTS)), int(printed(PRODUCTS, **many))
    assert all_kept > 16 << 20  # 200 primitives
    assert few < all_kept / 10


TRAINERS = """
import json, os, girih
from girih.schema import Categorical, Schema, Sequence
for history, variables in GIVEN:
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    features = [Categorical(name="user", dim=4)] + [Sequence(name="seen", dim=4)] * history
    girih.Trainer(girih.models.DNN(Schema(features, labels="click"), hidden=[4]))
    print(json.dumps([os.environ.get(name) for name in NAMES]))
"""


def told(*given):
    """The caches' sizes once there are trainers, each with a history or without, and with some variables."""
    code = TRAINERS.replace("GIVEN", repr(given)).replace("NAMES", repr(list(CAPACITIES)))
    return [json.loads(line) for line in printed(code).splitlines()]


def test_trainers_of_histories_keep_few_unless_the_environment_says_how_many():
    own = [{name: "7"} for name in CAPACITIES]
    with_history, without, *by_environment = told((1, {}), (0, {}), *((1, each) for each in own))
    assert with_history == list(CAPACITIES.values())
    assert without == [None, None]
    assert by_environment == [list((CAPACITIES | each).values()) for each in own]
