"""What an example costs the model, measured on one whose cost is known."""

import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import girih
from girih import cli
from girih.comm.group import TrainerGroup
from girih.dense.half import DenseSpec
from girih.lifecycle.dense_cost import measure_dense_cost, with_update
from girih.planner.facts import DenseCost
from girih.sparse.spec import SparseSpec

PASS_S, EXAMPLE_S, DIM = 0.02, 0.0005, 4


def compute(seconds):
    """Takes so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Known(torch.nn.Module):
    """Computes for a known time, and keeps two numbers for each of a row: those that it squares."""

    def __init__(self):
        super().__init__()
        self.moved = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, numeric, embeddings):
        examples = len(numeric)
        compute((PASS_S + EXAMPLE_S * examples) / 2)
        self.calls += 1
        made = embeddings["user"] + 1.0
        made.register_hook(lambda gradient: compute((PASS_S + EXAMPLE_S * examples) / 2))
        return (made.square() + (made + 1.0).square()).sum(1, keepdim=True) + self.moved


@pytest.mark.parametrize("rows", [100, 2])
def test_memory_and_time_of_a_pass_and_of_an_example(tmp_path, rows):
    table = {"user": np.arange(rows), "click": np.zeros(rows, np.int8)}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    schema = girih.Schema([girih.Categorical(name="user", dim=DIM)], labels="click")
    data = girih.read_parquet(tmp_path / "train.parquet", schema, batch_size=rows)
    needs = {"user": frozenset({"embedding"})}
    sparse = SparseSpec(schema=schema, needs=needs, optimizer=girih.optim.SGD())
    module = Known()
    dense = DenseSpec(module=module, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    cost = measure_dense_cost(data, sparse, dense, TrainerGroup())
    assert module.calls == 0  # a copy ran
    assert module.moved.grad is None
    if rows == 2:  # too few for a line
        assert cost is None
        return
    assert cost.memory_bytes > 2**20
    assert cost.bytes_per_example == 2 * DIM * 4
    assert 0.5 * PASS_S < cost.pass_s < 5 * PASS_S
    assert 0.5 * EXAMPLE_S < cost.example_s < 5 * EXAMPLE_S
    assert 0.8 < cost.busy_threads < 1.5  # others may have the processor meanwhile


@pytest.mark.parametrize(
    ("made", "copies"), [(torch.optim.SGD, 2), (torch.optim.Adagrad, 3), (torch.optim.Adam, 4)]
)
def test_time_and_state_of_an_optimizer(made, copies):
    module = torch.nn.Linear(100, 100)
    before = module.weight.detach().clone()
    dense = DenseSpec(module=module, optimizer=lambda parameters: made(parameters, lr=1.0))
    cost = with_update(DenseCost(1.0, 2.0), dense, TrainerGroup())
    assert cost.parameter_copies == pytest.approx(copies, rel=1e-2)  # Adam counts its steps too
    assert 0 < cost.update_s < 1
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None
    frozen = DenseSpec(module=module.requires_grad_(False), optimizer=made)
    assert with_update(DenseCost(1.0, 2.0), frozen, TrainerGroup()) == DenseCost(1.0, 2.0)


def test_a_run_with_automatic_micro_batches_writes_checkpoints(log_source, tmp_path):
    words = ["train", log_source / "config.toml", "--run", tmp_path / "run"]
    options = ["--set", "train.max_steps=2", "--set", "schedule.micro_batches=auto"]
    assert cli.run([str(word) for word in [*words, *options]]) == 0
    assert list((tmp_path / "run" / "checkpoints").iterdir())
