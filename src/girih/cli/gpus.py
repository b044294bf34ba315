"""The GPUs of this machine, and what of girih runs on them: lines of ``girih info``."""

from __future__ import annotations

import importlib.util
import os

import torch

from girih.report.text import size
from girih.strategies import BY_NAME

LEAST_CAPABILITY = (7, 0)
"""The oldest GPUs for which Triton compiles."""


def described() -> dict[str, str]:
    """Name and value of each line; one name more for every GPU behind the first."""
    if not torch.cuda.is_available():
        return {"gpu": "none that torch can use", "on a gpu": _without()}
    rows = {}
    for number in range(torch.cuda.device_count()):
        own = torch.cuda.get_device_properties(number)
        told = f"{own.name}, {size(own.total_memory)}, capability {own.major}.{own.minor}"
        rows["gpu" if number == 0 else f"gpu {number}"] = told
    rows["cuda"] = f"{torch.version.cuda}, NCCL {_nccl()}"
    rows["on a gpu"] = _with()
    return rows


def _without() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1" and _has_triton():
        return (
            "nothing: store.tiers = ['gpu'] is interpreted on this processor (TRITON_INTERPRET=1), for tests"
        )
    return "nothing: train.device = 'cuda' and store.tiers = ['gpu'] are refused"


def _with() -> str:
    """Which strategies have rows there, and what keeps others from it."""
    there = sorted(name for name, kind in BY_NAME.items() if getattr(kind, "keeps_rows_on_gpu", False))
    if not _has_triton():
        return f"dense halves; rows need triton, which a CUDA build of torch brings (strategies {' and '.join(there)})"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "dense halves; rows are interpreted on this processor while TRITON_INTERPRET=1 is set"
    least = torch.cuda.get_device_capability()
    if least < LEAST_CAPABILITY:
        return "dense halves; rows need a GPU of capability {}.{} or more".format(*LEAST_CAPABILITY)
    number = torch.cuda.device_count()
    share = "a trainer" if number == 1 else f"up to {number} trainers, a GPU for each"
    return f"dense halves of {share}; rows, by compiled kernels, under {' and '.join(there)}"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "not built into torch"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
