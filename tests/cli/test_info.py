"""``girih info`` on machines with GPUs and without; torch is told what it finds."""

from types import SimpleNamespace

import pytest
import torch

from girih import cli
from girih.cli import info

H200 = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30, major=9, minor=0)


@pytest.fixture
def found(monkeypatch):
    """Has torch find some GPUs, of a capability."""

    def find(number, capability=(9, 0), triton=True):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: H200)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(info, "_nccl", lambda: "2.28.9")
        monkeypatch.setattr(info, "_has_triton", lambda: triton)

    return find


def test_a_gpu_is_named_and_what_runs_on_it(found, capsys):
    found(1)
    assert cli.run(["info"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200, 139" in shown
    assert "capability 9.0" in shown
    assert "13.0, NCCL 2.28.9" in shown
    assert "rows, by compiled kernels, under local and synchronous" in shown


def test_every_gpu_has_a_line(found):
    found(3)
    rows = info.described()
    assert {"gpu", "gpu 1", "gpu 2"} <= rows.keys()
    assert "up to 3 trainers" in rows["on a gpu"]


def test_what_keeps_rows_away_is_said(found, monkeypatch):
    found(1, capability=(6, 1))
    assert "capability 7.0 or more" in info.described()["on a gpu"]
    found(1, triton=False)
    assert "rows need triton" in info.described()["on a gpu"]
    found(0)
    assert info.described() == {
        "gpu": "none that torch can use",
        "on a gpu": "nothing: train.device = 'cuda' and store.tiers = ['gpu'] are refused",
    }
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "is interpreted on this processor" in info.described()["on a gpu"]
    found(1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "rows are interpreted on this processor" in info.described()["on a gpu"]
