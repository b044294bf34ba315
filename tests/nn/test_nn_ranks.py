"""Modules of girih.nn in several processes: each rank would train rows of its own, so training is refused."""

import subprocess
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import girih

SCRIPT = """
import sys
import torch
import girih
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows, self.head = rows, nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.rows(ids))


rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
ids = torch.arange(10 * rank, 10 * rank + 5)[:, None]
collection = girih.nn.EmbeddingBagCollection([girih.Categorical(name="user", dim=8)])
nets = [Net(girih.nn.Embedding(8, seed=1)), Net(girih.nn.EmbeddingBag(8, seed=1)), collection]
for net in nets:
    try:
        if net is collection:
            net({"user": ids})
        else:
            DistributedDataParallel(net)(ids).sum().backward()
    except girih.errors.ConfigError as error:
        print(error)
net = nets[1]
with torch.no_grad():
    net(ids)
net.eval()
net(ids).sum().backward()
net.train()
net.rows.requires_grad_(False)
DistributedDataParallel(net)(ids).sum().backward()
print(net.rows.num_rows, nets[0].rows.num_rows, collection.num_rows)
torch.distributed.destroy_process_group()
"""
REFUSED = (
    "torch.distributed has 2 ranks, and each rank would train other rows; train with girih.Trainer and"
    " strategy=girih.Synchronous(trainers=2) under torchrun, in one process, or with rows frozen by requires_grad_(False)"
)


def test_two_ranks_train_no_rows_and_read_them(tmp_path):
    commands = [[sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    names = ("Embedding(dim=8)", "EmbeddingBag(dim=8)", "EmbeddingBagCollection")
    for out, _ in outputs:
        assert out.splitlines() == [*(f"{name}: {REFUSED}" for name in names), "0 0 0"]


def test_one_rank_trains(tmp_path):
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        net = torch.nn.Sequential(girih.nn.EmbeddingBag(8), torch.nn.Linear(8, 1))
        DistributedDataParallel(net)(torch.arange(5)[:, None]).sum().backward()
        assert net[0].num_rows == 5
    finally:
        torch.distributed.destroy_process_group()
