"""``girih info``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import torch

from girih.cli import cli
from girih.dense.accel import onednn, process_settings
from girih.kernels.cpu import ahead
from girih.kernels.cpu.jit import CACHE_DIRECTORY, CACHE_WARNING, KERNELS
from girih.report.text import size
from girih.strategies import BY_NAME
from girih.version import __version__

LEAST_CAPABILITY = (7, 0)
"""The capability of the oldest GPUs that Triton supports."""


def described() -> dict[str, str]:
    """Returns name and value of each line. Each GPU after the first has its own name."""
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
    """Names the strategies that can keep rows on a GPU, or the reason why no strategy can."""
    there = sorted(name for name, kind in BY_NAME.items() if kind.capabilities.rows_on_gpu)
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


PACKAGES = ("torch", "triton", "numba", "numpy", "pyarrow", "safetensors", "fsspec", "tensorboard")
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
HUGE_PAGES_SHARED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@cli.command()
def info() -> int:
    """Show the machine, the versions, and what runs on its GPUs."""
    flags = set(" ".join(_cpuinfo("flags", "Features")).split())
    rows = {
        "girih": __version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "processor": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch",
        "memory": size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        **described(),
        "bfloat16": "in hardware" if flags & {"avx512_bf16", "bf16"} else "emulated: slow on this processor",
        "float32 layers": "oneDNN" if onednn.pays() else "those of PyTorch",
        "kernels": _kernels(),
        "idle threads": process_settings.spins(),
        "huge pages": _selected(HUGE_PAGES) + ", shared memory: " + _selected(HUGE_PAGES_SHARED),
        "shared memory": size(shutil.disk_usage("/dev/shm").free) + " free"
        if Path("/dev/shm").is_dir()
        else "none",
    }
    for name, value in rows.items():
        click.echo(f"{name:14} {value}")
    if _selected(HUGE_PAGES) == "never":
        click.echo("hint: huge pages are off; large tables read about twice as fast with them set to madvise")
    if _selected(HUGE_PAGES_SHARED) == "never":
        click.echo(
            "hint: shared memory, in which embedding servers keep rows, has no huge pages; set shmem_enabled to"
            ' advise, or store.arena = "heap"'
        )
    return 0


def _kernels() -> str:
    count = f"{len(KERNELS) - len(ahead.missing_of(KERNELS))} of {len(KERNELS)} compiled"
    return f"{count}, in {CACHE_DIRECTORY}" if CACHE_DIRECTORY else CACHE_WARNING or "plain Python"


def processor() -> str:
    """Returns the name of this machine's processor."""
    return (_cpuinfo("model name") or [platform.processor() or platform.machine()])[0]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpuinfo(*keys: str) -> list[str]:
    """Returns the values of some keys of ``/proc/cpuinfo``, or none if the system has no such file."""
    file = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in file.read_text().splitlines()] if file.is_file() else []
    return [value.strip() for key, _, value in lines if key.strip() in keys]


def _selected(path: str) -> str:
    """Returns the word in brackets, as in ``always [madvise] never``."""
    file = Path(path)
    return file.read_text().partition("[")[2].partition("]")[0] if file.is_file() else "unknown"
