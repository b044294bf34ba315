"""Memory levels off where each step has shapes of its own: oneDNN's caches keep few primitives."""

import ctypes
import os
import subprocess
import sys

import pytest

from girih.dense.accel import onednn
from girih.dense.accel.primitives import CAPACITIES

PRODUCTS = """
import ctypes, os, torch
from girih.dense.accel.primitives import keep_few
from girih.schema import Categorical, Schema, Sequence
keep_few(Schema([Categorical(name="user", dim=4), Sequence(name="seen", dim=4)], labels="click"))
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


TRAINER = """
import os, girih
from girih.schema import Categorical, Schema, Sequence
features = [Categorical(name="user", dim=4)] + [Sequence(name="seen", dim=4)] * HISTORY
schema = Schema(features, labels="click")
girih.Trainer(girih.models.DNN(schema, hidden=[4]))
print(*(os.environ.get(name) for name in NAMES))
"""


def told(history, **variables):
    code = TRAINER.replace("HISTORY", str(history)).replace("NAMES", str(list(CAPACITIES)))
    return printed(code, **variables).split()


def test_trainers_of_histories_keep_few():
    assert told(1) == list(CAPACITIES.values())
    assert told(0) == ["None", "None"]


@pytest.mark.parametrize("name", CAPACITIES)
def test_what_the_environment_says_holds(name):
    assert told(1, **{name: "7"}) == list((CAPACITIES | {name: "7"}).values())
