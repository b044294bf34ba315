"""torch's compiler is not loaded for marks that nobody reads, and works where it is wanted."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MARKS = """
import sys
from girih.dense.accel.process_settings import defer_dynamo

defer_dynamo()
import torch
from torch.nn.parallel import DistributedDataParallel
from girih.comm.group.process_group import AbortableGroup

group = AbortableGroup(torch.distributed.HashStore(), 0, 1, host="127.0.0.1", name="one")
module = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group.process_group)
optimizer = torch.optim.Adam(module.parameters(), fused=True)
module(torch.ones(1, 1)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert not hasattr(sys.modules["torch._dynamo"], "__file__")
print("torch._dynamo.eval_frame" in sys.modules)
"""
COMPILE = """
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
import torch._dynamo.config
optimizer.step()
print("torch._dynamo.eval_frame" in sys.modules, torch._dynamo is sys.modules["torch._dynamo"])
"""
TRAIN = """
import sys
from girih.cli import main

try:
    main(["train", sys.argv[1], "--run", sys.argv[2], "--set", "train.max_steps=1"])
except SystemExit as end:
    print(end.code, "torch._dynamo.eval_frame" in sys.modules)
"""


def printed(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_optimizers_and_parallel_modules_load_no_compiler_and_compiling_does():
    assert printed(MARKS + COMPILE) == ["False", "2.0", "True True"]


def test_a_command_that_trains_loads_no_compiler(log_directory):
    assert printed(TRAIN, log_directory / "config.toml", log_directory / "run")[-1] == "0 False"
